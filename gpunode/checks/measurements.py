"""Base of the checks on measurements: selection of records, results for figures, and the node's shape."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gpunode.catalog import load
from gpunode.checks.frameworks import OF_THE_IMAGE
from gpunode.checks.gpus import SeenGpu, listed_gpus
from gpunode.checks.links import GENERATIONS, port_above
from gpunode.checks.machine import nvswitches, platforms
from gpunode.checks.registry import CheckResult, Expectation, FigureReport, Level, NotJudged, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
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
from gpunode.expectations import Assessment, Figure, MarkRules, Shape, assess, unit_of
from gpunode.expectations.limits import Pair
from gpunode.facts.models.measured import MEASURED
from gpunode.facts.models.workload import DeviceIdentity, MalformedRecord, Record, Values, values_of
from gpunode.facts.node import NodeFacts

NVLINKS = re.compile(r"NV(\d{1,3})")


def shape_of(node: NodeFacts) -> Shape:
    """Return the node's shape by nvidia-smi, the bus and the catalog."""
    gpus = listed_gpus(node)
    models = {gpu.match.gpu.id: gpu.match.gpu for gpu in gpus if gpu.match and gpu.match.gpu}
    known = len(models) == 1 and all(gpu.match and gpu.match.gpu for gpu in gpus)
    rows = platforms(node)
    return Shape(
        gpu=next(iter(models.values())) if known else None,
        count=len(gpus),
        nvswitch=bool(nvswitches(node)) or any(row.nvswitches for row in rows) or _in_rack(gpus),
        links=links_of(node, gpus),
        pcie={gpu.reported.index: link for gpu in gpus if (link := _pcie(node, gpu)) is not None},
        platforms=frozenset(name for row in rows for name in (row.id, row.board) if name is not None),
    )


def _in_rack(gpus: list[SeenGpu]) -> bool:
    return any(gpu.known.get("fabric") == "rack" for gpu in gpus)


def _pcie(node: NodeFacts, gpu: SeenGpu) -> tuple[int, int] | None:
    """Return generation and width that both ends support; None if nvidia-smi does not print them."""
    gen, lanes = gpu.reported.pcie.gen_max, gpu.reported.pcie.width_max
    if not gen or not lanes:
        return None
    width = int(lanes)
    port = port_above(node, gpu.device) if gpu.device is not None else None
    above = port.link if port is not None else None
    if above is not None and above.width_max:
        width = min(width, above.width_max)
    if above is not None and above.speed_max_gt_per_s in GENERATIONS:
        gen = min(gen, GENERATIONS[above.speed_max_gt_per_s])
    return gen, width


def links_of(node: NodeFacts, gpus: list[SeenGpu]) -> dict[Pair, int] | None:
    """Return the NVLinks between every two GPUs by ``nvidia-smi topo -m``; None without the whole matrix."""
    by_pair: dict[Pair, int] = {}
    indices = sorted(gpu.reported.index for gpu in gpus)
    for position, first in enumerate(indices):
        for second in indices[position + 1 :]:
            cell = node.gpu_links.get(f"GPU{first}", {}).get(f"GPU{second}")
            if cell is None:
                return None
            links = NVLINKS.fullmatch(cell)
            by_pair[first, second] = int(links[1]) if links else 0
    return by_pair


GROSS = Threshold(
    "performance.gross",
    0.4,
    "of the physical limit",
    "A lower figure is a failure on every model, even without a published reference.",
    source="our choice: the lowest share that is published of a healthy machine is 0.62 (gpu-fryer, GB200)",
    most=1,
)
DROP_WARNS = Threshold(
    "performance.drop.warns",
    0.05,
    "of the baseline",
    "A figure that is lower than the baseline's by more warns.",
    source="our choice, between 3.5 % (Azure ai-infrastructure-on-azure, a warning) and 5 to 10 % (CSCS)",
    most=1,
)
DROP_FAILS = Threshold(
    "performance.drop.fails",
    0.10,
    "of the baseline",
    "A figure that is lower than the baseline's by more is a failure.",
    source="our choice, between 7 % (Azure ai-infrastructure-on-azure, a failure) and 10 % (CSCS)",
    most=1,
)
OF_FIGURES = (GROSS, DROP_WARNS, DROP_FAILS)
"""The thresholds of every check of figures."""
STATUS = {"good": Status.PASS, "low": Status.WARN, "bad": Status.FAIL, "unknown": Status.SKIP}
NO_MARK = "nothing to compare with: the catalog has no mark for it on this machine, and the site file has none"
SITE = "site file (figures)"


def rules_of(expect: Expectation, figure: Figure, component: str) -> MarkRules:
    """Return the rules that apply to a figure of a component in addition to the catalog."""
    baseline = expect.baseline
    key = (figure.metric, component, _whole(figure.message_bytes))
    return MarkRules(
        site=expect.figures or {},
        site_origin=SITE,
        baseline=None if baseline is None else baseline.figures.get(key),
        baseline_origin="" if baseline is None else f"baseline {baseline.origin}",
        drop_warns=DROP_WARNS.value,
        drop_fails=DROP_FAILS.value,
        gross=GROSS.value,
        gross_origin=f"{GROSS.name}: {GROSS.value:g} {GROSS.unit}",
    )


def judged(figure: Figure, shape: Shape, expect: Expectation, component: str, label: str = "") -> CheckResult:
    """Return the result for a figure. ``label`` precedes it in the message; default: the metric's name."""
    assessment = assess(figure, shape, load(), rules_of(expect, figure, component))
    return verdict_of(assessment, label).at(component)


def verdict_of(assessment: Assessment, label: str = "") -> CheckResult:
    """Return an assessment as a result."""
    name = label or words(assessment.figure.metric)
    message = f"{name}: {assessment}"
    return CheckResult(
        STATUS[assessment.grade],
        message if assessment.mark is not None else f"{message}; {NO_MARK}",
        expected=None if assessment.mark is None else round(assessment.mark.value, 3),
        measured=round(assessment.figure.value, 3),
        unit=unit_of(assessment.figure.metric),
        source=assessment.origin,
        figure=FigureReport(
            metric=assessment.figure.metric,
            limit=None if assessment.limit is None else round(assessment.limit.value, 3),
            limit_of=None if assessment.limit is None else assessment.limit.what,
            ratio=None if assessment.ratio is None else round(assessment.ratio, 4),
            baseline=None if assessment.baseline is None else round(assessment.baseline, 3),
            message_bytes=_whole(assessment.figure.message_bytes),
        ),
    )


def _whole(size: float | None) -> int | None:
    return None if size is None else int(size)


def words(metric: str) -> str:
    """Return a metric's name for messages: ``host to device``, ``all_reduce bus bandwidth``, ``bf16 products``."""
    if metric.endswith("_busbw"):
        return f"{metric.removesuffix('_busbw')} bus bandwidth"
    if metric.startswith("gemm_"):
        return f"{metric.removeprefix('gemm_')} products"
    return metric.replace("_", " ")


def worst_of(verdicts: Iterable[CheckResult], **changes: Any) -> list[CheckResult]:
    """Return the results that neither pass nor lack a mark; if there are none, the result of the lowest figure.

    For figures of many pairs: one line for sixty healthy ones.
    """
    all_verdicts = list(verdicts)
    bad = [verdict for verdict in all_verdicts if verdict.status not in (Status.PASS, Status.SKIP)]
    if bad or not all_verdicts:
        return bad
    least = min(all_verdicts, key=lambda verdict: (verdict.status is Status.SKIP, _number(verdict.measured)))
    return [replace(least, **changes)]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


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
