"""Tests of a node with its kernel's settings, run on the node itself."""

import pytest
from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_logins_and_services_may_lock_memory(host: Host) -> None:
    assert output(host, "systemctl show -p DefaultLimitMEMLOCK") == "DefaultLimitMEMLOCK=infinity"
    assert "* - memlock unlimited" in host.file("/etc/security/limits.d/90-gpunode.conf").content_string


@pytest.mark.parametrize("line", ["vm.swappiness = 10", "vm.max_map_count = 1048576"])
def test_the_next_boot_sets_the_kernel(host: Host, line: str) -> None:
    assert line in host.file("/etc/sysctl.d/90-gpunode.conf").content_string


def test_nothing_that_containers_and_profilers_need_is_touched(host: Host) -> None:
    text = host.file("/etc/sysctl.d/90-gpunode.conf").content_string
    for word in ("ip_forward", "userns", "ptrace", "perf_event", "rp_filter", "namespaces"):
        assert word not in text


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
