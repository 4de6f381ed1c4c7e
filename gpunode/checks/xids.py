"""Checks on the driver's messages in the kernel's log: Xid of GPUs, SXid of NVSwitches, other errors."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpunode.catalog import GpuMatch, load
from gpunode.checks import xid_nvlink5
from gpunode.checks.actions import State
from gpunode.checks.compare import passed, skipped, warned
from gpunode.checks.gpus import ANSWERS, OFF_THE_BUS, lost_gpus, model_of
from gpunode.checks.machine import is_container, nvswitches
from gpunode.checks.registry import CheckResult, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.checks.xid_registers import ARCHITECTURE, ECC_MOST, NVLINK_ERROR, REPEATED, judge
from gpunode.checks.xid_registers import SOURCE as REGISTERS
from gpunode.facts.kernel_log import KernelEvent
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed, moment

SOURCE = "catalog (xids.yml)"
BAD = ("critical", "high")
HARMLESS = ("info", "low")
APPLICATIONS_OWN: tuple[str, ...] = ("none",)
"""Actions for an Xid that an application caused: none on the node."""
BY_SEVERITY = (Status.FAIL, Status.WARN, Status.PASS)
LOG_REMEDY = "journalctl -k -b shows the lines around it."
RECOVERY = 154
"""The Xid that is not a fault itself: it reports the recovery action that a GPU needs after others, or that none is
left."""
OF_A_LOST_GPU = frozenset({OFF_THE_BUS, RECOVERY})
"""Xids for a GPU that nvidia-smi cannot reach, which gpu.answers reports."""
RECOVERED = re.compile(r"\bto 0x0+ \(None\)", re.I)
# Lines after which a GPU cannot be used, whatever other lines the driver writes.
OFF_THE_BUS_WORDS = ("fallen off the bus", "GPU is lost")
NO_WINDOW = ("PCI I/O region assigned to your NVIDIA device is invalid",)
WINDOW_REMEDY = (
    "The firmware gave the GPU no memory window (BAR of 0M): enable Above 4G Decoding in the firmware's settings, with "
    "it Resizable BAR, or give the virtual machine a larger 64-bit MMIO space; if that is not possible, add "
    "pci=realloc to the kernel's command line. Then reboot; lspci -vv -s SLOT shows the regions."
)
INIT_FAILED = ("RmInitAdapter failed", *OFF_THE_BUS_WORDS)

GAP = Threshold(
    "gpu.xid.incident-gap",
    180,
    "s",
    "Xids of one GPU with shorter gaps are one incident, rated by the most severe of them.",
    source="NVIDIA Fleet Intelligence, Xid bursts: 3 minutes of silence end one",
)

Incident = list[KernelEvent]


def reach(node: NodeFacts) -> str:
    """Return how far back the log goes, for messages."""
    complete = node.kernel_log is not None and node.kernel_log.complete
    return "of this boot" if complete else "as far as it is stored"


def nothing_found(node: NodeFacts, kind: str) -> CheckResult:
    """Return the result for a log without such events, as far back as it goes."""
    if is_container(node) and not (node.kernel_log and node.kernel_log.simulated):
        return skipped(f"no {kind}; in a container the kernel's log is the host's")
    if node.kernel_log is not None and not node.kernel_log.complete:
        return warned(
            f"no {kind}, but the kernel's log does not reach back to the boot",
            expected=0,
            measured=0,
            remedy="Store the journal on disk (Storage=persistent in journald.conf), with space for a whole boot.",
        )
    return passed(f"no {kind} in the kernel's log of this boot", expected=0, measured=0)


@registry.check(
    "gpu.xid",
    needs=("kernel_log",),
    needs_gpu=True,
    means="The driver reported no GPU error (Xid) since the boot. Each number is rated by its meaning on the "
    "GPU's model: application errors warn, hardware errors fail, uncertain ones warn. A burst is one incident, "
    "rated by its most severe Xid. An Xid cancelled by a later one (163 by 162) is ignored; 74 is rated by its "
    "registers; 154 by its last recovery action.",
    remedy=LOG_REMEDY,
    state="drain",
    actions=("reset_gpu", "restart_os", "open_support_case"),
    scope="gpu",
    thresholds=(GAP, ECC_MOST, REPEATED),
)
def xid(node: NodeFacts) -> Iterator[CheckResult]:
    events = [event for event in _events(node, "xid") if event.xid is not None]
    if not events:
        yield nothing_found(node, "Xid")
        return
    lost = lost_gpus(node)
    groups = sorted((gpu_of(node, xids[0]), xids) for xids in by_gpu(events).values())
    for component, xids in groups:
        for number, verdict in _of_gpu(component, xids, model_at(node, xids[-1])):
            explained = number in OF_A_LOST_GPU and xids[-1].pci_bus_id in lost and verdict.status is not Status.PASS
            yield _left_to_answers(verdict) if explained else verdict


def _left_to_answers(verdict: CheckResult) -> CheckResult:
    return skipped(f"{verdict.message} ({ANSWERS})", component=verdict.component, measured=verdict.measured)


def _of_gpu(component: str, events: list[KernelEvent], model: GpuMatch | None) -> Iterator[tuple[int, CheckResult]]:
    """Yield a result for each Xid that leads an incident, and one for the recovery action."""
    over = cancelled(events)
    led: dict[int, list[Incident]] = defaultdict(list)
    for incident in incidents([event for event in events if event.xid != RECOVERY]):
        numbers = dict.fromkeys(event.xid or 0 for event in incident)
        ranks = {number: _rank(number, incident, model, over) for number in numbers}
        led[min(numbers, key=lambda number: ranks[number])].append(incident)
    for number, bursts in sorted(led.items()):
        others = tuple(sorted({event.xid or 0 for burst in bursts for event in burst} - {number}))
        same = [event for burst in bursts for event in burst if event.xid == number]
        verdict = xid_verdict(component, number, same, model, others)
        if number in over:
            message = f"{verdict.message}; over: Xid {over[number]} followed"
            verdict = replace(verdict, status=Status.PASS, message=message)
        elif len(bursts) > 1:
            verdict = replace(verdict, message=f"{verdict.message} (in {len(bursts)} incidents)")
        yield number, verdict
    recovery = [event for event in events if event.xid == RECOVERY]
    if recovery:
        yield RECOVERY, xid_verdict(component, RECOVERY, recovery, model)


def _rank(number: int, incident: Incident, model: GpuMatch | None, over: Mapping[int, int]) -> int:
    """Return the rank of an Xid: the more severe, the smaller."""
    same = [event for event in incident if event.xid == number]
    alone = all(event.xid == number for event in incident)
    status = xid_verdict("", number, same, model, () if alone else (0,)).status
    return len(BY_SEVERITY) if number in over else BY_SEVERITY.index(status)


def xid_verdict(
    component: str, number: int, events: list[KernelEvent], model: GpuMatch | None, others: tuple[int, ...] = ()
) -> CheckResult:
    """Return the result for all lines of one Xid of one GPU. ``others``: the Xids in the same incidents."""
    row = load().xid(number)
    known = row.on(model.common.get("compute_capability") if model else None) if row else None
    last = events[-1]
    distinct = len({event.message for event in events})
    often = f", {len(events)} times{f' ({distinct} distinct)' if distinct > 1 else ''}" if len(events) > 1 else ""
    when = f", last at {last.time}" if last.time else ""
    who = f", process {last.process}" if last.process else ""
    beside = f"; in the same incident: Xid {listed([str(other) for other in others])}" if others else ""
    verdict = warned(
        "", component=component, expected=0, measured=len(events), unit="events", source=SOURCE, actions=None
    )
    if known is None or known.severity == "unused":
        details = f" ({last.message})" if last.message else ""
        message = f"Xid {number}{often}{when}{who}: the catalog has no meaning for it{details}{beside}"
        return replace(verdict, message=message, actions=("open_support_case",))
    status = Status.FAIL if known.severity in BAD else Status.PASS if known.severity in HARMLESS else Status.WARN
    if known.cancelled_by and status is Status.PASS:
        status = Status.WARN  # a state that holds until another Xid ends it
    meaning = known.meaning
    if not known.sure("severity"):
        status = Status.WARN
        reason = known.unsure.get("severity", "its row")
        meaning += f" (not sure for {model.gpu.name if model and model.gpu else 'this GPU'}: {reason})"
    if number == RECOVERY:
        # Each reports the state from then on: only the last one applies.
        meaning = f"{meaning}: {last.message}" if last.message else meaning
        status = Status.PASS if RECOVERED.search(last.message) else status
    by_application = known.severity == "application"
    follow = f" (where Xid {' or '.join(known.follow)} follows, that one applies)" if known.follow else ""
    verdict = replace(
        verdict,
        status=status,
        message=f"Xid {number}{often}{when}{who}: {meaning}{beside}",
        remedy=f"{known.action}{follow}",
        actions=APPLICATIONS_OWN if by_application else None,
        state=State.NONE if by_application else None,
    )
    decoded, registers = None, REGISTERS
    if number == NVLINK_ERROR and _has_registers(model):
        decoded = judge(events, alone=not others)
    elif number in xid_nvlink5.NUMBERS:
        decoded, registers = xid_nvlink5.judge(number, events), xid_nvlink5.SOURCE
    if decoded is None:
        return verdict
    message = f"Xid {number}{often}{when}{who}: {meaning}; {decoded.meaning}{beside}"
    source = f"{SOURCE}; {registers}"
    return replace(verdict, status=decoded.status, message=message, actions=decoded.actions, source=source)


def _has_registers(model: GpuMatch | None) -> bool:
    """Return whether the registers of Xid 74 are documented for the model."""
    return model is not None and model.common.get("architecture") == ARCHITECTURE


@registry.check(
    "nvswitch.sxid",
    needs=("kernel_log", "pci"),
    needs_gpu=True,
    means="The driver reported no error (SXid) of an NVSwitch since the boot.",
    remedy="Fatal: drain the node, reset all GPUs and NVSwitches or reboot. Otherwise check the reported link. "
    f"{LOG_REMEDY}",
    state="drain",
    actions=("reset_gpu", "restart_os", "open_support_case"),
)
def sxid(node: NodeFacts) -> Iterator[CheckResult]:
    events = _events(node, "sxid")
    if not events and not nvswitches(node):
        yield skipped("no NVSwitch is on the PCI bus")
    elif not events:
        yield nothing_found(node, "SXid")
    together: dict[tuple[str, int], list[KernelEvent]] = defaultdict(list)
    for event in events:
        together[event.pci_bus_id or "an unknown location", event.xid or 0].append(event)
    for (slot, number), same in sorted(together.items()):
        fatal = any(event.fatal for event in same)
        yield CheckResult(
            Status.FAIL if fatal else Status.WARN,
            f"SXid {number}, {counted(len(same), 'time')}: {same[-1].message}",
            f"nvswitch {slot}",
            expected=0,
            measured=len(same),
            unit="events",
        )


@registry.check(
    "driver.log",
    needs=("kernel_log",),
    needs_gpu=True,
    means="The kernel log has no driver errors other than Xids: no GPU that failed to initialize, no mismatch "
    "of firmware or library.",
    remedy=LOG_REMEDY,
    state="drain",
    actions=("reset_gpu", "restart_os", "open_support_case"),
)
def driver_log(node: NodeFacts) -> Iterator[CheckResult]:
    events = (*_events(node, "nvrm"), *_events(node, "nouveau"))
    if not events:
        yield nothing_found(node, "trouble of the driver")
        return
    lost = lost_gpus(node)
    left = [event for event in events if event.pci_bus_id not in lost or not _says_off_the_bus(event)]
    if not left:
        message = f"{counted(len(events), 'line')} about GPUs that do not answer ({ANSWERS})"
        yield skipped(message, measured=len(events), unit="lines")
        return
    events = tuple(left)
    texts = list(dict.fromkeys(event.message for event in events))
    no_window = any(sign in text for text in texts for sign in NO_WINDOW)
    signs = (*INIT_FAILED, *NO_WINDOW)
    broken = [text for text in texts if any(sign in text for sign in signs)]
    yield CheckResult(
        Status.FAIL if broken else Status.WARN,
        f"{counted(len(events), 'line')} of trouble {reach(node)}: {listed(broken or texts, most=2)}",
        expected=0,
        measured=len(events),
        unit="lines",
        remedy=WINDOW_REMEDY if no_window else None,
        actions=("fix_configuration", "restart_os") if no_window else None,
    )


def _says_off_the_bus(event: KernelEvent) -> bool:
    return any(sign in event.message for sign in OFF_THE_BUS_WORDS)


def _events(node: NodeFacts, kind: str) -> tuple[KernelEvent, ...]:
    log = node.kernel_log
    return tuple(event for event in log.events if event.kind == kind) if log else ()


def model_at(node: NodeFacts, event: KernelEvent) -> GpuMatch | None:
    """Return the catalog's model of the GPU; if its slot is empty, the node's model if it has only one."""
    models = {device.slot: model for device in node.pci or () if (model := model_of(device)) is not None}
    if event.pci_bus_id in models:
        return models[event.pci_bus_id]
    others = {tuple(gpu.id for gpu in model.gpus): model for model in models.values()}
    return next(iter(others.values())) if len(others) == 1 else None


def gpu_of(node: NodeFacts, event: KernelEvent) -> str:
    """Return ``gpu3`` by nvidia-smi's order, the slot if that is unknown."""
    index = next((gpu.index for gpu in node.smi_gpus if gpu.pci_bus_id == event.pci_bus_id), None)
    if index is not None:
        return f"gpu{index}"
    return f"gpu at {event.pci_bus_id}" if event.pci_bus_id else "node"


def by_gpu(events: Iterable[KernelEvent]) -> dict[str | None, list[KernelEvent]]:
    """Return the events by the GPU's PCI address, in their order."""
    groups: dict[str | None, list[KernelEvent]] = defaultdict(list)
    for event in events:
        groups[event.pci_bus_id].append(event)
    return dict(groups)


def incidents(events: list[KernelEvent]) -> list[Incident]:
    """Return the events of one GPU in bursts. Events without a time form one burst per number."""
    bursts: list[Incident] = []
    timeless: dict[int | None, Incident] = defaultdict(list)
    last = None
    for event in events:
        now = moment(event.time)
        if now is None:
            timeless[event.xid].append(event)
            continue
        if last is None or (now - last).total_seconds() > GAP.value:
            bursts.append([])
        bursts[-1].append(event)
        last = now
    return [*bursts, *timeless.values()]


def cancelled(events: list[KernelEvent]) -> Mapping[int, int]:
    """Return the Xids of one GPU that are over, with the Xid that ended each: 163 by a later 162."""
    last = {event.xid: at for at, event in enumerate(events) if event.xid is not None}
    over = {}
    for number, at in last.items():
        row = load().xid(number)
        ended_by = next((int(text) for text in row.cancelled_by if last.get(int(text), -1) > at), None) if row else None
        if ended_by is not None:
            over[number] = ended_by
    return over
