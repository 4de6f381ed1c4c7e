"""Checks on exposure: the network, logins by SSH, keys and passwords, and accounts that are effectively root."""

from collections.abc import Iterator
from datetime import datetime
from ipaddress import ip_address

from gpunode.checks.compare import at_most, failed, passed, skipped, warned
from gpunode.checks.declared import declare
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.exposure import KeyFile, Listener, PacketFilter
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

FIREWALL_UNIT = "gpunode-firewall.service"
FIREWALL_TABLE = "inet gpunode"
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
    unit = next((unit for unit in node.units or () if unit.name == FIREWALL_UNIT and unit.load == "loaded"), None)
    packet_filter = node.packet_filter
    if unit is None:
        tables = listed(packet_filter.refusing) if packet_filter is not None and packet_filter.refusing else ""
        others = f"; input is refused by {tables}" if tables else ""
        yield skipped(f"the node has no policy of the role firewall{others}")
    elif packet_filter is None or packet_filter.own is None:
        yield failed(
            f"{FIREWALL_UNIT} is installed and its table is not loaded", expected=FIREWALL_TABLE, measured=None
        )
    elif missing := [name for name, refused in _families(packet_filter).items() if not refused]:
        message = f"{' and '.join(missing)} enter without a rule that accepts them"
        yield failed(message, expected="refused", measured="accepted")
    else:
        yield passed(f"the table {FIREWALL_TABLE} is loaded, and refuses what no rule accepts")


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


HOST_KEY = "/etc/ssh/ssh_host_"
BROKEN_ALGORITHMS = ("group1-sha1", "group14-sha1", "group-exchange-sha1", "-cbc", "arcfour", "hmac-md5", "-96")
"""Parts of the names of algorithms that OpenSSH itself no longer offers by default (its release notes, 6.7 to 8.2)."""
RSA_LEAST = Threshold(
    "host.ssh-host-keys.rsa-least",
    2048,
    "bits",
    "Smaller RSA keys warn.",
    source="NIST SP 800-57 part 1, table 2 (112 bits of strength)",
)
READ_BY_OTHERS, READ_BY_GROUP = 0o004, 0o040
DAY_S = 86400


@registry.check(
    "host.ssh-settings",
    needs=("ssh_daemon",),
    means="sshd accepts keys and no passwords, and offers no broken algorithm, according to its effective "
    "configuration (sshd -T).",
    remedy="Harden SSH: role ssh_hardening (ssh_hardening_state: present), tag ssh_hardening_configure. It "
    "reverts itself unless a new login succeeds.",
    state="observe",
    actions=("run_role:ssh_hardening:ssh_hardening_configure",),
)
def ssh_settings(node: NodeFacts) -> Iterator[CheckResult]:
    if node.ssh_daemon is None:
        raise Skip("the node has no OpenSSH server")
    values = node.ssh_daemon.settings
    if values.get("permitemptypasswords") == "yes":
        message = "sshd permits logins with empty passwords"
        yield failed(message, expected="no", measured="yes", source="sshd -T")
        return
    faults = []
    methods = values.get("authenticationmethods", "any").split()
    by_key = all(method.partition(",")[0] == "publickey" for method in methods)
    names = [name for name in ("passwordauthentication", "kbdinteractiveauthentication") if values.get(name) == "yes"]
    if names and not by_key:
        faults.append(f"passwords are accepted ({', '.join(names)})")
        if values.get("permitrootlogin") == "yes":
            faults.append("root's too (permitrootlogin)")
    offered = [word for name in ("kexalgorithms", "ciphers", "macs") for word in values.get(name, "").split(",")]
    broken = sorted({word for word in offered if any(part in word for part in BROKEN_ALGORITHMS)})
    if broken:
        faults.append(f"broken algorithms are offered: {listed(broken)}")
    yield at_most(len(faults), 0, "sshd accepts only keys", "; ".join(faults), fault=Status.WARN, source="sshd -T")


@registry.check(
    "host.ssh-host-keys",
    needs=("private_keys", "ssh_daemon"),
    thresholds=(RSA_LEAST,),
    means="The host keys of sshd have a secure type and size, and only root can read them.",
    remedy="The role ssh_hardening, tag ssh_hardening_install, generates strong host keys and removes weak ones "
    "after clients learned the new ones. Replace a host key that others could read: remove it and its .pub file, "
    "then run the role.",
    state="observe",
    actions=("run_role:ssh_hardening:ssh_hardening_install",),
)
def ssh_host_keys(node: NodeFacts) -> Iterator[CheckResult]:
    keys = [key for key in node.private_keys or () if key.path.startswith(HOST_KEY)]
    if node.ssh_daemon is None or not keys:
        raise Skip("the node has no host keys of OpenSSH")
    exposed = [key.path for key in keys if int(key.mode, 8) & READ_BY_OTHERS]
    weak = [key for key in keys if key.type == "ssh-dss" or (key.type == "ssh-rsa" and key.bits < RSA_LEAST.value)]
    if exposed:
        yield failed(f"readable by all users: {listed(exposed)}", expected=0, measured=len(exposed))
        return
    names = listed([f"{key.path} ({key.type} of {key.bits} bits)" for key in weak])
    kinds = listed(sorted({key.type or "unknown kind" for key in keys}))
    good = f"{counted(len(keys), 'host key')} ({kinds}), the oldest of {_oldest_days(keys, node)} days"
    yield at_most(len(weak), 0, good, f"weak host keys: {names}", fault=Status.WARN, unit="keys")


def _oldest_days(keys: list[KeyFile], node: NodeFacts) -> int:
    now = datetime.fromisoformat(node.collected_at).timestamp()
    return max(0, int((now - min(key.modified_s for key in keys)) // DAY_S))


@registry.check(
    "host.private-keys",
    needs=("private_keys",),
    means="Only its owner can read the private key of a user.",
    remedy="chmod 600 FILE; replace a key that others could read on all machines that accept it.",
    state="observe",
    actions=("fix_configuration",),
)
def user_keys(node: NodeFacts) -> Iterator[CheckResult]:
    keys = [key for key in node.private_keys or () if not key.path.startswith(HOST_KEY)]
    exposed = [key.path for key in keys if int(key.mode, 8) & READ_BY_OTHERS]
    shared = [key.path for key in keys if int(key.mode, 8) & READ_BY_GROUP]
    if exposed:
        yield failed(f"readable by all users: {listed(exposed)}", expected=0, measured=len(exposed))
    else:
        good = f"{counted(len(keys), 'private key')} of users, readable only by their owners"
        yield at_most(len(shared), 0, good, f"a group can read {listed(shared)}", fault=Status.WARN)


declare(
    "host.empty-passwords",
    fact="empty_passwords[]",
    count=True,
    comparison="equals",
    value=0,
    good="every account has a password or is locked",
    message="{measured:account} without a password: {items}",
    unit="accounts",
    means="No account with a shell has an empty password, which su and the console accept.",
    remedy="Run passwd -l NAME to lock one, or the role accounts (accounts_lock_passwords), tag "
    "accounts_configure, to lock all.",
    state="observe",
    actions=("run_role:accounts:accounts_configure",),
)
