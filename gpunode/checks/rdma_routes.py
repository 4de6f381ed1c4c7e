"""Check on the routes of several RoCE rails."""

from collections import defaultdict
from collections.abc import Iterator
from ipaddress import IPv4Network, ip_address, ip_network

from gpunode.checks.compare import failed, passed, skipped, warned
from gpunode.checks.rdma import ports
from gpunode.checks.rdma_links import NO_DEVICE
from gpunode.checks.registry import CheckResult, Skip, Undetermined, registry, why_unknown
from gpunode.facts.network import SourceRoutes
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

KERNEL = "Linux, Documentation/networking/ip-sysctl.rst: rp_filter"


@registry.check(
    "rdma.routes",
    needs=("infiniband", "nics"),
    means="RoCE interfaces that share an IPv4 network have a rule and a table of their own: otherwise all answers "
    "leave on the first one, and a strict reverse path filter drops what arrives on the others.",
    remedy="For each rail: ip rule add from ADDRESS lookup TABLE, and ip route add NETWORK dev INTERFACE table TABLE; "
    "or a network of its own. sysctl net.ipv4.conf.INTERFACE.rp_filter=2 only stops the drops.",
    actions=("fix_configuration",),
    state="drain",
    scope="link",
)
def routes(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.infiniband:
        raise Skip(NO_DEVICE)
    names = {
        name
        for _, _, port in ports(node)
        if port.state == "ACTIVE" and port.link_layer == "Ethernet"
        for name in port.interfaces
    }
    routes = node.source_routes
    for name in ("source_routes", "addresses"):
        if names and (gap := why_unknown(node, name)):
            raise Undetermined(gap)
    if not names or routes is None:
        raise Skip("no active RoCE port has a network interface")
    by_network: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        for network in routes.networks.get(name, ()):
            by_network[network].append(name)
    shared = {network: rails for network, rails in by_network.items() if len(rails) > 1}
    for network, rails in sorted(shared.items()):
        yield _shared(node, routes, network, rails)
    if not by_network:
        yield skipped("no RoCE interface has an IPv4 network")
    elif not shared:
        yield passed(f"{counted(len(by_network), 'rail')}, each with an IPv4 network of its own", source=KERNEL)


def _shared(node: NodeFacts, routes: SourceRoutes, network: str, rails: list[str]) -> CheckResult:
    filters = {nic.name: nic.filters_strictly for nic in node.nics or () if nic.name in rails}
    lacking = [name for name in rails if not _has_rule(node, routes, network, name)]
    if not lacking:
        message = f"{counted(len(rails), 'rail')} in one network, each with a rule of its own"
        return passed(message, component=network, expected=len(rails), measured=len(rails), source=KERNEL)
    if any(filters.get(name) is None for name in lacking):
        raise Undetermined(f"the reverse path filter of {listed(lacking)} was not read")
    strict = [name for name in lacking if filters[name]]
    have = len(rails) - len(lacking)
    if strict:
        message = (
            f"no rule by source for {listed(lacking)}: the strict reverse path filter of {listed(strict)} drops answers"
        )
        return failed(message, component=network, expected=len(rails), measured=have, unit="rules", source=KERNEL)
    message = f"no rule by source for {listed(lacking)}: all answers leave on one of {counted(len(rails), 'rail')}"
    return warned(message, component=network, expected=len(rails), measured=have, unit="rules", source=KERNEL)


def _has_rule(node: NodeFacts, routes: SourceRoutes, network: str, name: str) -> bool:
    """Return whether every address that an interface has in a network is routed by a rule of its own."""
    inside = IPv4Network(network)
    addresses = [ip_address(address.address) for address in node.addresses or () if address.interface == name]
    addresses = [address for address in addresses if address in inside]
    return bool(addresses) and all(
        any(address in ip_network(source, strict=False) for source in routes.sources) for address in addresses
    )
