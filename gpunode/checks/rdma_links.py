"""Checks on RDMA adapters in comparison: links with outages, cards with less than their peers."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from gpunode.checks.compare import Scale, failed, passed, skipped, warned
from gpunode.checks.machine import is_container
from gpunode.checks.rdma import LOOK, NO_DEVICE, NVSENTINEL
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry, why_unknown
from gpunode.checks.thresholds import Threshold
from gpunode.facts.network import IbDevice
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice
from gpunode.facts.rdma import LinkEvent
from gpunode.text import counted, is_recent, listed, seconds_between

HEALTH_VALIDATION = "NVIDIA Health Validation, rdma_linkflap_fatal"
AZURE = "azurehpc-health-checks: 5 lost carriers in 24 h"
PORTS = "rdma.ports reports the port"
MELLANOX, NETWORK, INFINIBAND = "15b3", "02", "0207"
AMAZON, EFA = "1d0f", "efa"
"""Vendor, and the beginning of the device ids of Elastic Fabric Adapters: efa0, efa1 …; ENA's are ec20 and others."""
LONG_S = Threshold(
    "rdma.flaps.long", 30, "s", "An outage of this length or longer is a long one.", source=HEALTH_VALIDATION
)
LONG = Threshold(
    "rdma.flaps.long-outages",
    1,
    "outages",
    "As many long outages of an interface since the boot, or more, are a fault.",
    source=HEALTH_VALIDATION,
    least=1,
)
SHORT = Threshold(
    "rdma.flaps.short-outages",
    5,
    "outages",
    "As many outages of any length within the window, or more, are a fault.",
    source=AZURE,
    least=1,
)
WINDOW = Threshold("rdma.flaps.window", 24, "h", "In which short outages are counted.", source=AZURE, least=1)
PEERS = Threshold(
    "rdma.peers.least-peers",
    1,
    "cards",
    "An adapter is compared with others of its type if this many have more.",
    source="our choice",
    least=1,
)


@dataclass(frozen=True)
class Outage:
    """A link that went down. ``seconds`` is None if it did not come back, or if the log has no time."""

    began: str | None
    over: bool
    seconds: float | None


def outages(events: tuple[LinkEvent, ...]) -> dict[str, list[Outage]]:
    """Return the outages of each interface; several reports of one change (driver, daemon) count once."""
    down: dict[str, LinkEvent] = {}
    by_interface: dict[str, list[Outage]] = defaultdict(list)
    for event in events:
        if not event.up:
            down.setdefault(event.interface, event)
        elif event.interface in down:
            first = down.pop(event.interface)
            by_interface[event.interface].append(
                Outage(first.time, over=True, seconds=seconds_between(first.time, event.time))
            )
    for interface, event in down.items():
        by_interface[interface].append(Outage(event.time, over=False, seconds=None))
    return dict(by_interface)


def rdma_interfaces(node: NodeFacts) -> dict[str, str | None]:
    """Return the network interfaces of RDMA ports with the port's link layer."""
    layers = {
        name: port.link_layer for device in node.infiniband or () for port in device.ports for name in port.interfaces
    }
    by_slot = {device.slot: device for device in node.infiniband or () if device.slot}
    for nic in node.nics or ():
        device = by_slot.get(nic.slot or "")
        if device is not None and device.ports:
            layers.setdefault(nic.name, device.ports[0].link_layer)
    for event in node.link_log.events if node.link_log else ():
        device = by_slot.get(event.slot or "")
        if device is not None and device.ports:
            layers.setdefault(event.interface, device.ports[0].link_layer)
    return layers


@registry.check(
    "rdma.flaps",
    needs=("infiniband",),
    means="No link of an RDMA adapter was down for a longer time since the boot, and none is flapping. See "
    "rdma.ports for links that are down now.",
    remedy=f"journalctl -b -k | grep Link shows when; ethtool -S and mlxlink show the cause. {LOOK}",
    actions=("open_support_case", "replace_hardware"),
    state="drain",
    scope="link",
    thresholds=(LONG_S, LONG, SHORT, WINDOW),
)
def flaps(node: NodeFacts) -> Iterator[CheckResult]:
    reason = why_unknown(node, "link_log")
    if not node.infiniband:
        raise Skip(NO_DEVICE)
    if node.link_log is None:
        raise Undetermined(reason or "the log of links was not read")
    layers = rdma_interfaces(node)
    by_interface = {name: list_ for name, list_ in outages(node.link_log.events).items() if name in layers}
    for name, downtimes in sorted(by_interface.items()):
        yield _flaps_of(node, name, downtimes, layers[name])
    if by_interface:
        return
    if is_container(node) and not node.simulated:
        yield skipped("no outage; in a container the log is the host's")
    elif not node.link_log.complete:
        message = "no outage of a link, but the log does not reach back to the boot"
        remedy = "Store the journal on disk (Storage=persistent in journald.conf), with space for a whole boot."
        yield warned(message, expected=0, measured=0, unit="outages", remedy=remedy)
    else:
        yield passed("no outage of a link since the boot", expected=0, measured=0, unit="outages")


def _flaps_of(node: NodeFacts, name: str, downtimes: list[Outage], layer: str | None) -> CheckResult:
    long = [outage for outage in downtimes if outage.seconds is not None and outage.seconds >= LONG_S.value]
    recent = [outage for outage in downtimes if _is_recent(node, outage)]
    lengths = [f"{outage.seconds:g} s" for outage in downtimes if outage.seconds is not None]
    last = downtimes[-1].began
    message = (
        f"{counted(len(downtimes), 'outage')}, {len(long)} of {LONG_S.value:g} s or longer"
        f"{f' ({listed(lengths)})' if lengths else ''}{f', last at {last}' if last else ''}"
        f"{'' if downtimes[-1].over else f'; down since then ({PORTS})'}"
    )
    if len(long) < LONG.value and len(recent) < SHORT.value:
        return passed(message, component=name, measured=len(downtimes), unit="outages")
    # Adapters for storage and management are RDMA devices too: Ethernet alone does not prove that jobs use the link.
    fault = failed if layer == "InfiniBand" else warned
    source = HEALTH_VALIDATION if len(long) >= LONG.value else AZURE
    return fault(message, component=name, expected=0, measured=len(downtimes), unit="outages", source=source)


def _is_recent(node: NodeFacts, outage: Outage) -> bool:
    return is_recent(outage.began, node.collected_at, timedelta(hours=WINDOW.value))


def cards(node: NodeFacts) -> Mapping[str, Mapping[str, list[IbDevice]]]:
    """Return RDMA devices by their kind (board), and within a kind by card."""
    by_kind: dict[str, dict[str, list[IbDevice]]] = defaultdict(lambda: defaultdict(list))
    for device in node.infiniband or ():
        kind = device.board_id or device.type
        if kind and device.slot:
            by_kind[kind][device.slot.rpartition(".")[0]].append(device)
    return by_kind


@registry.check(
    "rdma.peers",
    needs=("infiniband",),
    means="Every RDMA card has as many ports, and as many active ones, as the other cards of its kind. A card that is "
    "the only one of its kind has no peers.",
    remedy=f"{LOOK} A port that is missing: power-cycle the node, then reseat or replace the card.",
    actions=("power_cycle", "replace_hardware"),
    state="drain",
    scope="link",
    thresholds=(PEERS,),
)
def peers(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.infiniband:
        raise Skip(NO_DEVICE)
    compared = 0
    for _, by_card in sorted(cards(node).items()):
        ports = {card: sum(len(device.ports) for device in devices) for card, devices in by_card.items()}
        active = {card: sum(_active(device) for device in devices) for card, devices in by_card.items()}
        usual = Peers(_usual(ports), _usual(active))
        compared += len(by_card) if len(by_card) > 1 else 0
        for card, devices in sorted(by_card.items()):
            enough = PEERS.value
            has_fewer = ports[card] < usual.ports and _others(ports, card) >= enough
            less_active = active[card] < usual.active and _others(active, card) >= enough
            verdict = _beside_peers(devices, ports[card], active[card], usual) if has_fewer or less_active else None
            if verdict is not None:
                yield verdict.at("/".join(sorted(device.name for device in devices)))
    if compared:
        yield passed(f"{counted(compared, 'card')} compared with others of their kind", measured=compared)
    else:
        yield skipped("every RDMA card is the only one of its kind")


@dataclass(frozen=True)
class Peers:
    """The most frequent values of a kind of card."""

    ports: int
    active: int


def _beside_peers(devices: list[IbDevice], ports: int, active: int, usual: Peers) -> CheckResult:
    """Return the result for a card that has less than its peers."""
    every = [port for device in devices for port in device.ports]
    ports_of: Scale = {"unit": "ports", "source": NVSENTINEL}
    if ports < usual.ports:
        message = f"{ports} ports, {usual.ports} on the other cards of its kind"
        return failed(message, expected=usual.ports, measured=ports, **ports_of)
    message = f"{active} active ports, {usual.active} on the other cards of its kind"
    # rdma.ports fails on an InfiniBand port that is down; an Ethernet port can only be compared with its peers.
    by_ports = any(port.physical_state == "Disabled" or port.link_layer == "InfiniBand" for port in every)
    status = Status.SKIP if by_ports else Status.FAIL
    if any(port.state is None for port in every):
        status, message = Status.ERROR, "the kernel does not report the state of its ports"
    elif by_ports:
        message = f"{message} ({PORTS})"
    return CheckResult(status, message, expected=usual.active, measured=active, **ports_of)


def _active(device: IbDevice) -> int:
    return sum(port.state == "ACTIVE" for port in device.ports)


def _usual(numbers: Mapping[str, int]) -> int:
    """Return the number that most cards have, the greater if two are equally frequent."""
    counts = Counter(numbers.values())
    return max(counts, key=lambda number: (counts[number], number))


def _others(numbers: Mapping[str, int], card: str) -> int:
    return sum(number > numbers[card] for number in numbers.values())


@registry.check(
    "rdma.adapters",
    needs=("infiniband", "pci_io"),
    means="Every InfiniBand adapter and every Elastic Fabric Adapter (EFA) on the bus has an RDMA device, as does "
    "every adapter of a type of which one has; and no adapter with a link since the boot disappeared from the bus.",
    remedy="lspci -k -s SLOT shows the driver; journalctl -k | grep mlx5 shows why it released the adapter. "
    "Power-cycle the node; reseat or replace an adapter that does not return. EFA without a driver: modprobe efa; "
    "dkms status shows whether the module of Amazon's installer is built for this kernel.",
    actions=("restart_os", "power_cycle", "replace_hardware"),
    state="drain",
    scope="link",
)
def adapters(node: NodeFacts) -> Iterator[CheckResult]:
    on_bus = {device.slot: device for device in node.pci_io or ()}
    with_rdma = {device.slot for device in node.infiniband or () if device.slot}
    kinds = {on_bus[slot].device_id for slot in with_rdma if slot in on_bus}
    expected = [device for device in on_bus.values() if _is_adapter(device, kinds)]
    events = node.link_log.events if node.link_log else ()
    gone = {event.slot: event for event in events if event.slot and event.slot not in on_bus}
    for slot, event in sorted(gone.items()):
        message = f"{event.interface} was in use at {event.time or 'an unknown time'} and is not on the bus any more"
        yield failed(message, component=f"adapter at {slot}", source=NVSENTINEL)
    for device in expected:
        if device.slot not in with_rdma:
            message = f"no RDMA device; driver {device.driver or 'none'}"
            yield failed(message, component=f"adapter at {device.slot}", measured=device.driver)
    good = [device.slot for device in expected if device.slot in with_rdma]
    if good:
        yield passed(f"{counted(len(good), 'adapter')} with their RDMA devices", measured=len(good))
    elif not expected and not gone:
        yield skipped("no adapter on the bus of a kind that has RDMA devices here")


def _is_adapter(device: PciDevice, kinds: set[str]) -> bool:
    if device.vendor_id == AMAZON:
        return device.device_id.startswith(EFA)
    if device.vendor_id != MELLANOX or not device.class_id.startswith(NETWORK):
        return False
    return device.class_id.startswith(INFINIBAND) or device.device_id in kinds
