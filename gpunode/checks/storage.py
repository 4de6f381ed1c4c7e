"""Checks on mounts of the role storage: scratch space on local disks, remote data."""

from collections.abc import Iterator
from functools import partial

from gpunode.checks.compare import skipped
from gpunode.checks.registry import CheckResult, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.host import StoredMount
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
    found = [one for one in node.storage or () if not one.remote]
    if not found:
        yield skipped("the role storage set up no scratch space" if node.storage else NO_STORAGE)
    for one in found:
        yield _scratch(one)


def _scratch(one: StoredMount) -> CheckResult:
    verdict = partial(CheckResult, component=one.path)
    lost = [option for option in one.options if option not in one.mounted_options]
    if one.mounted_type is None:
        return verdict(Status.FAIL, "nothing is mounted", expected=one.type, measured="nothing")
    if one.mounted_type != one.type or one.same_device is False:
        message = f"{one.mounted_type} of another device is mounted, not {one.source}"
        return verdict(Status.FAIL, message, expected=one.type, measured=one.mounted_type)
    if "rw" not in one.mounted_options and "ro" not in one.options:
        return verdict(Status.FAIL, "is mounted read-only: the kernel does that after errors", expected="rw")
    if one.problem is not None:
        return verdict(Status.FAIL, f"does not answer: {one.problem}")
    if one.same_device is None or not one.size_mib or one.free_mib is None:
        return verdict(Status.ERROR, "its device or its size is unknown")
    free = 100 * one.free_mib // one.size_mib
    if free < FREE_LEAST.value:
        return verdict(Status.WARN, f"{free} % are free", expected=FREE_LEAST.value, measured=free, unit="%")
    if lost:
        message = f"is mounted without {listed(lost)}"
        return verdict(Status.WARN, message, expected=listed(lost), measured=listed(one.mounted_options, 12))
    return verdict(
        Status.PASS, f"{one.mounted_type}, {free} % free", expected=FREE_LEAST.value, measured=free, unit="%"
    )


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
    found = [one for one in node.storage or () if one.remote]
    if not found:
        yield skipped("the role storage mounts no remote data" if node.storage else NO_STORAGE)
    for one in found:
        verdict = partial(CheckResult, component=one.path)
        if one.problem is not None:
            yield verdict(Status.FAIL, f"{one.source} does not answer: {one.problem}")
        elif one.mounted_type is None:
            yield verdict(Status.FAIL, f"{one.source} is not mounted", expected=one.type, measured="nothing")
        elif one.size_mib is None:
            yield verdict(Status.ERROR, "whether it answers is unknown")
        else:
            yield verdict(Status.PASS, f"{one.source} answers ({one.mounted_type})", measured=one.mounted_type)
