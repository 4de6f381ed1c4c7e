"""Checks on the engine's defaults for containers without options: shared memory, locked memory, stack.

The payload's own container requests enough, so that it does not show the defaults of a user's plain ``docker run``.
"""

from gpunode.checks.compare import Scale, at_least, passed, warned
from gpunode.checks.inside import ARGUMENTS, ON_HOST
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined
from gpunode.checks.thresholds import Threshold
from gpunode.checks.workload import record_check
from gpunode.facts.models.workload import LimitValues, Record
from gpunode.facts.node import NodeFacts
from gpunode.tuning.containers import GIB, NCCL_GUIDE, SHM_MIN_BYTES, STACK_MIN_BYTES

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
