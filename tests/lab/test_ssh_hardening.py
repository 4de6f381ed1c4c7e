"""The role ssh_hardening on Debian 12 and 13, judged by ssh-audit and by new logins, and what it refuses.

The tests of this file share the two nodes and run in their order.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import pytest
from playbook_runs import ROOT, Run, Site
from programs import run_program

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("gpunode/provisioning/ssh", "plugins/")

DROP_IN = "/etc/ssh/sshd_config.d/00-gpunode.conf"
POLICIES = {"debian-12": "Hardened Debian 12 (version 3)", "debian-13": "Hardened Debian 13 (version 1)"}
LOST = ("node.reachable", "error")
SOCKET = "/etc/systemd/system/ssh.socket.d"
PLAY = "- hosts: all\n  gather_facts: false\n  roles:\n    - gpunode.node.ssh_hardening\n"
HASHES = Path(__file__).with_name("ssh_audit.txt")
LEFT = "cd /; find etc/ssh etc/systemd -type f -o -type l | sort | xargs sha256sum; sshd -T"


class Nodes(Site):
    """Both nodes and the role run on them."""

    def __init__(self, lab: Lab, play: Path) -> None:
        super().__init__(lab)
        self.file = play
        self.trusted: list[str] = []

    def harden(self, *arguments: str, state: str = "present") -> Run:
        extra_vars = {"ssh_hardening_state": state, "ssh_hardening_trusted_networks": self.trusted}
        return self.play("-e", json.dumps(extra_vars), *arguments, playbook=str(self.file))

    def judged(self) -> dict[str, set[tuple[str, str]]]:
        """What gpunode finds on each node: check and status."""
        program = Path(sys.executable).with_name("gpunode")
        argv = [str(program), "validate", "-i", str(self.lab.inventory_path), "--level", "quick", "--format", "json"]
        done = run_program(argv, cwd=ROOT, limit_s=300)
        return {
            node["host"]: {(finding["check"], finding["status"]) for finding in node["findings"]}
            for node in json.loads(done.stdout)["nodes"]
        }

    def shell(self, node: LabNode, script: str) -> str:
        done = node.run(["bash", "-euc", script], timeout_s=120)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)


@contextmanager
def connections(nodes: Nodes) -> Iterator[None]:
    """Connect to each node's port again and again meanwhile, as logins of a busy node do; a socket starts sshd then."""
    ended = Event()

    def connect(node: LabNode) -> None:
        while not ended.wait(0.05):
            with suppress(OSError), socket.create_connection((node.address, node.port), timeout=5) as connection:
                connection.recv(16)

    with ThreadPoolExecutor() as pool:
        pending = [pool.submit(connect, node) for node in nodes.lab.nodes()]
        try:
            yield
        finally:
            ended.set()
            for future in pending:
                future.result()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    play = tmp_path_factory.mktemp("plays") / "play.yml"
    play.write_text(PLAY, encoding="utf-8")
    lab = Lab(f"test-ssh-{os.getpid()}")
    try:
        lab.up(1, "debian-12")
        lab.up(1, "debian-13")
        nodes = Nodes(lab, play)
        # The lab names a host key in a drop-in of its own, as sites do: on one node the role's files alone name them.
        nodes.shell(
            lab.nodes()[0], "sed -i /^HostKey/d /etc/ssh/sshd_config.d/10-gpunode-lab.conf; systemctl reload ssh"
        )
        yield nodes
    finally:
        lab.down()


@pytest.fixture(scope="module")
def ssh_audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ssh-audit as PyPI has it, in an environment of its own."""
    folder = tmp_path_factory.mktemp("ssh-audit")
    subprocess.run([sys.executable, "-I", "-m", "venv", str(folder)], check=True, timeout=300)
    install = ["-I", "-m", "pip", "install", "-qq", "--require-hashes", "-r", str(HASHES)]
    subprocess.run([str(folder / "bin" / "python"), *install], check=True, timeout=300)
    return folder / "bin" / "ssh-audit"


@pytest.fixture(scope="module")
def hardened(nodes: Nodes) -> tuple[Run, Run, dict[str, str]]:
    """The announcement, what was done, and what each node had before."""
    before = {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()}
    announced = nodes.harden("--check")
    assert {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()} == before
    return announced, nodes.harden(), before


def test_both_are_hardened_as_announced(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]]) -> None:
    announced, done, _ = hardened
    assert announced.rc == 0, announced.output
    assert done.rc == 0, done.output
    assert DROP_IN in announced.paths
    assert announced.paths == done.paths
    for run in (announced, done):
        # The daemon's effective settings, before and after.
        assert "-x11forwarding yes" in run.output
        assert "+x11forwarding no" in run.output
        assert "+authenticationmethods publickey" in run.output


def test_a_second_run_changes_nothing(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]]) -> None:
    before = {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()}
    run = nodes.harden()
    assert (run.rc, run.changed) == (0, {}), run.output
    forced = nodes.harden("-e", "gpunode_force=true")
    assert (forced.rc, forced.changed) == (0, {}), forced.output
    assert {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()} == before


def test_new_logins_are_not_throttled(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]]) -> None:
    for _ in range(3):
        judged = nodes.judged()
        assert judged.keys() == {node.name for node in nodes.lab.nodes()}
        # Host keys of lab nodes are not known before, which is a warning of the same check.
        assert LOST not in {finding for findings in judged.values() for finding in findings}
    for node in nodes.lab.nodes():
        for _ in range(15):
            assert node.ssh(["true"]).returncode == 0


def test_ssh_audit_passes(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]], ssh_audit: Path) -> None:
    # OpenSSH 10 penalises who connects and does not log in, as ssh-audit does: this machine is trusted from here on.
    nodes.trusted = ["172.16.0.0/12", "192.168.0.0/16", "10.0.0.0/8"]
    run = nodes.harden()
    assert run.rc == 0, run.output
    for node in nodes.lab.nodes():
        argv = [str(ssh_audit), "-n", "-P", POLICIES[node.os], "-p", str(node.port), node.address]
        done = run_program(argv, limit_s=120)
        assert (done.returncode, "Passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"ssh_hardening_ciphers": ["rot13"]}, "rot13 is not offered"),
        ({"ssh_hardening_admin_users": ["ghost"]}, "no account ghost"),
        ({"ssh_hardening_allow_users": ["operator"]}, "admin is not in AllowUsers"),
        ({"ssh_hardening_ports": [2222]}, "this login came in at port 22"),
        ({"ssh_hardening_max_startups": "50:30:20"}, "sshd refuses the settings"),
        ({"ssh_hardening_least_rsa_bits": 99}, "ssh_hardening_least_rsa_bits"),
    ],
)
def test_what_would_lock_out_is_refused_and_nothing_changes(
    nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]], arguments: dict[str, object], reason: str
) -> None:
    before = {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()}
    run = nodes.harden("-e", json.dumps(arguments))
    assert run.rc != 0
    assert reason in " ".join(run.output.split()), run.output
    assert {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()} == before


def test_what_is_damaged_is_repaired(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]]) -> None:
    before = {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()}
    for node in nodes.lab.nodes():
        nodes.shell(node, f"echo 'PasswordAuthentication yes' > {DROP_IN}; systemctl reload ssh")
    run = nodes.harden()
    assert run.rc == 0, run.output
    assert run.paths == {DROP_IN}
    assert {node.name: nodes.shell(node, LEFT) for node in nodes.lab.nodes()} == before


def test_a_socket_keeps_its_port_and_gets_another(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]]) -> None:
    for node in nodes.lab.nodes():
        # The socket of Ubuntu takes IPv6 alone for a bare port.
        nodes.shell(node, f"mkdir -p {SOCKET}; printf '[Socket]\\nBindIPv6Only=ipv6-only\\n' > {SOCKET}/00-ubuntu.conf")
        nodes.shell(node, "systemctl disable --now ssh.service; systemctl enable --now ssh.socket")
    with connections(nodes):
        run = nodes.harden("-e", '{"ssh_hardening_ports": [22, 2222]}')
    assert run.rc == 0, run.output
    for node in nodes.lab.nodes():
        assert node.ssh(["true"]).returncode == 0
        listening = nodes.shell(node, "ss -Htln | awk '{print $4}'").split()
        assert {"0.0.0.0:2222", "[::]:2222", "0.0.0.0:22", "[::]:22"} <= set(listening)
    assert nodes.harden("-e", '{"ssh_hardening_ports": [22, 2222]}').changed == {}
    # sshd's folder in /run comes and goes behind a socket: it is judged all the same.
    for findings in nodes.judged().values():
        assert ("host.ssh-settings", "pass") in findings
    # Without the role's ports this socket would take IPv6 alone, and the login of this test is one of IPv4.
    for node in nodes.lab.nodes():
        nodes.shell(node, f"rm {SOCKET}/00-ubuntu.conf")
    run = nodes.harden()
    assert run.rc == 0, run.output
    for node in nodes.lab.nodes():
        assert "2222" not in nodes.shell(node, "ss -Htln | awk '{print $4}'")
        nodes.shell(node, f"rm -r {SOCKET}; systemctl daemon-reload")
        nodes.shell(node, "systemctl disable --now ssh.socket; systemctl enable --now ssh.service")


def test_absent_restores_what_was_there(nodes: Nodes, hardened: tuple[Run, Run, dict[str, str]]) -> None:
    run = nodes.harden(state="absent")
    assert run.rc == 0, run.output
    assert nodes.harden(state="absent").changed == {}
    for node in nodes.lab.nodes():
        # New host keys stay: clients know them by now.
        kept = [line for line in hardened[2][node.name].splitlines() if "ssh_host_" not in line]
        assert [line for line in nodes.shell(node, LEFT).splitlines() if "ssh_host_" not in line] == kept
