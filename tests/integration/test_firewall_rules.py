"""The rules of the role firewall in a kernel: what a scan from another network namespace finds, IPv4 and IPv6.

Three namespaces: the node, the world outside, and a container behind a bridge to which a port is published, as engines
do it. That the rules hold beside a real Docker engine is shown in tests/lab/test_firewall.py.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpunode.provisioning.firewall import WATCH, WATCHED_S, WATCHING
from gpunode.provisioning.firewall_policy import TABLE, nft_text, policy_of

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not (shutil.which("nft") and shutil.which("ip")), reason="needs nft and ip"),
    pytest.mark.timeout(120),
]

ADMIN, CLUSTER, MONITOR, STRANGER = range(4)
SETTINGS: dict[str, Any] = {
    "ssh_networks": ["10.99.0.0/24", "fd99:0::/64"],
    "ssh_ports": [22],
    "cluster_networks": ["10.99.1.0/24", "fd99:1::/64"],
    "cluster_interfaces": [],
    "container_interfaces": ["br-*"],
    "public_rate": 60,
    "services": [
        {
            "name": "node-exporter",
            "protocol": "tcp",
            "ports": ["9100", "9400-9410"],
            "networks": ["10.99.2.2", "fd99:2::2"],
        },
        {"name": "web", "protocol": "tcp", "ports": ["443"], "networks": ["any"]},
        {"name": "statsd", "protocol": "udp", "ports": ["8125"], "networks": ["10.99.2.0/24"]},
        {"name": "published", "protocol": "tcp", "ports": ["8080"], "networks": ["10.99.2.0/24", "fd99:2::/64"]},
    ],
    "extra_rules": ["tcp dport 7777 ip saddr 10.99.3.2 accept"],
}
PORTS = [*range(1, 200), 443, 5000, 7777, 8080, 9100, 9399, 9400, 9405, 9410, 9411, 29500, 65535]
LISTENS = [22, 443, 5000, 7777, 9100, 9405, 29500]
LISTENER = """
import socket, sys, time
held = []
for port in map(int, sys.argv[1:]):
    one = socket.socket(socket.AF_INET6)
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("::", port)); one.listen(512); held.append(one)
print("up", flush=True)
time.sleep(600)
"""
# Every port at once: what was refused reached the node, what did not answer was dropped.
SCANNER = """
import errno, json, select, socket, sys, time
source, target, seconds, *ports = sys.argv[1:]
family = socket.AF_INET6 if ":" in target else socket.AF_INET
found, poll, waiting = {}, select.poll(), {}
for port in map(int, ports):
    one = socket.socket(family); one.setblocking(False); one.bind((source, 0))
    status = one.connect_ex((target, port))
    waiting[one.fileno()] = (one, port); poll.register(one, select.POLLOUT)
end = time.monotonic() + float(seconds)
while waiting and time.monotonic() < end:
    for number, _ in poll.poll(100):
        one, port = waiting.pop(number); poll.unregister(number)
        status = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR); one.close()
        found[port] = "open" if status == 0 else "closed" if status == errno.ECONNREFUSED else errno.errorcode[status]
print(json.dumps(found))
"""


@dataclass
class World:
    """Three namespaces and what runs in them."""

    node: str
    outside: str
    container: str

    def sh(self, space: str, script: str, text: str | None = None) -> str:
        argv = ["ip", "netns", "exec", space, "sh", "-euc", script]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def load(self, **changes: Any) -> None:
        policy = policy_of({**SETTINGS, **changes})
        assert policy.problems == ()
        self.sh(self.node, "nft -c -f - ", nft_text(policy))
        self.sh(self.node, "nft -f -", nft_text(policy))

    def scan(self, host: int, ports: list[int] = PORTS, version: int = 4, seconds: float = 1.5) -> dict[int, str]:
        """Ports that answered, to how: ``open`` or ``closed``."""
        ends = (f"10.99.{host}.2", f"10.99.{host}.1") if version == 4 else (f"fd99:{host}::2", f"fd99:{host}::1")
        words = " ".join([*ends, str(seconds), *map(str, ports)])
        out = self.sh(self.outside, f"{sys.executable} -I - {words}", SCANNER)
        return {int(port): how for port, how in json.loads(out).items()}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(*(f"gpw-{name}-{os.getpid()}" for name in ("node", "outside", "container")))
    running = []
    try:
        for space in (made.node, made.outside, made.container):
            subprocess.run(["ip", "netns", "add", space], check=True, timeout=30)
            made.sh(space, "ip link set lo up; sysctl -qw net.ipv6.conf.default.accept_dad=0")
        made.sh(made.node, f"ip link add eth0 type veth peer name eth0 netns {made.outside}")
        made.sh(made.node, f"ip link add br-test type veth peer name eth0 netns {made.container}")
        for space, end in ((made.node, 1), (made.outside, 2)):
            for host in (ADMIN, CLUSTER, MONITOR, STRANGER):
                made.sh(space, f"ip addr add 10.99.{host}.{end}/24 dev eth0")
                made.sh(space, f"ip addr add fd99:{host}::{end}/64 dev eth0 nodad")
            made.sh(space, "ip link set eth0 up")
        made.sh(made.node, "ip addr add 172.30.0.1/24 dev br-test; ip addr add fd30::1/64 dev br-test nodad")
        made.sh(made.node, "ip link set br-test up; sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
        made.sh(made.outside, "ip route add 172.30.0.0/24 via 10.99.3.1; ip route add fd30::/64 via fd99:3::1")
        made.sh(made.container, "ip addr add 172.30.0.2/24 dev eth0; ip addr add fd30::2/64 dev eth0 nodad")
        made.sh(made.container, "ip link set eth0 up; ip route add default via 172.30.0.1")
        made.sh(made.container, "ip -6 route add default via fd30::1")
        made.sh(
            made.node,
            "nft -f -",
            "table inet engine { chain prerouting { type nat hook prerouting priority dstnat;\n"
            "fib daddr type local tcp dport 8080 dnat ip to 172.30.0.2:80\n"
            "fib daddr type local tcp dport 8080 dnat ip6 to [fd30::2]:80\n"
            "fib daddr type local tcp dport 8081 dnat ip to 172.30.0.2:80\n}\n}\n",
        )
        for space, ports in ((made.node, LISTENS), (made.container, [80])):
            argv = ["ip", "netns", "exec", space, sys.executable, "-I", "-c", LISTENER, *map(str, ports)]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE)
            running.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        yield made
    finally:
        for process in running:
            process.kill()
            process.wait()
        for space in (made.node, made.outside, made.container):
            subprocess.run(["ip", "netns", "del", space], check=False, timeout=30)


@pytest.mark.parametrize("version", [4, 6])
def test_a_scan_shows_exactly_the_allowed_ports(world: World, version: int) -> None:
    before = world.scan(STRANGER, version=version)
    assert {port for port, how in before.items() if how == "open"} == {*LISTENS, 8080}
    world.load()
    assert world.scan(ADMIN, version=version) == {22: "open", 443: "open"}
    assert world.scan(STRANGER, version=version) == {443: "open", **({7777: "open"} if version == 4 else {})}
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
        assert world.scan(STRANGER, [8080, 8081]) == {}
        assert world.scan(CLUSTER, [8080, 8081]) == {8080: "open", 8081: "open"}
        # A service on the port inside the container does not open another published port that leads there.
        world.load(services=[{"name": "web", "protocol": "tcp", "ports": ["80"], "networks": ["any"]}])
        assert world.scan(STRANGER, [8080, 8081]) == {}
    finally:
        world.sh(world.node, f"nft delete table inet {TABLE}")
    assert world.scan(STRANGER, [8080, 8081]) == {8080: "open", 8081: "open"}


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
        world.scan(STRANGER, [443])
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
    before = world.sh(world.node, "nft list ruleset")
    text = nft_text(policy_of({**SETTINGS, "extra_rules": ["tcp dport nonsense accept"]}))
    (tmp_path / "rules").write_text(text, encoding="utf-8")
    argv = ["ip", "netns", "exec", world.node, "nft", "-f", str(tmp_path / "rules")]
    assert subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode != 0
    assert world.sh(world.node, "nft list ruleset") == before
    world.sh(world.node, f"nft delete table inet {TABLE}")
