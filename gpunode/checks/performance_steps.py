"""The check on single steps: the launch of an operation, and the gain of mixed precision."""

from collections.abc import Iterator

from gpunode.checks.compare import passed, warned
from gpunode.checks.measurements import MeasuredNode, measurement_check
from gpunode.checks.registry import CheckResult
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.measured import StepsValues
from gpunode.facts.models.workload import Record
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

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
def steps(values: StepsValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    gain = values.fp32_step_seconds / values.mixed_step_seconds
    text = (
        f"launch of an operation {values.launch_us:.3g} us, {values.round_trip_us:.3g} us until its result; a training "
        f"step in {values.dtype} is {gain:.3g} times as fast as in FP32"
    )
    if values.launch_us > LAUNCH.value:
        causes = listed(causes_of_slow_launches(run.node, record)) or "none of the usual causes was found on the node"
        yield warned(
            f"{text}; launches are slow: {causes}",
            expected=LAUNCH.value,
            measured=values.launch_us,
            unit="us",
        )
    elif gain <= GAIN.value:
        yield warned(f"{text}: no gain", expected=GAIN.value, measured=round(gain, 3), unit="times")
    else:
        yield passed(text, measured=values.launch_us, unit="us")


def causes_of_slow_launches(node: NodeFacts, record: Record) -> list[str]:
    """Return what makes this host slow to launch: governor, idle states, load, IOMMU, being a guest, the container."""
    causes = []
    frequency = node.cpu_frequency
    governors = [name for name in (frequency.governors if frequency else {}) if name != "performance"]
    if governors:
        causes.append(f"the governor is {listed(governors)} (host.cpu-governor)")
    longest = max(frequency.idle_latencies if frequency else (), default=0)
    if longest > LAUNCH.value:
        causes.append(f"idle processors take up to {longest} us to wake up (kernel_tuning_idle_latency_us)")
    types = node.iommu.group_types if node.iommu else {}
    kinds = {types[device.iommu_group] for device in node.gpus_on_bus or () if device.iommu_group in types}
    if kinds - {"identity"}:
        causes.append(f"an IOMMU translates addresses: {listed(sorted(kinds))} (host.iommu)")
    if node.load_1min is not None and node.cpu is not None and node.cpu.cpus and node.load_1min > node.cpu.cpus:
        causes.append(f"the load was {node.load_1min:.0f} on {node.cpu.cpus} processors")
    if node.virtualization not in (None, "none"):
        causes.append(f"a guest of {node.virtualization}")
    if record.container is not None and causes:
        causes.append("measured in a container: compare with --no-container")
    return causes
