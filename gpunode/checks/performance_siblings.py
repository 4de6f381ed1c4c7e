"""Comparison of each GPU with the others of its node: slower than its siblings is a finding."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

from gpunode.checks.compare import passed, undetermined
from gpunode.checks.measurements import MeasuredNode, require_measured, shape_of, why_no_figures, words
from gpunode.checks.registry import CheckResult, Expectation, FigureReport, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.checks.workload import component, of
from gpunode.expectations import unit_of
from gpunode.facts.models.measured import GEMM_TYPES, DeviceCopyValues, GemmValues, HostCopyValues, StreamValues
from gpunode.facts.models.workload import Values, values_of
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

WARNS = Threshold(
    "performance.siblings.warns",
    0.10,
    "below the median of the others",
    "A GPU that is slower than the others of its node by more warns.",
    source="huggingface/gpu-fryer: a GPU 10 % below the best of its node is unhealthy",
    most=1,
)
FAILS = Threshold(
    "performance.siblings.fails",
    0.20,
    "below the median of the others",
    "A GPU that is slower than the others by more is a failure.",
    source="our choice: twice gpu-fryer's limit, since a model's GPUs differ by some percent",
    most=1,
)
KINDS: Mapping[str, type[Values]] = {
    "copy.host": HostCopyValues,
    "copy.device": DeviceCopyValues,
    "memory.stream": StreamValues,
}
RECORDS = (*KINDS, *(f"gemm.{dtype}" for dtype in GEMM_TYPES))
Figures = Mapping[str, Mapping[str, float]]
"""Figures by metric and GPU."""


@registry.check(
    "performance.siblings",
    level="standard",
    needs=("records",),
    needs_gpu=True,
    means="No GPU of the node is much slower than the others of its model in copies, memory and products. No table of "
    "expected figures is needed for that.",
    remedy="Compare that GPU with the others: link.pcie-width, link.numa, performance.clocks, gpu.power-limit, "
    "gpu.throttling, gpu.clocks; then swap it with another slot. What stays with the card is the card.",
    state="observe",
    actions=("fix_configuration", "reset_gpu", "open_support_case", "replace_hardware"),
    thresholds=(WARNS, FAILS),
    scope="gpu",
)
def siblings(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    require_measured(node, RECORDS)
    figures, reasons, broken = figures_of(MeasuredNode(node, expect, shape_of(node)))
    for reason in broken:
        yield undetermined(reason)
    several = {metric: alike for metric, values in figures.items() if (alike := _of_one_model(node, values))}
    slow = [verdict for metric, alike in several.items() for values in alike for verdict in _slow(metric, values)]
    yield from slow
    if broken:
        return
    if not figures:
        raise Skip(reasons[0]) if reasons else Undetermined("no figure of a GPU was recorded")
    if not several:
        raise Skip("no two GPUs of one model were measured: nothing to compare")
    if not slow:
        number = max(sum(map(len, alike)) for alike in several.values())
        yield passed(f"{number} GPUs are alike in {listed([words(metric) for metric in several])}")


def _of_one_model(node: NodeFacts, values: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the figures of each model with at least two measured GPUs on the node."""
    models = {f"gpu{gpu.index}": gpu.name for gpu in node.smi_gpus}
    alike: defaultdict[str | None, dict[str, float]] = defaultdict(dict)
    for gpu, value in values.items():
        alike[models.get(gpu)][gpu] = value
    return [group for group in alike.values() if len(group) > 1]


def figures_of(run: MeasuredNode) -> tuple[Figures, list[str], list[str]]:
    """Return the figures of the node's GPUs, the reasons for missing ones, and the defects of unreadable ones."""
    figures: defaultdict[str, dict[str, float]] = defaultdict(dict)
    reasons: list[str] = []
    broken: list[str] = []
    for record in (record for name in RECORDS for record in of(run.node, name)):
        reason = why_no_figures(run.node, record, on_gpu=True) or record.skipped or record.error or record.undetermined
        if reason is not None:
            reasons.append(reason)
        else:
            values = values_of(record, KINDS.get(record.record, GemmValues))
            if isinstance(values, str):
                broken.append(values)
            else:
                gpu = component(run.node, record)
                for metric, value in _figures(record.record, values):
                    figures[metric][gpu] = max(value, figures[metric].get(gpu, 0.0))
    return figures, reasons, broken


def _figures(name: str, values: Values) -> Iterator[tuple[str, float]]:
    match values:
        case HostCopyValues():
            for copy in values.copies:
                if copy.pinned and copy.near is not False:
                    yield copy.direction, copy.bandwidth_gb_per_s
        case DeviceCopyValues():
            yield "on_device", values.bandwidth_gb_per_s
        case StreamValues():
            for kernel in values.kernels:
                yield f"memory_{kernel.kernel}", kernel.bandwidth_gb_per_s
        case GemmValues():
            yield name.replace(".", "_"), values.tflops


def _slow(metric: str, values: Mapping[str, float]) -> Iterator[CheckResult]:
    for gpu, value in values.items():
        usual = median(other for name, other in values.items() if name != gpu)
        missing = 1 - value / usual
        if missing <= WARNS.value:
            continue
        threshold, status = (FAILS, Status.FAIL) if missing > FAILS.value else (WARNS, Status.WARN)
        unit = unit_of(metric)
        text = f"{words(metric)}: {value:.4g} {unit}, {missing:.0%} below the median of the other GPUs ({usual:.4g})"
        yield CheckResult(
            status,
            text,
            gpu,
            expected=round(usual * (1 - threshold.value), 3),
            measured=round(value, 3),
            unit=unit,
            source="the other GPUs of the node",
            figure=FigureReport(metric=metric),
        )
