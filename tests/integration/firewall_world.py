"""What the tests of the firewall know of their three network namespaces; firewall_fixtures.py makes them."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from gpunode.provisioning.firewall_policy import FirewallSettings, nft_text, policy_of

ADMIN, CLUSTER, MONITOR, FOREIGN = range(4)
SETTINGS: dict[str, Any] = {
    "ssh_networks": ["10.99.0.0/24", "fd99:0::/64"],
    "ssh_ports": ["22"],
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


def rules(**changes: Any) -> str:
    """The rules of these settings."""
    policy = policy_of(FirewallSettings.model_validate({**SETTINGS, **changes}))
    assert policy.problems == ()
    return nft_text(policy)


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
        self.sh(self.node, "nft -c -f - ", rules(**changes))
        self.sh(self.node, "nft -f -", rules(**changes))

    def scan(self, host: int, ports: list[int] = PORTS, version: int = 4, seconds: float = 1.5) -> dict[int, str]:
        """Ports that answered, to how: ``open`` or ``closed``."""
        ends = (f"10.99.{host}.2", f"10.99.{host}.1") if version == 4 else (f"fd99:{host}::2", f"fd99:{host}::1")
        words = " ".join([*ends, str(seconds), *map(str, ports)])
        out = self.sh(self.outside, f"{sys.executable} -I - {words}", SCANNER)
        return {int(port): how for port, how in json.loads(out).items()}
