"""Policy of the role firewall: read from its settings, every entry checked, and rendered for nftables and firewalld."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Literal, NamedTuple

from gpunode.frozen import Frozen
from gpunode.provisioning.role import PackageSettings, option
from gpunode.provisioning.templates import completed, rendered

Network = IPv4Network | IPv6Network
Family = Literal["ip", "ip6"]
TABLE = "gpunode"
EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
ZONE = "gpunode"
ZONE_FILE = f"/etc/firewalld/zones/{ZONE}.xml"
CONF = "/etc/firewalld/firewalld.conf"
_DEFAULT = re.compile(r"(?m)^[ \t]*DefaultZone[ \t]*=[ \t]*(.*?)[ \t]*$")
BURST = 30
"""New connections of one source before its rate is limited."""
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_INTERFACE = re.compile(r"[A-Za-z0-9_.@:-]{1,15}\*?|[A-Za-z0-9_.@:-]{0,14}\*")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_HIGHEST_PORT = 65535


class FirewallService(Frozen):
    """One entry of the services."""

    name: str = option(..., "Name of the service, lower-case.")
    protocol: Literal["tcp", "udp"] = option("tcp", "Protocol.")
    ports: tuple[str, ...] = option(..., "Ports and ranges of ports. For a container it is the published port.")
    networks: tuple[str, ...] = option(..., "Networks that may connect; V(any) allows all.")
    rate: int | None = option(
        None,
        "New connections per minute and source address. Without it O(firewall_public_rate) holds for a public service.",
    )


class FirewallSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is changed. V(present): the node drops everything that the policy does not list. V(absent): "
        "table, unit and files are removed.",
    )
    ssh_networks: tuple[str, ...] = option(
        (),
        "Networks from which SSH is allowed (required), the controller's among them: [10.0.0.0/8, 2001:db8::/32]; any "
        "allows all.",
    )
    ssh_ports: tuple[str, ...] = option(("22",), "Ports of sshd.")
    cluster_networks: tuple[str, ...] = option(
        (),
        "Training networks of the cluster: all traffic from them is allowed, because NCCL and Gloo use any port.",
    )
    cluster_interfaces: tuple[str, ...] = option(
        (), "Interfaces on which the training networks are trusted. Empty: all."
    )
    services: tuple[FirewallService, ...] = option(
        (),
        "Named services: [{name: node-exporter, protocol: tcp, ports: [9100], networks: [10.0.5.0/24]}].",
    )
    public_rate: int = option(
        60,
        "New connections per minute that one address may open to a public service (networks: [any]). V(0): no limit.",
    )
    container_interfaces: tuple[str, ...] = option(
        (
            *("docker0", "docker_gwbridge", "br-*", "podman*", "cni*", "cali*", "flannel*", "cilium*", "lxc*", "tunl*"),
            *("veth*", "vxlan.calico", "vxlan-v6.calico", "wireguard.cali", "wg-v6.cali", "antrea-gw0", "ovn-k8s-mp0"),
            "virbr*",
        ),
        "Interfaces of container engines, CNI plugins and libvirt: traffic from them is subject to the engine's own "
        "rules.",
    )
    extra_rules: tuple[str, ...] = option(
        (),
        "Further rules of the input chain, in nft syntax, one per line. Invalid rules are refused before anything is "
        "changed.",
    )
    revert_s: int = option(
        60, "Seconds until the node restores the old rules unless a new login succeeds, 20 to 900. V(0): never."
    )
    require_controller: bool = option(
        True, "Refuse a policy that would lock out the address of this run. False for image builds."
    )


@dataclass(frozen=True, slots=True)
class OpenPorts:
    """Ports that networks may connect to."""

    name: str
    protocol: str
    ports: tuple[tuple[int, int], ...]
    networks: tuple[Network, ...]
    rate: int = 0
    """New connections per minute that one source address may open; 0: unlimited."""

    @property
    def public(self) -> bool:
        """Return whether every address may connect."""
        return any(network.prefixlen == 0 for network in self.networks)


@dataclass(frozen=True, slots=True)
class FirewallPolicy:
    """All accepted traffic."""

    services: tuple[OpenPorts, ...] = ()
    """The first one is SSH."""
    cluster: tuple[Network, ...] = ()
    cluster_interfaces: tuple[str, ...] = ()
    container_interfaces: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Errors in the settings, one line each."""


class _Reader:
    """Reader of the settings that collects errors."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def networks(self, name: str, values: Iterable[str]) -> tuple[Network, ...]:
        """Return the networks of a list."""
        networks: list[Network] = []
        for value in values:
            network, problem = _network(value)
            networks += network
            self.problems += [f"{name}: {problem}"] if problem else []
        return tuple(dict.fromkeys(networks))

    def ports(self, name: str, values: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """Return ports and ranges of ports, first and last of each."""
        ports = []
        for value in values:
            match = _PORTS.fullmatch(value.strip())
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if 1 <= first <= last <= _HIGHEST_PORT:
                ports.append((first, last))
            else:
                self.problems.append(f"{name}: {value} is not a port or a range of ports (examples: 9100, 9400-9410)")
        return tuple(sorted(set(ports)))

    def interfaces(self, name: str, values: Iterable[str]) -> tuple[str, ...]:
        """Return names of interfaces; a trailing * matches any."""
        names = [*values]
        wrong = [link for link in names if not _INTERFACE.fullmatch(link)]
        self.problems += [f"{name}: {link} is not the name of an interface (examples: eth1, br-*)" for link in wrong]
        return tuple(link for link in names if link not in wrong)

    def service(self, where: str, row: FirewallService, names: set[str]) -> OpenPorts:
        """Return one entry of the services; ``names`` are those of the entries before it."""
        name = row.name
        if not _NAME.fullmatch(name):
            self.problems.append(f"{where}: name must be lower-case letters, digits, - and _ (example: node-exporter)")
        elif name.replace("-", "_") in names:
            self.problems.append(f"{where}: the name is used twice")
        if not row.ports or not row.networks:
            self.problems.append(f"{where}: ports and networks are required (networks: [any] opens the port to all)")
        return OpenPorts(
            name.replace("-", "_"),
            row.protocol,
            self.ports(where, row.ports),
            self.networks(where, row.networks),
        )

    def rules(self, name: str, values: Iterable[str]) -> tuple[str, ...]:
        """Return further rules of the input chain, each a line."""
        lines = tuple(line.strip() for line in values if line.strip())
        for line in lines:
            if "\n" in line or line.count("{") != line.count("}") or line.startswith("}"):
                self.problems.append(f"{name}: {line}: write one rule of the input chain on one line")
        return lines


def policy_of(settings: FirewallSettings) -> FirewallPolicy:
    """Return the policy of the settings, with all errors in them."""
    reader = _Reader()
    rate = settings.public_rate
    if not settings.ssh_networks:
        reader.problems.append(
            "firewall_ssh_networks is empty: name the networks from which you administer the node, the controller's "
            "among them (example: [10.0.0.0/8])"
        )
    if not settings.ssh_ports:
        reader.problems.append("firewall_ssh_ports is empty: no login would be possible (default: [22])")
    ssh_ports = reader.ports("firewall_ssh_ports", settings.ssh_ports)
    ssh = OpenPorts("ssh", "tcp", ssh_ports, reader.networks("firewall_ssh_networks", settings.ssh_networks))
    services = [_limited(ssh, None, rate)]
    for number, row in enumerate(settings.services, 1):
        where = f"firewall_services, entry {number} ({row.name})"
        service = reader.service(where, row, {service.name for service in services})
        services.append(_limited(service, row.rate, rate))
    return FirewallPolicy(
        services=tuple(services),
        cluster=reader.networks("firewall_cluster_networks", settings.cluster_networks),
        cluster_interfaces=reader.interfaces("firewall_cluster_interfaces", settings.cluster_interfaces),
        container_interfaces=reader.interfaces("firewall_container_interfaces", settings.container_interfaces),
        extra=reader.rules("firewall_extra_rules", settings.extra_rules),
        problems=tuple(reader.problems),
    )


def _network(text: str) -> tuple[Sequence[Network], str | None]:
    """Return (networks of an entry, the error in it)."""
    if text.strip().lower() == "any":
        return EVERYWHERE, None
    try:
        return [ip_network(text.strip())], None
    except ValueError:
        pass
    try:
        meant = ip_network(text.strip(), strict=False)
    except ValueError:
        return [], f"{text} is not a network (examples: 10.0.0.0/8, 192.0.2.7, 2001:db8::/32, any)"
    return [], f"{text} is an address within a network: write {meant} for the network, or the address without /"


def _limited(service: OpenPorts, rate: int | None, public_rate: int) -> OpenPorts:
    """Return the service with its rate: public services are limited, unless the entry sets another rate."""
    requested = rate if rate is not None else public_rate if service.public else 0
    return replace(service, rate=max(0, requested))


def lets_in(policy: FirewallPolicy, address: str, port: int) -> bool:
    """Return whether a source address may open an SSH connection to the port. ValueError for an invalid address."""
    source = ip_address(address.partition("%")[0])
    mapped = getattr(source, "ipv4_mapped", None)
    source = mapped or source
    if not policy.cluster_interfaces and any(source in network for network in policy.cluster):
        return True
    ssh = policy.services[0]
    return any(source in network for network in ssh.networks) and any(
        first <= port <= last for first, last in ssh.ports
    )


def nft_text(policy: FirewallPolicy, *, host: bool = True, site: str = "") -> str:
    """Return the file that nft loads in one transaction; without ``host`` it has no chain for input.

    ``site``: folder of the site's templates.
    """
    return rendered(
        "firewall",
        "firewall.nft.j2",
        site=site,
        host=host,
        table=TABLE,
        sets={
            _rate_set(service, family): "ipv4_addr" if family == "ip" else "ipv6_addr"
            for service in policy.services
            if service.rate
            for family in _families(service.networks)
        },
        containers=policy.container_interfaces,
        extra=policy.extra,
        cluster=_cluster_rules(policy),
        services=_service_rules(policy),
        published=_service_rules(policy, published=True),
    )


def _rate_set(service: OpenPorts, family: Family) -> str:
    return f"rate_{service.name}{'4' if family == 'ip' else '6'}"


def _cluster_rules(policy: FirewallPolicy) -> list[str]:
    sources = [f"{family} saddr {_set(policy.cluster, family)}" for family in _families(policy.cluster)]
    if not policy.cluster_interfaces:
        return [f"{source} accept" for source in sources]
    return [f'iifname "{name}" {source} accept' for name in policy.cluster_interfaces for source in sources]


def _service_rules(policy: FirewallPolicy, published: bool = False) -> list[str]:
    """Return the rules of the services; ``published``: by the port that the client requested, not by that inside the
    container.
    """
    rules = []
    for service in policy.services:
        ports = port_ranges(service.ports)
        matches = [f"{service.protocol} dport {{ {', '.join(ports)} }}"]
        if published:
            matches = [f"meta l4proto {service.protocol} ct original proto-dst {port}" for port in ports]
        for match in matches:
            for family in _families(service.networks):
                source = f"{match} {family} saddr {_set(service.networks, family)}"
                if service.rate:
                    meter = f"{family} saddr limit rate over {service.rate}/minute burst {BURST} packets"
                    rules.append(f"{source} update @{_rate_set(service, family)} {{ {meter} }} counter drop")
                rules.append(f"{source} accept")
    return rules


def _families(networks: Iterable[Network]) -> list[Family]:
    versions = {network.version for network in networks}
    families: dict[int, Family] = {4: "ip", 6: "ip6"}
    return [family for version, family in families.items() if version in versions]


def _set(networks: Iterable[Network], family: Family) -> str:
    """Return the networks of a family, without those within others: nft refuses overlapping intervals."""
    version = 4 if family == "ip" else 6
    nets = sorted({network for network in networks if network.version == version}, key=lambda subnet: subnet.prefixlen)
    outer: list[Network] = []
    for network in nets:
        if not any(network.subnet_of(other) for other in outer):  # type: ignore[arg-type]
            outer.append(network)
    texts = [
        str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)
        for network in sorted(outer, key=lambda subnet: (int(subnet.network_address), subnet.prefixlen))
    ]
    return f"{{ {', '.join(texts)} }}"


def port_ranges(ports: Sequence[tuple[int, int]]) -> list[str]:
    """Return the ports, ranges that touch or overlap as one: nft refuses overlapping intervals."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ports):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return [str(first) if first == last else f"{first}-{last}" for first, last in merged]


class ZoneRule(NamedTuple):
    """What a network may reach; without ports: everything."""

    network: Network
    ports: str = ""
    protocol: str = ""
    rate: int = 0


def zone_rules(policy: FirewallPolicy) -> list[ZoneRule]:
    """Return the rules of the zone, which rejects traffic that none of them accepts."""
    return [
        *map(ZoneRule, policy.cluster),
        *(
            ZoneRule(network, ports, service.protocol, service.rate)
            for service in policy.services
            for network in service.networks
            for ports in port_ranges(service.ports)
        ),
    ]


def with_default_zone(conf: str, zone: str) -> str:
    """Return firewalld.conf with another default zone."""
    if _DEFAULT.search(conf):
        return _DEFAULT.sub(f"DefaultZone={zone}", conf, count=1)
    return f"{completed(conf)}DefaultZone={zone}\n"


def default_zone(conf: str) -> str:
    """Return the default zone in firewalld.conf; firewalld's built-in default is ``public``."""
    match = _DEFAULT.search(conf)
    return match[1] if match and match[1] else "public"
