"""Slurm's lists of hosts, GPUs and device files."""

import pytest
from facts_samples import answer, gpu_facts_with
from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.errors import ParseError
from gpunode.facts.slurm import covers, devices_of, gpus_of


def test_the_lines_that_apply_to_the_node() -> None:
    """NodeName=DEFAULT, a line of its own, and one of others; written by hand after slurm.conf(5) and gres.conf(5)."""
    slurm = gpu_facts_with().slurm
    assert slurm is not None
    assert (slurm.configured, slurm.device_files, slurm.autodetect, slurm.constrains_devices) == (8, 5, None, True)
    assert gpu_facts_with({"slurm": answer("")}).slurm is None


def test_the_versions_of_slurmd_and_of_the_controller_that_answered() -> None:
    versions = gpu_facts_with().slurm_versions
    assert versions is not None
    assert (versions.daemon, versions.controller) == ("24.05.2", "24.11.1")
    assert gpu_facts_with({"slurm": answer("")}).slurm_versions is None
    assert gpu_facts_with({"version-slurmd": answer("", 127)}).slurm_versions is None
    alone = gpu_facts_with({"slurm-controller": answer("", 127)}).slurm_versions
    assert alone is not None, "Debian's slurmd comes without scontrol"
    assert (alone.daemon, alone.controller) == ("24.05.2", None)
    silent = answer("", 1, "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)\n")
    for wrong in (silent, answer("", 124), answer("SLURM_VERSION = x\n")):
        assert "slurm_versions" in gpu_facts_with({"slurm-controller": wrong}).gaps


@pytest.mark.parametrize(
    ("expression", "name", "expected"),
    [
        ("gpu1", "gpu1", True),
        ("gpu1", "gpu10", False),
        ("gpu[1-12]", "gpu10", True),
        ("gpu[1-12]", "gpu01", False),
        ("gpu[01-12]", "gpu7", False),
        ("gpu[001-120,130],login", "gpu130", True),
        ("login,gpu[001-120,130]", "login", True),
        ("r[1-2]n[01-04]", "r2n04", True),
        ("r[1-2]n[01-04]", "r3n04", False),
        ("gpu[8-11]", "gpu10", True),
    ],
)
def test_a_list_of_hosts(expression: str, name: str, expected: bool) -> None:
    assert covers(expression, name) is expected


HOSTNAMES = {
    "gpu[1-12]": "gpu1 gpu2 gpu3 gpu4 gpu5 gpu6 gpu7 gpu8 gpu9 gpu10 gpu11 gpu12",
    "gpu[001-003,130],login": "gpu001 gpu002 gpu003 gpu130 login",
    "r[1-2]n[01-02]": "r1n01 r1n02 r2n01 r2n02",
    "gpu[098-102]": "gpu098 gpu099 gpu100 gpu101 gpu102",
    "gpu[9-010]": "gpu9 gpu10",
}
"""Recorded: ``scontrol show hostnames LIST`` of Slurm 22.05.8 (Debian 12)."""


@pytest.mark.parametrize("expression", HOSTNAMES)
def test_a_list_has_the_hosts_that_scontrol_shows(expression: str) -> None:
    names = {name for text in HOSTNAMES.values() for name in text.split()}
    assert {name for name in names if covers(expression, name)} == set(HOSTNAMES[expression].split())


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 4), st.integers(0, 1000))
def test_a_range_has_what_lies_in_it(first: int, more: int, width: int, number: int) -> None:
    low, high = str(first).zfill(width), str(first + more).zfill(width)
    name = f"n{str(number).zfill(len(low))}"
    assert covers(f"n[{low}-{high}]", name) is (first <= number <= first + more)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:8", 8),
        ("gpu", 1),
        ("gpu:h100:8", 8),
        ("gpu:h100:6(S:0-1),gpu:t4:2,nic:4", 8),
        ("gpu:no_consume:4", 4),
        ("nic:2", 0),
    ],
)
def test_gpus_of_gres(text: str, expected: int) -> None:
    assert gpus_of(text) == expected


def test_device_files_of_gres() -> None:
    assert devices_of("/dev/nvidia[0-2,6],/dev/nvidia4") == {0, 1, 2, 4, 6}
    assert devices_of("/dev/tty0") == set()
    with pytest.raises(ParseError):
        devices_of("/dev/nvidia[0-9999]")


@given(st.text(alphabet='NodeameGrs=:gpu[]0189-,()"# \n/dvn', max_size=200))
def test_no_configuration_breaks_it(text: str) -> None:
    files = {f"/etc/slurm/{name}.conf": text for name in ("slurm", "gres", "cgroup")}
    facts = gpu_facts_with(files=files)
    assert (facts.slurm is None) == ("slurm" in facts.gaps)
