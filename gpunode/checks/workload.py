"""Checks on what a workload recorded: which record, what it is worth, and which GPU it tells of."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar, Unpack

from gpunode.checks.registry import Declared, Expectation, Status, Verdict, registry
from gpunode.facts.models.workload import DeviceIdentity, Record, Values, values_of
from gpunode.facts.node import NodeFacts

AnyValues = TypeVar("AnyValues", bound=Values)
RUNS = "container.runs reports the cause"
NOT_SO_FAR = "the payload did not come that far"
ON_CPU = "ran on the processor: that says nothing about a GPU"


def of(node: NodeFacts, name: str) -> list[Record]:
    """The records of a name."""
    return [record for record in node.records or () if record.record == name]


def nothing_ran(node: NodeFacts) -> Verdict | None:
    """The verdict where the container itself did not come to run; None where it did."""
    broken = [record for record in of(node, "container") if record.error is not None or record.skipped is not None]
    if broken and len(node.records or ()) == len(broken):
        return Verdict(Status.SKIP, f"nothing ran in a container ({RUNS})")
    return None


def one(node: NodeFacts, name: str, kind: type[AnyValues]) -> tuple[Record, AnyValues] | Verdict:
    """The one record of a name with its values, or the verdict on there being none that can be judged."""
    ended = nothing_ran(node)
    if ended is not None:
        return ended
    found = of(node, name)
    if not found:
        return Verdict(Status.ERROR, f"there is no record {name}: the payload did not come that far")
    return read(found[0], kind)


def read(record: Record, kind: type[AnyValues]) -> tuple[Record, AnyValues] | Verdict:
    """A record with its values, or the verdict on what it says instead."""
    if record.skipped is not None:
        return Verdict(Status.SKIP, record.skipped)
    if record.undetermined is not None:
        return Verdict(Status.ERROR, f"{record.undetermined}{where(record)}")
    if record.error is not None:
        return Verdict(Status.FAIL, f"{record.error}{where(record)}")
    values = values_of(record, kind)
    if isinstance(values, str):
        return Verdict(Status.ERROR, values)
    return record, values


def explained(node: NodeFacts, checks: Sequence[str], status: Status = Status.FAIL, message: str = "") -> str | None:
    """The first of the checks with that status on this node: what it found brings others down, and is reported once.

    ``message``: with which its own begins.
    """
    for check_id in checks:
        for finding in registry[check_id].findings(node, Expectation()):
            if finding.status is status and finding.message.startswith(message):
                return f"{check_id} reports the cause"
    return None


def missing(node: NodeFacts, records: Sequence[str], after: Sequence[str], why: str) -> Verdict:
    """Return the verdict where none of the records is there: a skip where one of the checks reports the cause."""
    pointer = explained(node, after)
    text = f"there is no record {' or '.join(records)}"
    if pointer is not None:
        return Verdict(Status.SKIP, f"{text} ({pointer})")
    return Verdict(Status.ERROR, f"{text}: {why}")


def where(record: Record) -> str:
    """`` (image IMAGE)``, for the end of a sentence."""
    return f" (image {record.container.image})" if record.container else ""


def component(node: NodeFacts, record: Record) -> str:
    """``gpu3`` as nvidia-smi on the host counts it, by UUID or slot; what the record calls it where neither is known.

    A MIG device is ``gpu3/mig1``.
    """
    about = values_of(record, DeviceIdentity)
    if isinstance(about, str):
        return record.component
    name = gpu_named(node, about.gpu_uuid or about.uuid, about.pci_bus_id)
    if name is None:
        return record.component
    return name if about.mig is None else f"{name}/mig{about.mig}"


def gpu_named(node: NodeFacts, uuid: str | None, pci_bus_id: str | None = None) -> str | None:
    """``gpu3``: the GPU of the host with that UUID, or at that slot; None where there is none."""
    for gpu in node.smi_gpus:
        same_uuid = uuid is not None and gpu.uuid == uuid
        if same_uuid or (pci_bus_id is not None and gpu.pci_bus_id == pci_bus_id):
            return f"gpu{gpu.index}"
    return None


def image_of(node: NodeFacts) -> str:
    """The image that the records come from, as a message names it."""
    return next((f"image {record.container.image}" for record in node.records or () if record.container), "the host")


def _explained(record: Record, node: NodeFacts, after: Sequence[str]) -> Verdict | None:
    """A skip where one of the checks reports what brought this part down; None elsewhere."""
    if record.error is not None:
        pointer = explained(node, after)
    elif record.undetermined is not None:
        # Of one that has no result either, for the same reason.
        pointer = explained(node, after, Status.ERROR, record.undetermined)
    else:
        return None
    reason = record.error or record.undetermined
    return Verdict(Status.SKIP, f"{reason} ({pointer})") if pointer is not None else None


JudgeValues = Callable[[AnyValues, Record, NodeFacts], Verdict | Iterable[Verdict]]


def record_check(  # noqa: PLR0913
    check_id: str,
    record: str,
    kind: type[AnyValues],
    *,
    on_gpu: bool = False,
    needs: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    **declared: Unpack[Declared],
) -> Callable[[JudgeValues[AnyValues]], JudgeValues[AnyValues]]:
    """Register a function of a record's values as a check of level ``standard``.

    It is asked once for every record of the name. ``on_gpu``: a record of the processor is ``skip``. ``after``: checks
    whose failure explains that this part broke.
    """

    def decorate(function: JudgeValues[AnyValues]) -> JudgeValues[AnyValues]:
        def judge(node: NodeFacts) -> Iterator[Verdict]:
            ended = nothing_ran(node)
            found = of(node, record)
            if ended is not None:
                yield ended
            elif not found:
                yield missing(node, (record,), after, NOT_SO_FAR)
            else:
                for each in found:
                    yield from _judged(each, node)

        def _judged(each: Record, node: NodeFacts) -> Iterator[Verdict]:
            if on_gpu and each.device == "cpu" and each.error is None and each.undetermined is None:
                yield Verdict(Status.SKIP, each.skipped or ON_CPU, component=each.component)
                return
            answer = _explained(each, node, after) or read(each, kind)
            if isinstance(answer, Verdict):
                yield replace(answer, component=component(node, each))
                return
            verdicts = function(answer[1], each, node)
            for verdict in (verdicts,) if isinstance(verdicts, Verdict) else verdicts:
                own = verdict.component != "node" or each.component == "node"
                yield verdict if own else replace(verdict, component=component(node, each))

        about: Declared = {"scope": "gpu" if on_gpu else "node", **declared}
        registry.check(check_id, level="standard", needs=("records", *needs), needs_gpu=True, **about)(judge)
        return function

    return decorate
