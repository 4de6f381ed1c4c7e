"""Checks on frameworks in a container: correct results on every GPU."""

from collections.abc import Iterator, Mapping
from functools import partial

from gpunode.checks.compare import failed, passed
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined
from gpunode.checks.thresholds import Threshold
from gpunode.checks.workload import explained, gpu_named, known, of, record_check, where
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
OF_THE_IMAGE = ("container.library", "container.gpus", "container.cuda", "framework.wheel")
"""Checks with a failure that breaks everything that computes on a GPU."""
SEE_ERROR = (
    "The message is from the framework: search for it; run the same image on another "
    "node to distinguish node and image."
)


@record_check(
    "framework.tensor",
    "frameworks.tensor",
    TensorValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="A matrix product is computed in the memory of every GPU, and is exact.",
    remedy="A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. " + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def tensor(values: TensorValues, record: Record) -> CheckResult:
    verdict = partial(CheckResult, expected=0.0, measured=values.max_error)
    if not values.allocated_bytes:
        return verdict(Status.FAIL, f"the tensor used no memory of {record.component}")
    if values.max_error != 0:
        return verdict(Status.FAIL, f"the product of whole numbers is off by {values.max_error:g}")
    return verdict(Status.PASS, f"computes on {record.component} ({values.name or 'GPU'})")


@record_check(
    "framework.amp",
    "frameworks.amp",
    StepValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="Training steps in mixed precision reduce the loss without NaN or infinity.",
    remedy=SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def amp(values: StepValues, record: Record) -> CheckResult:
    losses = [loss for loss in values.losses if loss is not None]
    verdict = partial(CheckResult, measured=losses[-1] if losses else None, unit="loss")
    if not values.losses:
        raise Undetermined("no step was recorded")
    if len(losses) < len(values.losses):
        return verdict(
            Status.FAIL, f"{values.dtype}: the loss is not a number in {len(values.losses) - len(losses)} steps"
        )
    if not losses[-1] < losses[0]:
        what = f"{values.dtype}: {counted(len(losses), 'step')} did not lower the loss"
        return verdict(Status.FAIL, f"{what} ({losses[0]:.3f} to {losses[-1]:.3f}){where(record)}")
    return verdict(
        Status.PASS, f"{values.dtype}: {losses[0]:.3f} to {losses[-1]:.3f} in {counted(len(losses), 'step')}"
    )


@record_check(
    "framework.compile",
    "frameworks.compile",
    CompileValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="torch.compile generates GPU code with the same result as the plain function.",
    remedy="The image needs the Triton of its PyTorch, which uses the ptxas of the driver or of the image. "
    + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(MAX_ERROR,),
)
def compiled(values: CompileValues, record: Record) -> CheckResult:
    verdict = partial(CheckResult, expected=f"at most {MAX_ERROR.value}", measured=values.max_error)
    if values.max_error > MAX_ERROR.value:
        return verdict(Status.FAIL, f"the compiled function is off by {values.max_error:g}{where(record)}")
    return verdict(Status.PASS, f"compiled for {values.compute_capability} in {values.compile_seconds:.1f} s")


@record_check(
    "framework.cudnn",
    "frameworks.cudnn",
    ConvolutionValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="A convolution and its gradient by cuDNN are what the processor computes.",
    remedy=SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(MAX_ERROR,),
)
def convolution(values: ConvolutionValues, record: Record) -> CheckResult:
    verdict = partial(CheckResult, expected=f"at most {MAX_ERROR.value}", measured=values.max_error)
    if not values.enabled:
        return verdict(Status.FAIL, f"PyTorch does not use cuDNN{where(record)}")
    if values.max_error > MAX_ERROR.value:
        return verdict(Status.FAIL, f"the convolution is off by {values.max_error:g}")
    return verdict(Status.PASS, f"cuDNN {values.cudnn} computes a convolution and its gradient")


@record_check(
    "framework.dataloader",
    "frameworks.dataloader",
    DataloaderValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="Worker processes pass batches to the GPU through pinned shared memory.",
    remedy="'No space left on device' and 'Bus error' mean that shared memory is full: docker run --shm-size=8g. "
    + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def dataloader(values: DataloaderValues) -> CheckResult:
    verdict = partial(CheckResult, measured=values.samples_per_second, unit="samples/s")
    if values.batches == 0:
        raise Undetermined("no batch was recorded")
    if not values.pinned:
        return verdict(Status.FAIL, "batches were not pinned", remedy="docker run --ulimit memlock=-1.")
    words = f"{counted(values.batches, 'batch', 'batches')} by {counted(values.workers, 'worker')}"
    return verdict(Status.PASS, f"{words}, pinned, {values.samples_per_second:.0f} samples/s")


@record_check(
    "framework.memory",
    "frameworks.memory",
    MemoryValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="PyTorch has the memory that the GPU or MIG device has, and what it writes to most of it is what it reads.",
    remedy="Wrong words are a fault of that GPU: stop using it and run dcgmi diag -r 3. Too little memory: "
    "nvidia-smi shows other processes that use it, or the profile of a vGPU.",
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
    thresholds=(MEMORY_MISSING,),
)
def memory(values: MemoryValues, record: Record, node: NodeFacts) -> CheckResult:
    verdict = partial(CheckResult, measured=values.total_mib, unit="MiB")
    if values.peak_mib <= 0 or values.reserved_mib < values.peak_mib:
        what = f"the allocator counts a peak of {values.peak_mib} of {values.reserved_mib} MiB"
        return verdict(Status.FAIL, what, remedy=SEE_ERROR)
    if values.wrong:
        return verdict(
            Status.FAIL, f"{values.wrong} words of {values.tested_mib} MiB were read back with wrong content"
        )
    total = memory_of(node, record)
    if total is not None:
        verdict = partial(verdict, expected=float(total))
        if values.total_mib < total * (1 - MEMORY_MISSING.value):
            return verdict(Status.FAIL, f"PyTorch has {values.total_mib} MiB, the device has {total}")
    return verdict(Status.PASS, f"{values.tested_mib} of {values.total_mib} MiB were written and read back twice")


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


@record_check(
    "framework.matmul",
    "frameworks.matmul",
    MatmulValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="A large product in bfloat16 (float16 before Ampere) is the processor's in every element, every time.",
    remedy="A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. " + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def matmul(values: MatmulValues) -> CheckResult:
    verdict = partial(CheckResult, expected=0, measured=values.wrong, unit="elements")
    what = f"{values.size} x {values.size} in {values.dtype}, {counted(values.rounds, 'time')}"
    if values.rounds <= 0:
        raise Undetermined("no round was recorded")
    if values.wrong:
        return verdict(Status.FAIL, f"{what}: {counted(values.wrong, 'element')} wrong")
    return verdict(Status.PASS, f"{what}: every element correct")


@record_check(
    "framework.fp8",
    "frameworks.fp8",
    Fp8Values,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="An FP8 product matches the processor's result in every element, if the GPU supports FP8.",
    remedy="A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. " + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def fp8(values: Fp8Values) -> CheckResult:
    verdict = partial(CheckResult, expected=0, measured=values.wrong, unit="elements")
    if values.wrong:
        return verdict(Status.FAIL, f"FP8: {counted(values.wrong, 'element')} wrong")
    return verdict(Status.PASS, "FP8: every element correct")


@record_check(
    "framework.p2p",
    "frameworks.p2p",
    PeerValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
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
        pairs = [f"{names[one]} to {names[other]}" for one, other in values.wrong if max(one, other) < number]
        return failed(f"wrong data:  {listed(pairs) or 'between GPUs'}")
    refused = [
        f"{names[one]}-{names[other]}"
        for one in range(number)
        for other in range(one + 1, number)
        if not values.access[one][other]
    ]
    total = number * (number - 1) // 2
    verdict = partial(CheckResult, expected=total, measured=total - len(refused), unit="pairs")
    links = node.peer_access.document.links if node.peer_access and node.peer_access.document else {}
    allowed = [pair for pair in refused if _says_ok(links, pair)]
    if allowed:
        what = f"nvidia-smi reports peer access for {listed(allowed)}, CUDA in the container denies it"
        return verdict(Status.WARN, what)
    through = f", {len(refused)} of {total} through the host" if refused else " directly"
    return verdict(Status.PASS, f"copies between {counted(number, 'GPU')} arrive{through}")


def _says_ok(links: Mapping[str, Mapping[str, str]], pair: str) -> bool:
    one, _, other = pair.upper().partition("-")
    return links.get(one, {}).get(other) == "OK"


@record_check(
    "framework.collective",
    "frameworks.collective",
    CollectiveValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="An NCCL all-reduce over all GPUs of the container returns correct sums; its transport is reported.",
    remedy="NCCL_DEBUG=INFO shows which connection breaks. Shared memory that is full: docker run --shm-size=8g; "
    "NVLink: nvlink.state and fabric.manager; PCIe: host.acs and host.iommu. " + SEE_ERROR,
    state="drain",
    actions=("fix_configuration", "reset_gpu", "open_support_case"),
)
def collective(values: CollectiveValues) -> CheckResult:
    verdict = partial(CheckResult, expected=0, measured=values.wrong, unit="elements")
    if values.ranks < 2:
        raise Undetermined("a single process reduces nothing")
    if values.wrong:
        return verdict(Status.FAIL, f"all-reduce over {counted(values.ranks, 'GPU')}: {values.wrong} sums wrong")
    ways = listed([f"{number} by {way}" for way, number in values.transports.items()]) or "not in its log"
    switches = ", NVLink SHARP" if values.nvls else ""
    return verdict(
        Status.PASS, f"all-reduce over {counted(values.ranks, 'GPU')} is correct; connections: {ways}{switches}"
    )


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
def tensorflow(values: TensorflowRunValues, record: Record, node: NodeFacts) -> Iterator[CheckResult]:
    verdict = partial(CheckResult, measured=values.count, unit="GPUs")
    if values.count == 0:
        pointer = explained(node, OF_THE_IMAGE)
        if node.simulated:
            raise Skip("TensorFlow finds no GPU, and the GPUs are simulated")
        if pointer:
            raise Skip(f"TensorFlow finds no GPU ({pointer})")
        if _beside_pytorch(node):
            what = "TensorFlow is a CPU build, while PyTorch uses the GPUs"
            raise Skip(f"{what}{where(record)}")
        yield verdict(Status.FAIL, f"TensorFlow finds no GPU{where(record)}")
    elif values.count < (expected := _of_one_process(node)):
        what = f"TensorFlow finds {values.count} of {counted(expected, 'GPU')}{where(record)}"
        yield verdict(Status.FAIL, what, expected=expected)
    elif values.max_error != 0:
        yield verdict(Status.FAIL, f"the product of whole numbers is off by {values.max_error:g}")
    elif values.memory_growth is not True:
        yield verdict(Status.FAIL, "TensorFlow allocates all memory at once although memory growth is set")
    elif values.compute_dtype != "float16":
        yield verdict(Status.FAIL, f"mixed_float16 computes in {values.compute_dtype}")
    else:
        mode = f"thread mode {values.thread_mode}" if values.thread_mode else "no thread mode set"
        yield verdict(Status.PASS, f"{counted(values.count, 'GPU')}, memory growth, mixed_float16, {mode}")


def _of_one_process(node: NodeFacts) -> int:
    """Return how many devices a single process can use: every whole GPU that computed, one if all are MIG devices."""
    found = [
        values
        for record in of(node, "gpus.kernel")
        if isinstance(values := values_of(record, KernelValues), KernelValues)
    ]
    whole = sum(1 for values in found if values.mig is None and values.wrong == 0)
    return whole or min(1, len(found))


def _beside_pytorch(node: NodeFacts) -> bool:
    """Return whether the image is one of PyTorch: its TensorFlow (mostly for TensorBoard) is not built for GPUs."""
    build, torch = known(node, "versions.tensorflow", TensorflowValues), known(node, "versions.torch", TorchValues)
    return build is not None and torch is not None and not build.built_with_cuda and torch.cuda is not None


@record_check(
    "framework.dali",
    "frameworks.dali",
    DaliValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="DALI, if installed in the image, loads data onto the GPU.",
    remedy="Install the DALI of the image's CUDA: nvidia-dali-cuda120, nvidia-dali-cuda130. " + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def dali(values: DaliValues) -> CheckResult:
    if values.samples <= 0:
        return failed(f"DALI {values.version} returned an empty batch", measured=values.samples)
    return passed(f"DALI {values.version} puts {counted(values.samples, 'sample')} on the GPU")
