"""The check on the input pipeline: samples that the GPUs need, samples that the files deliver, and what limits them."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.checks.compare import passed
from gpunode.checks.measurements import measurement_check
from gpunode.checks.registry import CheckResult, Status, Undetermined
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.measured import InputSteps, InputValues
from gpunode.text import counted

RATE = Threshold(
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
    thresholds=(RATE, CACHED),
    category="host",
)
def pipeline(values: InputValues) -> Iterator[CheckResult]:
    cold, hot = delivered(values, "cold"), delivered(values, "hot")
    if hot is None:
        raise Undetermined(f"{values.directory}: {values.no_loader or 'no loader was measured'}")
    gpus = max(1, values.gpus)
    rate = values.model_rate or (float(RATE.value) if values.kind == "images" else None)
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
        yield passed(f"{name}: {summary}; set --model-rate to compare", measured=_rounded(hot), unit=UNIT)
        return
    needed = rate * gpus
    origin = "--model-rate" if values.model_rate else RATE.name
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
        status, text, expected=round(needed, 1), measured=_rounded(slowest), unit=UNIT, source=origin, remedy=remedy
    )


UNIT = "samples/s"


def _figure(state: Delivered | None) -> str:
    return "unknown" if state is None else f"{state.samples_per_second:.0f} samples/s"


def _rounded(state: Delivered) -> float:
    return round(state.samples_per_second, 1)
