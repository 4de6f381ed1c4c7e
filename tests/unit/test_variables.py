"""Typos in role variables: the name, the file, the nearest right one."""

from pathlib import Path

import pytest

from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.variables import known_variables, locate, refuse_unknown, role_prefixes, unknown_variables

KNOWN = ("nvidia_driver_source", "nvidia_driver_version", "docker_data_root", "gpunode_reboot")
PREFIXES = ("nvidia_driver_", "docker_", "gpunode_")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("nvidia_driver_sorce", "nvidia_driver_source"),
        ("nvidia_driver_versions", "nvidia_driver_version"),
        ("nvida_driver_version", "nvidia_driver_version"),
        ("gpunode_rebot", "gpunode_reboot"),
        ("gpunode_zzz", None),
        ("nvidia_driver_branch", None),
        ("docker_dataroot", "docker_data_root"),
    ],
)
def test_a_typo_has_its_nearest(name: str, nearest: str | None) -> None:
    assert unknown_variables([name], KNOWN, PREFIXES) == [(name, nearest)]


@pytest.mark.parametrize(
    "name",
    [
        "nvidia_driver_source",
        "docker_users",
        "ansible_host",
        "site",
        "__nvidia_driver_x",
        "driver",
        "docker_edition",
        "nvidia_exporter_port",
    ],
)
def test_what_is_right_or_somebody_elses_is_left_alone(name: str) -> None:
    assert unknown_variables([name], KNOWN, PREFIXES) == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A collection with one role."""
    meta = tmp_path / "root" / "roles" / "nvidia_driver" / "meta"
    meta.mkdir(parents=True)
    (meta / "argument_specs.yml").write_text(
        "argument_specs:\n  main:\n    options:\n      nvidia_driver_source: {type: str}\n"
        "  other:\n    options:\n      nvidia_driver_state: {type: str}\n"
    )
    (tmp_path / "root" / "playbooks").mkdir()
    (tmp_path / "root" / "playbooks" / "site.yml").write_text("when: gpunode_reboot | default('never') == 'x'\n")
    return tmp_path / "root"


def test_the_roles_say_what_is_known(root: Path) -> None:
    assert known_variables(root) == (
        "gpunode_policy",
        "gpunode_reboot",
        "nvidia_driver_source",
        "nvidia_driver_state",
    )
    assert role_prefixes(root) == ("nvidia_driver_", "gpunode_")


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("group_vars/all.yml", "---\n# nvidia_driver_sorce: x\nnvidia_driver_sorce: debian\n", 3),
        ("host_vars/gpu1/driver.yml", "a: 1\n'nvidia_driver_sorce': debian\n", 2),
        ("hosts.ini", "[gpus]\ngpu1 ansible_port=1 nvidia_driver_sorce=debian\n", 2),
        ("hosts.ini", "[gpus]\ngpu1\n[gpus:vars]\nnvidia_driver_sorce = debian\n", 4),
        ("hosts.ini", 'all: {hosts: {gpu1: {"nvidia_driver_sorce": 1}}}\n', 1),
    ],
)
def test_the_line_names_file_line_and_nearest(tmp_path: Path, root: Path, file: str, text: str, line: int) -> None:
    (tmp_path / "hosts.ini").write_text("")
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(UsageError) as info:
        refuse_unknown(["nvidia_driver_sorce", "site"], root, [str(tmp_path / "hosts.ini")])
    assert str(info.value) == (
        f"{path}:{line}: unknown variable nvidia_driver_sorce; did you mean nvidia_driver_source?"
    )


def test_a_name_that_no_file_has_is_told_without_place(root: Path) -> None:
    with pytest.raises(UsageError, match=r"^the inventory: unknown variable nvidia_driver_stat;"):
        refuse_unknown(["nvidia_driver_stat"], root, ["host,"])


def test_good_names_pass(root: Path) -> None:
    refuse_unknown(["nvidia_driver_source", "gpunode_reboot", "site"], root, [])


def test_parts_of_longer_names_are_not_found(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("my_gpunode_x: 1\nuse: '{{ gpunode_x }}'\n")
    assert locate("gpunode_x", [str(file)]) is None


def test_our_own_roles_and_playbooks_are_read() -> None:
    known = known_variables(collection_root())
    assert "nvidia_driver_source" in known
    assert "gpunode_reboot" in known
    assert unknown_variables(known, known, role_prefixes(collection_root())) == []
