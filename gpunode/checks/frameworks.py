"""Checks on frameworks in a container: correct results on every GPU."""

from collections.abc import Callable, Mapping
from typing import Any

from gpunode.checks.compare import at_least, at_most, equals, failed, faultless, passed, warned
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined
from gpunode.checks.thresholds import Threshold
from gpunode.checks.workload import AnyValues, JudgeValues, explained, gpu_named, known, of, record_check, where
from gpunode.facts.models.workload import (
    CollectiveValues,
    CompileValues,
    ConvolutionValues,
    DaliValues,
    DataloaderValues,
    DeviceIdentity,
    Fp8Values,
    KernelValues,
    MatmulValues,
    MemoryValues,
    MigDevice,
    NvmlGpu,
    NvmlValues,
    PeerValues,
    Record,
    StepValues,
    TensorflowRunValues,
    TensorflowTrainingValues,
    TensorflowValues,
    TensorValues,
    TorchValues,
    values_of,
)
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

MAX_ERROR = Threshold(
    "framework.max-error",
    1e-3,
    "absolute",
    "Sums of some hundred products of numbers around 1 in single precision are off from double precision by more: a "
    "failure.",
    source="our choice: far above rounding errors, far below a wrong product",
)
MEMORY_MISSING = Threshold(
    "framework.memory.missing-most",
    0.10,
    "of the total",
    "Driver and CUDA context use a part of the total that nvidia-smi reports; more is a failure.",
    source="our choice",
    most=1,
)
EFFICIENCY_LEAST = Threshold(
    "framework.tensorflow-training.efficiency-least",
    0.5,
    "of n times one GPU",
    "A training step over all GPUs that takes more than twice as long as that of one GPU warns.",
    source="our choice: links between GPUs hide most of the communication, a path through the host does not",
    most=1,
)
OF_THE_IMAGE = ("container.library", "container.gpus", "container.cuda", "framework.wheel")
"""Checks with a failure that breaks everything that computes on a GPU."""
SEE_ERROR = (
    "The message is from the framework: search for it; run the same image on another "
    "node to distinguish node and image."
)


def _on_gpu_check(
    check_id: str, record: str, kind: type[AnyValues], **declared: Any
) -> Callable[[JudgeValues[AnyValues]], JudgeValues[AnyValues]]:
    """Return the decorator of a check of a framework on each GPU."""
    return record_check(check_id, record, kind, on_gpu=True, after=OF_THE_IMAGE, **declared)


@_on_gpu_check(
    "framework.tensor",
    "frameworks.tensor",
    TensorValues,
    means="A matrix product is computed in the memory of every GPU, and is exact.",
    remedy="A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. " + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def tensor(values: TensorValues, record: Record) -> CheckResult:
    if not values.allocated_bytes:
        message = f"the tensor used no memory of {record.component}"
        return failed(message, expected=0.0, measured=values.max_error)
    good = f"computes on {record.component} ({values.name or 'GPU'})"
    return equals(values.max_error, 0.0, good, f"the product of whole numbers is off by {values.max_error:g}")


@_on_gpu_check(
    "framework.amp",
    "frameworks.amp",
    StepValues,
    means="Training steps in mixed precision reduce the loss without NaN or infinity.",
    remedy=SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def amp(values: StepValues, record: Record) -> CheckResult:
    losses = [loss for loss in values.losses if loss is not None]
    if not values.losses:
        raise Undetermined("no step was recorded")
    last = losses[-1] if losses else None
    if last is None or len(losses) < len(values.losses):
        message = f"{values.dtype}: the loss is not a number in {len(values.losses) - len(losses)} steps"
        return failed(message, measured=last, unit="loss")
    steps, change = counted(len(losses), "step"), f"{losses[0]:.3f} to {last:.3f}"
    if not last < losses[0]:
        message = f"{values.dtype}: {steps} did not lower the loss ({change}){where(record)}"
        return failed(message, measured=last, unit="loss")
    return passed(f"{values.dtype}: {change} in {steps}", measured=last, unit="loss")


@_on_gpu_check(
    "framework.compile",
    "frameworks.compile",
    CompileValues,
    means="torch.compile generates GPU code with the same result as the plain function.",
    remedy="The image needs the Triton of its PyTorch, which uses the ptxas of the driver or of the image. "
    + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(MAX_ERROR,),
)
def compiled(values: CompileValues, record: Record) -> CheckResult:
    good = f"compiled for {values.compute_capability} in {values.compile_seconds:.1f} s"
    bad = f"the compiled function is off by {values.max_error:g}{where(record)}"
    return at_most(values.max_error, MAX_ERROR.value, good, bad, expected=f"at most {MAX_ERROR.value}")


@_on_gpu_check(
    "framework.cudnn",
    "frameworks.cudnn",
    ConvolutionValues,
    means="A convolution and its gradient by cuDNN are what the processor computes.",
    remedy=SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(MAX_ERROR,),
)
def convolution(values: ConvolutionValues, record: Record) -> CheckResult:
    most = f"at most {MAX_ERROR.value}"
    if not values.enabled:
        return failed(f"PyTorch does not use cuDNN{where(record)}", expected=most, measured=values.max_error)
    good = f"cuDNN {values.cudnn} computes a convolution and its gradient"
    bad = f"the convolution is off by {values.max_error:g}"
    return at_most(values.max_error, MAX_ERROR.value, good, bad, expected=most)


@_on_gpu_check(
    "framework.dataloader",
    "frameworks.dataloader",
    DataloaderValues,
    means="Worker processes pass batches to the GPU through pinned shared memory.",
    remedy="'No space left on device' and 'Bus error' mean that shared memory is full: docker run --shm-size=8g. "
    + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def dataloader(values: DataloaderValues) -> CheckResult:
    rate = values.samples_per_second
    if values.batches == 0:
        raise Undetermined("no batch was recorded")
    if not values.pinned:
        remedy = "docker run --ulimit memlock=-1."
        return failed("batches were not pinned", measured=rate, unit="samples/s", remedy=remedy)
    words = f"{counted(values.batches, 'batch', 'batches')} by {counted(values.workers, 'worker')}"
    return passed(f"{words}, pinned, {rate:.0f} samples/s", measured=rate, unit="samples/s")


@_on_gpu_check(
    "framework.memory",
    "frameworks.memory",
    MemoryValues,
    means="PyTorch has the memory that the GPU or MIG device has, and what it writes to most of it is what it reads.",
    remedy="Wrong words are a fault of that GPU: stop using it and run dcgmi diag -r 3. Too little memory: "
    "nvidia-smi shows other processes that use it, or the profile of a vGPU.",
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
    thresholds=(MEMORY_MISSING,),
)
def memory(values: MemoryValues, record: Record, node: NodeFacts) -> CheckResult:
    has = values.total_mib
    if values.peak_mib <= 0 or values.reserved_mib < values.peak_mib:
        message = f"the allocator counts a peak of {values.peak_mib} of {values.reserved_mib} MiB"
        return failed(message, measured=has, unit="MiB", remedy=SEE_ERROR)
    if values.wrong:
        message = f"{values.wrong} words of {values.tested_mib} MiB were read back with wrong content"
        return failed(message, measured=has, unit="MiB")
    good = f"{values.tested_mib} of {has} MiB were written and read back twice"
    total = memory_of(node, record)
    if total is None:
        return passed(good, measured=has, unit="MiB")
    bad = f"PyTorch has {has} MiB, the device has {total}"
    return at_least(has, total * (1 - MEMORY_MISSING.value), good, bad, expected=float(total), unit="MiB")


def memory_of(node: NodeFacts, record: Record) -> int | None:
    """Return the memory in MiB of a record's device, from NVML: of the slice for a MIG device, not of the whole GPU."""
    about, nvml = values_of(record, DeviceIdentity), known(node, "versions.nvml", NvmlValues)
    if isinstance(about, str):
        return None
    if nvml is not None:
        devices: list[NvmlGpu | MigDevice] = [*nvml.gpus]
        devices += [part for gpu in nvml.gpus for part in gpu.mig_devices]
        for device in devices:
            if device.uuid is not None and device.uuid == about.uuid:
                return device.memory_mib
    by_uuid = {gpu.uuid: gpu.memory_total_mib for gpu in node.smi_gpus}
    total = by_uuid.get(about.uuid) if about.mig is None else None
    return int(total) if total is not None else None


@_on_gpu_check(
    "framework.matmul",
    "frameworks.matmul",
    MatmulValues,
    means="A large product in bfloat16 (float16 before Ampere) is the processor's in every element, every time.",
    remedy="A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. " + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def matmul(values: MatmulValues) -> CheckResult:
    product = f"{values.size} x {values.size} in {values.dtype}, {counted(values.rounds, 'time')}"
    if values.rounds <= 0:
        raise Undetermined("no round was recorded")
    bad = f"{product}: {counted(values.wrong, 'element')} wrong"
    return at_most(values.wrong, 0, f"{product}: every element correct", bad, unit="elements")


@_on_gpu_check(
    "framework.fp8",
    "frameworks.fp8",
    Fp8Values,
    means="An FP8 product matches the processor's result in every element, if the GPU supports FP8.",
    remedy="A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. " + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def fp8(values: Fp8Values) -> CheckResult:
    bad = f"FP8: {counted(values.wrong, 'element')} wrong"
    return at_most(values.wrong, 0, "FP8: every element correct", bad, unit="elements")


@_on_gpu_check(
    "framework.p2p",
    "frameworks.p2p",
    PeerValues,
    means="Data copied between GPUs arrives unchanged, and GPUs with peer access according to nvidia-smi also "
    "have it in the container.",
    remedy="Wrong data over PCIe is mostly caused by ACS or an IOMMU: host.acs, host.iommu; over NVLink: "
    "nvlink.errors and fabric.manager. Otherwise the GPU is faulty. " + SEE_ERROR,
    state="drain",
    actions=("fix_configuration", "reset_gpu", "open_support_case"),
)
def p2p(values: PeerValues, node: NodeFacts) -> CheckResult:
    number = len(values.uuids)
    if number < 2 or [len(row) for row in values.access] != [number] * number:
        raise Undetermined("the record does not contain peer access between GPUs")
    names = [gpu_named(node, uuid) or uuid for uuid in values.uuids]
    if values.wrong:
        pairs = [f"{names[gpu]} to {names[other]}" for gpu, other in values.wrong if max(gpu, other) < number]
        return failed(f"wrong data:  {listed(pairs) or 'between GPUs'}")
    refused = [
        f"{names[gpu]}-{names[other]}"
        for gpu in range(number)
        for other in range(gpu + 1, number)
        if not values.access[gpu][other]
    ]
    total = number * (number - 1) // 2
    direct = total - len(refused)
    links = node.peer_access.document.links if node.peer_access and node.peer_access.document else {}
    allowed = [pair for pair in refused if _says_ok(links, pair)]
    if allowed:
        conflict = f"nvidia-smi reports peer access for {listed(allowed)}, CUDA in the container denies it"
        return warned(conflict, expected=total, measured=direct, unit="pairs")
    through = f", {len(refused)} of {total} through the host" if refused else " directly"
    message = f"copies between {counted(number, 'GPU')} arrive{through}"
    return passed(message, expected=total, measured=direct, unit="pairs")


def _says_ok(links: Mapping[str, Mapping[str, str]], pair: str) -> bool:
    gpu, _, other = pair.upper().partition("-")
    return links.get(gpu, {}).get(other) == "OK"


@_on_gpu_check(
    "framework.collective",
    "frameworks.collective",
    CollectiveValues,
    means="An NCCL all-reduce over all GPUs of the container returns correct sums; its transport is reported.",
    remedy="NCCL_DEBUG=INFO shows which connection breaks. Shared memory that is full: docker run --shm-size=8g; "
    "NVLink: nvlink.state and fabric.manager; PCIe: host.acs and host.iommu. A CUDA failure in transport/nvls.cc (401, "
    "invalid argument) follows a restart of the fabric manager under running processes: reboot the drained node; "
    "NCCL_NVLS_ENABLE=0 avoids it until then, with a lower bandwidth. " + SEE_ERROR,
    state="drain",
    actions=("fix_configuration", "reset_gpu", "open_support_case"),
)
def collective(values: CollectiveValues) -> CheckResult:
    if values.ranks < 2:
        raise Undetermined("a single process reduces nothing")
    over = f"all-reduce over {counted(values.ranks, 'GPU')}"
    ways = listed([f"{number} by {way}" for way, number in values.transports.items()]) or "not in its log"
    switches = ", NVLink SHARP" if values.nvls else ""
    good = f"{over} is correct; connections: {ways}{switches}"
    return at_most(values.wrong, 0, good, f"{over}: {values.wrong} sums wrong", unit="elements")


@record_check(
    "framework.tensorflow",
    "frameworks.tensorflow",
    TensorflowRunValues,
    after=OF_THE_IMAGE,
    means="TensorFlow finds the GPUs, allocates memory on demand, supports mixed_float16, and computes correct "
    "results.",
    remedy="Run pip install 'tensorflow[and-cuda]' to install the matching CUDA and cuDNN; 0 GPUs is mostly "
    "caused by a missing library.",
    state="observe",
    actions=("fix_configuration",),
)
def tensorflow(values: TensorflowRunValues, record: Record, node: NodeFacts) -> CheckResult:
    count, expected = values.count, _of_one_process(node)
    if count == 0:
        pointer = explained(node, OF_THE_IMAGE)
        if node.simulated:
            raise Skip("TensorFlow finds no GPU, and the GPUs are simulated")
        if pointer:
            raise Skip(f"TensorFlow finds no GPU ({pointer})")
        if _beside_pytorch(node):
            raise Skip(f"TensorFlow is a CPU build, while PyTorch uses the GPUs{where(record)}")
    mode = f"thread mode {values.thread_mode}" if values.thread_mode else "no thread mode set"
    return faultless(
        f"{counted(count, 'GPU')}, memory growth, mixed_float16, {mode}",
        {
            f"TensorFlow finds no GPU{where(record)}": count == 0,
            f"TensorFlow finds {count} of {counted(expected, 'GPU')}{where(record)}": count < expected,
            f"the product of whole numbers is off by {values.max_error:g}": values.max_error != 0,
            "TensorFlow allocates all memory at once although memory growth is set": values.memory_growth is not True,
            f"mixed_float16 computes in {values.compute_dtype}": values.compute_dtype != "float16",
        },
        expected=expected if 0 < count < expected else None,
        measured=count,
        unit="GPUs",
    )


def _of_one_process(node: NodeFacts) -> int:
    """Return how many devices a single process can use: every whole GPU that computed, one if all are MIG devices."""
    kernels = [
        values
        for record in of(node, "gpus.kernel")
        if isinstance(values := values_of(record, KernelValues), KernelValues)
    ]
    whole = sum(1 for values in kernels if values.mig is None and values.wrong == 0)
    return whole or min(1, len(kernels))


def _beside_pytorch(node: NodeFacts) -> bool:
    """Return whether the image is one of PyTorch: its TensorFlow (mostly for TensorBoard) is not built for GPUs."""
    build, torch = known(node, "versions.tensorflow", TensorflowValues), known(node, "versions.torch", TorchValues)
    return build is not None and torch is not None and not build.built_with_cuda and torch.cuda is not None


@record_check(
    "framework.tensorflow-training",
    "frameworks.tensorflow-training",
    TensorflowTrainingValues,
    on_gpu=True,
    after=(*OF_THE_IMAGE, "framework.tensorflow"),
    means="TensorFlow trains over all GPUs with correct gradients (MirroredStrategy), XLA compiles with correct "
    "results, and all GPUs do almost n times the work of one.",
    remedy="Wrong gradients or a slow step: see performance.collectives and link.topology. XLA needs libdevice and "
    "ptxas of the image's CUDA: pip install 'tensorflow[and-cuda]', XLA_FLAGS=--xla_gpu_cuda_data_dir=DIR. "
    + SEE_ERROR,
    thresholds=(MAX_ERROR, EFFICIENCY_LEAST),
    state="observe",
    actions=("fix_configuration",),
)
def tensorflow_training(values: TensorflowTrainingValues) -> CheckResult:
    over = f"MirroredStrategy over {counted(values.ranks, 'GPU')}"
    rate = f"{values.parallel_samples_per_second:.0f} samples/s of tf.data with {counted(values.cpus, 'processor')}"
    shown = f"{over}: correct gradients, {values.efficiency:.0%} of {values.ranks} times one; {rate}; XLA compiles"
    verdict = faultless(
        shown,
        {
            f"{over}: {counted(values.wrong, 'gradient')} wrong, by up to {values.max_gradient_error:g}": values.wrong
            > 0,
            f"XLA does not compile: {values.xla_error}": values.xla_error is not None,
            f"the result of XLA is off by {values.xla_max_error}": (values.xla_max_error or 0) > MAX_ERROR.value,
        },
    )
    slow = values.ranks > 1 and values.efficiency < EFFICIENCY_LEAST.value
    if verdict.status is not Status.PASS or not slow:
        return verdict
    return warned(
        f"{over} does {values.efficiency:.0%} of {values.ranks} times the work of one",
        expected=EFFICIENCY_LEAST.value,
        measured=values.efficiency,
        source=EFFICIENCY_LEAST.source,
    )


@_on_gpu_check(
    "framework.dali",
    "frameworks.dali",
    DaliValues,
    means="DALI, if installed in the image, loads data onto the GPU.",
    remedy="Install the DALI of the image's CUDA: nvidia-dali-cuda120, nvidia-dali-cuda130. " + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def dali(values: DaliValues) -> CheckResult:
    if values.samples <= 0:
        return failed(f"DALI {values.version} returned an empty batch", measured=values.samples)
    return passed(f"DALI {values.version} puts {counted(values.samples, 'sample')} on the GPU")
