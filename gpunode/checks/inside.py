"""Checks on what a container is given: whether it runs, GPUs, the driver's libraries, CUDA, limits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from packaging.version import InvalidVersion, Version

from gpunode.catalog import load
from gpunode.checks.driver import same_version
from gpunode.checks.registry import Expectation, Status, Verdict, no_gpu, registry
from gpunode.checks.words import counted, listed
from gpunode.checks.workload import explained, image_of, nothing_ran, of, one, record_check, where
from gpunode.facts.models.workload import (
    ContainerValues,
    CudaValues,
    LimitValues,
    NvmlValues,
    Record,
    SystemValues,
    TorchValues,
    values_of,
)
from gpunode.facts.node import NodeFacts
from gpunode.tuning.containers import GIB, SHM_MIN_BYTES, STACK_MIN_BYTES

MISMATCH_NVML = 18
MISMATCH_CUDA = 803
NO_COMPAT = 804
NOT_READY = 802
ARGUMENTS = "gpunode env --format docker-args HOST prints the arguments for docker run."
ON_HOST = "on the host itself, in no container"
SIMULATED = "simulated GPUs: no library in a container can compute on them"
CUDA_SOURCE = "catalog (cuda.yml)"


@registry.check(
    "container.runs",
    level="standard",
    means="A container was started on the node with its idle GPUs, and the workload in it came to its end.",
    remedy="docker run by hand with the arguments of gpunode env; journalctl -u docker has the engine's own words.",
)
def runs(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
    if node.records is None:
        absent = no_gpu(node, expect) if node.pci is not None else None
        reason = node.gap("records") or "records: not in the collected data"
        yield Verdict(Status.SKIP, absent) if absent else Verdict(Status.ERROR, reason)
        return
    found = of(node, "container")
    if not found:
        if all(record.container is None for record in node.records):
            yield Verdict(Status.SKIP, f"ran {ON_HOST}")
        else:
            yield Verdict(
                Status.ERROR, "there is no record of the container: it is not known whether it came to its end"
            )
        return
    yield from _run(found[0])


def _run(record: Record) -> Iterator[Verdict]:
    if record.error is not None:
        yield Verdict(Status.ERROR, f"{record.error}{where(record)}")
        return
    if record.skipped is not None:
        yield Verdict(Status.SKIP, record.skipped)
        return
    values = values_of(record, ContainerValues)
    if isinstance(values, str):
        yield Verdict(Status.ERROR, values)
        return
    for line in values.busy:
        gpu, _, process = line.partition(": ")
        yield Verdict(Status.SKIP, f"left out, busy with {process or 'a process'}", component=gpu)
    handed = "without GPUs" if not values.gpus else f"with {counted(values.gpus, 'GPU')}"
    if values.complete is False:
        yield Verdict(Status.ERROR, f"ran {handed} and broke off after {record.seconds:.0f} s{where(record)}")
    elif values.complete is None:
        yield Verdict(Status.ERROR, f"it is not known whether it came to its end{where(record)}")
    elif record.container is None:
        yield Verdict(Status.SKIP, f"ran {handed} in {record.seconds:.0f} s {ON_HOST}")
    else:
        yield Verdict(Status.PASS, f"ran {handed} in {record.seconds:.0f} s{where(record)}")


@registry.check(
    "container.gpus",
    level="standard",
    needs=("records",),
    needs_gpu=True,
    means="The management library, CUDA and PyTorch count the same GPUs inside the container: all that it was given.",
    remedy="Give it the GPUs: --device nvidia.com/gpu=all (CDI) or --gpus all; role nvidia_container_toolkit sets both "
    "up. " + ARGUMENTS,
)
def gpus(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    nvml, cuda = one(node, "versions.nvml", NvmlValues), one(node, "versions.cuda", CudaValues)
    for answer in (nvml, cuda):
        if isinstance(answer, Verdict):
            yield _untold(node, answer)
            return
    if isinstance(nvml, Verdict) or isinstance(cuda, Verdict):
        return
    if _refused(node):
        yield Verdict(Status.SKIP, "the libraries inside do not fit the module (container.library says more)")
    elif cuda[1].forward_compat and cuda[1].result in (MISMATCH_CUDA, NO_COMPAT):
        yield Verdict(Status.SKIP, "cuda-compat is refused (container.forward-compat says more)")
    else:
        yield _counts(node, nvml[1], cuda[1])


def _untold(node: NodeFacts, answer: Verdict) -> Verdict:
    """A library of the driver that is not there, or broken, is the fault itself: the container was given no GPU."""
    if answer.status is Status.ERROR or nothing_ran(node) is not None:
        return answer
    return Verdict(Status.SKIP, SIMULATED) if node.simulated else replace(answer, status=Status.FAIL)


def _counts(node: NodeFacts, nvml: NvmlValues, cuda: CudaValues) -> Verdict:
    for name, result, said in (("NVML", nvml.result, nvml.result_name), ("CUDA", cuda.result, cuda.result_name)):
        if result != 0:
            remedy = "Fabric manager is not ready: role nvidia_fabric; driver.* and fabric.* checks say more."
            return Verdict(
                Status.FAIL,
                f"{name} does not start inside: {said or 'error'} ({result})",
                remedy=remedy if result == NOT_READY else None,
            )
    counts = {"NVML": nvml.count, "CUDA": cuda.count}
    torch = one(node, "versions.torch", TorchValues)
    # A build for the processor, or for a CUDA that the driver lacks, counts none; that has checks of its own.
    if not isinstance(torch, Verdict) and torch[1].cuda is not None and not explained(node, ("container.cuda",)):
        counts["PyTorch"] = torch[1].count
    untold = [name for name, count in counts.items() if count is None]
    if untold:
        return Verdict(Status.ERROR, f"{listed(untold)} did not say how many GPUs there are")
    document = (node.smi.document if node.smi else None) or {}
    if any(gpu.get("mig_mode") for gpu in document.get("gpus", ())):
        return Verdict(Status.SKIP, "GPUs are divided by MIG: NVML counts cards, CUDA counts what it may use")
    given = next((values.gpus for _, values in _container(node) if values.gpus is not None), None)
    words = listed([f"{name} {count}" for name, count in counts.items()])
    expected = given if given is not None else counts["NVML"]
    told = partial(Verdict, expected=expected, measured=min(count or 0 for count in counts.values()), unit="GPUs")
    if set(counts.values()) == {expected}:
        return told(Status.PASS, f"{words}, as given")
    return told(Status.FAIL, f"given {expected}; counted inside: {words}")


def _container(node: NodeFacts) -> Iterator[tuple[Record, ContainerValues]]:
    for record in of(node, "container"):
        values = values_of(record, ContainerValues)
        if isinstance(values, ContainerValues):
            yield record, values


@registry.check(
    "container.library",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The driver's libraries inside the container have the version of the module that the kernel has loaded.",
    remedy="Write the CDI specification anew (nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml) and start "
    "containers anew; an image must not bring libcuda or libnvidia-ml of its own.",
)
def library(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    answer = one(node, "versions.system", SystemValues)
    if isinstance(answer, Verdict):
        yield answer
        return
    if node.loaded_driver is None:
        yield Verdict(Status.SKIP, "no NVIDIA module is loaded (driver.module-loaded says why)")
        return
    loaded = node.loaded_driver.version
    if node.driver_library_version is not None and not same_version(node.driver_library_version, loaded):
        yield Verdict(Status.SKIP, "they do not fit on the host either (driver.library-matches-module says why)")
        return
    compat = any(values.forward_compat for values in _cuda(node))
    inside = {
        name: version
        for name, version in answer[1].driver_libraries.items()
        if version is not None and not (compat and name == "libcuda.so.1")
    }
    told = partial(Verdict, expected=loaded, measured=listed(sorted(set(inside.values()))) or None)
    other = [f"{name} {version}" for name, version in inside.items() if not same_version(version, loaded)]
    refused = _refused(node)
    if other:
        yield told(Status.FAIL, f"inside: {listed(other)}; the loaded module is {loaded}{where(answer[0])}")
    elif refused:
        yield told(Status.FAIL, f"{refused}; the loaded module is {loaded}{where(answer[0])}")
    elif not inside:
        yield told(Status.SKIP, "the container has no library of the driver with a version (container.gpus says more)")
    else:
        yield told(Status.PASS, f"{listed(sorted(inside))} at {loaded}, as the module")


def _cuda(node: NodeFacts) -> Iterator[CudaValues]:
    answer = one(node, "versions.cuda", CudaValues)
    if not isinstance(answer, Verdict):
        yield answer[1]


def _refused(node: NodeFacts) -> str | None:
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
    remedy="Take an image whose CUDA the driver has itself, or move the driver (gpunode plan --cuda VERSION); a "
    "needless cuda-compat goes: apt-get remove 'cuda-compat-*', or out of LD_LIBRARY_PATH.",
)
def forward_compat(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    answer = one(node, "versions.cuda", CudaValues)
    if isinstance(answer, Verdict):
        broken = answer.status is Status.FAIL
        yield Verdict(Status.SKIP, f"{answer.message} (container.gpus says more)") if broken else answer
        return
    yield _compat(*answer, node)


def _compat(record: Record, values: CudaValues, node: NodeFacts) -> Verdict:
    told = partial(Verdict, source=CUDA_SOURCE, measured=values.version)
    if not values.forward_compat:
        return told(Status.PASS, "not in use: libcuda is the host's")
    if values.result in (MISMATCH_CUDA, NO_COMPAT):
        said = values.result_name or "error"
        return told(Status.FAIL, f"{values.library} is refused: {said} ({values.result}){where(record)}")
    series = ".".join((values.cuda_version or "").split(".")[:2])
    row = load().forward_compat.get(series)
    branch = int(node.loaded_driver.version.split(".", maxsplit=1)[0]) if node.loaded_driver else None
    if row is not None and branch in row.needless_on:
        return told(
            Status.WARN, f"cuda-compat {values.version} is in use, and driver {branch} has CUDA {series} itself"
        )
    if row is not None and branch in row.refused_on:
        return told(Status.FAIL, f"cuda-compat {values.version} is older than driver {branch}{where(record)}")
    return told(Status.PASS, f"in use: CUDA {values.cuda_version} by {values.library}")


@registry.check(
    "container.cuda",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The driver runs the CUDA that the image is made with.",
    remedy="Take an image or wheel of an older CUDA, or move the driver: gpunode plan --cuda VERSION HOST, then role "
    "nvidia_driver.",
)
def cuda_of_image(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    system, torch = one(node, "versions.system", SystemValues), one(node, "versions.torch", TorchValues)
    if isinstance(system, Verdict):
        yield system
        return
    if node.loaded_driver is None:
        yield Verdict(Status.SKIP, "no NVIDIA module is loaded (driver.module-loaded says why)")
        return
    said = {"the image": system[1].cuda, "PyTorch": None if isinstance(torch, Verdict) else torch[1].cuda}
    wanted = {name: number for name, text in said.items() if text and (number := _series(text))}
    if not wanted:
        yield Verdict(Status.SKIP, f"{image_of(node)} names no CUDA of its own")
        return
    name, number = max(wanted.items(), key=lambda item: item[1])
    yield _driver_runs(node, f"{name}: CUDA {number}", number, node.loaded_driver.version)


def _series(text: str) -> Version | None:
    """``13.0.2`` as 13.0; None for what is no version."""
    try:
        release = Version(text).release
    except InvalidVersion:
        return None
    return Version(".".join(str(part) for part in (*release, 0)[:2]))


def _driver_runs(node: NodeFacts, what: str, number: Version, driver: str) -> Verdict:
    catalog = load()
    document = (node.smi.document if node.smi else None) or {}
    branch = catalog.branches.get(driver.split(".", maxsplit=1)[0])
    own = _series(document.get("cuda_version") or "") or _series((branch.native_cuda if branch else None) or "")
    if own is None:
        return Verdict(Status.ERROR, f"it is not known which CUDA driver {driver} runs")
    told = partial(Verdict, expected=f"at most {own}", measured=str(number), source=CUDA_SOURCE)
    if number <= own:
        return told(Status.PASS, f"{what}; driver {driver} runs up to {own}")
    if any(values.forward_compat and values.result == 0 for values in _cuda(node)):
        return told(Status.PASS, f"{what}; driver {driver} runs up to {own}, cuda-compat carries the rest")
    major = catalog.cuda_majors.get(str(number.major))
    if number.major == own.major and major is not None and Version(driver) >= Version(major.floor):
        return told(
            Status.WARN,
            f"{what}; driver {driver} runs up to {own}: minor-version compatibility, without PTX of the newer CUDA",
        )
    return told(Status.FAIL, f"{what}; driver {driver} runs up to {own}")


@record_check(
    "container.shm",
    "versions.limits",
    LimitValues,
    means="The container's shared memory holds what the DataLoader's workers and NCCL put there.",
    remedy="docker run --shm-size=8g (or --ipc=host). " + ARGUMENTS,
)
def shm(values: LimitValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    if record.container is None:
        return Verdict(Status.SKIP, f"ran {ON_HOST}")
    if values.shm_bytes is None:
        return Verdict(Status.ERROR, "the size of /dev/shm was not seen")
    told = partial(
        Verdict,
        expected=SHM_MIN_BYTES // 2**20,
        measured=values.shm_bytes // 2**20,
        unit="MiB",
        source="catalog (sources.yml, ncclgdr)",
    )
    if values.shm_bytes < SHM_MIN_BYTES:
        return told(
            Status.FAIL, f"shared memory has {values.shm_bytes // 2**20} MiB, {SHM_MIN_BYTES // 2**20} are wanted"
        )
    return told(Status.PASS, f"shared memory has {values.shm_bytes / GIB:.1f} GiB")


@record_check(
    "container.memlock",
    "versions.limits",
    LimitValues,
    means="The container may lock memory without limit: RDMA and pinned buffers need it.",
    remedy="docker run --ulimit memlock=-1. " + ARGUMENTS,
)
def memlock(values: LimitValues, record: Record, node: NodeFacts) -> Verdict:
    if record.container is None:
        return Verdict(Status.SKIP, f"ran {ON_HOST}")
    if values.memlock_bytes is None:
        return Verdict(Status.ERROR, "the limit of locked memory was not seen")
    told = partial(Verdict, expected="unlimited", source="catalog (sources.yml, ncclgdr)")
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
)
def stack(values: LimitValues, record: Record, node: NodeFacts) -> Verdict:  # noqa: ARG001
    if record.container is None:
        return Verdict(Status.SKIP, f"ran {ON_HOST}")
    size = values.stack_bytes
    if size is None:
        return Verdict(Status.ERROR, "the limit of the stack was not seen")
    told = partial(Verdict, expected=f"{STACK_MIN_BYTES // 1024} KiB", source="catalog (sources.yml, ncclgdr)")
    if size == -1:
        return told(Status.WARN, "the stack is unlimited, which NCCL's threads cannot have", measured="unlimited")
    told = partial(told, measured=f"{size // 1024} KiB")
    if size < STACK_MIN_BYTES:
        return told(Status.WARN, f"the stack has {size // 1024} KiB, {STACK_MIN_BYTES // 1024} are wanted")
    return told(Status.PASS, f"the stack has {size // 1024} KiB")
