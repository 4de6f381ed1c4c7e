"""Tests of a node with DCGM, run on the node itself."""

from testinfra.host import Host

STEM = "datacenter-gpu-manager-4"
PARTS = {STEM + part for part in ("-core", "-cuda13", "-proprietary", "-proprietary-cuda13")}


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_all_parts_have_one_version_and_are_held(host: Host) -> None:
    shown = output(host, "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n' 'datacenter-gpu-manager*'")
    rows = [line.split() for line in shown.splitlines() if line.endswith(" installed")]
    assert {row[0] for row in rows} == PARTS
    assert len({row[1] for row in rows}) == 1
    assert set(output(host, "apt-mark showhold").split()) == PARTS


def test_dcgm_3_is_gone(host: Host) -> None:
    assert not host.package("datacenter-gpu-manager").is_installed


def test_the_service_is_enabled_and_bound_to_a_gpu(host: Host) -> None:
    assert host.service("nvidia-dcgm").is_enabled
    assert "0x10de:0x03*" in output(host, "systemctl cat nvidia-dcgm")


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
