"""The check on single steps: the launch of an operation, and the gain of mixed precision."""

from collections.abc import Iterator

from gpunode.checks.measurements import measurement_check
from gpunode.checks.registry import CheckResult, Status
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.measured import StepsValues

LAUNCH = Threshold(
    "performance.steps.launch",
    30,
    "us",
    "The launch of an operation by PyTorch that takes longer on the host warns.",
    source="our choice: several times the 5 to 10 us that are usual (from memory, unsure)",
)
GAIN = Threshold(
    "performance.steps.gain",
    1,
    "times",
    "A training step in mixed precision that is not faster than FP32 by more than this factor warns.",
    source="our choice: mixed precision that does not pay",
)


@measurement_check(
    "performance.steps",
    ("steps.device",),
    StepsValues,
    level="deep",
    means="The host launches operations on the GPU without delay, and a training step in mixed precision is faster "
    "than in FP32.",
    remedy="Slow launches: host.cpu-governor, idle states of the processor (cpupower idle-info), an IOMMU that "
    "translates (host.iommu), other load on the cores. No gain: performance.gemm, performance.clocks.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(LAUNCH, GAIN),
    scope="gpu",
)
def steps(values: StepsValues) -> Iterator[CheckResult]:
    gain = values.fp32_step_seconds / values.mixed_step_seconds
    text = (
        f"launch of an operation {values.launch_us:.3g} us, {values.round_trip_us:.3g} us until its result; a training "
        f"step in {values.dtype} is {gain:.3g} times as fast as in FP32"
    )
    if values.launch_us > LAUNCH.value:
        yield CheckResult(
            Status.WARN, f"{text}; launches are slow", expected=LAUNCH.value, measured=values.launch_us, unit="us"
        )
    elif gain <= GAIN.value:
        yield CheckResult(Status.WARN, f"{text}: no gain", expected=GAIN.value, measured=round(gain, 3), unit="times")
    else:
        yield CheckResult(Status.PASS, text, measured=values.launch_us, unit="us")
