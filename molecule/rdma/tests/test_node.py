"""Tests of a node with RDMA, run on the node itself."""

import pytest
from testinfra.host import Host

NAMES = ("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags")


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


@pytest.mark.parametrize("name", NAMES)
def test_the_distributions_packages_are_there(host: Host, name: str) -> None:
    assert host.package(name).is_installed


def test_the_modules_of_the_board_are_loaded_at_boot_and_now(host: Host) -> None:
    listed = host.file("/etc/modules-load.d/gpunode-rdma.conf").content_string.splitlines()
    names = [line for line in listed if not line.startswith("#")]
    assert "ib_umad" in names
    # dma-buf carries the data: a module that is not needed is not loaded.
    assert "nvidia_peermem" not in names


def test_udev_reads_the_rules_of_names_in_place_of_rdma_cores(host: Host) -> None:
    name = "60-rdma-persistent-naming.rules"
    assert host.file(f"/lib/udev/rules.d/{name}").exists
    lines = [line for line in output(host, "udevadm test /sys/class/net/lo 2>&1").splitlines() if name in line]
    overridden, *read = sorted(lines, key=lambda line: not line.startswith("Skipping overridden file"))
    assert f"/lib/udev/rules.d/{name}" in overridden
    # Invalid rules have a line of their own.
    assert read == [f"Reading rules file: /etc/udev/rules.d/{name}"]


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
