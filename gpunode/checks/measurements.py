"""Base of the checks on measurements: selection of records, whether figures are a GPU's, and the node's shape."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gpunode.checks.frameworks import OF_THE_IMAGE
from gpunode.checks.machine_shape import shape_of
from gpunode.checks.registry import CheckResult, Expectation, Level, NotJudged, Skip, registry
from gpunode.checks.workload import (
    NOT_SO_FAR,
    NOTHING_RAN,
    ON_CPU,
    explained,
    gpu_named,
    missing,
    nothing_ran,
    of,
    placed,
    read,
    taking,
)
from gpunode.expectations import Shape
from gpunode.facts.models.measured import MEASURED
from gpunode.facts.models.workload import DeviceIdentity, MalformedRecord, Record, Values, values_of
from gpunode.facts.node import NodeFacts

AnyValues = TypeVar("AnyValues", bound=Values)
NOT_MEASURED = "nothing was measured on this node"
SIMULATED = "simulated: not a measurement of a GPU"
OVER_GLOO = "gloo on processors: not a measurement of NCCL"
OF_A_PART = "a MIG device: figures of a whole GPU do not apply"


@dataclass(frozen=True)
class MeasuredNode:
    """The node on which a measurement ran."""

    node: NodeFacts
    expect: Expectation
    shape: Shape

    def index(self, uuid: str | None) -> int | None:
        """Return nvidia-smi's index of a GPU; None if no GPU has that UUID."""
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
    """Return why the figures of a record are not figures of a GPU; None if they are."""
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


JudgeMeasured = (
    Callable[[AnyValues], Iterable[CheckResult]]
    | Callable[[AnyValues, Record], Iterable[CheckResult]]
    | Callable[[AnyValues, MeasuredNode], Iterable[CheckResult]]
    | Callable[[AnyValues, Record, MeasuredNode], Iterable[CheckResult]]
)
"""A function of a record's values; ``record`` and ``run`` are optional parameters."""


def measurement_check(  # noqa: PLR0913
    check_id: str,
    records: tuple[str, ...],
    kind: type[AnyValues],
    *,
    level: Level = "standard",
    on_gpu: bool = True,
    broken_in: str | None = None,
    **declared: Any,
) -> Callable[[JudgeMeasured[AnyValues]], JudgeMeasured[AnyValues]]:
    """Return a decorator that registers a function of the values of measured records as a check, called once per
    record.

    Records that are simulated, or of the processor (unless ``on_gpu`` is false), or of gloo are ``skip``; so are those
    with an error that another check, ``broken_in``, reports.
    """

    def decorate(function: JudgeMeasured[AnyValues]) -> JudgeMeasured[AnyValues]:
        call = taking(function)

        def judge(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
            require_measured(node, records)
            run = MeasuredNode(node, expect, shape_of(node))
            for record in (record for name in records for record in of(node, name)):
                try:
                    for verdict in _of_record(record, run):
                        yield placed(verdict, node, record)
                except NotJudged as reason:
                    yield placed(reason.verdict, node, record)

        def _of_record(record: Record, run: MeasuredNode) -> Iterable[CheckResult]:
            reason = why_no_figures(run.node, record, on_gpu=on_gpu)
            if reason is not None:
                raise Skip(reason)
            if record.error is not None and not isinstance(record, MalformedRecord):
                pointer = f"reported by {broken_in}" if broken_in is not None else explained(run.node, OF_THE_IMAGE)
                if pointer is not None:
                    raise Skip(f"{record.error} ({pointer})")
            return call(read(record, kind), record=record, run=run)

        registry.check(check_id, level=level, needs=("records",), needs_gpu=True, **declared)(judge)
        return function

    return decorate


def require_measured(node: NodeFacts, records: tuple[str, ...]) -> None:
    """Raise NotJudged if none of the records exists."""
    if nothing_ran(node):
        raise Skip(NOTHING_RAN)
    if any(of(node, name) for name in records):
        return
    if not any(record.record in MEASURED for record in node.records or ()):
        raise Skip(NOT_MEASURED)
    levels = {record.values.get("level") for record in of(node, "container")}
    why = NOT_SO_FAR if "deep" in levels else "not written at level standard, or cut off before"
    raise missing(node, records, OF_THE_IMAGE, why)
