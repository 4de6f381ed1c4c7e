"""Checks on InfiniBand and RoCE ports, on the routes of several RoCE rails, and on GPUDirect RDMA."""

from collections import defaultdict
from collections.abc import Iterator
from ipaddress import IPv4Network, ip_address, ip_network

from gpunode.catalog import load
from gpunode.catalog.driver_rules import against_dma_buf, against_gpudirect, kernel_number
from gpunode.checks.compare import at_least, at_most, failed, passed, skipped, undetermined, warned
from gpunode.checks.gpu import SITE
from gpunode.checks.registry import CheckResult, Expectation, Skip, Status, Undetermined, registry, why_unknown
from gpunode.checks.thresholds import Threshold
from gpunode.errors import UsageError
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.network import IbDevice, IbPort, SourceRoutes
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

COUNTED = {
    "symbol_error": "symbol errors",
    "link_error_recovery": "recoveries of the link",
    "link_downed": "losses of the link",
    "port_rcv_errors": "receive errors",
    "local_link_integrity_errors": "integrity errors",
    "excessive_buffer_overrun_errors": "buffer overruns",
}
ERRORS_MOST = Threshold(
    "rdma.errors.most",
    0,
    "errors",
    "More errors of all counters of a port together warn.",
    source="our choice: the counters stay 0 on a healthy link",
)
NO_DEVICE = "the node has no InfiniBand or RoCE device"
NVSENTINEL = "NVSentinel, NIC health monitor"
LOOK = "ibstat and ibdiagnet show the port; check cable and transceiver at both ends, and the switch."


def ports(node: NodeFacts) -> Iterator[tuple[str, IbDevice, IbPort]]:
    """Yield every port with its name: ``mlx5_0``, or ``mlx4_0/2`` if a device has several."""
    for device in node.infiniband or ():
        for port in device.ports:
            several = len(device.ports) > 1
            yield (f"{device.name}/{port.port}" if several else device.name), device, port


@registry.check(
    "rdma.ports",
    needs=("infiniband",),
    means="The number and rate of active InfiniBand and RoCE ports match the site file; without one, every "
    "enabled port is active.",
    remedy=f"{LOOK} A port in state INIT waits for a subnet manager.",
    state="drain",
    actions=("replace_hardware",),
    scope="link",
)
def rdma_ports(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    seen = list(ports(node))
    if not seen and not expect.nics:
        raise Skip(NO_DEVICE)
    active = [name for name, _, port in seen if port.state == "ACTIVE"]
    for name, _, port in seen:
        yield _state_of(name, port)
    if expect.nics is not None:
        message = f"{len(active)} active ports, {expect.nics} expected"
        yield at_least(len(active), expect.nics, message, unit="ports", source=SITE)
    if expect.nic_rate_gbit_per_s is not None:
        yield _rates(seen, expect.nic_rate_gbit_per_s, expect.nics)


def _state_of(name: str, port: IbPort) -> CheckResult:
    state, physical = port.state, port.physical_state
    if state is None:
        return undetermined("the kernel does not report the state of the port", component=name)
    if state == "ACTIVE":
        return passed(f"active at {port.rate or 'an unknown rate'}", component=name, expected="ACTIVE", measured=state)
    if physical == "Disabled":
        return warned("switched off (Disabled)", component=name, expected="ACTIVE", measured=state)
    words = f"{state}{f', {physical}' if physical else ''}"
    if port.link_layer == "Ethernet":
        # A RoCE device is a network adapter too: one without a cable is normal.
        return warned(words, component=name, expected="ACTIVE", measured=state)
    return failed(words, component=name, expected="ACTIVE", measured=state)


def _rates(seen: list[tuple[str, IbDevice, IbPort]], expected: float, number: int | None) -> CheckResult:
    rates = {name: port.rate_gbit_per_s or 0.0 for name, _, port in seen if port.state == "ACTIVE"}
    fast = [name for name, rate in rates.items() if rate >= expected]
    slow = [f"{name} at {rate:g}" for name, rate in rates.items() if rate < expected]
    enough = len(fast) >= number if number is not None else not slow
    message = (
        f"{counted(len(fast), 'port')} at {expected:g} Gbit/s or more{f', slower: {listed(slow)}' if slow else ''}"
    )
    slowest = min(rates.values(), default=0.0)
    return (passed if enough else failed)(message, expected=expected, measured=slowest, unit="Gbit/s", source=SITE)


@registry.check(
    "rdma.errors",
    needs=("infiniband",),
    means="No active port counts errors of its link.",
    remedy=f"Clear the counters (perfquery -R) and check whether they rise again. {LOOK}",
    state="observe",
    actions=("replace_hardware",),
    scope="link",
    thresholds=(ERRORS_MOST,),
)
def rdma_errors(node: NodeFacts) -> Iterator[CheckResult]:
    active = [(name, port) for name, _, port in ports(node) if port.state == "ACTIVE"]
    if not active:
        yield skipped("the node has no active InfiniBand or RoCE port")
    for name, port in active:
        if port.of_provider:
            yield skipped("EFA: the link belongs to the cloud and has no counters of errors", component=name)
            continue
        if not any(counter in port.counters for counter in COUNTED):
            yield undetermined("the kernel does not report the counters of the port", component=name)
            continue
        raised = {text: port.counters[counter] for counter, text in COUNTED.items() if port.counters.get(counter)}
        words = listed([f"{number} {text}" for text, number in raised.items()]) or "no error of the link"
        total = sum(raised.values())
        yield at_most(total, ERRORS_MOST.value, words, fault=Status.WARN, component=name, unit="errors")


RP_FILTER = "Linux, Documentation/networking/ip-sysctl.rst: rp_filter"


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
        yield passed(f"{counted(len(by_network), 'rail')}, each with an IPv4 network of its own", source=RP_FILTER)


def _shared(node: NodeFacts, routes: SourceRoutes, network: str, rails: list[str]) -> CheckResult:
    filters = {nic.name: nic.filters_strictly for nic in node.nics or () if nic.name in rails}
    lacking = [name for name in rails if not _has_rule(node, routes, network, name)]
    if not lacking:
        message = f"{counted(len(rails), 'rail')} in one network, each with a rule of its own"
        return passed(message, component=network, expected=len(rails), measured=len(rails), source=RP_FILTER)
    if any(filters.get(name) is None for name in lacking):
        raise Undetermined(f"the reverse path filter of {listed(lacking)} was not read")
    strict = [name for name in lacking if filters[name]]
    have = len(rails) - len(lacking)
    if strict:
        message = (
            f"no rule by source for {listed(lacking)}: the strict reverse path filter of {listed(strict)} drops answers"
        )
        return failed(message, component=network, expected=len(rails), measured=have, unit="rules", source=RP_FILTER)
    message = f"no rule by source for {listed(lacking)}: all answers leave on one of {counted(len(rails), 'rail')}"
    return warned(message, component=network, expected=len(rails), measured=have, unit="rules", source=RP_FILTER)


def _has_rule(node: NodeFacts, routes: SourceRoutes, network: str, name: str) -> bool:
    """Return whether every address that an interface has in a network is routed by a rule of its own."""
    inside = IPv4Network(network)
    addresses = [ip_address(address.address) for address in node.addresses or () if address.interface == name]
    addresses = [address for address in addresses if address in inside]
    return bool(addresses) and all(
        any(address in ip_network(source, strict=False) for source in routes.sources) for address in addresses
    )


PEERMEM = "nvidia_peermem"
CLIENTS = ("nv_mem", "nv_mem_nc")
UNREGISTERED = (
    "Rebuild the driver's modules against the installed OFED (dkms build nvidia/VERSION --force, dkms install "
    "nvidia/VERSION --force), then modprobe -r nvidia_peermem && modprobe nvidia_peermem; ls "
    "/sys/kernel/mm/memory_peers must list nv_mem. NCCL up to 2.22.3 looks for nothing else; later releases also "
    "accept the loaded module."
)
NCCL_GUIDE = "NVIDIA's NCCL guide, GPUDirect RDMA; catalog (sources.yml, ncclgdr)"
LEAST_RATE = Threshold(
    "rdma.gpudirect.least-rate",
    100,
    "Gbit/s",
    "Slower RoCE ports are treated as storage and management ports, without GPUDirect RDMA.",
    source="our choice: adapters of training networks have 100 Gbit/s and more",
    least=1,
)


@registry.check(
    "rdma.gpudirect",
    needs=("infiniband", "modules", "kernels", "loaded_driver", "peer_memory", "peer_memory_clients"),
    needs_gpu=True,
    means="On a node with GPUs and an active InfiniBand port, or a RoCE port at the policy's rate, adapters "
    "access GPU memory directly: over dma-buf (open kernel modules, kernel 5.12, CUDA 11.7, Turing or younger), "
    "or over nvidia-peermem, which has to be registered with the kernel's RDMA: loaded is not registered.",
    remedy="Use the open kernel modules (nvidia_driver_flavour: open), or run the role rdma, which loads "
    "nvidia-peermem if the kernel has its interface (rdma_source: doca installs it); NCCL_DEBUG=INFO shows the "
    "path that NCCL uses.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(LEAST_RATE,),
)
def gpudirect(node: NodeFacts) -> Iterator[CheckResult]:
    models = load().models_of((device.pci_id, device.subsystem_id) for device in node.gpus_on_bus or ())
    reason = _not_expected(node) or "; ".join(against_gpudirect(models))
    if reason:
        raise Skip(reason)
    driver = node.loaded_driver
    if driver is None:
        raise Skip("no NVIDIA module is loaded")
    loaded = PEERMEM in (node.modules or ())
    if loaded and _registered(node):
        yield passed("over nvidia-peermem, which is registered", measured="peermem", source=NCCL_GUIDE)
        return
    state = "loaded and not registered" if loaded else "not loaded"
    if driver.flavour is None or not models:
        subject = "the flavour of the loaded module" if models else "which GPUs these are"
        raise Undetermined(f"nvidia-peermem is {state}, and {subject} could not be determined")
    against = against_dma_buf(models, driver.flavour, _cuda_of(driver), kernel_number(node.running_kernel))
    if against:
        lacking = {False: "; this kernel has no interface for it", None: "", True: ""}[node.peer_memory]
        message = (
            f"GPU memory is reached over main memory: no dma-buf ({listed(against)}), and nvidia-peermem is {state}"
        )
        source = f"{NCCL_GUIDE}; NVIDIA/nccl issue 1939" if loaded else NCCL_GUIDE
        remedy = UNREGISTERED if loaded else None
        yield warned(message + lacking, expected="dma-buf", measured="none", source=source, remedy=remedy)
    else:
        yield passed("over dma-buf", expected="dma-buf", measured="dma-buf", source=NCCL_GUIDE)


def _registered(node: NodeFacts) -> bool:
    """Return True if nvidia-peermem is among the kernel's clients, as far as the kernel lists them.

    Without such a list NCCL up to 2.22.3 does not use the module either (NVIDIA/nccl issue 1676).
    """
    return node.peer_memory is not False and any(name in (node.peer_memory_clients or ()) for name in CLIENTS)


def _not_expected(node: NodeFacts) -> str | None:
    """Return why no GPUDirect RDMA is expected of a node; None if it is expected."""
    if not node.infiniband:
        return NO_DEVICE
    active = [port for _, _, port in ports(node) if port.state == "ACTIVE"]
    if not active:
        return "no RDMA port is active"
    fast = [port for port in active if (port.rate_gbit_per_s or 0.0) >= LEAST_RATE.value]
    if any(port.link_layer == "InfiniBand" for port in active) or any(port.link_layer == "Ethernet" for port in fast):
        return None
    return f"no InfiniBand port is active, and no RoCE port at {LEAST_RATE.value:g} Gbit/s or more"


def _cuda_of(driver: LoadedDriver) -> str | None:
    """Return the CUDA of the driver's branch; None if the catalog does not have the branch."""
    try:
        return load().branch_of(driver.version.split(".")[0]).native_cuda if driver.version else None
    except UsageError:
        return None
