"""Checks on versions in a container: the driver's libraries, forward compatibility, the image's CUDA."""

from collections.abc import Iterator
from dataclasses import replace

from packaging.version import Version

from gpunode.catalog import load
from gpunode.checks.compare import faultless, parsed_version, skipped, undetermined
from gpunode.checks.driver import loaded_driver, same_version
from gpunode.checks.registry import Broken, CheckResult, NotJudged, Skip, Status, Undetermined, registry
from gpunode.checks.workload import explained, image_of, known, single_record, where
from gpunode.facts.models.workload import CudaValues, NvmlValues, Record, SystemValues, TorchValues
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

MISMATCH_NVML = 18
MISMATCH_CUDA = 803
NO_COMPAT = 804
OF_COMPAT = frozenset({"libcuda.so.1", "libcudadebugger.so.1", "libnvidia-nvvm.so.4", "libnvidia-ptxjitcompiler.so.1"})
"""Files of cuda-compat that must have libcuda's version."""
MODULE = ("the module in /proc", "the module by NVML")
CUDA_SOURCE = "catalog (cuda.yml)"
MINOR = "minor-version compatibility, without PTX of the newer CUDA"


@registry.check(
    "container.library",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The driver's libraries inside the container have the version of the module that the kernel has loaded.",
    remedy="Regenerate the CDI specification (nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml) and "
    "recreate containers; an image must not contain its own libcuda or libnvidia-ml.",
    state="drain",
    actions=("run_role:nvidia_container_toolkit",),
)
def library(node: NodeFacts) -> Iterator[CheckResult]:
    record, system = single_record(node, "versions.system", SystemValues)
    loaded = loaded_driver(node).version
    if node.driver_library_version is not None and not same_version(node.driver_library_version, loaded):
        raise Skip("they do not fit on the host either (driver.library-matches-module reports the cause)")
    cuda, nvml = known(node, "versions.cuda", CudaValues), known(node, "versions.nvml", NvmlValues)
    compat = cuda is not None and cuda.forward_compat
    seen = {
        **system.driver_libraries,
        MODULE[0]: system.module_version,
        MODULE[1]: nvml.driver_version if nvml is not None else None,
    }
    inside = {name: version for name, version in seen.items() if version and not (compat and name in OF_COMPAT)}
    other = [f"{name} {version}" for name, version in inside.items() if not same_version(version, loaded)]
    why = f"inside: {listed(other)}" if other else refused(node)
    if not why and not set(inside) & set(system.driver_libraries):
        yield _without_versions(node, system)
        return
    good = f"{listed(sorted(set(inside) - set(MODULE)))} at {loaded}, as the module"
    bad = f"{why}; the loaded module is {loaded}{where(record)}"
    yield faultless(good, {bad: why}, expected=loaded, measured=listed(sorted(set(inside.values()))) or None)


def _without_versions(node: NodeFacts, inside: SystemValues) -> CheckResult:
    """Return the result without versions: another check reports a container without the driver's libraries."""
    if not inside.driver_libraries and (node.simulated or explained(node, ("container.gpus",))):
        return skipped("the container has no library of the driver (container.gpus reports the cause)")
    return undetermined("the version of the driver's libraries inside the container could not be read")


def refused(node: NodeFacts) -> str | None:
    """Return the message with which a library in the container refuses the module; None if none does."""
    nvml, cuda = known(node, "versions.nvml", NvmlValues), known(node, "versions.cuda", CudaValues)
    if nvml is not None and nvml.result == MISMATCH_NVML:
        return f"NVML: {nvml.result_name or 'Driver/library version mismatch'}"
    if cuda is not None and cuda.result == MISMATCH_CUDA and not cuda.forward_compat:
        return f"CUDA: {cuda.result_name or 'error'} (803)"
    return None


@registry.check(
    "container.forward-compat",
    level="standard",
    needs=("records",),
    needs_gpu=True,
    means="If the image's cuda-compat library replaces the driver's, this driver and these GPUs support it.",
    remedy="Use an image with a CUDA version that the driver supports, or change the driver (gpunode plan -i "
    "INVENTORY --cuda "
    "VERSION); remove an unnecessary cuda-compat: apt-get remove 'cuda-compat-*', or remove it from LD_LIBRARY_PATH.",
    state="observe",
    actions=("fix_configuration",),
)
def forward_compat(node: NodeFacts) -> Iterator[CheckResult]:
    try:
        record, values = single_record(node, "versions.cuda", CudaValues)
    except Broken as reason:
        raise Skip(f"{reason} (container.gpus reports the cause)") from None
    yield _compat(record, values, node)


def _compat(record: Record, values: CudaValues, node: NodeFacts) -> CheckResult:
    series = ".".join((values.cuda_version or "").split(".")[:2])
    row = load().forward_compat.get(series)
    branch = int(node.loaded_driver.version.split(".", maxsplit=1)[0]) if node.loaded_driver else None
    status, message = Status.PASS, f"in use: CUDA {values.cuda_version} by {values.library}"
    if not values.forward_compat:
        message = "not in use: libcuda is the host's"
    elif values.result in (MISMATCH_CUDA, NO_COMPAT):
        status, reason = Status.FAIL, f"{values.result_name or 'error'} ({values.result})"
        message = f"{values.library} is refused: {reason}{where(record)}"
    elif values.result != 0:
        status = Status.SKIP
        message = f"{values.library} is in use and CUDA does not start (container.gpus reports the cause)"
    elif row is not None and branch in row.needless_on:
        status = Status.WARN
        message = f"cuda-compat {values.version} is in use, and driver {branch} has CUDA {series} itself"
    elif row is not None and branch in row.refused_on:
        status = Status.FAIL if row.sure("refused_on") else Status.WARN
        message = f"cuda-compat {values.version} is older than driver {branch}{where(record)}"
    return CheckResult(status, message, measured=values.version, source=CUDA_SOURCE)


@registry.check(
    "container.cuda",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The driver supports the CUDA version of PyTorch, or of the image if it has no PyTorch for CUDA.",
    remedy="Use an image or wheel with an older CUDA, or change the driver: gpunode plan -i INVENTORY --cuda "
    "VERSION, then role nvidia_driver.",
    state="observe",
    actions=("fix_configuration",),
)
def cuda_of_image(node: NodeFacts) -> Iterator[CheckResult]:
    _, system = single_record(node, "versions.system", SystemValues)
    driver = loaded_driver(node).version
    try:
        used = single_record(node, "versions.torch", TorchValues)[1].cuda
    except NotJudged as reason:
        if isinstance(reason, Undetermined) and system.cuda is None:
            raise
        used = None
    texts = {"PyTorch": used} if used else {"the image": system.cuda}
    needed = {name: number for name, text in texts.items() if text and (number := _series(text))}
    unread = [f"{name}: CUDA '{text}' is not a version" for name, text in texts.items() if text and not _series(text)]
    if unread:
        raise Undetermined(listed(unread))
    if not needed:
        raise Skip(f"{image_of(node)} declares no CUDA version")
    ((name, number),) = needed.items()
    verdict = driver_runs(node, f"{name}: CUDA {number}", number, driver)
    toolkit = _series(system.cuda or "")
    if verdict.status is Status.PASS and used and toolkit is not None and toolkit > number:
        # PyTorch's own CUDA is the one that computes; the toolkit in the image is for compiling.
        beside = driver_runs(node, f"toolkit: CUDA {toolkit}", toolkit, driver)
        if beside.status is not Status.PASS:
            verdict = replace(verdict, message=f"{verdict.message}; not used: {beside.message}")
    yield verdict


def _series(text: str) -> Version | None:
    """Return ``13.0.2`` as 13.0; None if the text is not a version."""
    version = parsed_version(text)
    return None if version is None else Version(".".join(str(part) for part in (*version.release, 0)[:2]))


def driver_runs(node: NodeFacts, label: str, number: Version, driver: str) -> CheckResult:
    """Return whether a driver runs programs of a CUDA version; ``label`` begins the message."""
    catalog = load()
    branch = catalog.branches.get(driver.split(".", maxsplit=1)[0])
    reported = _series((node.smi.document.cuda_version if node.smi and node.smi.document else None) or "")
    limit = reported or _series((branch.native_cuda if branch else None) or "")
    if limit is None:
        return undetermined(f"the CUDA version of driver {driver} is unknown")
    cuda = known(node, "versions.cuda", CudaValues)
    carried = cuda is not None and cuda.forward_compat and not cuda.result
    most = _series(cuda.cuda_version or "") if cuda is not None and carried else None
    major = catalog.cuda_majors.get(str(number.major))
    up_to = f"driver {driver} runs up to {limit}"
    if number <= limit:
        status, why = Status.PASS, up_to
    elif most is not None and number <= most:
        status, why = Status.PASS, f"{up_to}, cuda-compat up to {most}"
    elif most is not None and number.major == most.major:
        status, why = Status.WARN, f"cuda-compat runs up to {most}: {MINOR}"
    elif number.major == limit.major and major is not None and Version(driver) >= Version(major.floor):
        status, why = Status.WARN, f"{up_to}: {MINOR}"
    else:
        sure = reported is not None or branch is None or branch.sure("native_cuda")
        if number.major == limit.major:
            sure = sure and major is not None and major.sure("floor")
        status, why = Status.FAIL if sure else Status.WARN, up_to
    return CheckResult(status, f"{label}; {why}", expected=f"at most {limit}", measured=str(number), source=CUDA_SOURCE)
