"""Records of workloads in a container, and the model of the values of each kind of record."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from gpunode.facts.models import Fact, RareFact
from gpunode.frozen import invalid_field

SCHEMA: Literal["gpunode.record/1"] = "gpunode.record/1"
NAME = r"^[a-z][a-z0-9-]*(\.[a-z][a-z0-9-]*)?$"
"""``TEST`` or ``TEST.PART``."""
MOST_MEASURED = 1e100
"""No measured number is larger; the product and the ratio of two are still finite."""


class RecordContainer(Fact):
    """The container in which a record was written."""

    image: str
    engine: str | None = None
    """``docker 28.5.1``."""
    gpus: Literal["cdi", "runtime", "none"] | None = None
    """How the engine was asked for GPUs. None: unknown."""


class Record(Fact):
    """One result of a workload on a node.

    Exactly one of four: it ran, it broke (``error``), it was left out (``skipped``), or its result is not known
    (``undetermined``).
    """

    model_config = ConfigDict(populate_by_name=True)

    record: str = Field(pattern=NAME)
    """``TEST`` or ``TEST.PART``: ``container``, ``versions.torch``, ``frameworks.compile``."""
    schema_name: Literal["gpunode.record/1"] = Field(SCHEMA, alias="schema")
    device: Literal["cuda", "cpu"]
    """The device that was used. A record of ``cpu`` is not evidence about a GPU."""
    component: str = "node"
    """``cuda:3`` is the container's own order; ``values.uuid`` and ``values.pci_bus_id`` identify the GPU."""
    seconds: float = Field(ge=0)
    values: dict[str, Any] = Field(default_factory=dict)
    """The keys contain the units. None: not collected."""
    error: str | None = None
    skipped: str | None = None
    """Why it was left out: it does not apply."""
    undetermined: str | None = None
    """Why the result is unknown although the record applies: the time ran out, another process used the GPU, the
    image's own framework cannot be loaded."""
    container: RecordContainer | None = None
    """None: it ran on the host itself."""
    simulated: bool = False

    @model_validator(mode="after")
    def _has_one_outcome(self) -> Self:
        if sum(reason is not None for reason in (self.error, self.skipped, self.undetermined)) > 1:
            raise ValueError("only one of error, skipped and undetermined can be there")
        return self

    @field_validator("values")
    @classmethod
    def _has_measured_numbers(cls, values: object) -> object:
        waiting: list[Any] = [values]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list):
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int | float) and not -MOST_MEASURED <= value <= MOST_MEASURED:
                raise ValueError(f"a number beyond {MOST_MEASURED:g}, infinity or NaN")
        return values


class MalformedRecord(Record):
    """A malformed result, under the name of its record; it has no usable values.

    It is a record of its own, so that the results of the other records stand, and no check treats this one as absent.
    """

    malformed: str
    """The result and its defect, in one line."""


class Values(RareFact):
    """Base of the ``values`` of a record. Unknown keys are ignored: images may be newer than this program."""

    model_config = ConfigDict(extra="ignore")


AnyValues = TypeVar("AnyValues", bound=Values)
Text = Annotated[str, Field(max_length=500)]
Limit = Annotated[int, Field(ge=-1)]


def values_of(record: Record, kind: type[AnyValues]) -> AnyValues | str:
    """Return a record's values as the model of their kind, else the reason in one line."""
    if isinstance(record, MalformedRecord):
        return record.malformed
    try:
        return kind.model_validate(record.values)
    except ValidationError as err:
        field, why = invalid_field(err, "values")
        return f"record {record.record}: {field}: {why}"


class ImageLibrary(Values):
    """A library file in the image: a CUDA runtime, cuDNN, NCCL."""

    name: Text
    """``libcudart``, ``libcudnn``, ``libnccl``."""
    path: Text
    version: Text | None = None
    """From the file's name, if it contains one."""


class BuildTools(Values):
    """The image's programs that compile extensions of PyTorch (DeepSpeed, flash-attn)."""

    cuda_home: Text | None = None
    """The toolkit that PyTorch would use: CUDA_HOME, that of nvcc in PATH, ``/usr/local/cuda``."""
    nvcc: Text | None = None
    """Version of the compiler there: ``12.8``."""
    nvcc_in_path: Text | None = None
    """Version of the one in PATH."""
    compiler: Text | None = None
    """Version of the C++ compiler."""
    ninja: bool = False
    libaio: bool = False
    """True with header and library."""


class SystemValues(Values):
    """``versions.system``: the image, and the files of the host that it received."""

    python: Text
    os: Text | None = None
    module_version: Text | None = None
    """Version of the kernel module, from ``/proc/driver/nvidia/version`` in the container."""
    driver_libraries: dict[str, Text | None] = Field(default_factory=dict)
    """``{"libcuda.so.1": "580.95.05"}``: the libraries that the linker finds in the container, by the names of their
    files."""
    cuda: Text | None = None
    """The image's CUDA version as declared by ``CUDA_VERSION`` or ``/usr/local/cuda/version.json``."""
    libraries: tuple[ImageLibrary, ...] = ()
    devices: tuple[Text, ...] = ()
    """``/dev/nvidia*``."""
    build: BuildTools | None = None
    """None: an older payload."""


class LimitValues(Values):
    """``versions.limits``: of the payload's container. ``defaults.limits``: of one that requests none. -1: no limit."""

    shm_bytes: Limit | None = None
    memlock_bytes: Limit | None = None
    stack_bytes: Limit | None = None
    nofile: Limit | None = None
    cpus: Limit | None = None


class InsideGpu(Values):
    """One GPU as NVML, CUDA or PyTorch show it in the container."""

    index: int
    name: Text | None = None
    uuid: Text | None = None
    pci_bus_id: Text | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    memory_mib: int | None = None


class MigDevice(Values):
    """A MIG device, as NVML shows it in the container."""

    index: int
    """Index of its GPU."""
    name: Text | None = None
    uuid: Text | None = None
    memory_mib: int | None = None


class NvmlGpu(InsideGpu):
    """One GPU as NVML shows it in the container."""

    result: int = 0
    """NVML's return code for its handle: 15 for a GPU that is lost."""
    result_name: Text | None = None
    memory_used_mib: int | None = None
    mig_mode: bool | None = None
    """None: the GPU does not support MIG, or the library does not support the query."""
    mig_devices: tuple[MigDevice, ...] = ()
    """The MIG devices that this container may use."""


class NvmlValues(Values):
    """``versions.nvml``: the GPUs and versions that NVML shows in the container."""

    library: Text
    """The file that was loaded."""
    result: int
    """NVML's return code of its initialization: 0 is success, 18 a library that does not match the module."""
    result_name: Text | None = None
    driver_version: Text | None = None
    cuda_version: Text | None = None
    count: int | None = None
    gpus: tuple[NvmlGpu, ...] = ()


class CudaValues(Values):
    """``versions.cuda``: the driver's API, libcuda."""

    library: Text
    version: Text | None = None
    """From the file's name."""
    result: int
    """Return code of CUDA's ``cuInit``: 803 the library does not match the module, 804 no forward compatibility with
    this GPU, 802 the fabric is not ready."""
    result_name: Text | None = None
    cuda_version: Text | None = None
    """The newest CUDA that this library supports."""
    count: int | None = None
    forward_compat: bool = False
    """True if the library is from cuda-compat, not from the host: by its folder, or because it is newer than the module
    and works."""
    gpus: tuple[InsideGpu, ...] = ()


class TorchValues(Values):
    """``versions.torch``: PyTorch in the image."""

    version: Text
    cuda: Text | None = None
    """None: a build for the CPU."""
    cudnn: Text | None = None
    nccl: Text | None = None
    architectures: tuple[Text, ...] = ()
    """The targets that the wheel's kernels were compiled for: ``sm_90``, ``compute_120`` (PTX)."""
    available: bool
    unavailable: Text | None = None
    """Why a CUDA build uses no GPU, as PyTorch prints it."""
    count: int
    """Before CUDA starts: the number of GPUs by NVML, also in a process that has a single MIG device."""
    gpus: tuple[InsideGpu, ...] = ()


class TensorflowValues(Values):
    """``versions.tensorflow``: TensorFlow in the image."""

    version: Text
    built_with_cuda: bool
    cuda: Text | None = None
    cudnn: Text | None = None
    architectures: tuple[Text, ...] = ()
    """The targets that it was compiled for: ``sm_80``, ``compute_90`` (PTX)."""
    count: int


class DeviceIdentity(Values):
    """The identity of the GPU or MIG device that a record is about."""

    uuid: Text | None = None
    """UUID of the device itself: ``GPU-…``, or ``MIG-…``."""
    gpu_uuid: Text | None = None
    """UUID of the GPU that it is, or is a part of."""
    mig: int | None = None
    """Number of the MIG device on its GPU; None: the whole GPU."""
    pci_bus_id: Text | None = None


class KernelValues(DeviceIdentity):
    """``gpus.kernel``, one per device: a kernel that the driver compiled from PTX, and its result."""

    name: Text | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    memory_mib: int | None = None
    elements: int
    wrong: int
    """Number of wrong elements."""
    jit_seconds: float


class TensorValues(DeviceIdentity):
    """``frameworks.tensor``, one per device: a product computed there, compared with the processor's."""

    name: Text | None = None
    allocated_bytes: int | None = None
    """Growth of the device's memory use."""
    max_error: float


class StepValues(Values):
    """``frameworks.amp``: training steps in mixed precision."""

    dtype: Text
    losses: tuple[float | None, ...]
    """None: NaN, or infinite."""


class MatmulValues(Values):
    """``frameworks.matmul``: the same large product several times, every element compared with the processor's."""

    dtype: Text
    size: int
    rounds: int
    wrong: int
    """Wrong elements of all rounds."""
    seconds: float
    """Of the fastest round."""


class Fp8Values(Values):
    """``frameworks.fp8``: a product in 8-bit floating point, every element compared with the processor's."""

    wrong: int


class PeerValues(Values):
    """``frameworks.p2p``: copies from every GPU to every other one."""

    uuids: tuple[Text, ...]
    access: tuple[tuple[bool, ...], ...]
    """``access[i][j]``: GPU i can access the memory of GPU j directly, without the host."""
    wrong: tuple[tuple[int, int], ...] = ()
    """Pairs with a copy that arrived with different content."""


class CollectiveValues(Values):
    """``frameworks.collective``: an all-reduce over all GPUs."""

    backend: Literal["nccl", "gloo"]
    ranks: int
    wrong: int
    """Wrong elements of all ranks."""
    seconds: float
    """Of the slowest rank, for the largest message."""
    transports: dict[str, int] = Field(default_factory=dict)
    """Connections by the transport that NCCL's log names: ``{"P2P/CUMEM": 224}``; empty: its log names none."""
    nvls: bool = False
    """True if NCCL may use the switches for reductions (NVLink SHARP)."""
    warning: Text | None = None
    """The first warning that NCCL wrote."""


class CompileValues(Values):
    """``frameworks.compile``: a compiled function, compared with the plain one."""

    compute_capability: Text | None = None
    max_error: float
    compile_seconds: float
    cached_seconds: float | None = None
    """The same in another process, with the first one's cache. None: it did not end well."""


class ConvolutionValues(Values):
    """``frameworks.cudnn``: a convolution and its gradient, compared with the processor's."""

    cudnn: Text | None = None
    enabled: bool
    max_error: float


class DataloaderValues(Values):
    """``frameworks.dataloader``: a DataLoader with workers."""

    workers: int
    batches: int
    pinned: bool
    samples_per_second: float


class MemoryValues(Values):
    """``frameworks.memory``, one per device: most of its memory written and read back."""

    total_mib: int
    free_mib: int
    peak_mib: int
    reserved_mib: int
    tested_mib: int
    wrong: int
    """Words that were read back with different content."""


class TensorflowRunValues(Values):
    """``frameworks.tensorflow``: a TensorFlow run."""

    count: int
    memory_growth: bool | None = None
    """None: there is no GPU to query."""
    compute_dtype: Text
    """Of the policy ``mixed_float16``."""
    thread_mode: Text | None = None
    """``TF_GPU_THREAD_MODE`` in effect."""
    max_error: float


class TensorflowTrainingValues(Values):
    """``frameworks.tensorflow-training``: MirroredStrategy over all GPUs, XLA, and tf.data."""

    ranks: Annotated[int, Field(ge=1)]
    """GPUs; on a processor: logical devices."""
    parameters: Annotated[int, Field(ge=1)]
    wrong: Annotated[int, Field(ge=0)]
    """Gradients of all devices that differ from those of one device with all data."""
    max_gradient_error: Annotated[float, Field(ge=0)]
    """Relative to the largest gradient."""
    single_seconds: Annotated[float, Field(gt=0)]
    """A step of one device, which has the same number of samples."""
    step_seconds: Annotated[float, Field(gt=0)]
    efficiency: Annotated[float, Field(gt=0, le=1)]
    """``single_seconds`` / ``step_seconds``: 1 if n devices do n times the work of one."""
    xla_error: Text | None = None
    """Why a function with ``jit_compile=True`` did not run."""
    xla_max_error: float | None = None
    xla_seconds: float | None = None
    """Of the first call, which compiles."""
    input_samples_per_second: Annotated[float, Field(gt=0)]
    """tf.data with one call of ``map`` at a time."""
    parallel_samples_per_second: Annotated[float, Field(gt=0)]
    """With ``AUTOTUNE`` and ``prefetch``."""
    cpus: Annotated[int, Field(ge=1)]
    intra_op_threads: int
    """0: TensorFlow chooses."""
    inter_op_threads: int
    thread_mode: Text | None = None
    """``TF_GPU_THREAD_MODE`` in effect."""
    thread_count: Text | None = None


class DaliValues(Values):
    """``frameworks.dali``: a DALI pipeline."""

    version: Text
    samples: int


class ContainerValues(Values):
    """``container``: the start of the container by the launcher. If it was left out or failed, ``skipped`` or ``error``
    has the reason."""

    complete: bool | None = None
    """True if the payload printed its last line."""
    busy: tuple[Text, ...] = ()
    """GPUs that were not passed to the container, with process and user: ``gpu3: python3 (pid 4242, alice)``."""
    security: tuple[Text, ...] = ()
    """The confinement of the engine's containers, or of the engine itself: ``selinux``, ``apparmor``, ``seccomp``,
    ``rootless``."""
    gpus: int | None = None
    """Number of GPUs that were passed to the container."""
    uuids: tuple[Text, ...] | None = None
    """UUIDs of the GPUs that were passed to the container, as on the host. None: not recorded."""
