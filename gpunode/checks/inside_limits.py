"""Checks on the limits of a container: shared memory, locked memory, stack."""

from functools import partial

from gpunode.checks.inside import ARGUMENTS, ON_HOST
from gpunode.checks.registry import Status, Verdict
from gpunode.checks.thresholds import Threshold
from gpunode.checks.workload import record_check
from gpunode.facts.models.workload import LimitValues, Record
from gpunode.facts.node import NodeFacts
from gpunode.tuning.containers import GIB, NCCL_GUIDE, SHM_MIN_BYTES, STACK_MIN_BYTES

SHM_LEAST = Threshold(
    "container.shm.least", SHM_MIN_BYTES // 2**20, "MiB", "Less shared memory is a failure.", source=NCCL_GUIDE
)
STACK_LEAST = Threshold(
    "container.stack.least", STACK_MIN_BYTES // 1024, "KiB", "A smaller stack warns.", source=NCCL_GUIDE
)


@record_check(
    "container.shm",
    "versions.limits",
    LimitValues,
    means="The container's shared memory holds what the DataLoader's workers and NCCL put there.",
    remedy="docker run --shm-size=8g (or --ipc=host). " + ARGUMENTS,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(SHM_LEAST,),
)
def shm(values: LimitValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    if record.container is None:
        return Verdict(Status.SKIP, f"ran {ON_HOST}")
    if values.shm_bytes is None:
        return Verdict(Status.ERROR, "the size of /dev/shm was not seen")
    least, mebibytes = SHM_LEAST.value, values.shm_bytes / 2**20
    told = partial(
        Verdict,
        expected=least,
        measured=values.shm_bytes // 2**20,
        unit="MiB",
        source=NCCL_GUIDE,
    )
    if mebibytes < least:
        return told(Status.FAIL, f"shared memory has {values.shm_bytes // 2**20} MiB, {least} are required")
    return told(Status.PASS, f"shared memory has {values.shm_bytes / GIB:.1f} GiB")


@record_check(
    "container.memlock",
    "versions.limits",
    LimitValues,
    means="The container may lock memory without limit: RDMA and pinned buffers need it.",
    remedy="docker run --ulimit memlock=-1. " + ARGUMENTS,
    state="observe",
    actions=("fix_configuration",),
)
def memlock(values: LimitValues, record: Record, node: NodeFacts) -> Verdict:
    if record.container is None:
        return Verdict(Status.SKIP, f"ran {ON_HOST}")
    if values.memlock_bytes is None:
        return Verdict(Status.ERROR, "the limit of locked memory was not seen")
    told = partial(Verdict, expected="unlimited", source=NCCL_GUIDE)
    if values.memlock_bytes == -1:
        return told(Status.PASS, "locked memory is not limited", measured="unlimited")
    rdma = any(port.state == "ACTIVE" for device in node.infiniband or () for port in device.ports)
    told = partial(told, measured=f"{values.memlock_bytes // 1024} KiB")
    why = "and RDMA is active here" if rdma else "no RDMA is active here"
    return told(
        Status.FAIL if rdma else Status.WARN, f"at most {values.memlock_bytes // 1024} KiB can be locked, {why}"
    )


@record_check(
    "container.stack",
    "versions.limits",
    LimitValues,
    means="Threads in the container have a stack of at least 8 MiB, and not an unlimited one.",
    remedy="docker run --ulimit stack=67108864. " + ARGUMENTS,
    state="observe",
    actions=("fix_configuration",),
    thresholds=(STACK_LEAST,),
)
def stack(values: LimitValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    if record.container is None:
        return Verdict(Status.SKIP, f"ran {ON_HOST}")
    size = values.stack_bytes
    if size is None:
        return Verdict(Status.ERROR, "the limit of the stack was not seen")
    least = STACK_LEAST.value
    told = partial(Verdict, expected=f"{least} KiB", source=NCCL_GUIDE)
    if size == -1:
        return told(Status.WARN, "the stack is unlimited, which NCCL's threads cannot have", measured="unlimited")
    told = partial(told, measured=f"{size // 1024} KiB")
    kibibytes = size / 1024
    if kibibytes < least:
        return told(Status.WARN, f"the stack has {size // 1024} KiB, {least} are required")
    return told(Status.PASS, f"the stack has {size // 1024} KiB")
