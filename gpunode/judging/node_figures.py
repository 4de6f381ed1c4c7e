"""The figures of a node that guides for training quote: this node, the guide's figure, and the limit."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from typing import Any

from gpunode.checks.measurements import shape_of, why_no_figures
from gpunode.checks.performance_steps import LAUNCH
from gpunode.checks.workload import of
from gpunode.expectations.limits import Where, limit_of
from gpunode.facts import NodeFacts
from gpunode.facts.models.measured import GemmValues, HostCopyValues, StepsValues, TrainingValues
from gpunode.facts.models.workload import AnyValues, values_of

RESNET = "NVIDIA DeepLearningExamples, ResNet-50 v1.5, DGX A100 80GB"
"""PyTorch/Classification/ConvNets/resnet50v1.5/README.md, read 2026-11-23."""
NONE = "-"


@dataclass(frozen=True)
class NodeFigure:
    """One row of the table."""

    figure: str
    node: str | None
    """None: not measured on GPUs of this node."""
    value: float | None
    guide: str
    limit: str
    missing: str | None = None
    """The command that measures it."""


def figures(node: NodeFacts) -> list[NodeFigure]:
    """Return the table; rows without a record of a GPU name the command that writes it."""
    return [_launch(node), _mixed(node), _pinned(node), *_training(node)]


def as_json(rows: list[NodeFigure]) -> list[dict[str, Any]]:
    """Return the rows for a JSON document."""
    return [asdict(row) | {"value": row.value if row.value is None or isfinite(row.value) else None} for row in rows]


def _values(node: NodeFacts, name: str, kind: type[AnyValues]) -> Iterator[AnyValues]:
    """Yield the values of records that are figures of GPUs: not simulated, not of a processor, without an error."""
    for record in of(node, name):
        if record.error or record.skipped or record.undetermined or record.device != "cuda":
            continue
        values = values_of(record, kind)
        if why_no_figures(node, record, on_gpu=True) is None and not isinstance(values, str):
            yield values


def _missing(figure: str, guide: str, limit: str = NONE) -> NodeFigure:
    return NodeFigure(figure, None, None, guide, limit, "gpunode validate HOST --level deep --save DIR")


def _launch(node: NodeFacts) -> NodeFigure:
    gpus = list(_values(node, "steps.device", StepsValues))
    name, guide = "launch of an operation", "shorter than the kernels"
    if not gpus:
        return _missing(name, guide)
    slowest = max(gpus, key=lambda gpu: gpu.launch_us)
    text = f"{slowest.launch_us:.3g} us, {slowest.round_trip_us:.3g} us until its result (slowest of {len(gpus)} GPUs)"
    return NodeFigure(name, text, slowest.launch_us, guide, f"{LAUNCH.value} us ({LAUNCH.name})")


def _mixed(node: NodeFacts) -> NodeFigure:
    name, guide = "gain of mixed precision", f"2.63 (TF32 to mixed; {RESNET})"
    gains = [gpu.fp32_step_seconds / gpu.mixed_step_seconds for gpu in _values(node, "steps.device", StepsValues)]
    if not gains:
        return _missing(name, guide)
    gain = median(gains)
    rates = {
        dtype: [gpu.tflops for gpu in _values(node, f"gemm.{dtype}", GemmValues)] for dtype in ("bf16", "fp16", "fp32")
    }
    half = rates["bf16"] or rates["fp16"]
    limit = NONE
    if half and rates["fp32"]:
        limit = f"{median(half) / median(rates['fp32']):.3g} (16-bit products against FP32, gemm of this node)"
    return NodeFigure(name, f"{gain:.3g} times as many FP32 steps", gain, guide, limit)


def _pinned(node: NodeFacts) -> NodeFigure:
    name, guide = "gain of pinned memory", "1.4 (pin_memory, a guide to PyTorch: unsure)"
    gains, pinned_rates = [], []
    for gpu in _values(node, "copy.host", HostCopyValues):
        rows = [copy for copy in gpu.copies if copy.direction == "host_to_device"]
        pinned = max((copy.bandwidth_gb_per_s for copy in rows if copy.pinned), default=0.0)
        pageable = max((copy.bandwidth_gb_per_s for copy in rows if not copy.pinned), default=0.0)
        if pinned and pageable:
            gains.append(pinned / pageable)
            pinned_rates.append(pinned)
    if not gains:
        return _missing(name, guide)
    bound = limit_of("host_to_device", shape_of(node), Where())
    limit = NONE if bound is None else f"{bound.value:.3g} GB/s ({bound.what})"
    gain = median(gains)
    return NodeFigure(name, f"{gain:.3g} times pageable, {median(pinned_rates):.3g} GB/s", gain, guide, limit)


def _training(node: NodeFacts) -> Iterator[NodeFigure]:
    scaling = f"0.84 of 8 GPUs (6.72 times one, mixed precision; {RESNET})"
    formula = "parameters x 4 bytes / bandwidth"
    runs = [
        run
        for run in _values(node, "ddp.replicated", TrainingValues)
        if run.step_seconds and run.compute_seconds and run.parameters and run.ranks > 1
    ]
    if not runs:
        yield _missing("scaling from 1 to n GPUs", scaling, "1")
        yield _missing("all-reduce of the gradients", formula)
        return
    run = runs[0]
    step, compute, parameters = run.step_seconds or 1.0, run.compute_seconds or 1.0, run.parameters or 0
    share = compute / step
    bound = "1"
    if run.communication_seconds:
        bound = f"{compute / (compute + run.communication_seconds):.3g} without overlap, 1 with all of it hidden"
    text = f"{share:.3g} of {run.ranks} GPUs ({compute * 1e3:.3g} ms of a step of {step * 1e3:.3g} ms)"
    yield NodeFigure("scaling from 1 to n GPUs", text, share, scaling, bound)
    if run.communication_seconds is None or not run.busbw_gb_per_s:
        yield _missing("all-reduce of the gradients", formula)
        return
    simple = 4 * parameters / run.busbw_gb_per_s / 1e9
    least = 2 * (run.ranks - 1) / run.ranks * simple
    yield NodeFigure(
        "all-reduce of the gradients",
        f"{run.communication_seconds * 1e3:.3g} ms for {parameters / 1e6:.3g} million parameters",
        run.communication_seconds,
        f"{simple * 1e3:.3g} ms ({formula}, at {run.busbw_gb_per_s:.3g} GB/s)",
        f"{least * 1e3:.3g} ms (2(n-1)/n of it, at the bus bandwidth of nccl.all-reduce)",
    )
