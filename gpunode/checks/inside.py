"""Checks on the container itself: it runs, has the GPUs that were passed to it, and the engine's default limits.

The payload's own container requests enough, so that it does not show the limits of a user's plain ``docker run``.
"""

from collections.abc import Iterator

from gpunode.checks.compare import Scale, at_least, at_most, equals, failed, passed, skipped, undetermined, warned
from gpunode.checks.driver_modes import HMM_OFF
from gpunode.checks.inside_driver import MISMATCH_CUDA, NO_COMPAT, refused
from gpunode.checks.registry import (
    Broken,
    CheckResult,
    Expectation,
    NotJudged,
    Skip,
    Status,
    Undetermined,
    no_gpu,
    registry,
)
from gpunode.checks.thresholds import Threshold
from gpunode.checks.workload import (
    component,
    explained,
    gpu_named,
    known,
    nothing_ran,
    of,
    record_check,
    single_record,
    where,
)
from gpunode.facts.models.workload import (
    ContainerValues,
    CudaValues,
    DeviceIdentity,
    KernelValues,
    LimitValues,
    NvmlGpu,
    NvmlValues,
    Record,
    TorchValues,
    values_of,
)
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed
from gpunode.tuning.containers import GIB, NCCL_GUIDE, SHM_MIN_BYTES, STACK_MIN_BYTES

FABRIC = "The fabric manager is not ready: role nvidia_fabric; see also the driver.* and fabric.* checks."
SELINUX = (
    "setsebool -P container_use_devices on lets containers use the GPUs' device files; ausearch -m avc -ts recent "
    "shows what was refused."
)
NO_PERMISSION = 4
"""NVML's status (NVIDIA/nvidia-container-toolkit issue 33)."""
NOT_INITIALIZED = 3
NOT_READY = 802
ARGUMENTS = "gpunode env --format docker-args HOST prints the arguments for docker run."
ON_HOST = "on the host itself, in no container"
STALE = (
    "The CDI specification is outdated (its names are indices, which change): regenerate it with nvidia-ctk cdi "
    "generate --output=/var/run/cdi/nvidia.yaml."
)
SIMULATED = "simulated GPUs: no library in a container can compute on them"


@registry.check(
    "container.runs",
    level="standard",
    means="A container ran on the node with its idle GPUs, and its workload finished.",
    remedy="Run docker run by hand with the arguments of gpunode env; journalctl -u docker shows the engine's "
    "messages.",
    state="drain",
    actions=("restart_service:docker.service",),
)
def runs(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    if node.records is None:
        absent = no_gpu(node, expect) if node.pci is not None else None
        raise Skip(absent) if absent else Undetermined(node.gap("records") or "records: not in the collected data")
    records = of(node, "container")
    if not records:
        if node.records and all(record.container is None for record in node.records):
            raise Skip(f"ran {ON_HOST}")
        raise Undetermined("no record of the container: whether it finished is unknown")
    yield from _run(records[0])


def _run(record: Record) -> Iterator[CheckResult]:
    if record.error is not None:
        named = record.container is not None and record.container.image in record.error
        raise Undetermined(record.error if named else f"{record.error}{where(record)}")
    if record.skipped is not None:
        raise Skip(record.skipped)
    values = values_of(record, ContainerValues)
    if isinstance(values, str):
        raise Undetermined(values)
    for line in values.busy:
        gpu, _, process = line.partition(": ")
        yield skipped(f"skipped, in use by {process or 'a process'}", component=gpu)
    handed = "without GPUs" if not values.gpus else f"with {counted(values.gpus, 'GPU')}"
    if values.complete is False:
        yield undetermined(f"ran {handed} and was interrupted after {record.seconds:.0f} s{where(record)}")
    elif values.complete is None:
        yield undetermined(f"whether it finished is unknown{where(record)}")
    elif record.container is None:
        yield skipped(f"ran {handed} in {record.seconds:.0f} s {ON_HOST}")
    else:
        yield passed(f"ran {handed} in {record.seconds:.0f} s{where(record)}")


@registry.check(
    "container.gpus",
    level="standard",
    needs=("records",),
    needs_gpu=True,
    means="NVML, CUDA and PyTorch find the same GPUs inside the container: all that were passed to it.",
    remedy="Pass the GPUs with --device nvidia.com/gpu=all (CDI) or --gpus all; the role "
    "nvidia_container_toolkit sets up both. " + ARGUMENTS,
    state="drain",
    actions=("run_role:nvidia_container_toolkit",),
)
def gpus(node: NodeFacts) -> Iterator[CheckResult]:
    try:
        (_, nvml), (_, cuda) = (
            single_record(node, "versions.nvml", NvmlValues),
            single_record(node, "versions.cuda", CudaValues),
        )
    except NotJudged as reason:
        if isinstance(reason, Undetermined) or nothing_ran(node):
            raise
        # A missing or broken library of the driver is the fault itself: the container received no GPU.
        raise Skip(SIMULATED) if node.simulated else Broken(str(reason)) from None
    if refused(node):
        raise Skip("the libraries inside do not fit the module (container.library reports the cause)")
    if cuda.forward_compat and cuda.result in (MISMATCH_CUDA, NO_COMPAT):
        raise Skip("cuda-compat is refused (container.forward-compat reports the cause)")
    yield _counts(node, nvml, cuda)


def _counts(node: NodeFacts, nvml: NvmlValues, cuda: CudaValues) -> CheckResult:
    record, values = next(_container(node), (None, ContainerValues()))
    for name, result, meaning in (("NVML", nvml.result, nvml.result_name), ("CUDA", cuda.result, cuda.result_name)):
        if result != 0:
            fault = f"{name} does not start inside: {meaning or 'error'} ({result})"
            if result == NO_PERMISSION and "selinux" in values.security:
                return failed(f"{fault}; SELinux confines containers here", remedy=SELINUX)
            if (name, result) == ("CUDA", NOT_INITIALIZED) and explained(node, ("driver.hmm",)):
                return failed(
                    f"{fault}; the host's nvidia-uvm gets no address range for HMM (driver.hmm)", remedy=HMM_OFF
                )
            return failed(fault, remedy=FABRIC if result == NOT_READY else None)
    # On the host itself NVML shows all GPUs, whichever the payload was given.
    alone = record is not None and record.container is None
    lost = [gpu.result_name or str(gpu.result) for gpu in nvml.gpus if gpu.result != 0]
    if lost:
        seen = {gpu.uuid for gpu in nvml.gpus}
        names = [gpu_named(node, uuid) or uuid for uuid in values.uuids or () if uuid not in seen]
        which = listed(names) or counted(len(lost), "GPU")
        return failed(f"NVML counts {nvml.count} GPUs inside and cannot reach {which} ({lost[0]})")
    wrong = _others(node, nvml, values, alone=alone)
    if wrong is not None:
        return wrong
    if any(gpu.mig_mode for gpu in nvml.gpus):
        return _divided(node, nvml, cuda, values)
    return _whole(node, nvml, cuda, values, alone=alone)


def _others(node: NodeFacts, nvml: NvmlValues, values: ContainerValues, *, alone: bool) -> CheckResult | None:
    """Return the result if the GPUs in the container differ by UUID from those passed to it; None if they are the
    same."""
    inside = {gpu.uuid: gpu for gpu in nvml.gpus if gpu.uuid is not None}
    if not values.uuids or not inside:
        return None
    absent = [gpu_named(node, uuid) or uuid for uuid in values.uuids if uuid not in inside]
    # A GPU in MIG mode without an instance is included if all GPUs are requested, and cannot compute.
    empty = {uuid for uuid, gpu in inside.items() if gpu.mig_mode and not gpu.mig_devices}
    more = [gpu_named(node, uuid) or uuid for uuid in inside if uuid not in (*values.uuids, *empty)]
    if not absent and (alone or not more):
        return None
    instead = f"; {listed(more)} found instead" if more else ""
    message = f"passed but missing inside: {listed(absent)}{instead}"
    if not absent:
        message = f"not passed but found inside: {listed(more)}"
    return failed(message, expected=len(values.uuids), measured=len(inside), unit="GPUs", remedy=STALE)


def _divided(node: NodeFacts, nvml: NvmlValues, cuda: CudaValues, values: ContainerValues) -> CheckResult:
    """Return the result with MIG: as many MIG devices inside as on the host; CUDA finds one, because it supports only
    one."""
    parts, gaps = 0, []
    host = {gpu.uuid: gpu.mig_devices for gpu in node.smi_gpus}
    for gpu in nvml.gpus:
        outside = host.get(gpu.uuid)
        if values.uuids is not None and gpu.uuid not in values.uuids:
            continue
        parts += len(gpu.mig_devices)
        if outside is not None and len(outside) != len(gpu.mig_devices):
            gaps.append(f"{_name(node, gpu)} {len(gpu.mig_devices)} of {len(outside)}")
    if gaps:
        return failed(f"MIG devices that are missing inside: {listed(gaps)}", remedy=STALE)
    if cuda.count is None:
        raise Undetermined("CUDA did not report the number of GPUs")
    devices, whole = counted(parts, "MIG device"), sum(1 for gpu in nvml.gpus if not gpu.mig_mode)
    if cuda.count == 0:
        message = f"{devices} and {counted(whole, 'whole GPU')} inside, and CUDA finds none"
        return failed(message, expected=parts, measured=0, unit="MIG devices")
    beside = f" and {counted(whole, 'whole GPU')}" if whole else ""
    message = f"{devices}{beside}, as passed; CUDA allows a process one of them"
    return passed(message, expected=parts, measured=parts, unit="MIG devices")


def _whole(node: NodeFacts, nvml: NvmlValues, cuda: CudaValues, values: ContainerValues, *, alone: bool) -> CheckResult:
    counts = {"NVML": nvml.count, "CUDA": cuda.count}
    if alone and values.gpus is not None:
        del counts["NVML"]
    torch = known(node, "versions.torch", TorchValues)
    # A build for the processor, or for a CUDA that the driver lacks, counts none; other checks report it.
    if torch is not None and torch.cuda is not None and not explained(node, ("container.cuda",)):
        counts["PyTorch"] = torch.count if torch.available else 0
    unknown = [name for name, count in counts.items() if count is None]
    if unknown:
        raise Undetermined(f"{listed(unknown)} did not report the number of GPUs")
    words = listed([f"{name} {count}" for name, count in counts.items()])
    expected = values.gpus if values.gpus is not None else nvml.count
    seen = {gpu.uuid for gpu in cuda.gpus}
    lost = [_name(node, gpu) for gpu in nvml.gpus if gpu.uuid not in seen and None not in seen] if seen else []
    without = f"; CUDA lacks {listed(lost)}" if lost and not alone else ""
    why = f"; PyTorch reports: {torch.unavailable}" if torch is not None and torch.unavailable else ""
    return equals(
        set(counts.values()),
        {expected},
        f"{words}, as given",
        f"passed {expected}; found inside: {words}{without}{why}",
        expected=expected,
        measured=min(count or 0 for count in counts.values()),
        unit="GPUs",
    )


def _name(node: NodeFacts, gpu: NvmlGpu) -> str:
    return gpu_named(node, gpu.uuid, gpu.pci_bus_id) or gpu.uuid or f"GPU {gpu.index} of NVML"


def _container(node: NodeFacts) -> Iterator[tuple[Record, ContainerValues]]:
    for record in of(node, "container"):
        values = values_of(record, ContainerValues)
        if isinstance(values, ContainerValues):
            yield record, values


@record_check(
    "container.compute",
    "gpus.kernel",
    KernelValues,
    on_gpu=True,
    after=("container.library", "container.gpus", "container.forward-compat"),
    means="Every passed GPU and MIG device runs a kernel that the driver compiles, with a correct result.",
    remedy="dmesg and gpu.xid show the fault of a GPU that does not compute: stop using it and run dcgmi diag "
    "-r 3. 'CUDA has no device': the MIG layout changed after the CDI specification was written.",
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
    scope="gpu",
)
def compute(values: KernelValues, record: Record, node: NodeFacts) -> Iterator[CheckResult]:
    if values.elements <= 0:
        yield undetermined("the kernel computed nothing")
    else:
        good = f"compiles and computes ({values.name or 'GPU'})"
        bad = f"{values.wrong} of {values.elements} elements are wrong"
        yield at_most(values.wrong, 0, good, bad, component=component(node, record), unit="elements")
    # Reported once: with the first of the devices that did compute.
    first = next(iter(of(node, "gpus.kernel")), None)
    if first is record:
        yield from _without_record(node)


def _without_record(node: NodeFacts) -> Iterator[CheckResult]:
    """Yield results for devices that were passed to the container but have no record although the payload finished."""
    nvml = known(node, "versions.nvml", NvmlValues)
    container = next(_container(node), None)
    if nvml is None or container is None or not container[1].complete or container[1].uuids is None:
        return
    if explained(node, ("container.gpus",)):
        return
    tried = {about.uuid for each in of(node, "gpus.kernel") if not isinstance(about := _about(each), str)}
    for gpu in nvml.gpus:
        if gpu.uuid not in container[1].uuids:
            continue
        for device in gpu.mig_devices if gpu.mig_mode else (gpu,):
            if device.uuid not in tried:
                yield failed(f"{device.uuid} was passed, but nothing computed on it", component=_name(node, gpu))


def _about(record: Record) -> DeviceIdentity | str:
    return values_of(record, DeviceIdentity)


DEFAULTS = "defaults.limits"

SHM_LEAST = Threshold(
    "container.shm.least", SHM_MIN_BYTES // 2**20, "MiB", "Less shared memory warns.", source=NCCL_GUIDE
)
STACK_LEAST = Threshold(
    "container.stack.least", STACK_MIN_BYTES // 1024, "KiB", "A smaller stack warns.", source=NCCL_GUIDE
)


@record_check(
    "container.shm",
    DEFAULTS,
    LimitValues,
    means="A plain docker run has the shared memory that the DataLoader's workers and NCCL need.",
    remedy='For every container: docker_shm_size of the role docker ("default-shm-size" in daemon.json). For one: '
    "docker run --shm-size=8g. " + ARGUMENTS,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(SHM_LEAST,),
)
def shm(values: LimitValues, record: Record) -> CheckResult:
    if record.container is None:
        raise Skip(f"ran {ON_HOST}")
    if values.shm_bytes is None:
        raise Undetermined("the size of /dev/shm is unknown")
    good = f"a plain docker run gets {values.shm_bytes / GIB:.1f} GiB of shared memory"
    bad = f"a plain docker run gets {values.shm_bytes // 2**20} MiB of shared memory, {SHM_LEAST.value} are required"
    size = values.shm_bytes / 2**20
    megabytes: Scale = {"unit": "MiB", "source": NCCL_GUIDE}
    return at_least(size, SHM_LEAST.value, good, bad, fault=Status.WARN, measured=int(size), **megabytes)


@record_check(
    "container.memlock",
    DEFAULTS,
    LimitValues,
    means="If RDMA is active, containers of docker run may lock unlimited memory.",
    remedy='For every container: "default-ulimits": {"memlock": {"Name": "memlock", "Soft": -1, "Hard": -1}} in '
    "daemon.json (role docker: docker_daemon). For one: docker run --ulimit memlock=-1. " + ARGUMENTS,
    state="observe",
    actions=("fix_configuration",),
)
def memlock(values: LimitValues, record: Record, node: NodeFacts) -> CheckResult:
    if record.container is None:
        raise Skip(f"ran {ON_HOST}")
    if values.memlock_bytes is None:
        raise Undetermined("the limit of locked memory is unknown")
    if values.memlock_bytes == -1:
        return passed("locked memory is not limited", expected="unlimited", measured="unlimited", source=NCCL_GUIDE)
    rdma = any(port.state == "ACTIVE" for device in node.infiniband or () for port in device.ports)
    size = f"{values.memlock_bytes // 1024} KiB"
    if rdma:
        message = f"a plain docker run may lock {size}, and RDMA is active here"
        return warned(message, expected="unlimited", measured=size, source=NCCL_GUIDE)
    return passed(f"a plain docker run may lock {size}; no RDMA is active here", measured=size, source=NCCL_GUIDE)


@record_check(
    "container.stack",
    DEFAULTS,
    LimitValues,
    means="Threads of a plain docker run have a stack of at least 8 MiB, and not an unlimited one.",
    remedy='For every container: "default-ulimits" in daemon.json (role docker: docker_daemon). For one: docker run '
    "--ulimit stack=67108864. " + ARGUMENTS,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(STACK_LEAST,),
)
def stack(values: LimitValues, record: Record) -> CheckResult:
    if record.container is None:
        raise Skip(f"ran {ON_HOST}")
    size = values.stack_bytes
    if size is None:
        raise Undetermined("the limit of the stack is unknown")
    least, kibibytes = f"{STACK_LEAST.value} KiB", f"{size // 1024} KiB"
    if size == -1:
        message = "the stack is unlimited, which NCCL's threads cannot have"
        return warned(message, expected=least, measured="unlimited", source=NCCL_GUIDE)
    return at_least(
        size / 1024,
        STACK_LEAST.value,
        f"the stack has {kibibytes}",
        f"the stack has {kibibytes}, {STACK_LEAST.value} are required",
        fault=Status.WARN,
        expected=least,
        measured=kibibytes,
        source=NCCL_GUIDE,
    )
