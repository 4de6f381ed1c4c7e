"""Three network namespaces: the node, the world outside, and a container behind a bridge."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from firewall_world import ADMIN, CLUSTER, FOREIGN, LISTENER, LISTENS, MONITOR, World


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
            for host in (ADMIN, CLUSTER, MONITOR, FOREIGN):
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
