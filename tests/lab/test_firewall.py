"""The role firewall on a lab node: what a scan finds, what Docker publishes, and that nobody is locked out.

The tests of this file share one node and run in their order. The world outside is a network namespace of the node
behind a cable of its own, with an address in each of four networks; the controller comes over the lab's network.
"""

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site

from gpunode.errors import UndeterminedError
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("plugins/action/guarded_change", "plugins/module_utils/guard")

RULES, UNIT = "/etc/gpunode/firewall.nft", "/etc/systemd/system/gpunode-firewall.service"
CLUSTER, MONITOR, FOREIGN = 1, 2, 3
POLICY: dict[str, Any] = {
    "preflight_require_gpu": False,
    "firewall_state": "present",
    "firewall_cluster_networks": ["10.99.1.0/24", "fd99:1::/64"],
    "firewall_services": [
        {"name": "node-exporter", "ports": ["9100"], "networks": ["10.99.2.0/24", "fd99:2::/64"]},
        {"name": "inference", "ports": ["8080"], "networks": ["10.99.2.0/24", "fd99:2::/64"]},
        {"name": "web", "ports": [443], "networks": ["any"]},
    ],
}
PORTS = [*range(1, 200), 443, 5000, 8080, 8081, 9100, 29500]
LISTENS = [22, 443, 5000, 9100, 29500]
OUTSIDE = f"""
command -v nft || apt-get install -y -q nftables busybox-static
ip netns add outside
ip link add ether1 type veth peer name eth0 netns outside
sysctl -qw net.ipv6.conf.ether1.disable_ipv6=0 net.ipv4.ip_forward=1
ip netns exec outside sysctl -qw net.ipv6.conf.all.disable_ipv6=0
for host in 1 2 3; do
    ip address add 10.99.$host.1/24 dev ether1
    ip address add fd99:$host::1/64 dev ether1 nodad
    ip -n outside address add 10.99.$host.2/24 dev eth0
    ip -n outside address add fd99:$host::2/64 dev eth0 nodad
done
ip link set ether1 up
ip -n outside link set lo up
ip -n outside link set eth0 up
cat > /run/listen.py <<'END'
import socket, sys, time
held = []
for port in map(int, sys.argv[1:]):
    one = socket.socket(socket.AF_INET6)
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("::", port)); one.listen(512); held.append(one)
time.sleep(100000)
END
cat > /run/scan.py <<'END'
import errno, json, select, socket, sys, time
source, target, *ports = sys.argv[1:]
family = socket.AF_INET6 if ":" in target else socket.AF_INET
found, poll, waiting = {{}}, select.poll(), {{}}
for port in map(int, ports):
    one = socket.socket(family); one.setblocking(False); one.bind((source, 0))
    one.connect_ex((target, port)); waiting[one.fileno()] = (one, port); poll.register(one, select.POLLOUT)
end = time.monotonic() + 4
while waiting and time.monotonic() < end:
    for number, _ in poll.poll(100):
        one, port = waiting.pop(number); poll.unregister(number)
        status = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR); one.close()
        found[port] = "open" if status == 0 else errno.errorcode[status]
print(json.dumps(found))
END
systemd-run --quiet --unit=listeners python3 -I /run/listen.py {" ".join(str(port) for port in LISTENS if port != 22)}
"""
BOX = """
systemctl start docker
tar -c -C / bin/busybox | docker import - box > /dev/null
mkdir -p /srv/box && echo hello > /srv/box/index.html
docker run --detach --name named -p 8080:80 -v /srv/box:/srv:ro box /bin/busybox httpd -f -p 80 -h /srv
docker run --detach --name unnamed -p 8081:80 -v /srv/box:/srv:ro box /bin/busybox httpd -f -p 80 -h /srv
systemd-run --quiet --unit=world --property=NetworkNamespacePath=/run/netns/outside \
    /bin/busybox httpd -f -p 4444 -h /srv/box
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"wall-{os.getpid()}")
    try:
        lab.up(1, "debian-12")
        site = Site(lab)
        site.sh("apt-get update -q")
        site.sh(OUTSIDE)
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def firewall(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    return Roles(site, tmp_path_factory.mktemp("plays"), "firewall")


@pytest.fixture(scope="module")
def controller(site: Site) -> str:
    """Address from which this machine reaches the node."""
    return site.sh("ip -o route show default").split()[2]


@pytest.fixture(scope="module")
def policy(controller: str) -> list[str]:
    return variables(firewall_ssh_networks=[controller])


@pytest.fixture(scope="module")
def loaded(firewall: Roles, policy: list[str]) -> tuple[Run, Run]:
    """The announcement, and what was done."""
    before = firewall.site.snapshot()
    announced = firewall.done("--check", *policy)
    assert firewall.site.snapshot() == before
    assert "inet gpunode" not in firewall.site.sh("nft list tables")
    return announced, firewall.done(*policy)


def variables(**changes: Any) -> list[str]:
    return ["-e", json.dumps({**POLICY, **changes})]


def scan(site: Site, host: int, ports: list[int] = PORTS, version: int = 4) -> dict[int, str]:
    """Ports that answered: open, or refused by the node itself."""
    ends = f"10.99.{host}.2 10.99.{host}.1" if version == 4 else f"fd99:{host}::2 fd99:{host}::1"
    out = site.sh(f"ip netns exec outside python3 -I /run/scan.py {ends} {' '.join(map(str, ports))}")
    return {int(port): how for port, how in json.loads(out).items()}


def table(site: Site) -> str:
    """The rules, without the sources that rates have counted since."""
    return site.sh("nft -s -t list table inet gpunode")


def logs_in(site: Site) -> bool:
    """Whether a new SSH connection works."""
    try:
        return site.node.ssh(["true"], timeout_s=20).returncode == 0
    except UndeterminedError:
        return False


def test_it_is_loaded_as_announced_and_a_second_run_changes_nothing(
    firewall: Roles, loaded: tuple[Run, Run], policy: list[str]
) -> None:
    announced, done = loaded
    assert announced.paths >= {RULES, UNIT}
    assert done.paths == announced.paths
    assert firewall.site.sh("systemctl is-active gpunode-firewall; systemctl is-enabled gpunode-firewall").split() == [
        "active",
        "enabled",
    ]
    before = firewall.site.snapshot(), firewall.site.sh("nft -s -t list ruleset")
    run = firewall.done(*policy, "-e", "gpunode_force=true")
    assert run.recap["changed"] == 0, run.changed
    assert (firewall.site.snapshot(), firewall.site.sh("nft -s -t list ruleset")) == before
    assert "gpunode_watch" not in before[1]


@pytest.mark.parametrize("version", [4, 6])
def test_a_scan_shows_exactly_the_allowed_ports(site: Site, loaded: tuple[Run, Run], version: int) -> None:
    assert scan(site, FOREIGN, version=version) == {443: "open"}
    assert scan(site, MONITOR, version=version) == {443: "open", 9100: "open", 8080: "ECONNREFUSED"}
    everything = scan(site, CLUSTER, version=version)
    assert everything.keys() == set(PORTS)
    assert {port for port, how in everything.items() if how == "open"} == set(LISTENS)


def test_a_policy_that_locks_out_reverts_by_itself(firewall: Roles, loaded: tuple[Run, Run]) -> None:
    site = firewall.site
    before = site.snapshot(), table(site)
    wrong = variables(firewall_ssh_networks=["10.0.0.0/8"], firewall_require_controller=False, firewall_revert_s=30)
    started = time.monotonic()
    run = firewall.play(*wrong)
    assert run.rc != 0
    assert "was reverted" in run.output, run.output
    assert time.monotonic() - started < 240
    assert (site.snapshot(), table(site)) == before
    assert logs_in(site)


def test_without_the_revert_it_does_lock_out(firewall: Roles, loaded: tuple[Run, Run], policy: list[str]) -> None:
    """Otherwise the drills above would prove nothing."""
    site = firewall.site
    wrong = variables(firewall_ssh_networks=["10.0.0.0/8"], firewall_require_controller=False, firewall_revert_s=0)
    try:
        firewall.play(*wrong)
        time.sleep(60)
        assert not logs_in(site)
    finally:
        site.sh("systemctl stop gpunode-firewall")
    assert logs_in(site)
    firewall.done(*policy)


def test_a_published_port_follows_the_policy_and_dockers_rules_stay(site: Site, loaded: tuple[Run, Run]) -> None:
    site.sh("apt-get install -y -q --no-install-recommends docker.io iptables")
    site.sh(BOX)
    docker = site.sh("iptables-save -t nat | grep -v ^#; iptables-save -t filter | grep -v ^#")
    assert scan(site, MONITOR, [8080, 8081]) == {8080: "open"}
    assert scan(site, FOREIGN, [8080, 8081]) == {}
    assert scan(site, CLUSTER, [8080, 8081]) == {8080: "open", 8081: "open"}
    # Over IPv6 it is docker-proxy that listens, where the node had IPv6 when the engine started.
    assert scan(site, MONITOR, [8080, 8081], version=6).keys() == {8080}
    assert scan(site, FOREIGN, [8080, 8081], version=6) == {}
    # What containers open themselves goes out, to each other and to the world.
    gateway = site.sh("ip -4 -o address show docker0").split()[3].partition("/")[0]
    for endpoint in (f"{gateway} 8081", "10.99.1.1 8080", "10.99.3.2 4444"):
        request = r"printf 'GET /index.html HTTP/1.0\r\n\r\n'"
        reply = site.sh(f"{request} | docker run --interactive --rm box /bin/busybox nc -w 5 {endpoint}")
        assert reply.endswith("hello\n"), reply
    site.sh("systemctl restart gpunode-firewall")
    assert site.sh("iptables-save -t nat | grep -v ^#; iptables-save -t filter | grep -v ^#") == docker
    site.sh("systemctl restart docker; docker start named unnamed")
    assert scan(site, FOREIGN, [8080, 8081]) == {}
    site.sh("systemctl stop gpunode-firewall")
    assert scan(site, FOREIGN, [8080, 8081]) == {8080: "open", 8081: "open"}
    site.sh("systemctl start gpunode-firewall; docker rm -f named unnamed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"firewall_ssh_networks": ["10.0.0.0/8"]}, "would not allow it again"),
        ({"firewall_cluster_networks": ["training"]}, "training is not a network"),
        ({"firewall_extra_rules": ["tcp dport nonsense accept"]}, "nft rejects the rules"),
    ],
)
def test_bad_settings_are_refused_before_anything_changes(
    firewall: Roles, loaded: tuple[Run, Run], controller: str, changes: dict[str, Any], message: str
) -> None:
    before = firewall.site.snapshot(), firewall.site.sh("nft -s -t list ruleset")
    run = firewall.play(*variables(**{"firewall_ssh_networks": [controller], **changes}))
    assert run.rc != 0
    assert message in " ".join(run.output.split())
    assert (firewall.site.snapshot(), firewall.site.sh("nft -s -t list ruleset")) == before


def test_what_is_damaged_is_repaired(firewall: Roles, loaded: tuple[Run, Run], policy: list[str]) -> None:
    site = firewall.site
    before = site.snapshot(), table(site)
    for damage in (
        "nft flush chain inet gpunode services",
        f"echo '# damaged' >> {RULES}; systemctl disable --now --quiet gpunode-firewall",
    ):
        site.sh(damage)
        run = firewall.done(*policy)
        assert run.recap["changed"] == 1, damage
        assert (site.snapshot(), table(site)) == before, damage


def test_the_rules_of_the_distributions_unit_do_not_remove_it(firewall: Roles, loaded: tuple[Run, Run]) -> None:
    """nftables.service flushes everything when it starts, stops and reloads."""
    for verb in ("start", "restart", "reload", "stop"):
        firewall.site.sh(f"systemctl {verb} nftables.service")
        if verb != "stop":
            assert scan(firewall.site, FOREIGN, [443, 5000]) == {443: "open"}, verb
    firewall.site.sh("systemctl start gpunode-firewall")


def test_the_rules_are_loaded_at_boot(firewall: Roles, loaded: tuple[Run, Run], policy: list[str]) -> None:
    site = firewall.site
    rules = table(site)
    site.node.restart()
    site.node.wait()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not logs_in(site):
        time.sleep(2)
    assert table(site) == rules
    assert firewall.done(*policy).recap["changed"] == 0
    # The world outside was in the memory of the node.
    site.sh(OUTSIDE)
    assert scan(site, FOREIGN) == {443: "open"}


def test_the_first_policy_that_locks_out_reverts_by_itself_too(
    firewall: Roles, loaded: tuple[Run, Run], policy: list[str]
) -> None:
    site = firewall.site
    firewall.done(*policy, "-e", "firewall_state=absent")
    assert "inet gpunode" not in site.sh("nft list tables")
    wrong = variables(firewall_ssh_networks=["10.0.0.0/8"], firewall_require_controller=False, firewall_revert_s=30)
    run = firewall.play(*wrong)
    assert run.rc != 0
    assert "was reverted" in run.output, run.output
    assert "inet gpunode" not in site.sh("nft list tables")
    assert site.sh(f"ls {RULES} {UNIT} 2>/dev/null || true") == ""
    assert logs_in(site)


def test_absent_removes_it(firewall: Roles, loaded: tuple[Run, Run], policy: list[str]) -> None:
    firewall.done(*policy)
    announced = firewall.done("--check", *policy, "-e", "firewall_state=absent")
    run = firewall.done(*policy, "-e", "firewall_state=absent")
    assert announced.paths == run.paths >= {RULES, UNIT}
    assert "inet gpunode" not in firewall.site.sh("nft list tables")
    # The guard keeps its lock, and what confirmed the last change.
    left = "find /etc /var/lib/gpunode -path '*firewall*' -path '*gpunode*' -not -path '*/guard/*'"
    assert firewall.site.sh(left) == ""
    assert firewall.done(*policy, "-e", "firewall_state=absent").recap["changed"] == 0


def test_with_firewalld_the_policy_is_its_default_zone(firewall: Roles, policy: list[str]) -> None:
    site = firewall.site
    # firewalld, which its package starts, flushes the rules by which Docker serves names to the lab's node.
    site.sh("getent ahostsv4 deb.debian.org | awk '{print $1, \"deb.debian.org\"; exit}' >> /etc/hosts")
    site.sh("apt-get install -y -q --no-install-recommends firewalld python3-dbus python3-gi polkitd && sleep 5")
    site.sh("systemctl enable --now firewalld && firewall-cmd --state")
    before = site.sh("cat /etc/firewalld/firewalld.conf; ls /etc/firewalld/zones")
    firewall.done(*policy)
    assert site.sh("firewall-cmd --get-default-zone").strip() == "gpunode"
    # A zone rejects what it does not let in, where our own table drops it.
    for host, expected in ((FOREIGN, {443}), (MONITOR, {443, 9100}), (CLUSTER, set(LISTENS))):
        assert {port for port, how in scan(site, host).items() if how == "open"} == expected
    assert firewall.done(*policy).recap["changed"] == 0
    wrong = variables(firewall_ssh_networks=["10.0.0.0/8"], firewall_require_controller=False, firewall_revert_s=30)
    assert "was reverted" in firewall.play(*wrong).output
    assert logs_in(site)
    firewall.done(*policy, "-e", "firewall_state=absent")
    assert site.sh("cat /etc/firewalld/firewalld.conf; ls /etc/firewalld/zones") == before
