"""Checks on training steps: the launch of an operation, the gain of mixed precision, and the input pipeline."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.checks.compare import passed, warned
from gpunode.checks.measurements import MeasuredNode, measurement_check
from gpunode.checks.registry import CheckResult, Status, Undetermined
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.measured import InputSteps, InputValues, StepsValues
from gpunode.facts.models.workload import Record
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

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


INPUT_RATE = Threshold(
    "performance.input.images",
    2470,
    "images/s of one GPU",
    "Images that one GPU is assumed to use where --model-rate is not set; with fewer, a directory of images warns.",
    source="NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md (2026-11-23): training "
    "in mixed precision on one A100 80GB",
    least=1,
)
CACHED = Threshold(
    "performance.input.cached",
    0.5,
    "of the files' pages",
    "A network file system that keeps less than this share in memory is read from the network each time.",
    source="our choice",
    most=1,
)
CAUSE = {
    "disk": "disk: copy the data to faster storage, or let the first epoch warm the page cache",
    "network": "network: copy the data to a local disk before the training, or more workers to hide the latency",
    "decoding": "decoding: store smaller or decoded images, decode on the GPU (nvJPEG, DALI), or more cores",
    "Python": "Python: fewer and larger files (shards), less work for each sample in Python",
}


@dataclass(frozen=True)
class Delivered:
    """What the files deliver in one state, and what limits it."""

    state: str
    samples_per_second: float
    workers: int
    loaders: int
    limit: str | None
    why: str


def delivered(values: InputValues, state: str) -> Delivered | None:
    """Return the best throughput in a state with its limit; None if it was not measured."""
    rows = [row for row in values.loaders if row.state == state and row.pinned is None]
    if not rows:
        return None
    best = max(rows, key=lambda row: row.samples_per_second)
    limit, why = limit_of(values, state)
    return Delivered(state, best.samples_per_second, best.workers, best.loaders, limit, why)


def limit_of(values: InputValues, state: str) -> tuple[str | None, str]:
    """Return ``disk``, ``network``, ``decoding`` or ``Python``, and the figures that show it; None: not measured.

    A sample's time without workers is split into waiting for storage, decoding and Python. Storage is the limit if
    it is most of that time, or if its measured throughput is below what all cores can decode.
    """
    steps: dict[str, InputSteps] = {step.state: step for step in values.steps}
    hot, now = steps.get("hot"), steps.get(state)
    if hot is None or now is None:
        return None, "the parts of a sample were not measured"
    waiting, decoding, python = _parts(values, hot, now)
    processing = decoding + python
    by_cores = values.cpus / processing if processing else float("inf")
    rates = [row.gb_per_s * 1e9 / values.sample_bytes for row in values.reads if row.state == state]
    stored = max(rates, default=float("inf"))
    shown = f"{_ms(waiting)} storage, {_ms(decoding)} decoding, {_ms(python)} Python for each sample"
    if waiting > processing or (waiting and stored < by_cores):
        return "network" if values.remote else "disk", shown
    return "decoding" if decoding > python else "Python", shown


def _parts(values: InputValues, hot: InputSteps, now: InputSteps) -> tuple[float, float, float]:
    """Return the seconds of a sample: storage, decoding, Python."""
    uncached = values.remote and (values.hot_resident or 0) < CACHED.value
    reading = 0.0 if uncached else min(hot.read_s, now.read_s)
    if values.remote and values.kind in ("files", "images"):
        # To open a file asks the server, also if the content is in memory.
        reading = max(0.0, reading - _seconds_of_a_file(values))
    waiting = now.read_s - reading
    # To read a table from memory is to unpack it.
    unpacking = reading if values.kind == "parquet" else 0.0
    return waiting, now.decode_s + unpacking, now.other_s + reading - unpacking


def _seconds_of_a_file(values: InputValues) -> float:
    """Return the time of a file with its content in memory, read by one thread without Python's part; 0: unknown."""
    rates = [row.files_per_s for row in values.reads if (row.state, row.threads) == ("hot", 1) and row.files_per_s]
    return 1 / max(rates) if rates else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


@measurement_check(
    "performance.input",
    ("input.pipeline",),
    InputValues,
    level="deep",
    on_gpu=False,
    means="The files of --data are read and decoded as fast as the GPUs use them, from storage and from memory; the "
    "message names what limits it: disk, network, decoding, Python.",
    remedy="Use the reported number of workers; see the limit: disk, network: host.nvme, host.remote-data, a copy on a "
    "local disk; decoding: nvJPEG, DALI or smaller images; Python: shards instead of small files.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(INPUT_RATE, CACHED),
    category="host",
)
def pipeline(values: InputValues) -> Iterator[CheckResult]:
    cold, hot = delivered(values, "cold"), delivered(values, "hot")
    if hot is None:
        raise Undetermined(f"{values.directory}: {values.no_loader or 'no loader was measured'}")
    gpus = max(1, values.gpus)
    rate = values.model_rate or (float(INPUT_RATE.value) if values.kind == "images" else None)
    summary = f"delivered {_figure(cold)} cold, {_figure(hot)} hot with num_workers={values.advised_workers}"
    slowest = cold or hot
    for state in (cold, hot):
        if state is not None and state.limit is not None:
            summary += f"; limit {state.state}: {state.limit} ({state.why})"
    if values.proof is None:
        summary += "; cold was not measured: the files did not leave the memory"
    if not values.walk_complete:
        summary += f"; only {counted(values.files, 'file')} were counted"
    name = f"{values.directory} ({values.kind}, {values.filesystem or 'unknown file system'})"
    if rate is None:
        yield passed(f"{name}: {summary}; set --model-rate to compare", measured=_rounded(hot), unit=SAMPLES)
        return
    needed = rate * gpus
    origin = "--model-rate" if values.model_rate else INPUT_RATE.name
    text = (
        f"{name}: {counted(gpus, 'GPU')} of {rate:.0f} samples/s ({origin}) need {needed:.0f} samples/s "
        f"({needed * values.sample_bytes / 1e9:.3g} GB/s); {summary}"
    )
    status, remedy = Status.PASS, None
    if values.kind == "images" and not any(decoder.device == "cpu" for decoder in values.decoders):
        text += "; the images were not decoded, because the container has no Pillow"
        if hot.samples_per_second >= needed:
            raise Undetermined(text)
    short = next((state for state in (hot, cold) if state is not None and state.samples_per_second < needed), None)
    if short is not None:
        status, remedy = Status.WARN, CAUSE.get(short.limit or "")
    yield CheckResult(
        status, text, expected=round(needed, 1), measured=_rounded(slowest), unit=SAMPLES, source=origin, remedy=remedy
    )


SAMPLES = "samples/s"


def _figure(state: Delivered | None) -> str:
    return "unknown" if state is None else f"{state.samples_per_second:.0f} samples/s"


def _rounded(state: Delivered) -> float:
    return round(state.samples_per_second, 1)
