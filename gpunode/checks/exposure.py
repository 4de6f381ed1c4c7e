"""Checks on network exposure, and on accounts that are effectively root."""

from collections.abc import Iterator
from ipaddress import ip_address

from gpunode.checks.compare import at_most, failed, passed, skipped, warned
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.facts.exposure import Listener, PacketFilter
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

UNIT = "gpunode-firewall.service"
TABLE = "inet gpunode"
WITHOUT_PASSWORD = {5555: "DCGM's host engine", 9100: "the node exporter", 9400: "the DCGM exporter"}
"""Ports of services without authentication: docs.nvidia.com/datacenter/dcgm (nv-hostengine, dcgm-exporter),
github.com/prometheus/node_exporter."""
TLS = "with TLS"
DOCKER_API = {2375: "without TLS", 2376: TLS}
"""Ports of Docker's API by convention: docs.docker.com, dockerd."""
SWARM = {2377: "accepts certificates only", 7946: "has no API"}
"""Ports of a swarm, which dockerd opens too."""
ADMINISTRATORS = ("sudo", "wheel", "admin")


@registry.check(
    "host.firewall",
    needs=("packet_filter", "units"),
    means="If the role firewall deployed a policy, it is active: the table is loaded, and traffic that no rule "
    "accepts is dropped, over IPv4 and IPv6.",
    remedy="systemctl restart gpunode-firewall.service loads the rules again; role firewall, tag firewall_service.",
    state="observe",
    actions=("restart_service:gpunode-firewall.service", "run_role:firewall:firewall_service"),
)
def firewall(node: NodeFacts) -> Iterator[CheckResult]:
    unit = next((unit for unit in node.units or () if unit.name == UNIT and unit.load == "loaded"), None)
    packet_filter = node.packet_filter
    if unit is None:
        tables = listed(packet_filter.refusing) if packet_filter is not None and packet_filter.refusing else ""
        others = f"; input is refused by {tables}" if tables else ""
        yield skipped(f"the node has no policy of the role firewall{others}")
    elif packet_filter is None or packet_filter.own is None:
        yield failed(f"{UNIT} is installed and its table is not loaded", expected=TABLE, measured=None)
    elif missing := [name for name, refused in _families(packet_filter).items() if not refused]:
        message = f"{' and '.join(missing)} enter without a rule that accepts them"
        yield failed(message, expected="refused", measured="accepted")
    else:
        yield passed(f"the table {TABLE} is loaded, and refuses what no rule accepts")


def _families(packet_filter: PacketFilter) -> dict[str, bool]:
    return {"IPv4": packet_filter.ipv4_refused, "IPv6": packet_filter.ipv6_refused}


@registry.check(
    "host.exposed-services",
    needs=("listeners", "addresses", "packet_filter"),
    means="Services without authentication (DCGM's host engine, exporters) do not listen on a public Internet "
    "address without a packet filter.",
    remedy="Bind the service to a private address, or list the networks that may connect: role firewall "
    "(firewall_services).",
    state="observe",
    actions=("run_role:firewall",),
)
def exposed_services(node: NodeFacts) -> Iterator[CheckResult]:
    packet_filter = node.packet_filter
    refused = _families(packet_filter) if packet_filter is not None else {}
    public = [ip_address(address.address) for address in node.addresses or ()]
    public = [address for address in public if address.is_global and not refused.get(f"IPv{address.version}")]
    exposed = []
    for socket in node.listeners or ():
        service = WITHOUT_PASSWORD.get(socket.port) or ("an exporter" if "exporter" in (socket.process or "") else None)
        if socket.protocol == "tcp" and service is not None:
            exposed += [f"{service} at {ip}, port {socket.port}" for ip in public if _covers(socket, str(ip))]
    bad = f"{counted(len(exposed), 'service')} without authentication: {listed(exposed, 3)}"
    good = "no service without a password is public"
    yield at_most(len(exposed), 0, good, bad, fault=Status.WARN, unit="services")


def _covers(socket: Listener, address: str) -> bool:
    """Return whether a socket accepts connections to an address; one for :: by default accepts IPv4 too."""
    if socket.address == "0.0.0.0":  # noqa: S104
        return ":" not in address
    return socket.address in {"*", "::", address}


@registry.check(
    "container.docker-api",
    needs=("listeners",),
    means="Docker's API is not reachable over TCP: without certificates, access to it is root access to the node.",
    remedy="Remove hosts from daemon.json and -H tcp:// from the unit, and use docker -H ssh://HOST instead.",
    state="drain",
    actions=("fix_configuration",),
)
def docker_api(node: NodeFacts) -> Iterator[CheckResult]:
    sockets = [
        socket
        for socket in node.listeners or ()
        if socket.protocol == "tcp" and (socket.process == "dockerd" or socket.port in DOCKER_API)
    ]
    sockets = [socket for socket in sockets if socket.port not in SWARM]
    outside = [socket for socket in sockets if not _loopback(socket.address)]
    places = listed([f"{socket.address} port {socket.port}" for socket in outside or sockets], 3)
    if [socket for socket in outside if DOCKER_API.get(socket.port) != TLS]:
        yield failed(f"Docker's API listens on {places}", expected=0, measured=len(outside))
    elif sockets:
        message = f"Docker's API listens on {places}: access without a certificate is root access"
        yield warned(message, expected=0, measured=len(sockets), unit="sockets")
    else:
        yield passed("Docker's API is not reachable over TCP", expected=0, measured=0, unit="sockets")


def _loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


@registry.check(
    "container.docker-group",
    needs=("root_groups",),
    means="The group docker has no members other than administrators: its members have root access without a "
    "password (docker run -v /:/host).",
    remedy="Run gpasswd -d USER docker to remove a user; rootless Docker or Podman runs containers without the "
    "group. The role docker adds users of docker_users.",
    state="observe",
    actions=("fix_configuration",),
)
def docker_group(node: NodeFacts) -> Iterator[CheckResult]:
    groups = node.root_groups or {}
    if "docker" not in groups:
        raise Skip("the node has no group docker")
    administrators = {name for group in ADMINISTRATORS for name in groups.get(group, ())}
    others = sorted(set(groups["docker"]) - administrators)
    if others:
        message = f"{counted(len(others), 'user')} in the group docker and not in {', '.join(ADMINISTRATORS)}: "
        message += f"{listed(others)}: root without a password"
        yield warned(message, expected=0, measured=len(others), unit="users")
    else:
        yield passed("the group docker has only administrators as members", expected=0, measured=0)
