"""Checks on connections of GPUs: PCI Express, topology, NUMA, peer access."""

from collections.abc import Iterator
from math import ceil

from gpunode.checks.compare import Scale, at_least, at_most, failed, passed, skipped, undetermined, warned
from gpunode.checks.gpus import SeenGpu, listed_gpus, model_of, of_one_gpu, seen_gpus
from gpunode.checks.machine import is_guest, nvswitches, platforms
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.smi import DocumentT, PeerAccess, Smi, Topology
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice, PciLink, PciPort
from gpunode.text import counted, listed

FULL_SPEED_STATES = frozenset({"P0", "P1", "P2"})
"""Performance states in which the driver does not slow down the PCIe link."""
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
MOST_GAPS = Threshold(
    "link.topology.gaps-most",
    0.25,
    "of the pairs",
    "Up to this many pairs without NVLink are a failure, because all pairs should have it. GPUs bridged in pairs, and "
    "eight V100 in a cube, have far more pairs without it.",
    source="our choice: between the two",
    most=1,
)
MOST_IN_A_MESH = 4
MOST_REPLAYS = Threshold(
    "link.pcie-replays.most",
    0.06,
    "replays per minute, lane and GT/s",
    "More since the boot on average warn: with 16 lanes of generation 3, 4, 5 and 6 more than 8, 16, 31 and 62 in a "
    "minute.",
    source="DCGM 4.6.0, DcgmHealthWatch.cpp: one error in 10^12 bits",
)
BOTH_ENDS = "both ends of the link"
Shown = tuple[float, str]
"""A number, and its text."""
GUEST = "a virtual machine: visible only on its host"
SEATING = "Reseat the card and check riser, cable and slot; lspci -vv -s SLOT shows LnkCap and LnkSta of both ends."


def why_not_judged(node: NodeFacts, device: PciDevice) -> str | None:
    """Return why the printed PCIe link of a GPU does not show its health; None if it does."""
    if is_guest(node):
        return GUEST
    match = model_of(device)
    if match is not None and match.common.get("pcie_judged") is False:
        return "the link that this model reports is not its data path (C2C)"
    if device.power_state is not None and device.power_state.startswith("D3"):
        return "the GPU is asleep (D3): its link state is not meaningful"
    return None


@registry.check(
    "link.pcie-width",
    needs=("pci", "pci_ports", "virtualization"),
    needs_gpu=True,
    means="The PCIe link of every GPU has as many lanes as both of its ends support. The width does not change when a "
    "GPU is idle: fewer lanes are a fault.",
    remedy=SEATING,
    state="drain",
    actions=("power_cycle", "replace_hardware"),
    scope="gpu",
    bare_metal=True,
)
def pcie_width(node: NodeFacts) -> Iterator[CheckResult]:
    for component, device in gpus_of(node):
        yield _width_of(node, device).at(component)


def gpus_of(node: NodeFacts) -> Iterator[tuple[str, PciDevice]]:
    """Yield the GPUs on the bus with their names: nvidia-smi's if it has them, else the slot."""
    index = {gpu.pci_bus_id: gpu.index for gpu in node.smi_gpus}
    for device in node.gpus_on_bus or ():
        yield (f"gpu{index[device.slot]}" if device.slot in index else f"gpu at {device.slot}"), device


def port_above(node: NodeFacts, device: PciDevice) -> PciPort | None:
    """Return the other end of a device's PCIe link; None if it is not on the bus."""
    nearest = device.ports[0] if device.ports else None
    return next((port for port in node.pci_ports or () if port.slot == nearest), None)


def _width_of(node: NodeFacts, device: PciDevice) -> CheckResult:
    reason = why_not_judged(node, device)
    if reason is not None:
        return skipped(reason)
    link = device.link
    if link is None or link.width is None or link.width_max is None:
        return undetermined(f"the kernel does not report the PCIe link of {device.slot}")
    port = port_above(node, device)
    if port is None or port.link is None or port.link.width_max is None:
        return _one_end(link.width, link.width_max, device)
    both = min(link.width_max, port.link.width_max)
    return _both_ends((link.width, f"x{link.width}"), (both, f"x{both}"), "lanes", device)


def _one_end(now: int, most: int, device: PciDevice) -> CheckResult:
    good = f"x{now}, the maximum of the card"
    bad = f"x{now}, the GPU supports x{most}; the port above {device.slot} does not report its maximum"
    return at_least(now, most, good, bad, fault=Status.WARN, unit="lanes", source="the card alone")


def _both_ends(now: Shown, supported: Shown, unit: str, device: PciDevice) -> CheckResult:
    good = f"{now[1]}, as both ends support"
    bad = f"{now[1]} at {device.slot}, both ends support {supported[1]}"
    return at_least(now[0], supported[0], good, bad, unit=unit, source=BOTH_ENDS)


@registry.check(
    "link.pcie-replays",
    needs=("loaded_driver", "smi", "uptime_s", "virtualization"),
    needs_gpu=True,
    means="GPUs resend few PCI Express packets: the driver's counter as a rate since the boot. Errors occur in "
    "bursts, so the rate of a single hour may be higher.",
    remedy="nvidia-smi -q -d PCIE shows whether Replays Since Reset rises. " + SEATING,
    state="observe",
    actions=("power_cycle", "replace_hardware"),
    scope="gpu",
    bare_metal=True,
    thresholds=(MOST_REPLAYS,),
)
def pcie_replays(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    minutes = max((node.uptime_s or 0.0) / 60, 1.0)
    for gpu in gpus:
        yield of_one_gpu(_replays_of, gpu, minutes=minutes)


def most_replays(errors: float, generation: int, lanes: float) -> int:
    """Return the replays per minute of a link, with ``errors`` per minute, lane and GT/s; a generation that is unknown
    counts as the newest."""
    gt_per_s = next((rate for rate, known in GENERATIONS.items() if known == generation), max(GENERATIONS))
    return ceil(round(errors * gt_per_s * lanes, 6))


def _replays_of(gpu: SeenGpu, minutes: float) -> CheckResult:
    replays = gpu.reported.pcie.replays
    if replays is None:
        return gpu.not_reported("replays on PCI Express", expected=gpu.for_servers)
    pcie = gpu.reported.pcie
    lanes = pcie.width_current if isinstance(pcie.width_current, (int, float)) else 16
    most = most_replays(MOST_REPLAYS.of(gpu.match), pcie.gen_max or pcie.gen_current or 3, lanes)
    rate = replays / minutes
    good = f"{counted(replays, 'packet')} sent again since the driver was loaded"
    bad = f"{replays} packets sent again, {rate:.0f} in a minute on average"
    per_minute: Scale = {"unit": "replays per minute", "source": MOST_REPLAYS.source}
    return at_most(rate, most, good, bad, fault=Status.WARN, measured=round(rate, 3), **per_minute)


@registry.check(
    "link.pcie-speed",
    needs=("pci", "pci_ports", "virtualization", "loaded_driver", "smi"),
    needs_gpu=True,
    means="The PCIe link of every GPU runs at the highest generation that both ends support. Skipped for idle "
    "GPUs, which reduce the link speed on purpose.",
    remedy=f"{SEATING} A firmware setting may also limit the slot to a lower generation.",
    state="drain",
    actions=("power_cycle", "replace_hardware"),
    scope="gpu",
    bare_metal=True,
)
def pcie_speed(node: NodeFacts) -> Iterator[CheckResult]:
    states = {gpu.pci_bus_id: gpu.performance_state for gpu in node.smi_gpus}
    for component, device in gpus_of(node):
        yield _speed_of(node, device, states.get(device.slot)).at(component)


def _speed_of(node: NodeFacts, device: PciDevice, state: str | None) -> CheckResult:
    reason = why_not_judged(node, device)
    if reason is not None:
        return skipped(reason)
    link = device.link
    if link is None or link.speed_gt_per_s is None or link.speed_max_gt_per_s is None:
        return undetermined(f"the kernel does not report the PCIe link of {device.slot}")
    port = port_above(node, device)
    both = _slower_end(link, port.link if port else None)
    now = link.speed_gt_per_s
    of_both = f"{_generation(now)} of {_generation(both)}"
    if now < both and state is None:
        message = f"{of_both}, and whether the GPU is idle is unknown"
        return skipped(message, expected=both, measured=now, unit="GT/s")
    if now < both and state not in FULL_SPEED_STATES:
        message = f"idle ({state}): {of_both}, which is normal; check under load"
        return skipped(message, expected=both, measured=now, unit="GT/s")
    return _both_ends((now, _generation(now)), (both, _generation(both)), "GT/s", device)


def _slower_end(link: PciLink, port: PciLink | None) -> float:
    ends = [link.speed_max_gt_per_s, port.speed_max_gt_per_s if port else None]
    return min(end for end in ends if end is not None)


def _generation(speed: float) -> str:
    return f"gen {GENERATIONS[speed]}" if speed in GENERATIONS else f"{speed:g} GT/s"


def answer_of(node: NodeFacts, answer: Smi[DocumentT] | None, command: str) -> DocumentT:
    """Return the answer to another call of nvidia-smi; raise Skip or Undetermined if there is none."""
    seen_gpus(node)
    if answer is None or answer.document is None:
        reason = answer.error_message if answer else "no answer"
        raise Undetermined(f"{command}: {reason}")
    return answer.document


@registry.check(
    "link.topology",
    needs=("loaded_driver", "smi", "topology", "pci", "virtualization"),
    needs_gpu=True,
    means="The connection between two GPUs is the same in both directions. On platforms with NVSwitches, all "
    "pairs use all NVLinks of the model. Where the platform connects every pair, or all but a few pairs have "
    "NVLink, all pairs have NVLink.",
    remedy="nvidia-smi topo -m and nvidia-smi nvlink --status show what is missing; see nvlink.state and "
    "fabric.manager.",
    state="drain",
    actions=("restart_service:nvidia-fabricmanager.service", "reset_gpu", "replace_hardware"),
    thresholds=(MOST_GAPS,),
)
def topology(node: NodeFacts) -> Iterator[CheckResult]:
    document = answer_of(node, node.topology, "nvidia-smi topo -m")
    names, ways = pairs(document)
    if len(names) < 2:
        raise Skip("only one GPU, so no connection between GPUs")
    asymmetric = [f"{gpu}-{other}" for (gpu, other), way in ways.items() if gpu < other and ways[other, gpu] != way]
    if asymmetric:
        yield failed(f"not the same in both directions: {listed(asymmetric)}")
        return
    yield _as_the_platform(node, ways)


Ways = dict[tuple[str, str], str]


def pairs(document: Topology | PeerAccess) -> tuple[tuple[str, ...], Ways]:
    """Return the GPUs of a matrix of nvidia-smi, and the cell of each ordered pair of them."""
    names, links = document.gpus, document.links
    return names, {(gpu, other): links[gpu][other] for gpu in names for other in names if gpu != other}


def _as_the_platform(node: NodeFacts, ways: Ways) -> CheckResult:
    kinds = sorted(set(ways.values()))
    known = platforms(node)
    switched = bool(known) and all(platform.nvswitches for platform in known)
    if not switched:
        return _as_the_others(node, ways)
    match = model_of((node.gpus_on_bus or ())[0])
    nvlink = match.common.get("nvlink") if match else None
    expected = f"NV{nvlink.links}" if nvlink else None
    name = known[0].name
    source = f"catalog (platforms.yml: {name})"
    wrong = [f"{gpu}-{other} {way}" for (gpu, other), way in ways.items() if gpu < other and way != expected]
    if expected is None:
        return skipped(f"the catalog has no data on links between GPUs of {name}")
    if wrong:
        message = f"{counted(len(wrong), 'pair')} not linked by {expected}: {listed(wrong)}"
        switched_for_sure = bool(nvswitches(node)) or all(platform.sure("nvswitches") for platform in known)
        sure = switched_for_sure and match is not None and all(gpu.sure("nvlink") for gpu in match.gpus)
        return CheckResult(
            Status.FAIL if sure else Status.WARN, message, expected=expected, measured=listed(kinds), source=source
        )
    return passed(f"all pairs are linked by {expected}", expected=expected, measured=expected, source=source)


def _as_the_others(node: NodeFacts, ways: Ways) -> CheckResult:
    """Return the result if no NVSwitch is between the GPUs: each link connects two of them."""
    kinds = listed(sorted(set(ways.values())))
    unlinkable = _without_nvlink(node)
    between = {pair: way for pair, way in ways.items() if pair[0] < pair[1] and not unlinkable.intersection(pair)}
    linked = sum(map(_is_nvlink, between.values()))
    gaps = [f"{gpu}-{other} {way}" for (gpu, other), way in between.items() if not _is_nvlink(way)]
    mesh = _mesh(node)
    few = linked > 0 and len(gaps) <= MOST_GAPS.value * len(between)
    if not gaps or not (few or mesh):
        return passed(f"the same in both directions: {kinds}", measured=kinds)
    message = f"{counted(len(gaps), 'pair')} of {len(between)} not linked by NVLink: {listed(gaps)}"
    if few:
        return failed(message, expected="NVLink", measured=kinds, source="the node's other pairs")
    gpus = listed_gpus(node)
    # With or without NVSwitches, modules with NVLink are all linked: the number of switches does not matter here.
    sure_models = bool(gpus) and all(gpu.sure("nvlink") and gpu.sure("form") for gpu in gpus)
    sure = sure_models and all(platform.sure() for platform in platforms(node))
    source = f"catalog (platforms.yml: {mesh})"
    return (failed if sure else warned)(message, expected="NVLink", measured=kinds, source=source)


def _without_nvlink(node: NodeFacts) -> set[str]:
    """Return the GPUs, by nvidia-smi's names, of models without NVLink: a display card beside the others."""
    return {f"GPU{gpu.reported.index}" for gpu in listed_gpus(node) if gpu.match and gpu.known.get("nvlink") is None}


def _mesh(node: NodeFacts) -> str | None:
    """Return the platform on which each GPU has links to every other, None if it is unknown.

    Four SXM modules without switches; eight of them (V100) are linked in a ring of two meshes. A hypervisor may hide
    the links, and the driver those of a GPU in MIG mode.
    """
    gpus = listed_gpus(node)
    known = platforms(node)
    if is_guest(node) or not gpus or not known or len(gpus) > MOST_IN_A_MESH:
        return None
    direct = all(gpu.known.get("form") == "sxm" and gpu.known.get("nvlink") and not gpu.mig for gpu in gpus)
    return known[0].name if direct and not any(platform.nvswitches for platform in known) else None


@registry.check(
    "link.numa",
    needs=("pci", "numa", "virtualization"),
    needs_gpu=True,
    means="The firmware reports the NUMA node of each GPU, so that jobs can be placed near it.",
    remedy="Update the firmware, or enable NUMA in it (NPS, sub-NUMA clustering); cat "
    "/sys/bus/pci/devices/SLOT/numa_node shows the kernel's value.",
    state="observe",
    actions=("fix_configuration",),
    scope="gpu",
    bare_metal=True,
)
def numa(node: NodeFacts) -> Iterator[CheckResult]:
    with_cpus = [entry.node for entry in node.numa or () if entry.cpus]
    if is_guest(node):
        raise Skip(GUEST)
    if node.numa and not with_cpus:
        raise Undetermined("the kernel reports no processors of any NUMA node")
    if len(with_cpus) < 2:
        raise Skip("the kernel reports one NUMA node, or is without NUMA")
    for component, device in gpus_of(node):
        if device.numa_node is None:
            message = f"the firmware does not report the NUMA node of {device.slot}"
            yield warned(message, component=component, expected=f"one of {listed([str(n) for n in with_cpus])}")
        else:
            message = f"at NUMA node {device.numa_node}, processors {device.local_cpus or 'unknown'}"
            yield passed(message, component=component, measured=device.numa_node)


@registry.check(
    "link.p2p",
    needs=("loaded_driver", "smi", "peer_access", "topology", "virtualization"),
    needs_gpu=True,
    means="GPUs connected by NVLink have peer access; so do server GPUs on one PCIe bus, if the chipset supports it.",
    remedy="nvidia-smi topo -p2p r shows the reason: NS not supported, CNS by the chipset, GNS by the GPU, TNS by the "
    "topology, DR disabled in the driver (NVreg_RegistryDwords does not belong on a healthy node). With NVLink: "
    "nvlink.state and fabric.manager; over PCIe: host.acs and host.iommu.",
    state="drain",
    actions=("restart_service:nvidia-fabricmanager.service", "fix_configuration"),
)
def p2p(node: NodeFacts) -> Iterator[CheckResult]:
    document = answer_of(node, node.peer_access, "nvidia-smi topo -p2p r")
    matrix = answer_of(node, node.topology, "nvidia-smi topo -m")
    gpus = seen_gpus(node)
    names, access = pairs(document)
    if len(names) < 2:
        raise Skip("one GPU has no other to reach")
    _, ways = pairs(matrix)
    refused = {pair: word for pair, word in access.items() if word != "OK" and pair[0] < pair[1]}
    linked = [f"{gpu}-{other} {word}" for (gpu, other), word in refused.items() if _is_nvlink(ways.get((gpu, other)))]
    yield _access(node, gpus, refused, linked, len(names))


def _is_nvlink(way: str | None) -> bool:
    return way is not None and way.startswith("NV")


def _access(
    node: NodeFacts, gpus: list[SeenGpu], refused: dict[tuple[str, str], str], linked: list[str], number: int
) -> CheckResult:
    total = number * (number - 1) // 2
    if linked:
        message = f"{counted(len(linked), 'pair')} linked by NVLink cannot reach each other: {listed(linked)}"
        return failed(message, expected=total, measured=total - len(refused), unit="pairs")
    if not refused:
        return passed(f"all {counted(total, 'pair')} reach each other", expected=total, measured=total)
    words = listed([f"{gpu}-{other} {word}" for (gpu, other), word in refused.items()], most=3)
    if is_guest(node):
        return skipped(f"{words}; {GUEST}")
    if not all(gpu.for_servers for gpu in gpus):
        return skipped(f"{words}; such GPUs need not reach each other over PCIe")
    message = f"{counted(len(refused), 'pair')} of {total} cannot reach each other over PCIe: {words}"
    return warned(message, expected=total, measured=total - len(refused), unit="pairs")
