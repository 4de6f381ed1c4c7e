"""Checks on the driver's messages in the kernel's log, of this boot and earlier ones: Xid, SXid, other errors."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta

from gpunode.catalog import GpuMatch, load
from gpunode.checks.compare import passed, skipped, warned
from gpunode.checks.gpus import ANSWERS, OFF_THE_BUS, lost_gpus, model_of
from gpunode.checks.machine import is_container, nvswitches
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.checks.xid_meaning import ECC_MOST, RECOVERY, REPEATED, SOURCE, xid_verdict
from gpunode.facts.kernel_log import KernelEvent
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, is_recent, listed, moment

BY_SEVERITY = (Status.FAIL, Status.WARN, Status.PASS)
LOG_REMEDY = "journalctl -k -b shows the lines around it."
OF_A_LOST_GPU = frozenset({OFF_THE_BUS, RECOVERY})
"""Xids for a GPU that nvidia-smi cannot reach, which gpu.answers reports."""
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
    events = [event for event in logged(node, "xid") if event.xid is not None]
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
    events = logged(node, "sxid")
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
    events = (*logged(node, "nvrm"), *logged(node, "nouveau"))
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


def logged(node: NodeFacts, kind: str) -> tuple[KernelEvent, ...]:
    """Return the log's events of one kind."""
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


LOOK_BACK = Threshold(
    "gpu.xid-earlier.look-back",
    168,
    "h",
    "Older Xids of earlier boots are ignored; the probe reads at most a week.",
    source="our choice: NVIDIA NVSentinel looks back 2 h across a reboot, and stores older events itself",
    most=168,
)
BOOTS = Threshold(
    "gpu.xid-earlier.boots",
    2,
    "boots",
    "The same Xid of hardware in as many boots, this one counted, is a fault that a reboot does not fix.",
    source="leptonai/gpud, component nvidia/xid: a reboot count of 2",
    least=2,
)


@registry.check(
    "gpu.xid-earlier",
    needs=("earlier_boots", "kernel_log"),
    needs_gpu=True,
    means="No hardware Xid occurred in several boots of the last days. One that occurred only in one earlier "
    "boot warns: the reboot, or the reset before it, may have fixed it.",
    remedy="journalctl _TRANSPORT=kernel --since=-7d shows the lines around it. If it recurs after a reboot, "
    "run DCGM's diagnostics, then replace the GPU.",
    state="drain",
    actions=("open_support_case", "replace_hardware"),
    scope="gpu",
    thresholds=(LOOK_BACK, BOOTS),
)
def xid_earlier(node: NodeFacts) -> Iterator[CheckResult]:
    boots = node.earlier_boots or ()
    if not boots:
        where = "in a container the journal is the container's" if is_container(node) else "the journal has no other"
        raise Skip(f"only this boot is known: {where}")
    seen: dict[tuple[str, int], list[KernelEvent]] = defaultdict(list)
    in_boots: dict[tuple[str, int], int] = defaultdict(int)
    for boot in boots:
        for key, events in _of_hardware(node, boot.events).items():
            seen[key] = events + seen[key]
            in_boots[key] += 1
    now = _of_hardware(node, node.kernel_log.events if node.kernel_log else ())
    for (component, number), events in sorted(seen.items()):
        number_of_boots = in_boots[component, number] + ((component, number) in now)
        yield _verdict(node, component, number, events, number_of_boots)
    if not seen:
        message = f"no Xid of hardware in {counted(len(boots), 'earlier boot')}"
        yield passed(message, expected=0, measured=0, unit="boots")


def _of_hardware(node: NodeFacts, events: tuple[KernelEvent, ...]) -> dict[tuple[str, int], list[KernelEvent]]:
    """Return the Xids that fail on the GPU's model, by GPU and number; the recovery action is a state, not a fault."""
    groups: dict[tuple[str, int], list[KernelEvent]] = defaultdict(list)
    for event in events:
        if event.kind == "xid" and event.xid not in {None, RECOVERY} and _is_recent(node, event):
            groups[gpu_of(node, event), event.xid or 0].append(event)
    return {
        (component, number): xids
        for (component, number), xids in groups.items()
        if xid_verdict(component, number, xids, model_at(node, xids[-1])).status is Status.FAIL
    }


def _is_recent(node: NodeFacts, event: KernelEvent) -> bool:
    return is_recent(event.time, node.collected_at, timedelta(hours=LOOK_BACK.value))


def _verdict(node: NodeFacts, component: str, number: int, events: list[KernelEvent], boots: int) -> CheckResult:
    verdict = xid_verdict(component, number, events, model_at(node, events[-1]))
    again = boots >= BOOTS.value
    words = [verdict.message, f"in {counted(boots, 'boot')}: a reboot does not fix it" if again else "before this boot"]
    return CheckResult(
        Status.FAIL if again else Status.WARN,
        listed(words),
        component,
        expected=0,
        measured=boots,
        unit="boots",
        source=SOURCE,
    )
