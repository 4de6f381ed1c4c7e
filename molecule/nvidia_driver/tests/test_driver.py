"""Tests of the node after the role, run on the node itself."""

import re

import pytest
from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


@pytest.fixture
def closure(host: Host) -> dict[str, str]:
    """The driver's packages with their releases; dkms is NVIDIA's too, in a version of its own."""
    lines = output(host, r"dpkg-query -W -f '${Package} ${Version} ${db:Status-Status} ${Maintainer}\n'").splitlines()
    rows = [line.split() for line in lines if "cudatools@nvidia.com" in line and "pinning" not in line]
    return {
        name: version.rpartition("-")[0]
        for name, version, status, *_ in rows
        if status == "installed" and name != "dkms"
    }


def test_every_package_has_one_version_and_is_held(host: Host, closure: dict[str, str]) -> None:
    assert {"nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1"} <= closure.keys()
    assert len(set(closure.values())) == 1
    assert next(iter(closure.values())).startswith("580.")
    assert closure.keys() == set(output(host, "apt-mark showhold").split())


def test_no_fabric_manager_comes_where_no_switch_is(closure: dict[str, str]) -> None:
    assert "nvidia-fabricmanager" not in closure


def test_the_module_is_built_for_the_newest_kernel_and_loaded(host: Host, closure: dict[str, str]) -> None:
    release = closure["libcuda1"]
    kernel = output(host, "linux-version list | linux-version sort | tail -n 1")
    assert output(host, f"modinfo -k {kernel} -F version nvidia") == release
    assert release in output(host, "cat /proc/driver/nvidia/version")


def test_apt_keeps_to_the_version(host: Host, closure: dict[str, str]) -> None:
    policy = output(host, "apt-cache policy libcuda1 nvidia-driver-cuda")
    candidates = set(re.findall(r"Candidate: (\S+)-", policy))
    assert candidates == set(closure.values())


def test_the_modules_options_are_set(host: Host) -> None:
    assert "NVreg_RestrictProfilingToAdminUsers=0" in output(host, "modprobe --showconfig")


def test_the_persistence_daemon_runs(host: Host) -> None:
    assert output(host, "systemctl is-active nvidia-persistenced.service") == "active"


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
