"""Checks on InfiniBand and RoCE ports."""

from collections.abc import Iterator

from gpunode.checks.compare import at_least, at_most, failed, passed, skipped, undetermined, warned
from gpunode.checks.gpu import SITE
from gpunode.checks.registry import CheckResult, Expectation, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.network import IbDevice, IbPort
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
        raise Skip("the node has no InfiniBand or RoCE device")
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
