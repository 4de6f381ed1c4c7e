"""Which Xids belong together: bursts of one GPU, and those that a later one cancels."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from gpunode.catalog import load
from gpunode.checks.thresholds import Threshold
from gpunode.facts.node import KernelEvent
from gpunode.text import moment

GAP = Threshold(
    "gpu.xid.incident-gap",
    180,
    "s",
    "Xids of one GPU with shorter gaps are one incident, rated by the most severe of them.",
    source="NVIDIA Fleet Intelligence, Xid bursts: 3 minutes of silence end one",
)

Incident = list[KernelEvent]


def by_gpu(events: Iterable[KernelEvent]) -> dict[str | None, list[KernelEvent]]:
    """Return the events by the GPU's PCI address, in their order."""
    found: dict[str | None, list[KernelEvent]] = defaultdict(list)
    for event in events:
        found[event.pci_bus_id].append(event)
    return dict(found)


def incidents(events: list[KernelEvent]) -> list[Incident]:
    """Return the events of one GPU in bursts. Of those without a time, each number is one: nothing joins them."""
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
