"""What pays on a node for training: the steps of docs/training-guide.md, filled from the node's facts and its
measurements.

Each advice has a number of this node or a source. A figure that a processor measured is not used for a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Literal, Self

from packaging.version import Version
from pydantic import Field, model_validator

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.facts.models.measured import (
    FioValues,
    GemmValues,
    HostCopyValues,
    LoaderValues,
    NcclValues,
    TrainingValues,
)
from gpunode.facts.models.workload import AnyValues, CompileValues, DaliValues, KernelValues, MemoryValues, values_of
from gpunode.frozen import FrozenByName
from gpunode.text import counted, listed
from gpunode.tuning.libraries import usable_cores
from gpunode.tuning.slices import processor_shares, threads_and_workers
from gpunode.tuning.tune import tune

SCHEMA: Literal["gpunode.advice/1"] = "gpunode.advice/1"
Step = Literal["measure", "input", "transfer", "precision", "memory", "code", "scale", "flags"]
STEPS: dict[Step, str] = {
    "measure": "Find out whether the GPU waits",
    "input": "Feed the GPU: loader, decoding, storage",
    "transfer": "Copy to the GPU",
    "precision": "Use 16-bit formats and tensor cores",
    "memory": "Fill the memory: batch and model",
    "code": "Compile and select kernels",
    "scale": "Use several GPUs",
    "flags": "Set what the node needs, remove what slows down",
}
"""The steps in their order: an early one hides the effect of a later one."""
STANDARD = "gpunode validate HOST"
DEEP = "gpunode validate HOST --level deep"
STORAGE = f"{DEEP} --storage DIR"
PINNING_PAYS = 1.1
"""Pinned memory with less gain than this is within the spread of copies."""
ADAM_BYTES = 16
"""Bytes per parameter with Adam in mixed precision: 2 weight, 2 gradient, 12 optimizer (source zero)."""
RESNET_50 = 25_600_000
"""Parameters, of the guides' example of an all-reduce."""
BF16_SINCE = Version("8.0")


class Advice(FrozenByName):
    """One advice for a node."""

    step: Step
    title: str
    advice: str
    numbers: tuple[str, ...] = ()
    """Figures of this node, each with the record or fact that has it."""
    missing: str | None = None
    """The command that measures the figure, if it was not measured on this node's GPUs."""
    source: str | None = None
    """URL of what the advice follows."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> Self:
        if not self.numbers and not self.source:
            raise ValueError(f"{self.title}: advice needs a number or a source")
        return self


class NodeAdvice(FrozenByName):
    """The advice for one node."""

    host: str
    simulated: bool
    gpus: str
    """``8x NVIDIA H100 80GB HBM3``."""
    advice: tuple[Advice, ...]


class AdviceDocument(FrozenByName):
    """The document ``gpunode.advice/1``."""

    schema_name: Literal["gpunode.advice/1"] = Field(SCHEMA, alias="schema")
    nodes: tuple[NodeAdvice, ...]


def advise(node: NodeFacts) -> NodeAdvice:
    """Return the advice for a node, in the order of the steps."""
    names = [gpu.name or "unknown GPU" for gpu in node.smi_gpus]
    kinds = listed(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    return NodeAdvice(
        host=node.host,
        simulated=node.simulated,
        gpus=kinds or "no GPU reported",
        advice=tuple(advice for part in PARTS for advice in part(node)),
    )


def _url(key: str) -> str:
    row = load().sources[key]
    return row.url or row.title


def _measured(node: NodeFacts, name: str, kind: type[AnyValues], device: str = "cuda") -> list[AnyValues]:
    """Return the values of the records of a name that ran on the device."""
    measured = []
    for record in node.records or ():
        if record.record != name or record.device != device or record.error or record.skipped or record.undetermined:
            continue
        values = values_of(record, kind)
        if not isinstance(values, str):
            measured.append(values)
    return measured


def _key_numbers(node: NodeFacts) -> Iterator[Advice]:
    busy = [gpu.utilization_percent for gpu in node.smi_gpus if gpu.utilization_percent is not None]
    used = {process.gpu for process in node.gpu_processes or () if process.computes}
    now: tuple[str, ...] = ()
    if busy and used:
        now = (f"now {listed(f'{load:g} %' for load in busy)} load of the GPUs, one sample (nvidia-smi)",)
    yield Advice(
        step="measure",
        title="three numbers first",
        advice="Run gpunode top --once beside the job: after a low load continue with step 2, after a full one with "
        "step 4. In a trace read three numbers: the share of the time in which the device computes, the share of "
        "operations on the host, the share of kernels in 16-bit formats",
        numbers=now,
        source=_url("tf_tune"),
    )
    yield Advice(
        step="measure",
        title="a trace",
        advice="gpunode profile -- COMMAND records a trace and names what takes the time; by hand in PyTorch: "
        "torch.profiler with export_chrome_trace, opened in Perfetto (TensorBoard's plugin is "
        "deprecated). TensorFlow and JAX: xprof",
        source=f"{_url('pt_profiler')}, {_url('xprof')}",
    )


def _workers(node: NodeFacts) -> Iterator[Advice]:
    cores = _cores_per_gpu(node)
    measured = _measured(node, "storage.dataloader", LoaderValues, device="cpu")
    if measured:
        rows = {row.workers: row.samples_per_second for row in measured[0].rows}
        advised = int(measured[0].advised_workers)
        best = max(rows, key=lambda workers: rows[workers], default=advised)
        workers = min(advised, max(0, cores - 1)) if cores else advised
        shown = [f"{rows[number]:.0f} with {number}" for number in sorted({0, advised, best} & set(rows))]
        number = f"samples/s: {', '.join(shown)} ({measured[0].directory or 'scratch folder'}; storage.dataloader)"
        if workers < advised:
            number += f"; {advised} do not fit the {cores} cores per GPU"
        yield _workers_advice(workers, (number,), None)
    elif cores:
        threads, workers = threads_and_workers(cores, None)
        gpus = counted(len(node.gpus_on_bus or ()), "GPU")
        number = f"{cores} cores for each of {gpus} (lscpu): {threads} for threads, {workers} for workers"
        yield _workers_advice(workers, (number,), STORAGE)
    else:
        yield Advice(
            step="input",
            title="loader workers",
            advice="Increase num_workers until the rate no longer grows, at most one per core of the process",
            missing=STORAGE,
            source=_url("pt_loader"),
        )


def _workers_advice(workers: int, numbers: tuple[str, ...], missing: str | None) -> Advice:
    return Advice(
        step="input",
        title="loader workers",
        advice=f"DataLoader(num_workers={workers}, persistent_workers={workers > 0}) in each process; tf.data: "
        "num_parallel_calls=tf.data.AUTOTUNE and prefetch(tf.data.AUTOTUNE)",
        numbers=numbers,
        missing=missing,
        source=_url("pt_loader"),
    )


def _cores_per_gpu(node: NodeFacts) -> int:
    """Return the cores for the process of one GPU; 0 if they are unknown."""
    bus = node.gpus_on_bus or ()
    if not bus:
        return 0
    shares, cores = processor_shares(node, bus)
    if shares:
        return min(len({cores[cpu] for cpu in cpus}) for cpus in shares.values())
    return (usable_cores(node) or 0) // len(bus)


def _decoding(node: NodeFacts) -> Iterator[Advice]:
    dali = _measured(node, "frameworks.dali", DaliValues)
    yield Advice(
        step="input",
        title="decoding of images",
        advice="If workers wait for the processor: torchvision.transforms.v2 on uint8 tensors, decode_jpeg on the GPU, "
        "or DALI. Pillow-SIMD and its compiler flags are outdated",
        numbers=tuple(f"DALI {run.version} ran on this node's GPU (frameworks.dali)" for run in dali[:1]),
        source=f"{_url('tv_v2')}, {_url('tv_jpeg')}",
    )


def _storage(node: NodeFacts) -> Iterator[Advice]:
    jobs = [(run.directory, job) for run in _measured(node, "storage.fio", FioValues, device="cpu") for job in run.jobs]
    numbers = tuple(
        f"{directory}: {job.pattern} {job.bandwidth_gb_per_s:.2g} GB/s in blocks of {int(job.block_bytes) // 1024} KiB"
        " (storage.fio)"
        for directory, job in jobs
        if job.pattern in ("read", "randread")
    )
    yield Advice(
        step="input",
        title="storage",
        advice="If workers wait for reads: copy the data set to a local disk, store many small files in shards (tar, "
        "Parquet, Arrow), read with few large requests",
        numbers=numbers,
        missing=None if numbers else STORAGE,
        source=_url("tf_data"),
    )


def _pinning(node: NodeFacts) -> Iterator[Advice]:
    gains = []
    for run in _measured(node, "copy.host", HostCopyValues):
        copies = [copy for copy in run.copies if copy.direction == "host_to_device"]
        pinned = max((copy.bandwidth_gb_per_s for copy in copies if copy.pinned), default=0.0)
        pageable = max((copy.bandwidth_gb_per_s for copy in copies if not copy.pinned), default=0.0)
        if pinned and pageable:
            gains.append((pinned / pageable, pinned, pageable))
    advice = "DataLoader(pin_memory=True) and tensor.to(device, non_blocking=True)"
    if not gains:
        yield Advice(step="transfer", title="pinned memory", advice=advice, missing=DEEP, source=_url("pt_tune"))
        return
    gain, pinned, pageable = sorted(gains)[len(gains) // 2]
    if gain < PINNING_PAYS:
        advice = "Pinned memory does not copy faster here; it still lets copies run beside kernels"
    yield Advice(
        step="transfer",
        title="pinned memory",
        advice=advice,
        numbers=(f"to the GPU {pinned:.3g} GB/s pinned, {pageable:.3g} pageable: {gain:.2g} times (copy.host)",),
        source=_url("pt_tune"),
    )


def _rates(node: NodeFacts) -> dict[str, float]:
    """Return TFLOP/s by format: the median of the GPUs."""
    medians = {}
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8", "int8"):
        rates = [run.tflops for run in _measured(node, f"gemm.{dtype}", GemmValues)]
        if rates:
            medians[dtype] = median(rates)
    return medians


def _capability(node: NodeFacts) -> Version | None:
    """Return the lowest compute capability of the node's GPUs; None if one is unknown."""
    kernels = _measured(node, "gpus.kernel", KernelValues)
    capabilities = [Version(kernel.compute_capability) for kernel in kernels if kernel.compute_capability]
    if capabilities:
        return min(capabilities)
    for device in node.gpus_on_bus or ():
        match = load().gpu_by_pci(device.pci_id, device.subsystem_id)
        known = {gpu.capability for gpu in match.gpus} if match else set()
        if len(known) != 1:
            return None
        capabilities += known
    return min(capabilities, default=None)


AUTOCAST = {
    "bf16": 'torch.amp.autocast("cuda", dtype=torch.bfloat16), without a GradScaler; Keras: mixed_bfloat16',
    "fp16": 'torch.amp.autocast("cuda", dtype=torch.float16) with torch.amp.GradScaler("cuda"); Keras: mixed_float16',
}


def _precision(node: NodeFacts) -> Iterator[Advice]:
    capability, rates = _capability(node), _rates(node)
    half = "fp16" if capability is not None and capability < BF16_SINCE else "bf16"
    advice = AUTOCAST[half]
    if capability is None:
        advice = f"From compute capability {BF16_SINCE} on {AUTOCAST['bf16']}. Before: {AUTOCAST['fp16']}"
    numbers = [f"compute capability {capability}"] if capability else []
    gain = rates.get(half, 0) / rates["fp32"] if rates.get("fp32") else 0.0
    if gain:
        shown = f"{rates[half]:.3g} TFLOP/s in {half}, {rates['fp32']:.3g} in fp32"
        numbers.append(f"products: {shown}: {gain:.2g} times (gemm)")
    yield Advice(
        step="precision",
        title="mixed precision",
        advice=advice,
        numbers=tuple(numbers),
        missing=None if gain else DEEP,
        source=_url("pt_amp"),
    )
    tf32 = rates.get("tf32", 0) / rates["fp32"] if rates.get("fp32") else 0.0
    if capability is None or capability >= BF16_SINCE:
        yield Advice(
            step="precision",
            title="TF32 for what stays in fp32",
            advice='torch.set_float32_matmul_precision("high")',
            numbers=(f"products: {rates['tf32']:.3g} TFLOP/s in TF32: {tf32:.2g} times fp32 (gemm)",) if tf32 else (),
            missing=None if tf32 else DEEP,
            source=_url("pt_tune"),
        )
    eight = [name for name in ("int8", "fp8") if rates.get(name) and rates.get(half)]
    yield Advice(
        step="precision",
        title="8-bit inference",
        advice="Of a trained model: torchao.quantization.quantize_; compare its accuracy. Worth it where products are "
        "what takes the time",
        numbers=tuple(
            f"products: {rates[name]:.3g} TOP/s in {name}: {rates[name] / rates[half]:.2g} times {half} (gemm)"
            for name in eight
        ),
        missing=None if eight else DEEP,
        source=_url("torchao"),
    )
    yield Advice(
        step="precision",
        title="dimensions",
        advice="Multiples of 8 for layers, batch and vocabulary in 16-bit formats, of 16 in 8-bit ones",
        source=_url("nv_matmul"),
    )


def _memory(node: NodeFacts) -> Iterator[Advice]:
    measured = _measured(node, "frameworks.memory", MemoryValues)
    if measured:
        mib = min(run.free_mib for run in measured)
        total = measured[0].total_mib / 1024
        number = f"{mib / 1024:.1f} of {total:.1f} GiB are free in a process with PyTorch (frameworks.memory)"
    else:
        sizes = [int(gpu.memory_total_mib) for gpu in node.smi_gpus if gpu.memory_total_mib]
        if not sizes:
            return
        mib = min(sizes)
        number = f"{mib / 1024:.1f} GiB of memory per GPU (nvidia-smi)"
    billions = mib * 2**20 / ADAM_BYTES / 1e9
    yield Advice(
        step="memory",
        title="batch",
        advice="Increase the batch until torch.cuda.max_memory_reserved() is at 90 % of the memory; a greater one by "
        "gradient accumulation, with no_sync() in DDP until the last part",
        numbers=(number, f"90 % are {0.9 * mib / 1024:.1f} GiB"),
        missing=None if measured else STANDARD,
        source=_url("pt_tune"),
    )
    yield Advice(
        step="memory",
        title="model",
        advice=f"With Adam in mixed precision a parameter takes {ADAM_BYTES} bytes beside activations: a model of "
        f"{billions:.1f} billion parameters fills a GPU. From half of that on: activation checkpointing, FSDP, or ZeRO",
        numbers=(f"{mib / 1024:.1f} GiB / {ADAM_BYTES} bytes = {billions:.1f} billion parameters",),
        source=_url("zero"),
    )


def _code(node: NodeFacts) -> Iterator[Advice]:
    compiled = _measured(node, "frameworks.compile", CompileValues)
    yield Advice(
        step="code",
        title="torch.compile",
        advice="torch.compile(model); the first steps compile. Keep TORCHINDUCTOR_CACHE_DIR on a local disk between "
        "runs. TensorFlow: tf.function(jit_compile=True)",
        numbers=tuple(
            f"a small function compiled in {run.compile_seconds:.1f} s on this node"
            + (f", in {run.cached_seconds:.1f} s with the cache of another process" if run.cached_seconds else "")
            + " (frameworks.compile)"
            for run in compiled[:1]
        ),
        missing=None if compiled else STANDARD,
        source=_url("pt_compile"),
    )
    yield Advice(
        step="code",
        title="convolutions",
        advice="torch.backends.cudnn.benchmark = True for inputs of one size, memory format channels_last; no "
        "benchmark if results must be deterministic",
        source=_url("pt_tune"),
    )


def _scale(node: NodeFacts) -> Iterator[Advice]:
    number = len(node.gpus_on_bus or ())
    if number < 2:
        return
    shown = tuple(
        f"{run.ranks} GPUs do {100 * run.compute_seconds / run.step_seconds:.0f} % of {run.ranks} single ones: a step "
        f"takes {1000 * run.step_seconds:.3g} ms, {1000 * run.compute_seconds:.3g} without communication "
        "(ddp.replicated)"
        for run in _measured(node, "ddp.replicated", TrainingValues)[:1]
        if run.compute_seconds and run.step_seconds
    )
    yield Advice(
        step="scale",
        title="data parallel",
        advice=f"torchrun --nproc-per-node {number} with DistributedDataParallel, a process per GPU under gpunode-run; "
        "DataParallel is superseded. TensorFlow: MirroredStrategy. First make one GPU fast",
        numbers=shown,
        missing=None if shown else DEEP,
        source=_url("pt_tune"),
    )
    rows = [
        (run.ranks, max([run.max_busbw_gb_per_s or 0, *(row.busbw_gb_per_s for row in run.rows)]))
        for run in _measured(node, "nccl.all-reduce", NcclValues)
        if run.ranks > 1 and run.backend == "nccl"
    ]
    for ranks, rate in [row for row in rows if row[1]][:1]:
        times = [(name, 2 * (ranks - 1) / ranks * 4 * count / rate / 1e6) for name, count in MODELS.items()]
        yield Advice(
            step="scale",
            title="time of an all-reduce",
            advice="Compare it with the time of a step: if computing does not hide it, send gradients in 16 bits "
            "(bf16_compress_hook), or accumulate",
            numbers=(
                f"bus bandwidth {rate:.3g} GB/s over {ranks} GPUs (nccl.all-reduce)",
                f"gradients in fp32: {', '.join(f'{name} {took:.3g} ms' for name, took in times)}",
            ),
            source=_url("pt_ddp"),
        )


MODELS = {"ResNet-50 (25.6 million)": RESNET_50, "1 billion parameters": 1_000_000_000}


def _flags(node: NodeFacts) -> Iterator[Advice]:
    tuning = tune(node, "pytorch")
    system = {variable.name: variable.value for variable in node.environment or ()}
    proposed = {setting.name: setting.value for setting in tuning.environment}
    same = [f"{name}={value}" for name, value in proposed.items() if system.get(name) == value]
    other = [
        f"{name}={system[name]} (here {value})" for name, value in proposed.items() if system.get(name, value) != value
    ]
    unset = [f"{name}={value}" for name, value in proposed.items() if name not in system]
    numbers = [
        f"{title}: {listed(names, most=10)}"
        for title, names in (("set for the whole system", same), ("set to another value", other), ("not set", unset))
        if names
    ]
    if node.environment is not None and numbers:
        yield Advice(
            step="flags",
            title="variables",
            advice="gpunode env prints them with their reasons and for docker run; gpunode-run sets them for a job",
            numbers=tuple(numbers),
            source=_url("pt_run"),
        )
    harmful = [f"{name}={system[name]}" for name in HARMFUL if name in system]
    if harmful:
        yield Advice(
            step="flags",
            title="left from debugging",
            advice="Remove them from the system's environment: each slows down every job",
            numbers=(listed(harmful),),
        )
    kernel = {setting.name: setting.value for setting in tuning.node.kernel}
    read = {name: " ".join(value.split()) for name, value in (node.sysctl or {}).items()}
    if node.transparent_hugepages is not None:
        read["transparent_hugepage"] = node.transparent_hugepages
    known = {name: read[name] for name in kernel if name in read}
    if known:
        differ = [f"{name}={value} (here {kernel[name]})" for name, value in known.items() if value != kernel[name]]
        as_here = f"{len(known) - len(differ)} of {len(known)} kernel settings as the role kernel_tuning sets them"
        yield Advice(
            step="flags",
            title="kernel",
            advice="The role kernel_tuning sets the others" if differ else "Nothing to do",
            numbers=(as_here + (f"; {listed(differ)}" if differ else ""),),
        )


HARMFUL = ("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")

PARTS: Sequence[Callable[[NodeFacts], Iterator[Advice]]] = (
    _key_numbers,
    _workers,
    _decoding,
    _storage,
    _pinning,
    _precision,
    _memory,
    _code,
    _scale,
    _flags,
)
