"""Results of measurements: the values of the records ``copy.*``, ``memory.*``, ``gemm.*``, ``nccl.*`` and others.

GB is 10^9 bytes, a TFLOP 10^12 operations. A figure is the median of its repetitions; ``spread`` is the difference
between the largest and the smallest repetition, divided by the median. On ``device: cpu`` and ``backend: gloo`` a
figure shows that the program works; it is not a measurement of a GPU or of NCCL. docs/measurements.md describes
each record.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from gpunode.facts.models.workload import DeviceIdentity, Text, Values

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[int, Field(ge=0)]
Rank = Number
Backend = Literal["nccl", "gloo"]
GEMM_TYPES = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "int8")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv")


class LoadState(Values):
    """The state of a GPU under load, sampled by NVML; all fields are None on a processor."""

    samples: Number = 0
    sm_clock_mhz: float | None = None
    """Median."""
    sm_clock_min_mhz: float | None = None
    memory_clock_mhz: float | None = None
    """Median."""
    power_w: float | None = None
    """Median."""
    temperature_c: float | None = None
    """Highest."""
    throttle_reasons: dict[Text, Share] | None = None
    """Share of the samples in which each reason was active, by the names in nvidia-smi's XML, without ``gpu_idle``.
    None: NVML returned none."""


class Repeated(Values):
    """A figure that was measured several times."""

    repetitions: Annotated[int, Field(ge=1)]
    """Without the warm-up."""
    spread: Annotated[float, Field(ge=0)]


class Corruption(Values):
    """A block of a result in which elements differ from the reference."""

    round: Number
    row: Number
    """Of the block's first element in the result."""
    column: Number
    rows: Annotated[int, Field(ge=1)]
    columns: Annotated[int, Field(ge=1)]
    wrong: Annotated[int, Field(ge=1)]
    """Elements of the block."""
    first_row: Number
    """Of the first wrong element in the result."""
    first_column: Number
    found: float | None = None
    """Of that element. None: not a finite number."""
    expected: float | None = None


class HostCopy(Repeated):
    """Copies between host and device in one direction."""

    direction: Literal["host_to_device", "device_to_host"]
    pinned: bool
    numa_node: int | None = None
    """Of the host's memory. None: not bound."""
    near: bool | None = None
    """True if that is the GPU's own NUMA node. None: unknown."""
    size_bytes: Positive
    bandwidth_gb_per_s: Positive
    wrong: Number
    """Elements that arrived with different content."""


class HostCopyValues(DeviceIdentity):
    """``copy.host``, one per device."""

    timer: Literal["events", "clock"]
    """By device events, or by the processor's clock."""
    copies: tuple[HostCopy, ...]


class DeviceCopyValues(DeviceIdentity, Repeated):
    """``copy.device``, one per device: copies within its memory."""

    timer: Literal["events", "clock"]
    size_bytes: Positive
    bandwidth_gb_per_s: Positive
    """Each byte counts twice: one read and one write."""
    wrong: Number


class PeerCopy(Repeated):
    """Copies from one GPU to another."""

    source: Number
    """Index in ``uuids``."""
    target: Number
    direct: bool
    """True if the copy does not pass through the host (peer access)."""
    bandwidth_gb_per_s: Positive
    both_gb_per_s: Positive | None = None
    """Sum of both directions at the same time; in the row with ``source`` < ``target``."""
    wrong: Number


class PeerCopyValues(Values):
    """``copy.peer``: copies between each pair of whole GPUs."""

    uuids: tuple[Text, ...]
    size_bytes: Positive
    pairs: tuple[PeerCopy, ...]


class StreamKernel(Repeated):
    """One pattern of access to a device's memory."""

    kernel: Literal["read", "write", "triad"]
    bandwidth_gb_per_s: Positive
    """Of all bytes read and written."""
    wrong: Number


class StreamValues(DeviceIdentity):
    """``memory.stream``, one per device: bandwidth of its memory."""

    timer: Literal["events", "clock"]
    size_bytes: Positive
    """Of one array."""
    kernels: tuple[StreamKernel, ...]
    load: LoadState = LoadState()


class GemmValues(DeviceIdentity, Repeated):
    """``gemm.TYPE``, one per device: a product of random square matrices, every result compared with the reference."""

    timer: Literal["events", "clock"]
    dtype: Text
    """PyTorch's name of the inputs: ``bfloat16``, ``float8_e4m3fn``; ``tf32`` is ``float32``."""
    size: Annotated[int, Field(ge=1)]
    """Rows and columns of each matrix."""
    tflops: Positive
    compared: Annotated[int, Field(ge=1)]
    """Results that were compared element by element."""
    wrong: Number
    """Elements of all compared results."""
    corrupted: tuple[Corruption, ...] = ()
    """The first blocks with wrong elements."""
    load: LoadState = LoadState()


class BurnPoint(Values):
    """An interval of a sustained load: its end, and the medians within it."""

    second: Annotated[float, Field(ge=0)]
    tflops: Positive
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class BurnValues(DeviceIdentity):
    """``burn.gemm``, one per device: products without a pause for a given time."""

    dtype: Text
    size: Annotated[int, Field(ge=1)]
    requested_seconds: Positive
    burn_seconds: Positive
    points: tuple[BurnPoint, ...]
    tflops: Positive
    """Median of the second half."""
    tflops_slope_percent_per_minute: float | None = None
    """Of a straight line through the points; None: too few."""
    sm_clock_slope_mhz_per_minute: float | None = None
    compared: Annotated[int, Field(ge=1)]
    wrong: Number
    corrupted: tuple[Corruption, ...] = ()
    load: LoadState = LoadState()


class CollectiveRow(Repeated):
    """One message size of a collective."""

    size_bytes: Positive
    """As nccl-tests counts it: the larger buffer of one rank."""
    time_us: Positive
    """Of the slowest rank."""
    algbw_gb_per_s: Annotated[float, Field(ge=0)]
    busbw_gb_per_s: Annotated[float, Field(ge=0)]
    wrong: Number | None = None
    """Elements of all ranks. None: not compared."""


class NcclValues(Values):
    """``nccl.COLLECTIVE``: one collective over all ranks, by torch.distributed or nccl-tests.

    A record with ``error`` needs only ``ranks``, ``backend`` and ``missing``.
    """

    backend: Backend
    program: Literal["torch.distributed", "nccl-tests"] = "torch.distributed"
    ranks: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)] = 1
    missing: tuple[Rank, ...] = ()
    """Ranks that ended or did not respond within the limit."""
    dtype: Text | None = None
    rows: tuple[CollectiveRow, ...] = ()
    max_busbw_gb_per_s: Annotated[float, Field(ge=0)] | None = None
    transports: dict[str, int] = Field(default_factory=dict)
    """Connections by the transport in NCCL's log: ``{"P2P/CUMEM": 224, "NET/IB": 16}``."""
    kinds: tuple[Literal["NVLS", "P2P", "SHM", "IB", "socket", "other"], ...] = ()
    """Of these transports; ``IB`` is any RDMA network. Empty: NCCL's log names none."""
    nccl_version: Text | None = None
    warning: Text | None = None
    """The first warning that NCCL wrote."""


class BadLink(Values):
    """A pair of ranks with a slow or failed exchange, measured alone."""

    ranks: tuple[Rank, Rank]
    verdict: Literal["slow", "failed", "corrupt"]
    bandwidth_gb_per_s: Positive | None = None
    """None: it did not end."""


class PairsValues(Values):
    """``nccl.pairs``: exchanges between pairs of ranks in rounds, until each link is known as good or bad."""

    backend: Backend
    ranks: Annotated[int, Field(ge=2)]
    nodes: Annotated[int, Field(ge=1)] = 1
    uuids: tuple[Text, ...] = ()
    """Of the ranks' GPUs."""
    rounds: Annotated[int, Field(ge=1)]
    size_bytes: Positive
    """Of one exchange between two ranks, in each direction."""
    links: Annotated[int, Field(ge=1)]
    """Pairs of ranks."""
    cleared: Number
    """Links that were good in a round. Links neither in ``cleared`` nor in ``bad`` are unknown (the time ran out)."""
    median_gb_per_s: Positive | None = None
    """One direction, of the pairs of the first round."""
    slow_factor: Positive
    """A link is slow when it takes this many times as long as the median."""
    bad: tuple[BadLink, ...] = ()
    bad_ranks: tuple[Rank, ...] = ()
    """Ranks of which every measured link is bad: the rank is at fault, not its links."""


class TrainingValues(Values):
    """``ddp.replicated`` (DistributedDataParallel), ``ddp.sharded`` (fully sharded): training steps over all ranks."""

    backend: Backend
    ranks: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)] = 1
    missing: tuple[Rank, ...] = ()
    steps: Number | None = None
    parameters: Number | None = None
    gradient_bytes: Number | None = None
    """Of one rank's whole gradients."""
    wrong: Number | None = None
    """Gradients of all ranks that differ from those of one process with all data."""
    max_gradient_error: float | None = None
    """Relative to the largest gradient."""
    step_seconds: Positive | None = None
    """Median, of the slowest rank."""
    compute_seconds: Positive | None = None
    """A step without communication."""
    communication_seconds: Positive | None = None
    """The same messages without computation: all-reduce (replicated), all-gather twice and reduce-scatter (sharded)."""
    expected_seconds: Positive | None = None
    """Of these messages at ``busbw_gb_per_s``: 2(n-1)/n x bytes (replicated), 3(n-1)/n x bytes (sharded)."""
    busbw_gb_per_s: Positive | None = None
    """The bandwidth that ``nccl.all-reduce`` measured in this run at the nearest size. None: it has no figure."""
    ratio: Positive | None = None
    """``expected_seconds`` / ``communication_seconds``."""
    overlap: Share | None = None
    """Share of the communication that computation hides."""
    losses: tuple[float | None, ...] = ()


class FioJob(Values):
    """One pattern of access to a directory's storage."""

    pattern: Literal["read", "write", "randread", "randwrite"]
    block_bytes: Positive
    jobs: Annotated[int, Field(ge=1)]
    depth: Annotated[int, Field(ge=1)]
    bandwidth_gb_per_s: Annotated[float, Field(ge=0)]
    iops: Annotated[float, Field(ge=0)]
    latency_us: Annotated[float, Field(ge=0)] | None = None
    """Median."""
    latency_p99_us: Annotated[float, Field(ge=0)] | None = None


class FioValues(Values):
    """``storage.fio``: direct I/O on the requested directory."""

    directory: Text
    filesystem: Text | None = None
    free_bytes: Number | None = None
    fio_version: Text | None = None
    direct: bool
    """True if the page cache is bypassed."""
    size_bytes: Positive
    """Of the file of one job."""
    jobs: tuple[FioJob, ...]


class LoaderRow(Repeated):
    """Throughput of a DataLoader with this number of workers."""

    workers: Number
    samples_per_second: Positive
    gb_per_s: Positive


class LoaderValues(Values):
    """``storage.dataloader``: samples read from files of the directory, or of the scratch folder, by workers."""

    directory: Text | None = None
    """None: the payload's own scratch folder, which may be memory."""
    cpus: Annotated[int, Field(ge=1)]
    sample_bytes: Positive
    rows: tuple[LoaderRow, ...]
    advised_workers: Number
    """The fewest workers that reach 95 % of the best throughput."""


class StepsValues(DeviceIdentity, Repeated):
    """``steps.device``, one per device: launches of a small operation by PyTorch, and steps of a small training."""

    launch_us: Positive
    """The host's time for one launch; the GPU runs behind."""
    round_trip_us: Positive
    """Until the result of one is there."""
    dtype: Text
    """Of the mixed precision."""
    fp32_step_seconds: Positive
    """Without TF32."""
    mixed_step_seconds: Positive


class InputRead(Values):
    """Reads of whole files by threads, without decoding."""

    state: Literal["cold", "hot"]
    threads: Annotated[int, Field(ge=1)]
    gb_per_s: Positive
    files_per_s: Annotated[float, Field(ge=0)]


class InputDecoder(Values):
    """Images decoded to 224 x 224 pixels: on one core of the processor, or on one GPU (its own size)."""

    decoder: Text
    device: Literal["cpu", "cuda"]
    samples_per_second: Positive


class InputLoader(Values):
    """Throughput of DataLoaders that read and decode."""

    state: Literal["cold", "hot"]
    workers: Number
    """Of each loader."""
    loaders: Annotated[int, Field(ge=1)] = 1
    """At the same time, one for each GPU."""
    pinned: bool | None = None
    """Of rows with copies to a GPU. None: nothing is copied."""
    samples_per_second: Positive
    gb_per_s: Positive
    """Of the files."""


class InputSteps(Values):
    """Seconds of one sample in a loader without workers."""

    state: Literal["cold", "hot"]
    read_s: Annotated[float, Field(ge=0)]
    """Open and read; of tables and archives, also unpack."""
    decode_s: Annotated[float, Field(ge=0)]
    other_s: Annotated[float, Field(ge=0)]
    """Everything else: tensors, batches, Python."""


class InputValues(Values):
    """``input.pipeline``: the user's own files in a directory, which are only read."""

    directory: Text
    filesystem: Text | None = None
    remote: bool
    """True if the type of the file system is that of a network."""
    files: Number
    bytes: Number
    walk_complete: bool
    """False: the directory has more than was counted."""
    unreadable: Number = 0
    """Entries that this user may not read."""
    broken_links: Number = 0
    other: Number = 0
    """Empty files, links to directories, and those that are neither file, link nor directory."""
    kinds: dict[Text, Number] = Field(default_factory=dict)
    """Files by ``images``, ``tar``, ``parquet``, ``files``."""
    kind: Literal["images", "tar", "parquet", "files"]
    """That with the most bytes, which is measured."""
    read_files: Annotated[int, Field(ge=1)]
    read_bytes: Number
    sample_bytes: Positive
    """Of one sample in its file."""
    cpus: Annotated[int, Field(ge=1)]
    gpus: Number
    model_rate: Positive | None = None
    """Samples per second that a GPU is expected to use (``--model-rate``)."""
    proof: Literal["mincore", "nowait"] | None = None
    """How the absence of the files from memory was verified. None: it was not, and there is no cold row."""
    cold_resident: Share | None = None
    """Share of their pages that was left in memory."""
    hot_resident: Share | None = None
    failed: Number = 0
    """Files of which reading failed."""
    shrunk: Number = 0
    """Files that became shorter while they were read."""
    unusable: Number = 0
    """Of the examined files, those that are damaged or have no decoder."""
    decoders: tuple[InputDecoder, ...] = ()
    reads: tuple[InputRead, ...] = ()
    loaders: tuple[InputLoader, ...] = ()
    steps: tuple[InputSteps, ...] = ()
    no_loader: Text | None = None
    advised_workers: Number | None = None
    """The fewest that reach 95 % of the best hot throughput."""
    synthetic_samples_per_second: Positive | None = None
    """Of a loader with that number of workers, without files and decoding."""


class ToolValues(Values):
    """``tools.NAME``: the output of an external program; its parser reads ``stdout``."""

    program: Text
    """Its path."""
    arguments: tuple[Text, ...] = ()
    exit_code: int
    stdout: Annotated[str, Field(max_length=48 * 1024)]
    stderr: Annotated[str, Field(max_length=4 * 1024)] = ""
    cut: bool = False
    """True if only the beginning of stdout is recorded."""


VALUES: Mapping[str, type[Values]] = {
    "copy.host": HostCopyValues,
    "copy.device": DeviceCopyValues,
    "copy.peer": PeerCopyValues,
    "memory.stream": StreamValues,
    **{f"gemm.{name}": GemmValues for name in GEMM_TYPES},
    "burn.gemm": BurnValues,
    **{f"nccl.{name}": NcclValues for name in COLLECTIVES},
    "nccl.pairs": PairsValues,
    **{f"ddp.{name}": TrainingValues for name in ("replicated", "sharded")},
    "steps.device": StepsValues,
    "storage.fio": FioValues,
    "storage.dataloader": LoaderValues,
    "input.pipeline": InputValues,
    **{f"tools.{name}": ToolValues for name in ("nvbandwidth", "dcgm-diag", "nccl-tests")},
}
"""The records of measurements, and the model of their values."""
MEASURED = frozenset(VALUES)
