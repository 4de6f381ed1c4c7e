"""Lockout drills over real SSH: each change would lock the controller out, and the node returns to the old state.

Each drill runs twice: with the automatic revert, and without it (``limit_s: 0``). The second time the node has to stay
locked, or the drill proves nothing. The node is then repaired through Docker, which needs no SSH.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playbook_runs import ROOT, Site

from gpunode.content import ansible_environment
from gpunode.errors import UndeterminedError
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = ("plugins/", "gpunode/provisioning/ssh", "roles/ssh_hardening/")

LIMIT_S = 20
LATE_S = 15
"""What a busy machine may add to the timer's time until a login has succeeded."""
DROP_IN = "/etc/ssh/sshd_config.d/01-drill.conf"
SOCKET = "/etc/systemd/system/ssh.socket.d/drill.conf"
KEYS = "/home/admin/.ssh/authorized_keys"
OUTCOME = "/var/lib/gpunode/guard/drill/outcome.json"
RELOADED = "/run/drill-reloaded"
HOLD_S = 15
RELOAD = [["systemctl", "reload", "ssh.service"]]
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Lock the controller out
      gpunode.node.guarded_change:
        name: drill
        files: "{{ drill.files }}"
        units: "{{ drill.units }}"
        activate: "{{ drill.activate }}"
        restore: "{{ drill.restore }}"
        limit_s: "{{ drill.limit_s }}"
      become: true
"""
STATE = (
    "cd /; find etc/ssh etc/systemd home/admin/.ssh -type f -print0 | sort -z | xargs -0 sha256sum;"
    "systemctl is-enabled ssh.service ssh.socket || true; systemctl is-active ssh.socket || true"
)


@dataclass(frozen=True)
class Drill:
    """A change that locks the controller out, and what leads up to it."""

    path: str
    content: str
    units: tuple[str, ...] = ("ssh.service",)
    activate: list[list[str]] = field(default_factory=lambda: RELOAD)
    owner: str = "root"
    group: str = "root"
    by_socket: bool = False

    def variables(self, limit_s: int, *, hold: bool = False) -> str:
        """The play's variables as JSON. ``hold``: the controller waits behind the reload, to be struck there."""
        mode = "0600" if self.owner != "root" else "0644"
        file = {"path": self.path, "content": self.content, "owner": self.owner, "group": self.group, "mode": mode}
        activate = [*self.activate, *([["touch", RELOADED], ["sleep", str(HOLD_S)]] if hold else [])]
        drill = {"files": [file], "units": self.units, "activate": activate, "restore": self.activate}
        return json.dumps({"drill": {**drill, "limit_s": limit_s}})


ALLOW_LIST = Drill(DROP_IN, "AllowUsers somebody\n")
DRILLS = {
    "allow list without the controller's user": ALLOW_LIST,
    "wrong port with ssh.socket active": Drill(
        SOCKET,
        "[Socket]\nListenStream=\nListenStream=2222\n",
        ("ssh.service", "ssh.socket"),
        [
            ["systemctl", "daemon-reload"],
            ["systemctl", "stop", "ssh.service"],
            ["systemctl", "restart", "ssh.socket"],
        ],
        by_socket=True,
    ),
    "key removed": Drill(KEYS, "", owner="admin", group="users"),
    "Match block that forbids": Drill(DROP_IN, "Match User admin\n    ForceCommand /bin/false\n"),
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"test-lockout-{os.getpid()}")
    try:
        lab.up(1, "debian-12")
        yield Site(lab)
    finally:
        lab.down()


@pytest.fixture
def play(tmp_path: Path) -> Path:
    path = tmp_path / "drill.yml"
    path.write_text(PLAY, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def repaired(site: Site) -> Iterator[None]:
    """Whatever a drill leaves is repaired through Docker."""
    before = site.sh(f"cat {KEYS}")
    yield
    site.sh(
        f"rm -rf {DROP_IN} {SOCKET} {RELOADED} /var/lib/gpunode/guard; systemctl daemon-reload; "
        "systemctl disable --now ssh.socket; systemctl enable ssh.service; systemctl restart ssh.service"
    )
    done = site.node.run(["tee", KEYS], env={})
    assert done.returncode == 0
    site.node.run(["sh", "-c", f"printf '%s' \"$KEYS\" > {KEYS}"], env={"KEYS": before})
    assert reachable(site)


def reachable(site: Site) -> bool:
    """Whether a new login over SSH works and its user becomes root."""
    try:
        return site.node.ssh(["sudo", "-n", "id", "-u"], timeout_s=20).stdout.strip() == "0"
    except UndeterminedError:
        return False


def prepared(site: Site, drill: Drill) -> str:
    if drill.by_socket:
        site.sh("systemctl disable --now ssh.service; systemctl enable --now ssh.socket")
    assert reachable(site)
    return site.sh(STATE)


def outcome(site: Site) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(site.sh(f"cat {OUTCOME}"))
    return document


def awaited(site: Site, limit_s: float) -> float:
    """Seconds until a login works again."""
    start = time.monotonic()
    while not reachable(site):
        assert time.monotonic() - start < limit_s, "the node stayed locked"
        time.sleep(0.5)
    return time.monotonic() - start


def started(site: Site, play: Path, drill: Drill, limit_s: int) -> "subprocess.Popen[str]":
    """Start the play and return when its change is in force on the node."""
    program = Path(sys.executable).with_name("ansible-playbook")
    argv = [
        str(part) for part in (program, "-i", site.lab.inventory_path, play, "-e", drill.variables(limit_s, hold=True))
    ]
    # A control connection of an earlier play could outlive a kill.
    environment = {**ansible_environment(), "ANSIBLE_NOCOLOR": "1"}
    child = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    site.node.run(["bash", "-c", f"until test -e {RELOADED}; do sleep 0.05; done"], timeout_s=120)
    assert child.poll() is None, child.communicate()[0]
    return child


@pytest.mark.parametrize("name", DRILLS)
def test_the_node_is_reachable_as_before_and_the_play_reports_it(site: Site, play: Path, name: str) -> None:
    drill = DRILLS[name]
    before = prepared(site, drill)
    run = site.play("-e", drill.variables(LIMIT_S), playbook=str(play))
    assert run.rc != 0
    assert f"Restored: {drill.path}" in " ".join(run.output.split())
    assert "A new login works again" in " ".join(run.output.split())
    awaited(site, LATE_S)
    report = outcome(site)
    assert (report["restored"], report["failed"]) == ([drill.path], [])
    assert report["after_s"] <= LIMIT_S + 2
    assert site.sh(STATE) == before


@pytest.mark.parametrize("name", DRILLS)
def test_without_the_revert_the_same_drill_locks_the_node(site: Site, play: Path, name: str) -> None:
    drill = DRILLS[name]
    prepared(site, drill)
    run = site.play("-e", drill.variables(0), playbook=str(play))
    assert run.rc == 0, run.output
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert not reachable(site)
        time.sleep(2)


def test_a_controller_killed_right_after_the_reload_leaves_the_old_state(site: Site, play: Path) -> None:
    before = prepared(site, ALLOW_LIST)
    child = started(site, play, ALLOW_LIST, LIMIT_S)
    killed(child)
    assert not reachable(site)
    awaited(site, LIMIT_S + LATE_S)
    report = outcome(site)
    assert report["by"] == "by the timer on the node"
    # systemd's default accuracy would allow a minute; what is beyond a second is the machine's.
    assert LIMIT_S <= report["after_s"] <= LIMIT_S + 8
    assert site.sh(STATE) == before


def test_without_the_revert_a_killed_controller_leaves_the_node_locked(site: Site, play: Path) -> None:
    prepared(site, ALLOW_LIST)
    child = started(site, play, ALLOW_LIST, 0)
    killed(child)
    time.sleep(LIMIT_S)
    assert not reachable(site)


def killed(child: "subprocess.Popen[str]") -> None:
    """Kill the controller with all that it started: Ansible's workers have sessions of their own."""
    doomed = [child.pid]
    for pid in doomed:
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, timeout=30, check=False)
        doomed += [int(word) for word in children.stdout.split()]
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.communicate()


def power_cut(site: Site) -> None:
    """The node loses its power and boots; nothing of it gets time to end in order."""
    site.node.container.kill()
    site.node.container.start()
    start = time.monotonic()
    while site.node.run(["systemctl", "is-active", "ssh.service"]).stdout.strip() != "active":
        assert time.monotonic() - start < 120
        time.sleep(0.5)


def test_a_node_that_restarts_at_that_moment_boots_with_the_old_state(site: Site, play: Path) -> None:
    before = prepared(site, ALLOW_LIST)
    # So long that the timer cannot have done it.
    child = started(site, play, ALLOW_LIST, 300)
    power_cut(site)
    awaited(site, LATE_S)
    assert outcome(site)["by"] == "at boot"
    assert site.sh(STATE) == before
    output = " ".join(child.communicate(timeout=200)[0].split())
    assert child.returncode != 0
    assert f"Restored: {DROP_IN}" in output
    assert "at boot" in output
    assert site.sh("systemctl list-units --failed --plain --no-legend") == ""


def test_without_the_revert_a_node_that_restarts_stays_locked(site: Site, play: Path) -> None:
    prepared(site, ALLOW_LIST)
    child = started(site, play, ALLOW_LIST, 0)
    power_cut(site)
    child.communicate(timeout=200)
    assert not reachable(site)


def test_a_change_that_lets_the_controller_in_stays_and_nothing_is_left_armed(site: Site, play: Path) -> None:
    prepared(site, ALLOW_LIST)
    fine = Drill(DROP_IN, "AllowUsers admin\n")
    run = site.play("-e", fine.variables(60), playbook=str(play))
    assert run.rc == 0, run.output
    power_cut(site)
    assert reachable(site)
    assert "AllowUsers admin" in site.sh(f"cat {DROP_IN}")
    assert site.sh(
        "systemctl list-unit-files 'gpunode-guard*' --no-legend || true; ls /var/lib/gpunode/guard/drill"
    ).split() == [
        "confirmed.json",
        "lock",
    ]
