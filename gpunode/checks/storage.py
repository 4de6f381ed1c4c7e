"""Checks on mounts of the role storage: scratch space on local disks, remote data."""

from collections.abc import Iterator

from gpunode.checks.compare import at_least, failed, passed, skipped, undetermined, warned
from gpunode.checks.registry import CheckResult, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.disks import StoredMount
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

FREE_LEAST = Threshold("host.scratch.free-least", 5, "% free", "Less free space warns.", source="our choice", most=100)
NO_STORAGE = "the role storage set up nothing here"


@registry.check(
    "host.scratch",
    needs=("storage",),
    means="The scratch space of the role storage is mounted from its own disks, can be written to, and has room. "
    "Jobs that write to the folder below it fill the system's disk.",
    remedy="systemctl status of the mount unit shows why it is not mounted; role storage, tag storage_service.",
    state="drain",
    actions=("run_role:storage:storage_service", "fix_configuration"),
    category="host",
    thresholds=(FREE_LEAST,),
)
def scratch(node: NodeFacts) -> Iterator[CheckResult]:
    mounts = [mount for mount in node.storage or () if not mount.remote]
    if not mounts:
        yield skipped("the role storage set up no scratch space" if node.storage else NO_STORAGE)
    for mount in mounts:
        yield _scratch(mount).at(mount.path)


def _scratch(mount: StoredMount) -> CheckResult:
    lost = [option for option in mount.options if option not in mount.mounted_options]
    if mount.mounted_type is None:
        return failed("nothing is mounted", expected=mount.type, measured="nothing")
    if mount.mounted_type != mount.type or mount.same_device is False:
        message = f"{mount.mounted_type} of another device is mounted, not {mount.source}"
        return failed(message, expected=mount.type, measured=mount.mounted_type)
    if "rw" not in mount.mounted_options and "ro" not in mount.options:
        return failed("is mounted read-only: the kernel does that after errors", expected="rw")
    if mount.problem is not None:
        return failed(f"does not answer: {mount.problem}")
    if mount.same_device is None or not mount.size_mib or mount.free_mib is None:
        return undetermined("its device or its size is unknown")
    free = 100 * mount.free_mib // mount.size_mib
    if free >= FREE_LEAST.value and lost:
        return warned(
            f"is mounted without {listed(lost)}", expected=listed(lost), measured=listed(mount.mounted_options, 12)
        )
    good = f"{mount.mounted_type}, {free} % free"
    return at_least(free, FREE_LEAST.value, good, f"{free} % are free", fault=Status.WARN, unit="%")


@registry.check(
    "host.remote-data",
    needs=("storage",),
    means="Each remote file system of the role storage responds; reading it mounts it if necessary.",
    remedy="Check the server and the network; systemctl status and journalctl -u of the mount unit show its messages.",
    state="observe",
    actions=("fix_configuration",),
    category="host",
)
def remote_data(node: NodeFacts) -> Iterator[CheckResult]:
    mounts = [mount for mount in node.storage or () if mount.remote]
    if not mounts:
        yield skipped("the role storage mounts no remote data" if node.storage else NO_STORAGE)
    for mount in mounts:
        yield _remote(mount).at(mount.path)


def _remote(mount: StoredMount) -> CheckResult:
    if mount.problem is not None:
        return failed(f"{mount.source} does not answer: {mount.problem}")
    if mount.mounted_type is None:
        return failed(f"{mount.source} is not mounted", expected=mount.type, measured="nothing")
    if mount.size_mib is None:
        return undetermined("whether it answers is unknown")
    return passed(f"{mount.source} answers ({mount.mounted_type})", measured=mount.mounted_type)
