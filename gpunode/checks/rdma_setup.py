"""Checks on the setup of RDMA adapters: MTU, device files, firmware."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from gpunode.checks.compare import failed, faultless, passed, skipped, undetermined, warned
from gpunode.checks.gpu import SITE
from gpunode.checks.machine import is_container
from gpunode.checks.rdma import NO_DEVICE, NVSENTINEL, ports
from gpunode.checks.registry import CheckResult, Expectation, Skip, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.network import IbDevice, Nic
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

NODEPULSE = "NodePulse: 9000 and more on every interface"
GIDS = "NVIDIA/nccl issues 426 and 769"
MTU_LEAST = Threshold(
    "rdma.mtu.least",
    0,
    "bytes",
    "An interface of a RoCE port with less is a fault; 0: none is requested (9000 for jumbo frames).",
    source=f"nothing by default; {NODEPULSE}",
    most=65536,
)


@registry.check(
    "rdma.mtu",
    needs=("infiniband", "nics"),
    means="All interfaces of one fabric (RDMA ports of one link layer and rate) have the same MTU, and those of RoCE "
    "ports at least the policy's.",
    remedy="Set the MTU of all interfaces of the fabric alike, and of the switch ports to at least as much; ping -M do "
    "-s BYTES shows what passes from end to end.",
    actions=("fix_configuration",),
    state="observe",
    scope="link",
    thresholds=(MTU_LEAST,),
)
def mtu(node: NodeFacts) -> Iterator[CheckResult]:
    known = {nic.name: nic.mtu for nic in node.nics or ()}
    by_fabric: dict[tuple[str, float], dict[str, int | None]] = defaultdict(dict)
    for _, device, port in ports(node):
        names = port.interfaces or tuple(nic.name for nic in node.nics or () if nic.slot and nic.slot == device.slot)
        for name in names if port.state == "ACTIVE" else ():
            if name in known:
                by_fabric[port.link_layer or "unknown", port.rate_gbit_per_s or 0.0][name] = known[name]
    if not by_fabric:
        raise Skip("no active RDMA port has a network interface" if node.infiniband else NO_DEVICE)
    for (layer, rate), mtus in sorted(by_fabric.items()):
        yield _mtu_of(layer, mtus).at(f"{layer} {rate:g} Gbit/s")


def _mtu_of(layer: str, mtus: dict[str, int | None]) -> CheckResult:
    values = {name: value for name, value in mtus.items() if value is not None}
    if len(values) < len(mtus):
        unknown = sorted(set(mtus) - set(values))
        return undetermined(f"the kernel does not report the MTU of {listed(unknown)}", unit="bytes")
    usual = Counter(values.values()).most_common(1)[0][0]
    others = {name: value for name, value in values.items() if value != usual}
    least = int(MTU_LEAST.value) if layer == "Ethernet" else 0
    small = [name for name, value in values.items() if value < least]
    if small:
        message = f"MTU below {least}: {listed([f'{name} has {values[name]}' for name in sorted(small)])}"
        return failed(message, expected=least, measured=min(values.values()), unit="bytes")
    if others:
        message = f"MTU {usual}, but {listed([f'{name} has {value}' for name, value in sorted(others.items())])}"
        return warned(message, expected=usual, measured=min(others.values()), unit="bytes")
    message = f"MTU {usual} on {counted(len(values), 'interface')}"
    return passed(message, expected=usual, measured=usual, unit="bytes")


@registry.check(
    "rdma.gids",
    needs=("infiniband",),
    means="All RoCE ports of one rate have an IPv4 address for RoCE v2, under the same index: programs that are given "
    "one index (NCCL_IB_GID_INDEX) use it on all ports.",
    remedy="ip -4 address show dev INTERFACE shows the address that the entry comes from, ibv_devinfo -v -d DEVICE the "
    "table. ip link set INTERFACE down && ip link set INTERFACE up builds the table again. NCCL 2.21 and later finds "
    "the entry itself where NCCL_IB_GID_INDEX is not set.",
    actions=("fix_configuration",),
    state="drain",
    scope="link",
)
def gids(node: NodeFacts) -> Iterator[CheckResult]:
    by_rate: dict[float, dict[str, int | None]] = defaultdict(dict)
    for name, _, port in ports(node):
        if port.state == "ACTIVE" and port.link_layer == "Ethernet" and port.gids:
            indices = (gid.index for gid in port.gids if gid.ipv4 and gid.type == "RoCE v2")
            by_rate[port.rate_gbit_per_s or 0.0][name] = next(indices, None)
    if not by_rate:
        raise Skip("no active RoCE port" if node.infiniband else NO_DEVICE)
    for rate, entries in sorted(by_rate.items()):
        yield _gids_of(entries).at(f"Ethernet {rate:g} Gbit/s")


def _gids_of(entries: dict[str, int | None]) -> CheckResult:
    known = {name: index for name, index in entries.items() if index is not None}
    if not known:
        return passed(f"no IPv4 on {counted(len(entries), 'port')}: the fabric has IPv6 alone, or none", source=GIDS)
    usual = Counter(known.values()).most_common(1)[0][0]
    if len(known) < len(entries):
        lacking = sorted(set(entries) - set(known))
        message = (
            f"no IPv4 entry for RoCE v2: {listed(lacking)}; {counted(len(known), 'port')} has one at index {usual}"
        )
        return failed(message, expected=len(entries), measured=len(known), unit="ports", source=GIDS)
    odd = [f"{name} has {index}" for name, index in sorted(known.items()) if index != usual]
    if odd:
        message = f"IPv4 for RoCE v2 is at index {usual}, but {listed(odd)}: one NCCL_IB_GID_INDEX does not fit all"
        return warned(message, expected=usual, measured=odd[0].rpartition(" ")[2], source=GIDS)
    message = f"IPv4 for RoCE v2 at index {usual} on {counted(len(entries), 'port')}"
    return passed(message, measured=usual, source=GIDS)


@registry.check(
    "rdma.flow-control",
    needs=("infiniband", "nics"),
    means="All interfaces of RoCE ports of one rate have flow control (PFC) and congestion marks (ECN) on the "
    "same priorities, and the same priorities of code points (DSCP) and traffic class of RDMA CM; they are reported. "
    "The configuration of the switches is not checked.",
    remedy="dcb pfc show dev INTERFACE shows PFC, dcb app show dev INTERFACE dscp-prio DSCP, "
    "cat /sys/class/net/INTERFACE/ecn/roce_np/enable/* ECN (DOCA-OFED); set all interfaces of the fabric alike, as its "
    "switches are (role rdma: rdma_roce_interfaces).",
    actions=("fix_configuration",),
    state="observe",
    scope="link",
)
def flow_control(node: NodeFacts) -> Iterator[CheckResult]:
    known = {nic.name: nic for nic in node.nics or ()}
    by_rate: dict[float, dict[str, tuple[Nic, int | None]]] = defaultdict(dict)
    for _, _, port in ports(node):
        if port.state == "ACTIVE" and port.link_layer == "Ethernet":
            interfaces = {name: (known[name], port.cm_tos) for name in port.interfaces if name in known}
            by_rate[port.rate_gbit_per_s or 0.0] |= interfaces
    by_rate = {rate: interfaces for rate, interfaces in by_rate.items() if interfaces}
    if not by_rate:
        raise Skip("no active RoCE port has a network interface" if node.infiniband else NO_DEVICE)
    for rate, interfaces in sorted(by_rate.items()):
        yield _flow_control_of(interfaces).at(f"Ethernet {rate:g} Gbit/s")


def _flow_control_of(interfaces: dict[str, tuple[Nic, int | None]]) -> CheckResult:
    shown = {
        name: f"PFC {_priorities(nic.pfc)}, ECN {_priorities(nic.ecn)}{_code_points(nic.dscp)}"
        f"{f', RDMA CM {tos}' if tos else ''}"
        for name, (nic, tos) in interfaces.items()
    }
    if all(nic.pfc is None and nic.ecn is None for nic, _ in interfaces.values()):
        return skipped("neither dcb nor the driver reports PFC and ECN")
    for feature, values in (
        ("PFC", {name: nic.pfc for name, (nic, _) in interfaces.items()}),
        ("ECN", {name: nic.ecn for name, (nic, _) in interfaces.items()}),
    ):
        silent = sorted(name for name, value in values.items() if value is None)
        if 0 < len(silent) < len(values):
            return undetermined(f"{feature} is reported of others, and not of {listed(silent)}")
    usual = Counter(shown.values()).most_common(1)[0][0]
    odd = [f"{name} has {text}" for name, text in sorted(shown.items()) if text != usual]
    if odd:
        return warned(f"{usual}, but {listed(odd)}", expected=usual, measured=odd[0].partition(" has ")[2])
    return passed(f"{usual} on {counted(len(interfaces), 'interface')}", measured=usual)


def _code_points(code_points: tuple[str, ...] | None) -> str:
    """Return the code points with a priority as the end of a message; nothing if dcb printed none."""
    return f", DSCP {listed(code_points, 8)}" if code_points else ""


def _priorities(priorities: tuple[int, ...] | None) -> str:
    if priorities is None:
        return "not reported"
    return f"on {listed([str(priority) for priority in priorities], 8)}" if priorities else "off"


@registry.check(
    "rdma.devices",
    needs=("infiniband", "rdma_nodes"),
    means="Programs can open every RDMA adapter: it has a uverbs device, each InfiniBand port has a umad device, and "
    "their files are in /dev/infiniband. A missing issm device is not a fault.",
    remedy="modprobe ib_uverbs ib_umad; rdma-core (role rdma) has udev load them at boot; ls /dev/infiniband.",
    actions=("fix_configuration", "restart_os"),
    state="drain",
    scope="link",
)
def devices(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.infiniband:
        raise Skip(NO_DEVICE)
    if is_container(node) and not node.simulated:
        raise Skip("in a container /dev has only the devices passed to it")
    for device in node.infiniband:
        lacking = [*_verbs_of(node, device), *_mads_of(node, device)]
        first = next(iter(lacking), None)
        bad = f"lacks {listed(lacking)}"
        yield faultless("has its devices", {bad: lacking}, component=device.name, measured=first, source=NVSENTINEL)


def _verbs_of(node: NodeFacts, device: IbDevice) -> Iterator[str]:
    uverbs = [handle for handle in node.rdma_nodes or () if handle.kind == "uverbs" and handle.device == device.name]
    if not uverbs:
        yield "a uverbs device"
    yield from (f"/dev/infiniband/{handle.name}" for handle in uverbs if not handle.file)


def _mads_of(node: NodeFacts, device: IbDevice) -> Iterator[str]:
    """Yield missing devices for management datagrams; RoCE does not set up its connections with them."""
    for port in device.ports if any(port.link_layer == "InfiniBand" for port in device.ports) else ():
        umads = [
            handle
            for handle in node.rdma_nodes or ()
            if handle.kind == "umad" and handle.device == device.name and handle.port in {port.port, None}
        ]
        if not umads:
            yield f"a umad device of port {port.port}"
        yield from (f"/dev/infiniband/{handle.name}" for handle in umads if not handle.file)


@registry.check(
    "rdma.firmware",
    needs=("infiniband",),
    means="All RDMA adapters of one board have the same firmware, and one of those in the site file, if listed "
    "(nic_firmware in the file of --expect).",
    remedy="mlxfwmanager --query shows what is installed and newest; update on a drained node and restart it.",
    actions=("fix_configuration", "restart_os"),
    state="observe",
    scope="link",
)
def firmware(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    if not node.infiniband:
        raise Skip(NO_DEVICE)
    by_board: dict[str, list[IbDevice]] = defaultdict(list)
    for device in node.infiniband:
        by_board[device.board_id or device.type or "unknown board"].append(device)
    for board, cards in sorted(by_board.items()):
        yield _firmware_of(cards, expect.nic_firmware).at(board)


def _firmware_of(cards: list[IbDevice], allowed: list[str] | None) -> CheckResult:
    unknown = [device.name for device in cards if device.firmware is None]
    if unknown:
        return undetermined(f"the kernel does not report the firmware of {listed(unknown)}")
    versions = Counter(str(device.firmware) for device in cards)
    usual = versions.most_common(1)[0][0]
    refused = [f"{device.name} has {device.firmware}" for device in cards if allowed and device.firmware not in allowed]
    if refused:
        expected = listed(allowed or [])
        return failed(f"{listed(refused)}; allowed: {expected}", expected=expected, measured=usual, source=SITE)
    if len(versions) > 1:
        odd = [f"{device.name} has {device.firmware}" for device in cards if device.firmware != usual]
        message = f"firmware {usual}, but {listed(odd)}"
        return warned(message, expected=usual, measured=odd[0].rpartition(" ")[2])
    source = SITE if allowed else None
    message = f"firmware {usual} on {counted(len(cards), 'adapter')}"
    return passed(message, expected=usual, measured=usual, source=source)
