"""Checks on versions inside a container: the driver's libraries, forward compatibility, the image's CUDA."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from packaging.version import InvalidVersion, Version

from gpunode.catalog import load
from gpunode.checks.driver import same_version
from gpunode.checks.registry import Skip, Status, Undetermined, Verdict, registry
from gpunode.checks.workload import explained, image_of, one, where
from gpunode.facts.models.workload import CudaValues, NvmlValues, Record, SystemValues, TorchValues
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

MISMATCH_NVML = 18
MISMATCH_CUDA = 803
NO_COMPAT = 804
OF_COMPAT = frozenset({"libcuda.so.1", "libcudadebugger.so.1", "libnvidia-nvvm.so.4", "libnvidia-ptxjitcompiler.so.1"})
"""What cuda-compat brings beside libcuda is meant to be of its version too."""
MODULE = ("the module in /proc", "the module by NVML")
CUDA_SOURCE = "catalog (cuda.yml)"


@registry.check(
    "container.library",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The driver's libraries inside the container have the version of the module that the kernel has loaded.",
    remedy="Write the CDI specification anew (nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml) and start "
    "containers anew; an image must not bring libcuda or libnvidia-ml of its own.",
    state="drain",
    actions=("run_role:nvidia_container_toolkit",),
)
def library(node: NodeFacts) -> Iterator[Verdict]:
    answer = one(node, "versions.system", SystemValues)
    if isinstance(answer, Verdict):
        yield answer
        return
    if node.loaded_driver is None:
        raise Skip("no NVIDIA module is loaded (driver.module-loaded reports the cause)")
    loaded = node.loaded_driver.version
    if node.driver_library_version is not None and not same_version(node.driver_library_version, loaded):
        raise Skip("they do not fit on the host either (driver.library-matches-module reports the cause)")
    compat = any(values.forward_compat for values in _cuda(node))
    nvml = one(node, "versions.nvml", NvmlValues)
    seen = {
        **answer[1].driver_libraries,
        MODULE[0]: answer[1].module_version,
        MODULE[1]: None if isinstance(nvml, Verdict) else nvml[1].driver_version,
    }
    inside = {name: version for name, version in seen.items() if version and not (compat and name in OF_COMPAT)}
    verdict = partial(Verdict, expected=loaded, measured=listed(sorted(set(inside.values()))) or None)
    other = [f"{name} {version}" for name, version in inside.items() if not same_version(version, loaded)]
    why = refused(node)
    if other:
        yield verdict(Status.FAIL, f"inside: {listed(other)}; the loaded module is {loaded}{where(answer[0])}")
    elif why:
        yield verdict(Status.FAIL, f"{why}; the loaded module is {loaded}{where(answer[0])}")
    elif not set(inside) & set(answer[1].driver_libraries):
        yield _without_versions(node, answer[1])
    else:
        yield verdict(Status.PASS, f"{listed(sorted(set(inside) - set(MODULE)))} at {loaded}, as the module")


def _without_versions(node: NodeFacts, inside: SystemValues) -> Verdict:
    """A container without the driver's libraries has a finding of its own; libraries without a version are unknown."""
    if not inside.driver_libraries and (node.simulated or explained(node, ("container.gpus",))):
        return Verdict(Status.SKIP, "the container has no library of the driver (container.gpus reports the cause)")
    return Verdict(Status.ERROR, "the version of the driver's libraries inside the container could not be read")


def _cuda(node: NodeFacts) -> Iterator[CudaValues]:
    answer = one(node, "versions.cuda", CudaValues)
    if not isinstance(answer, Verdict):
        yield answer[1]


def refused(node: NodeFacts) -> str | None:
    """In which words a library inside refuses the module; None where none does."""
    nvml = one(node, "versions.nvml", NvmlValues)
    if not isinstance(nvml, Verdict) and nvml[1].result == MISMATCH_NVML:
        return f"NVML: {nvml[1].result_name or 'Driver/library version mismatch'}"
    for values in _cuda(node):
        if values.result == MISMATCH_CUDA and not values.forward_compat:
            return f"CUDA: {values.result_name or 'error'} (803)"
    return None


@registry.check(
    "container.forward-compat",
    level="standard",
    needs=("records",),
    needs_gpu=True,
    means="Where the image's cuda-compat library stands in for the driver's, this driver and these GPUs allow it.",
    remedy="Take an image whose CUDA the driver has itself, or change the driver (gpunode plan -i INVENTORY --cuda "
    "VERSION); a needless cuda-compat goes: apt-get remove 'cuda-compat-*', or out of LD_LIBRARY_PATH.",
    state="observe",
    actions=("fix_configuration",),
)
def forward_compat(node: NodeFacts) -> Iterator[Verdict]:
    answer = one(node, "versions.cuda", CudaValues)
    if isinstance(answer, Verdict):
        broken = answer.status is Status.FAIL
        yield Verdict(Status.SKIP, f"{answer.message} (container.gpus reports the cause)") if broken else answer
        return
    yield _compat(*answer, node)


def _compat(record: Record, values: CudaValues, node: NodeFacts) -> Verdict:
    verdict = partial(Verdict, source=CUDA_SOURCE, measured=values.version)
    if not values.forward_compat:
        return verdict(Status.PASS, "not in use: libcuda is the host's")
    if values.result in (MISMATCH_CUDA, NO_COMPAT):
        said = values.result_name or "error"
        return verdict(Status.FAIL, f"{values.library} is refused: {said} ({values.result}){where(record)}")
    if values.result != 0:
        return verdict(
            Status.SKIP, f"{values.library} is in use and CUDA does not start (container.gpus reports the cause)"
        )
    series = ".".join((values.cuda_version or "").split(".")[:2])
    row = load().forward_compat.get(series)
    branch = int(node.loaded_driver.version.split(".", maxsplit=1)[0]) if node.loaded_driver else None
    if row is not None and branch in row.needless_on:
        return verdict(
            Status.WARN, f"cuda-compat {values.version} is in use, and driver {branch} has CUDA {series} itself"
        )
    if row is not None and branch in row.refused_on:
        status = Status.FAIL if row.sure("refused_on") else Status.WARN
        return verdict(status, f"cuda-compat {values.version} is older than driver {branch}{where(record)}")
    return verdict(Status.PASS, f"in use: CUDA {values.cuda_version} by {values.library}")


@registry.check(
    "container.cuda",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The driver runs the CUDA of PyTorch, or of the image where it has no PyTorch for CUDA.",
    remedy="Take an image or wheel of an older CUDA, or change the driver: gpunode plan -i INVENTORY --cuda "
    "VERSION, then role nvidia_driver.",
    state="observe",
    actions=("fix_configuration",),
)
def cuda_of_image(node: NodeFacts) -> Iterator[Verdict]:
    system, torch = one(node, "versions.system", SystemValues), one(node, "versions.torch", TorchValues)
    if isinstance(system, Verdict):
        yield system
        return
    if node.loaded_driver is None:
        raise Skip("no NVIDIA module is loaded (driver.module-loaded reports the cause)")
    if isinstance(torch, Verdict) and torch.status is Status.ERROR and system[1].cuda is None:
        yield torch
        return
    used = None if isinstance(torch, Verdict) else torch[1].cuda
    said = {"PyTorch": used} if used else {"the image": system[1].cuda}
    wanted = {name: number for name, text in said.items() if text and (number := _series(text))}
    unread = [f"{name}: CUDA '{text}' is not a version" for name, text in said.items() if text and not _series(text)]
    if unread:
        raise Undetermined(listed(unread))
    if not wanted:
        raise Skip(f"{image_of(node)} names no CUDA of its own")
    ((name, number),) = wanted.items()
    verdict = _driver_runs(node, f"{name}: CUDA {number}", number, node.loaded_driver.version)
    toolkit = _series(system[1].cuda or "")
    if verdict.status is Status.PASS and used and toolkit is not None and toolkit > number:
        # What PyTorch brings is what computes; the toolkit beside it is for who compiles in the image.
        beside = _driver_runs(node, f"the toolkit beside it: CUDA {toolkit}", toolkit, node.loaded_driver.version)
        if beside.status is not Status.PASS:
            verdict = replace(verdict, message=f"{verdict.message}; not used: {beside.message}")
    yield verdict


def _series(text: str) -> Version | None:
    """``13.0.2`` as 13.0; None for what is no version."""
    try:
        release = Version(text).release
    except InvalidVersion:
        return None
    return Version(".".join(str(part) for part in (*release, 0)[:2]))


def _driver_runs(node: NodeFacts, what: str, number: Version, driver: str) -> Verdict:
    catalog = load()
    branch = catalog.branches.get(driver.split(".", maxsplit=1)[0])
    reported = _series((node.smi.document.cuda_version if node.smi and node.smi.document else None) or "")
    own = reported or _series((branch.native_cuda if branch else None) or "")
    if own is None:
        return Verdict(Status.ERROR, f"it is not known which CUDA driver {driver} runs")
    verdict = partial(Verdict, expected=f"at most {own}", measured=str(number), source=CUDA_SOURCE)
    if number <= own:
        return verdict(Status.PASS, f"{what}; driver {driver} runs up to {own}")
    carried = [
        _series(values.cuda_version or "") for values in _cuda(node) if values.forward_compat and not values.result
    ]
    for most in carried:
        if most is not None and number <= most:
            return verdict(Status.PASS, f"{what}; driver {driver} runs up to {own}, cuda-compat up to {most}")
        if most is not None and number.major == most.major:
            return verdict(
                Status.WARN,
                f"{what}; cuda-compat runs up to {most}: minor-version compatibility, without PTX of the newer CUDA",
            )
    major = catalog.cuda_majors.get(str(number.major))
    if number.major == own.major and major is not None and Version(driver) >= Version(major.floor):
        return verdict(
            Status.WARN,
            f"{what}; driver {driver} runs up to {own}: minor-version compatibility, without PTX of the newer CUDA",
        )
    sure = reported is not None or branch is None or branch.sure("native_cuda")
    if number.major == own.major:
        sure = sure and major is not None and major.sure("floor")
    return verdict(Status.FAIL if sure else Status.WARN, f"{what}; driver {driver} runs up to {own}")
