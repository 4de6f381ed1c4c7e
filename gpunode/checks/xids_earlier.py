"""A check on the Xids of earlier boots: a fault that recurs after a reboot is not repaired by one."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

from gpunode.checks.compare import passed
from gpunode.checks.machine import is_container
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.checks.xids import RECOVERY, SOURCE, gpu_of, model_at, xid_verdict
from gpunode.facts.kernel_log import KernelEvent
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed, moment

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
    then, now = moment(event.time), moment(node.collected_at)
    return then is None or now is None or now - then <= timedelta(hours=LOOK_BACK.value)


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
