"""The rules of the role firewall in a kernel: what a scan from another network namespace finds, IPv4 and IPv6.

A port is published to the container as engines do it. That the rules hold beside a real Docker engine is shown in
test_firewall_docker.py.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.module_utils.guard import Guard
from firewall_world import ADMIN, CLUSTER, FOREIGN, LISTENS, MONITOR, PORTS, SCANNER, World, rules

from gpunode.provisioning.firewall import REMOVE, UNIT, WATCH, WATCHED_S, WATCHING
from gpunode.provisioning.firewall_policy import TABLE

pytest_plugins = ("firewall_fixtures",)
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not (shutil.which("nft") and shutil.which("ip")), reason="needs nft and ip"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("version", [4, 6])
def test_a_scan_shows_exactly_the_allowed_ports(world: World, version: int) -> None:
    before = world.scan(FOREIGN, version=version)
    assert {port for port, how in before.items() if how == "open"} == {*LISTENS, 8080}
    world.load()
    assert world.scan(ADMIN, version=version) == {22: "open", 443: "open"}
    assert world.scan(FOREIGN, version=version) == {443: "open", **({7777: "open"} if version == 4 else {})}
    exporters = {9100: "open", 9400: "closed", 9405: "open", 9410: "closed"}
    assert world.scan(MONITOR, version=version) == {443: "open", 8080: "open", **exporters}
    everything = world.scan(CLUSTER, version=version)
    assert everything.keys() == set(PORTS)
    assert {port for port, how in everything.items() if how == "open"} == {*LISTENS, 8080}
    world.sh(world.node, f"nft delete table inet {TABLE}")


def test_a_published_port_does_not_bypass_the_policy(world: World) -> None:
    world.load()
    try:
        assert world.scan(MONITOR, [8080, 8081]) == {8080: "open"}
        assert world.scan(FOREIGN, [8080, 8081]) == {}
        assert world.scan(CLUSTER, [8080, 8081]) == {8080: "open", 8081: "open"}
        # A service on the port inside the container does not open another published port that leads there.
        world.load(services=[{"name": "web", "protocol": "tcp", "ports": ["80"], "networks": ["any"]}])
        assert world.scan(FOREIGN, [8080, 8081]) == {}
    finally:
        world.sh(world.node, f"nft delete table inet {TABLE}")
    assert world.scan(FOREIGN, [8080, 8081]) == {8080: "open", 8081: "open"}


@pytest.mark.parametrize("address", ["172.30.0.2", "fd30::2"])
def test_a_container_is_not_reached_past_its_published_port(world: World, address: str) -> None:
    """Over a route to its own address; what it opens itself goes on, to the world and to the node."""
    outside = "10.99.3.2" if "." in address else "fd99:3::2"
    ask = f"{sys.executable} -I - {outside} {address} 1 80"
    assert json.loads(world.sh(world.outside, ask, SCANNER)) == {"80": "open"}
    world.load()
    try:
        assert json.loads(world.sh(world.outside, ask, SCANNER)) == {}
        gateway = "172.30.0.1" if "." in address else "fd30::1"
        inside = f"{sys.executable} -I - {address} {gateway} 1 5000"
        assert json.loads(world.sh(world.container, inside, SCANNER)) == {"5000": "open"}
        back = f"{sys.executable} -I - {address} {outside} 1 4444"
        assert json.loads(world.sh(world.container, back, SCANNER)) == {"4444": "closed"}
    finally:
        world.sh(world.node, f"nft delete table inet {TABLE}")


def test_new_connections_of_one_source_to_a_public_service_are_limited(world: World) -> None:
    world.load()
    try:
        world.scan(FOREIGN, [443])
        flood = world.sh(
            world.outside,
            f"{sys.executable} -I - 10.99.3.2 10.99.3.1 1 {' '.join(['443'] * 120)}",
            SCANNER.replace("found[port] =", "found[str(port) + '-' + str(number)] ="),
        )
        assert 20 <= len(json.loads(flood)) <= 40
        assert world.scan(ADMIN, [443]) == {443: "open"}
    finally:
        world.sh(world.node, f"nft delete table inet {TABLE}")


def test_loading_again_replaces_the_table_and_leaves_those_of_others(world: World) -> None:
    engine = world.sh(world.node, "nft list table inet engine")
    world.load()
    before = world.sh(world.node, f"nft -s -t list table inet {TABLE}")
    world.load()
    assert world.sh(world.node, f"nft -s -t list table inet {TABLE}") == before
    assert world.sh(world.node, "nft list tables").split("\n")[:-1] == ["table inet engine", f"table inet {TABLE}"]
    started = time.monotonic()
    world.load(ssh_networks=["10.99.3.0/24"])
    assert time.monotonic() - started < 10
    assert world.sh(world.node, f"nft -s -t list table inet {TABLE}") != before
    world.sh(world.node, f"nft delete table inet {TABLE}")
    assert world.sh(world.node, "nft list table inet engine") == engine


STREAM = """
import socket, time
one = socket.create_server(("10.99.3.2", 7000)); print("up", flush=True)
peer, _ = one.accept()
while True:
    peer.sendall(b"x"); time.sleep(0.4)
"""
RECEIVER = """
import socket
one = socket.create_connection(("10.99.3.2", 7000))
while one.recv(1):
    print("x", flush=True)
"""


def goes_on(world: World, watched: bool) -> bool:
    """Return whether a node that receives alone still does when the first rules are loaded."""
    engine = world.sh(world.node, "nft list table inet engine; nft delete table inet engine")
    programs = []
    try:
        for space, program in ((world.outside, STREAM), (world.node, RECEIVER)):
            argv = ["ip", "netns", "exec", space, sys.executable, "-I", "-c", program]
            programs.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
            assert programs[-1].stdout is not None
            programs[-1].stdout.readline()
        if watched:
            world.sh(world.node, f"nft '{WATCHING}'; sleep {WATCHED_S}")
        world.load()
        receiver = programs[1].stdout
        assert receiver is not None
        os.set_blocking(receiver.fileno(), False)
        time.sleep(1)
        receiver.read()
        time.sleep(2)
        return bool(receiver.read())
    finally:
        for process in programs:
            process.kill()
            process.wait()
        world.sh(
            world.node, f"nft delete table inet {TABLE}; nft add table inet {WATCH}; nft delete table inet {WATCH}"
        )
        world.sh(world.node, "nft -f -", engine)


def test_a_connection_that_was_open_before_goes_on(world: World) -> None:
    assert goes_on(world, watched=True)
    # Otherwise what its server sends counts as new, unless an answer of the node happened to be under way.
    assert not all(goes_on(world, watched=False) for _ in range(3))


def test_what_nft_rejects_changes_nothing(world: World, tmp_path: Path) -> None:
    world.load()
    before = world.sh(world.node, "nft -s list ruleset")
    text = rules(extra_rules=["tcp dport nonsense accept"])
    (tmp_path / "rules").write_text(text, encoding="utf-8")
    argv = ["ip", "netns", "exec", world.node, "nft", "-f", str(tmp_path / "rules")]
    assert subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode != 0
    assert world.sh(world.node, "nft -s list ruleset") == before
    world.sh(world.node, f"nft delete table inet {TABLE}")


@pytest.mark.parametrize("first", [True, False])
def test_a_policy_that_locks_out_is_reverted_by_the_guard(world: World, tmp_path: Path, first: bool) -> None:
    """The guard's program with the role's commands; that its timer and unit fire is shown by its own tests."""
    file = tmp_path / "firewall.nft"

    def runner(argv: list[str]) -> tuple[int, str]:
        if argv[0] in {"systemctl", "systemd-run"}:
            if argv[1] != "reload-or-restart":
                return 0, "active"
            argv = ["nft", "-f", str(file)]
        inside = ["ip", "netns", "exec", world.node, *argv]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout + done.stderr

    if not first:
        file.write_text(rules(), encoding="utf-8")
        world.load()
    before = world.scan(ADMIN, [22])
    restore = [["nft", REMOVE]] if first else [["systemctl", "reload-or-restart", UNIT]]
    guard = Guard("firewall", tmp_path / "guard", tmp_path / "units", runner)
    record = {"name": "firewall", "token": "a", "paths": [str(file)], "units": [], "restore": restore}
    try:
        guard.arm(record, {}, 60)
        file.write_text(rules(ssh_networks=["192.0.2.0/24"]), encoding="utf-8")
        world.sh(world.node, f"nft -f {file}")
        assert before == {22: "open"}
        assert world.scan(ADMIN, [22]) == {}
        outcome = guard.restore("by the timer on the node")
        assert outcome is not None
        assert outcome["failed"] == []
        assert world.scan(ADMIN, [22]) == {22: "open"}
        assert file.exists() is not first
        assert (TABLE in world.sh(world.node, "nft list tables")) is not first
    finally:
        world.sh(world.node, f"nft '{REMOVE}'")
