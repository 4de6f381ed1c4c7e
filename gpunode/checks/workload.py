"""Base of the checks on records of workloads: selection of the record, its validity, and its GPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, TypeVar

from gpunode.checks.registry import Broken, CheckResult, Expectation, NotJudged, Skip, Status, Undetermined, registry
from gpunode.facts.models.workload import DeviceIdentity, Record, Values, values_of
from gpunode.facts.node import NodeFacts

AnyValues = TypeVar("AnyValues", bound=Values)
FoundT = TypeVar("FoundT")
RUNS = "container.runs reports the cause"
NOTHING_RAN = f"nothing ran in a container ({RUNS})"
NOT_SO_FAR = "the payload ended earlier"
ON_CPU = "ran on the processor: not a measurement of a GPU"


def of(node: NodeFacts, name: str) -> list[Record]:
    """Return the records of a name."""
    return [record for record in node.records or () if record.record == name]


def nothing_ran(node: NodeFacts) -> bool:
    """Return whether the container itself did not start."""
    broken = [record for record in of(node, "container") if record.error is not None or record.skipped is not None]
    return bool(broken) and len(node.records or ()) == len(broken)


def single_record(node: NodeFacts, name: str, kind: type[AnyValues]) -> tuple[Record, AnyValues]:
    """Return the one record of a name with its values; raise NotJudged if there is none that can be checked."""
    if nothing_ran(node):
        raise Skip(NOTHING_RAN)
    records = of(node, name)
    if not records:
        raise Undetermined(f"no record {name}: {NOT_SO_FAR}")
    return records[0], read(records[0], kind)


def known(node: NodeFacts, name: str, kind: type[AnyValues]) -> AnyValues | None:
    """Return the values of the one record of a name; None if there are none that can be checked."""
    try:
        return single_record(node, name, kind)[1]
    except NotJudged:
        return None


def read(record: Record, kind: type[AnyValues]) -> AnyValues:
    """Return the values of a record; raise NotJudged with its reason if it has none."""
    if record.skipped is not None:
        raise Skip(record.skipped)
    if record.undetermined is not None:
        raise Undetermined(f"{record.undetermined}{where(record)}")
    if record.error is not None:
        raise Broken(f"{record.error}{where(record)}")
    values = values_of(record, kind)
    if isinstance(values, str):
        raise Undetermined(values)
    return values


def explained(node: NodeFacts, checks: Sequence[str], status: Status = Status.FAIL, message: str = "") -> str | None:
    """Return the message of the first of the checks with that status on this node: it explains other failures.

    ``message``: prefix of the message.
    """
    for check_id in checks:
        for finding in registry[check_id].findings(node, Expectation()):
            if finding.status is status and finding.message.startswith(message):
                return f"{check_id} reports the cause"
    return None


def missing(node: NodeFacts, records: Sequence[str], after: Sequence[str], why: str) -> NotJudged:
    """Return the exception for missing records: a skip if one of the checks reports the cause."""
    pointer = explained(node, after)
    text = f"no record {' or '.join(records)}"
    return Undetermined(f"{text}: {why}") if pointer is None else Skip(f"{text} ({pointer})")


def where(record: Record) -> str:
    """Return `` (image IMAGE)``, for the end of a sentence."""
    return f" (image {record.container.image})" if record.container else ""


def component(node: NodeFacts, record: Record) -> str:
    """Return ``gpu3`` by nvidia-smi on the host, by UUID or slot; the record's own name if neither is known.

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
    """Return ``gpu3``: the GPU of the host with that UUID, or at that slot; None if there is none."""
    for gpu in node.smi_gpus:
        same_uuid = uuid is not None and gpu.uuid == uuid
        if same_uuid or (pci_bus_id is not None and gpu.pci_bus_id == pci_bus_id):
            return f"gpu{gpu.index}"
    return None


def image_of(node: NodeFacts) -> str:
    """Return the image of the records, for messages."""
    return next((f"image {record.container.image}" for record in node.records or () if record.container), "the host")


def _pointer(record: Record, node: NodeFacts, after: Sequence[str]) -> str | None:
    """Return which of the checks reports the cause of this failure; None if none does."""
    if record.error is not None:
        return explained(node, after)
    # Also of one without a result, for the same reason.
    return None if record.undetermined is None else explained(node, after, Status.ERROR, record.undetermined)


def taking(function: Callable[..., FoundT]) -> Callable[..., FoundT]:
    """Return a function that passes on its first argument, and the named ones that the given function accepts."""
    taken = frozenset(signature(function).parameters)

    def call(values: Values, **named: Any) -> FoundT:
        return function(values, **{name: value for name, value in named.items() if name in taken})

    return call


def placed(verdict: CheckResult, node: NodeFacts, record: Record) -> CheckResult:
    """Return a result of a record with the component that the record is about, unless it names another."""
    named = verdict.component != "node" or record.component == "node"
    return verdict if named else verdict.at(component(node, record))


Judged = CheckResult | Iterable[CheckResult]
JudgeValues = (
    Callable[[AnyValues], Judged]
    | Callable[[AnyValues, Record], Judged]
    | Callable[[AnyValues, NodeFacts], Judged]
    | Callable[[AnyValues, Record, NodeFacts], Judged]
)
"""A function of a record's values; ``record`` and ``node`` are optional parameters."""


def record_check(  # noqa: PLR0913
    check_id: str,
    record: str,
    kind: type[AnyValues],
    *,
    on_gpu: bool = False,
    needs: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    **declared: Any,
) -> Callable[[JudgeValues[AnyValues]], JudgeValues[AnyValues]]:
    """Return a decorator that registers a function of a record's values as a check of level ``standard``.

    It is called once for every record of the name. ``on_gpu``: a record of the processor is ``skip``. ``after``: checks
    with failures that explain this one.
    """

    def decorate(function: JudgeValues[AnyValues]) -> JudgeValues[AnyValues]:
        call = taking(function)

        def judge(node: NodeFacts) -> Iterator[CheckResult]:
            if nothing_ran(node):
                raise Skip(NOTHING_RAN)
            records = of(node, record)
            if not records:
                raise missing(node, (record,), after, NOT_SO_FAR)
            for each in records:
                try:
                    for verdict in _judged(each, node):
                        yield placed(verdict, node, each)
                except NotJudged as reason:
                    yield placed(reason.verdict, node, each)

        def _judged(each: Record, node: NodeFacts) -> Iterable[CheckResult]:
            if on_gpu and each.device == "cpu" and each.error is None and each.undetermined is None:
                raise Skip(each.skipped or ON_CPU, each.component)
            pointer = _pointer(each, node, after)
            if pointer is not None:
                raise Skip(f"{each.error or each.undetermined} ({pointer})")
            verdicts = call(read(each, kind), record=each, node=node)
            return (verdicts,) if isinstance(verdicts, CheckResult) else verdicts

        about = {"scope": "gpu" if on_gpu else "node", **declared}
        registry.check(check_id, level="standard", needs=("records", *needs), needs_gpu=True, **about)(judge)
        return function

    return decorate
