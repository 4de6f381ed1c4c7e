"""What the checks on measurements share: which record, whether its figures are a GPU's, and the machine behind it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, Unpack

from gpunode.checks.frameworks import OF_THE_IMAGE
from gpunode.checks.machine_shape import shape_of
from gpunode.checks.registry import Declared, Expectation, Level, Status, Verdict, registry
from gpunode.checks.workload import ON_CPU, component, explained, gpu_named, nothing_ran, of, read
from gpunode.expectations import Shape
from gpunode.facts.models.measured import MEASURED
from gpunode.facts.models.workload import DeviceIdentity, MalformedRecord, Record, Values, values_of
from gpunode.facts.node import NodeFacts

AnyValues = TypeVar("AnyValues", bound=Values)
NOT_MEASURED = "nothing was measured on this node"
SIMULATED = "simulated: that says nothing about a GPU"
OVER_GLOO = "gloo on processors: that says nothing about NCCL"
OF_A_PART = "a MIG device: figures of a whole GPU do not hold for it"


@dataclass(frozen=True)
class MeasuredNode:
    """The node on which something was measured."""

    node: NodeFacts
    expect: Expectation
    shape: Shape

    def index(self, uuid: str | None) -> int | None:
        """Return nvidia-smi's index of a GPU; None where it has none of that UUID."""
        name = gpu_named(self.node, uuid)
        return None if name is None else int(name.removeprefix("gpu"))

    def index_of(self, record: Record) -> int | None:
        """Return the index of the GPU that a record is about; None also for one of a MIG device."""
        about = values_of(record, DeviceIdentity)
        if isinstance(about, str) or about.mig is not None:
            return None
        name = gpu_named(self.node, about.gpu_uuid or about.uuid, about.pci_bus_id)
        return None if name is None else int(name.removeprefix("gpu"))


def why_no_figures(node: NodeFacts, record: Record, *, on_gpu: bool) -> str | None:
    """Return why the figures of a record say nothing about a GPU; None where they do."""
    if isinstance(record, MalformedRecord) or record.error is not None or record.undetermined is not None:
        return None
    if on_gpu and record.device == "cpu":
        return record.skipped or ON_CPU
    if record.simulated or node.simulated:
        return record.skipped or SIMULATED
    if record.values.get("backend") == "gloo":
        return OVER_GLOO
    if record.values.get("mig") is not None:
        return OF_A_PART
    return None


JudgeMeasured = Callable[[AnyValues, Record, MeasuredNode], Iterable[Verdict]]


def measurement_check(
    check_id: str,
    records: tuple[str, ...],
    kind: type[AnyValues],
    *,
    level: Level = "standard",
    on_gpu: bool = True,
    **declared: Unpack[Declared],
) -> Callable[[JudgeMeasured[AnyValues]], JudgeMeasured[AnyValues]]:
    """Register a function of the values of measured records as a check; it is asked once for every record.

    Records that are simulated, or of the processor (unless ``on_gpu`` is false), or of gloo are ``skip``.
    """

    def decorate(function: JudgeMeasured[AnyValues]) -> JudgeMeasured[AnyValues]:
        def judge(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
            absent = unmeasured(node, records)
            if absent is not None:
                yield absent
                return
            run = MeasuredNode(node, expect, shape_of(node))
            for record in (record for name in records for record in of(node, name)):
                for verdict in _of_record(record, run):
                    own = verdict.component != "node" or record.component == "node"
                    yield verdict if own else replace(verdict, component=component(node, record))

        def _of_record(record: Record, run: MeasuredNode) -> Iterable[Verdict]:
            reason = why_no_figures(run.node, record, on_gpu=on_gpu)
            if reason is not None:
                return [Verdict(Status.SKIP, reason)]
            answer = read(record, kind)
            if not isinstance(answer, Verdict):
                return function(answer[1], record, run)
            pointer = explained(run.node, OF_THE_IMAGE) if record.error is not None else None
            return [answer if pointer is None else Verdict(Status.SKIP, f"{record.error} ({pointer})")]

        registry.check(check_id, level=level, needs=("records",), needs_gpu=True, **declared)(judge)
        return function

    return decorate


def unmeasured(node: NodeFacts, records: tuple[str, ...]) -> Verdict | None:
    """Return the verdict where none of the records is there; None where one is."""
    ended = nothing_ran(node)
    if ended is not None:
        return ended
    if any(of(node, name) for name in records):
        return None
    if not any(record.record in MEASURED for record in node.records or ()):
        return Verdict(Status.SKIP, NOT_MEASURED)
    pointer = explained(node, OF_THE_IMAGE)
    missing = f"there is no record {' or '.join(records)}"
    if pointer is not None:
        return Verdict(Status.SKIP, f"{missing} ({pointer})")
    return Verdict(Status.ERROR, f"{missing}: the payload did not come that far")
