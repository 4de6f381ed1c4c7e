"""Tests of the engine and its file, run on the node itself."""

import json

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_the_engine_runs_and_is_enabled(host: Host) -> None:
    with host.sudo():
        service = host.service("docker.service")
        assert service.is_running
        assert service.is_enabled


def test_the_file_has_what_was_there_and_what_was_requested(host: Host) -> None:
    assert json.loads(output(host, "cat /etc/docker/daemon.json")) == {
        "dns": ["10.1.2.3"],
        "log-opts": {"max-size": "100m", "max-file": "5", "tag": "x"},
        "live-restore": True,
        "default-shm-size": "1g",
        "shutdown-timeout": 30,
    }
    assert "1m" in output(host, "cat /etc/docker/daemon.json.before-gpunode")


def test_it_is_in_force(host: Host) -> None:
    assert output(host, "docker info --format '{{.LiveRestoreEnabled}}'") == "true"


def test_nothing_listens_on_the_network(host: Host) -> None:
    assert "dockerd" not in output(host, "ss -H -l -t -n -p || true")


def test_the_requested_user_and_nobody_else_may_use_it(host: Host) -> None:
    assert host.group("docker").members == ["operator"]


def test_unattended_upgrades_pass_over_the_engine_alone(host: Host) -> None:
    text = output(host, "apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert '"^docker[.]io$"' in text
    assert "nvidia" not in text
    assert output(host, "apt-mark showhold") == ""


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
