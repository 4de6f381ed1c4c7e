"""Tests of a node with the policy of upgrades, run on the node itself."""

import json

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_apt_reads_the_policy(host: Host) -> None:
    text = output(host, "apt-config dump Unattended-Upgrade APT::Periodic APT::Update")
    assert 'APT::Periodic::Unattended-Upgrade "1";' in text
    assert 'Unattended-Upgrade::Automatic-Reboot "false";' in text
    for pattern in ("^nvidia-", "^slurm-", "^linux-(image|", "^containerd("):
        assert f'"{pattern}' in text


def test_needrestart_reads_its_part(host: Host) -> None:
    perl = "our %nrconf; do q(/etc/needrestart/needrestart.conf); print join(q( ), keys %{$nrconf{override_rc}})"
    assert "^docker" in output(host, f"perl -e '{perl}'")
    output(host, "needrestart -b -r l")


def test_waiting_updates_are_recorded(host: Host) -> None:
    record = json.loads(output(host, "cat /var/lib/gpunode/updates/pending.json"))
    assert record["schema"] == "gpunode.pending-updates/1"
    output(host, "apt-get update -q")
    again = json.loads(output(host, "cat /var/lib/gpunode/updates/pending.json"))
    assert again["at"] >= record["at"]


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
