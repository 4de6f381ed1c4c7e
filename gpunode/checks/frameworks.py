"""Checks on frameworks in a container: do they compute on every GPU what they should."""

from collections.abc import Iterator
from functools import partial

from gpunode.checks.registry import Status, Verdict
from gpunode.checks.thresholds import Threshold
from gpunode.checks.words import counted
from gpunode.checks.workload import component, explained, record_check, where
from gpunode.facts.models.workload import (
    CompileValues,
    ConvolutionValues,
    DaliValues,
    DataloaderValues,
    MemoryValues,
    Record,
    StepValues,
    TensorflowRunValues,
    TensorValues,
)
from gpunode.facts.node import NodeFacts

MAX_ERROR = Threshold(
    "framework.max-error",
    1e-3,
    "absolute",
    "Sums of some hundred products of numbers around 1 in single precision are off from double precision by more: a "
    "failure.",
    source="our choice: far above rounding, far below a wrong product",
)
MEMORY_MISSING = Threshold(
    "framework.memory.missing-most",
    0.10,
    "of the total",
    "Driver and CUDA context take a part of what nvidia-smi calls the total; more is a failure.",
    source="our choice",
    most=1,
)
OF_THE_IMAGE = ("container.library", "container.gpus", "container.cuda", "framework.wheel")
"""What brings down everything that computes on a GPU."""
SEE_ERROR = "The message is the framework's own: search for it; the same image on another node tells node from image."


@record_check(
    "framework.tensor",
    "frameworks.tensor",
    TensorValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="A product of matrices is computed on every GPU, lies there, and is exactly right.",
    remedy="A wrong result on one GPU alone is a fault of that GPU: take it out of use, dcgmi diag -r 3 looks closer. "
    + SEE_ERROR,
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
)
def tensor(values: TensorValues, record: Record, node: NodeFacts) -> Verdict:
    told = partial(Verdict, component=component(node, record, values), expected=0.0, measured=values.max_error)
    if not values.allocated_bytes:
        return told(Status.FAIL, f"the tensor took no memory of {record.component}: it does not lie there")
    if values.max_error != 0:
        return told(Status.FAIL, f"the product of whole numbers is off by {values.max_error:g}")
    return told(Status.PASS, f"computes on {record.component} ({values.name or 'GPU'})")


@record_check(
    "framework.amp",
    "frameworks.amp",
    StepValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="Training steps in mixed precision lower the loss, and no number is lost on the way.",
    remedy=SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def amp(values: StepValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    losses = [loss for loss in values.losses if loss is not None]
    told = partial(Verdict, measured=losses[-1] if losses else None, unit="loss")
    if not values.losses:
        return Verdict(Status.ERROR, "no step was recorded")
    if len(losses) < len(values.losses):
        return told(Status.FAIL, f"{values.dtype}: the loss is no number in {len(values.losses) - len(losses)} steps")
    if not losses[-1] < losses[0]:
        what = f"{values.dtype}: {counted(len(losses), 'step')} did not lower the loss"
        return told(Status.FAIL, f"{what} ({losses[0]:.3f} to {losses[-1]:.3f}){where(record)}")
    return told(Status.PASS, f"{values.dtype}: {losses[0]:.3f} to {losses[-1]:.3f} in {counted(len(losses), 'step')}")


@record_check(
    "framework.compile",
    "frameworks.compile",
    CompileValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="torch.compile makes code for the GPU that gives what the plain function gives.",
    remedy="The image needs a C compiler (apt-get install gcc) and the Triton of its PyTorch. " + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(MAX_ERROR,),
)
def compiled(values: CompileValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    told = partial(Verdict, expected=f"at most {MAX_ERROR.value}", measured=values.max_error)
    if values.max_error > MAX_ERROR.value:
        return told(Status.FAIL, f"the compiled function is off by {values.max_error:g}{where(record)}")
    return told(Status.PASS, f"compiled for {values.compute_capability} in {values.compile_seconds:.1f} s")


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
def convolution(values: ConvolutionValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    told = partial(Verdict, expected=f"at most {MAX_ERROR.value}", measured=values.max_error)
    if not values.enabled:
        return told(Status.FAIL, f"PyTorch does not use cuDNN{where(record)}")
    if values.max_error > MAX_ERROR.value:
        return told(Status.FAIL, f"the convolution is off by {values.max_error:g}")
    return told(Status.PASS, f"cuDNN {values.cudnn} computes a convolution and its gradient")


@record_check(
    "framework.dataloader",
    "frameworks.dataloader",
    DataloaderValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="Worker processes hand batches to the GPU over shared memory, pinned.",
    remedy="'No space left on device' and 'Bus error' are shared memory that is full: docker run --shm-size=8g. "
    + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def dataloader(values: DataloaderValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    told = partial(Verdict, measured=values.samples_per_second, unit="samples/s")
    if values.batches == 0:
        return Verdict(Status.ERROR, "no batch was recorded")
    if not values.pinned:
        return told(Status.FAIL, "batches came without being pinned", remedy="docker run --ulimit memlock=-1.")
    words = f"{counted(values.batches, 'batch', 'batches')} by {counted(values.workers, 'worker')}"
    return told(Status.PASS, f"{words}, pinned, {values.samples_per_second:.0f} samples/s")


@record_check(
    "framework.memory",
    "frameworks.memory",
    MemoryValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="PyTorch has the memory that the GPU has, and its allocator counts what it hands out.",
    remedy="Something else holds the GPU's memory, or the container has a slice of it (MIG, vGPU): nvidia-smi tells.",
    state="observe",
    actions=("reset_gpu",),
    thresholds=(MEMORY_MISSING,),
)
def memory(values: MemoryValues, record: Record, node: NodeFacts) -> Verdict:
    document = (node.smi.document if node.smi else None) or {}
    whole = {gpu.get("memory_total_mib") for gpu in document.get("gpus", ())} - {None}
    told = partial(Verdict, component=record.component, measured=values.total_mib, unit="MiB")
    numbers = (
        f"{values.free_mib} of {values.total_mib} MiB free, peak {values.peak_mib}, "
        f"{values.fragmentation_percent:g} % of what the allocator holds unused"
    )
    if values.peak_mib <= 0 or values.reserved_mib < values.peak_mib:
        what = f"the allocator counts a peak of {values.peak_mib} of {values.reserved_mib} MiB"
        return told(Status.FAIL, what, remedy=SEE_ERROR)
    if len(whole) == 1:
        total = float(whole.pop())
        told = partial(told, expected=total)
        if values.total_mib < total * (1 - MEMORY_MISSING.value):
            return told(Status.FAIL, f"PyTorch has {values.total_mib} MiB, the GPU has {total:.0f}")
    return told(Status.PASS, numbers)


@record_check(
    "framework.tensorflow",
    "frameworks.tensorflow",
    TensorflowRunValues,
    after=OF_THE_IMAGE,
    means="TensorFlow sees the GPUs, takes memory as it needs it, computes in mixed_float16, and computes right.",
    remedy="pip install 'tensorflow[and-cuda]' brings the CUDA and cuDNN of that TensorFlow; 0 GPUs is most often a "
    "missing one of those.",
    state="observe",
    actions=("fix_configuration",),
)
def tensorflow(values: TensorflowRunValues, record: Record, node: NodeFacts) -> Iterator[Verdict]:
    told = partial(Verdict, measured=values.count, unit="GPUs")
    if values.count == 0:
        pointer = explained(node, OF_THE_IMAGE)
        if node.simulated:
            yield Verdict(Status.SKIP, "TensorFlow sees no GPU, and the GPUs are simulated")
        elif pointer:
            yield Verdict(Status.SKIP, f"TensorFlow sees no GPU ({pointer})")
        else:
            yield told(Status.FAIL, f"TensorFlow sees no GPU{where(record)}")
    elif values.max_error != 0:
        yield told(Status.FAIL, f"the product of whole numbers is off by {values.max_error:g}")
    elif values.memory_growth is not True:
        yield told(Status.FAIL, "TensorFlow takes all memory at once although growth is wished")
    elif values.compute_dtype != "float16":
        yield told(Status.FAIL, f"mixed_float16 computes in {values.compute_dtype}")
    else:
        mode = f"thread mode {values.thread_mode}" if values.thread_mode else "no thread mode set"
        yield told(Status.PASS, f"{counted(values.count, 'GPU')}, memory growth, mixed_float16, {mode}")


@record_check(
    "framework.dali",
    "frameworks.dali",
    DaliValues,
    on_gpu=True,
    after=OF_THE_IMAGE,
    means="DALI puts data on the GPU, where it is in the image.",
    remedy="Install the DALI of the image's CUDA: nvidia-dali-cuda120, nvidia-dali-cuda130. " + SEE_ERROR,
    state="observe",
    actions=("fix_configuration",),
)
def dali(values: DaliValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    if values.samples <= 0:
        return Verdict(Status.FAIL, f"DALI {values.version} gave an empty batch", measured=values.samples)
    return Verdict(Status.PASS, f"DALI {values.version} puts {counted(values.samples, 'sample')} on the GPU")
