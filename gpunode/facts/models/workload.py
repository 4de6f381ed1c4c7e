"""What a workload found inside a container: the record, and what the values of each kind of record mean."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from gpunode.facts.models.base import Fact

SCHEMA: Literal["gpunode.record/1"] = "gpunode.record/1"
NAME = r"^[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)?$"
"""``TEST`` or ``TEST.PART``."""


class RecordContainer(Fact):
    """The container that a record comes from."""

    image: str
    engine: str | None = None
    """``docker 28.5.1``."""
    gpus: Literal["cdi", "runtime", "none"] | None = None
    """How the engine was asked for GPUs. None: not known."""


class Record(Fact):
    """One thing that a workload tried on a node.

    Exactly one of four: it ran, it broke (``error``), it was left out (``skipped``), or its result is not known
    (``undetermined``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    record: str = Field(pattern=NAME)
    """``TEST`` or ``TEST.PART``: ``container``, ``versions.torch``, ``frameworks.compile``."""
    schema_name: Literal["gpunode.record/1"] = Field(SCHEMA, alias="schema")
    device: Literal["cuda", "cpu"]
    """What it really ran on. A record of ``cpu`` says nothing about a GPU."""
    component: str = "node"
    """``cuda:3`` is the container's own order; ``values.uuid`` and ``values.pci_bus_id`` say which GPU that is."""
    seconds: float = Field(ge=0)
    values: dict[str, Any] = Field(default_factory=dict)
    """Units stand in the keys. None: it was not seen."""
    error: str | None = None
    skipped: str | None = None
    """Why it was left out: it does not apply here."""
    undetermined: str | None = None
    """Why nothing is known of it although it applies: no time was left, another process took the GPU, the image's own
    framework cannot be loaded."""
    container: RecordContainer | None = None
    """None: it ran on the host itself."""
    simulated: bool = False

    @model_validator(mode="after")
    def _has_one_outcome(self) -> Self:
        if sum(reason is not None for reason in (self.error, self.skipped, self.undetermined)) > 1:
            raise ValueError("only one of error, skipped and undetermined can be there")
        return self


class MalformedRecord(Record):
    """A result that is no record, under the name that it has: it tells nothing, and its values cannot be had.

    It is a record of its own, so that what was judged of the others stands, and no check takes it for absent.
    """

    malformed: str
    """Which result, and what is wrong with it, in one line."""


class Values(Fact):
    """Base of what a record's ``values`` hold. Keys that are not known here are let be: images may be newer than we."""

    model_config = ConfigDict(frozen=True, extra="ignore")


AnyValues = TypeVar("AnyValues", bound=Values)
Text = Annotated[str, Field(max_length=500)]
Limit = Annotated[int, Field(ge=-1)]


def values_of(record: Record, kind: type[AnyValues]) -> AnyValues | str:
    """A record's values as their kind has them, else the reason in one line."""
    if isinstance(record, MalformedRecord):
        return record.malformed
    try:
        return kind.model_validate(record.values)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "values"
        return f"record {record.record}: {place}: {first['msg']}"


class ImageLibrary(Values):
    """A library file in the image: a CUDA runtime, cuDNN, NCCL."""

    name: Text
    """``libcudart``, ``libcudnn``, ``libnccl``."""
    path: Text
    version: Text | None = None
    """From the file's name, as far as it tells."""


class SystemValues(Values):
    """``versions.system``: what the image is, and what it was given of the host."""

    python: Text
    os: Text | None = None
    module_version: Text | None = None
    """Of the kernel module, as ``/proc/driver/nvidia/version`` has it inside."""
    driver_libraries: dict[str, Text | None] = Field(default_factory=dict)
    """``{"libcuda.so.1": "580.95.05"}``: what the linker gives a program inside, by its file's name."""
    cuda: Text | None = None
    """The image's CUDA by its own words: ``CUDA_VERSION``, ``/usr/local/cuda/version.json``."""
    libraries: tuple[ImageLibrary, ...] = ()
    devices: tuple[Text, ...] = ()
    """``/dev/nvidia*``."""


class LimitValues(Values):
    """``versions.limits``: of the payload's container. ``defaults.limits``: of one that asks for none. -1: no limit."""

    shm_bytes: Limit | None = None
    memlock_bytes: Limit | None = None
    stack_bytes: Limit | None = None
    nofile: Limit | None = None
    cpus: Limit | None = None


class InsideGpu(Values):
    """One GPU as NVML, CUDA or PyTorch show it inside."""

    index: int
    name: Text | None = None
    uuid: Text | None = None
    pci_bus_id: Text | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    memory_mib: int | None = None


class MigDevice(Values):
    """A part of a GPU that computes by itself, as NVML shows it inside."""

    index: int
    """Of its GPU."""
    name: Text | None = None
    uuid: Text | None = None
    memory_mib: int | None = None


class NvmlGpu(InsideGpu):
    """One GPU as NVML shows it inside."""

    result: int = 0
    """NVML's return code for its handle: 15 a GPU that is lost."""
    result_name: Text | None = None
    memory_used_mib: int | None = None
    mig_mode: bool | None = None
    """None: it cannot be divided, or the library does not know of it."""
    mig_devices: tuple[MigDevice, ...] = ()
    """Those that this container may use."""


class NvmlValues(Values):
    """``versions.nvml``."""

    library: Text
    """The file that was loaded."""
    result: int
    """NVML's own return code of its start: 0 is good, 18 a library that does not match the module."""
    result_name: Text | None = None
    driver_version: Text | None = None
    cuda_version: Text | None = None
    count: int | None = None
    gpus: tuple[NvmlGpu, ...] = ()


class CudaValues(Values):
    """``versions.cuda``: the driver's own interface, libcuda."""

    library: Text
    version: Text | None = None
    """From the file's name."""
    result: int
    """CUDA's own return code of ``cuInit``: 803 the library does not match the module, 804 no forward compatibility
    with this GPU, 802 the fabric is not ready."""
    result_name: Text | None = None
    cuda_version: Text | None = None
    """The newest CUDA that this library runs."""
    count: int | None = None
    forward_compat: bool = False
    """The library is one of cuda-compat's, not the host's: by its folder, or newer than the module and at work."""
    gpus: tuple[InsideGpu, ...] = ()


class TorchValues(Values):
    """``versions.torch``."""

    version: Text
    cuda: Text | None = None
    """None: a build for the CPU."""
    cudnn: Text | None = None
    nccl: Text | None = None
    architectures: tuple[Text, ...] = ()
    """What the wheel's kernels were compiled for: ``sm_90``, ``compute_120`` (PTX)."""
    available: bool
    unavailable: Text | None = None
    """Why a build for CUDA uses no GPU, in PyTorch's own words."""
    count: int
    """Before CUDA starts: NVML's count of cards, also where a process has a single MIG device."""
    gpus: tuple[InsideGpu, ...] = ()


class TensorflowValues(Values):
    """``versions.tensorflow``."""

    version: Text
    built_with_cuda: bool
    cuda: Text | None = None
    cudnn: Text | None = None
    architectures: tuple[Text, ...] = ()
    """What it was compiled for: ``sm_80``, ``compute_90`` (PTX)."""
    count: int


class DeviceIdentity(Values):
    """Which device a record of one GPU or MIG device is about."""

    uuid: Text | None = None
    """Its own: ``GPU-…``, or ``MIG-…``."""
    gpu_uuid: Text | None = None
    """Of the GPU that it is, or is a part of."""
    mig: int | None = None
    """Of its GPU; None: the whole GPU."""
    pci_bus_id: Text | None = None


class KernelValues(DeviceIdentity):
    """``gpus.kernel``, one a device: a kernel that the driver compiled from PTX, and what it computed."""

    name: Text | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    memory_mib: int | None = None
    elements: int
    wrong: int
    """Of the elements."""
    jit_seconds: float


class TensorValues(DeviceIdentity):
    """``frameworks.tensor``, one a device: a product computed there, beside the processor's."""

    name: Text | None = None
    allocated_bytes: int | None = None
    """What the device's memory grew by."""
    max_error: float


class StepValues(Values):
    """``frameworks.amp``: training steps in mixed precision."""

    dtype: Text
    losses: tuple[float | None, ...]
    """None: not a number, or infinite."""


class MatmulValues(Values):
    """``frameworks.matmul``: the same large product several times, every element compared with the processor's."""

    dtype: Text
    size: int
    rounds: int
    wrong: int
    """Elements of all rounds."""
    seconds: float
    """Of the fastest round."""


class Fp8Values(Values):
    """``frameworks.fp8``: a product in 8-bit floating point, every element compared with the processor's."""

    wrong: int


class PeerValues(Values):
    """``frameworks.p2p``: copies from every GPU to every other one."""

    uuids: tuple[Text, ...]
    access: tuple[tuple[bool, ...], ...]
    """``access[i][j]``: GPU i reaches the memory of GPU j without the host in between."""
    wrong: tuple[tuple[int, int], ...] = ()
    """Pairs whose copy arrived with another content."""


class CollectiveValues(Values):
    """``frameworks.collective``: an all-reduce over all GPUs."""

    backend: Literal["nccl", "gloo"]
    ranks: int
    wrong: int
    """Elements of all ranks."""
    seconds: float
    """Of the slowest rank, for the largest message."""
    transports: dict[str, int] = Field(default_factory=dict)
    """Connections by the transport that NCCL's log names: ``{"P2P/CUMEM": 224}``; empty: its log names none."""
    nvls: bool = False
    """NCCL may have the switches sum (NVLink SHARP)."""
    warning: Text | None = None
    """The first that NCCL wrote."""


class CompileValues(Values):
    """``frameworks.compile``: a compiled function beside the plain one."""

    compute_capability: Text | None = None
    max_error: float
    compile_seconds: float


class ConvolutionValues(Values):
    """``frameworks.cudnn``: a convolution and its gradient, beside the processor's."""

    cudnn: Text | None = None
    enabled: bool
    max_error: float


class DataloaderValues(Values):
    """``frameworks.dataloader``."""

    workers: int
    batches: int
    pinned: bool
    samples_per_second: float


class MemoryValues(Values):
    """``frameworks.memory``, one a device: most of it written and read back."""

    total_mib: int
    free_mib: int
    peak_mib: int
    reserved_mib: int
    tested_mib: int
    wrong: int
    """Words that came back with another content."""


class TensorflowRunValues(Values):
    """``frameworks.tensorflow``."""

    count: int
    memory_growth: bool | None = None
    """None: no GPU to ask it of."""
    compute_dtype: Text
    """Of the policy ``mixed_float16``."""
    thread_mode: Text | None = None
    """``TF_GPU_THREAD_MODE`` in effect."""
    max_error: float


class DaliValues(Values):
    """``frameworks.dali``."""

    version: Text
    samples: int


class ContainerValues(Values):
    """``container``: how the launcher started it. Left out or broken: the reason is in ``skipped`` or ``error``."""

    complete: bool | None = None
    """The payload came to its own last line."""
    busy: tuple[Text, ...] = ()
    """GPUs that were not handed in, with process and user: ``gpu3: python3 (pid 4242, alice)``."""
    security: tuple[Text, ...] = ()
    """What confines the engine's containers, or itself: ``selinux``, ``apparmor``, ``seccomp``, ``rootless``."""
    gpus: int | None = None
    """How many GPUs the container was given."""
    uuids: tuple[Text, ...] | None = None
    """Of the GPUs that it was given, as the host has them. None: not recorded."""
