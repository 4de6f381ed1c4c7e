"""Tests of the first boot's unit, run on the node itself."""

import json

from testinfra.host import Host

REPORT = "/var/lib/gpunode/first_boot/report.json"


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_the_unit_waits_for_the_next_boot(host: Host) -> None:
    assert output(host, "systemctl is-enabled gpunode-first-boot gpunode-host-keys") == "enabled\nenabled"
    assert output(host, "stat -c '%a %U' /etc/gpunode/first-boot/inventory.json") == "600 root"


def test_it_settles_validates_and_reports_once(host: Host) -> None:
    keys = output(host, "sha256sum /etc/ssh/ssh_host_*")
    output(host, "systemctl start gpunode-first-boot gpunode-host-keys")
    report = json.loads(output(host, f"cat {REPORT}"))
    assert (report["schema"], report["status"], report["problems"]) == ("gpunode.first-boot/1", "good", [])
    assert [step["step"] for step in report["steps"]] == ["provision", "validate"]
    assert report["steps"][0]["document"]["nodes"][0]["status"] == "changed"
    assert output(host, "dpkg-query -W -f '${db:Status-Status}' htop") == "installed"
    assert "settled and valid" in output(host, "journalctl --no-pager -u gpunode-first-boot")
    assert output(host, "sha256sum /etc/ssh/ssh_host_*") == keys, "keys that exist stay"
    before = output(host, f"sha256sum {REPORT}")
    output(host, "systemctl start gpunode-first-boot")
    assert output(host, "systemctl show -p ConditionResult --value gpunode-first-boot") == "no"
    assert output(host, f"sha256sum {REPORT}") == before
