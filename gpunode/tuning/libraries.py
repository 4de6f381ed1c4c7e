"""Environment of CUDA, OpenMP, PyTorch and TensorFlow."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from gpunode.facts import NodeFacts
from gpunode.facts.models.workload import TorchValues, values_of
from gpunode.onnode.launcher import threads_per_rank
from gpunode.tuning.model import LeftAlone, Setting, Traits

THREADS = {"OMP_NUM_THREADS": "torchrun would set 1", "MKL_NUM_THREADS": "same as OMP_NUM_THREADS"}
"""Variables, and the end of their reason."""
NEW_NAME = Version("2.10")
"""The first PyTorch to read PYTORCH_ALLOC_CONF alone; later ones read the old name too, with a warning."""


def order(_: NodeFacts) -> Iterator[Setting]:
    """Yield the order of GPUs."""
    yield Setting(
        name="CUDA_DEVICE_ORDER",
        value="PCI_BUS_ID",
        reason="cuda:N is then nvidia-smi's GPU N; the default order puts the fastest first",
        source="catalog (sources.yml, cuda_env)",
    )


def cuda(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    """Yield the variables of CUDA for a job."""
    yield from order(node)
    yield LeftAlone(name="CUDA_LAUNCH_BLOCKING", reason="debugging only: every kernel waits for the previous one")
    yield LeftAlone(name="CUDA_DEVICE_MAX_CONNECTIONS", reason="set by the program, not by the node")


def threads(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    """Yield the threads of one process of several on the node: one process per GPU."""
    gpus = len(node.gpus_on_bus or ())
    usable = usable_cores(node)
    if usable is None:
        reason = f"the processor's cores are unknown: {node.gap('cpu') or 'lscpu reports none'}"
    elif gpus == 0:
        reason = "no GPU: no process per GPU"
    elif usable < gpus:
        reason = f"{gpus} GPUs and {usable} cores: processes share cores"
    else:
        which = "physical cores"
        if usable != physical_cores(node):
            which = f"of {physical_cores(node)} physical cores that a cpuset allows,"
        for name, otherwise in THREADS.items():
            yield Setting(
                name=name,
                value=str(threads_per_rank(usable, gpus)),
                reason=f"{usable} {which} for one process on each of {gpus} GPU{'s' if gpus > 1 else ''}; {otherwise}",
                source="common practice; torchrun's default: catalog (sources.yml, pt_run)",
            )
        yield LeftAlone(name="OMP_PROC_BIND", reason="the launcher binds processes: gpunode-run, mpirun")
        return
    yield from (LeftAlone(name=name, reason=reason) for name in THREADS)
    yield LeftAlone(name="OMP_PROC_BIND", reason="the launcher binds processes: gpunode-run, mpirun")


def usable_cores(node: NodeFacts) -> int | None:
    """Return the physical cores that programs on the node may use; None if they are unknown."""
    cores, allowed = physical_cores(node), _allowed_cores(node)
    return cores if cores is None or allowed is None else min(cores, allowed)


def physical_cores(node: NodeFacts) -> int | None:
    """Return the number of cores, without second threads; None if lscpu does not report it."""
    seen = node.cpu
    if seen is None or not seen.sockets or not seen.cores_per_socket:
        return None
    return seen.sockets * seen.cores_per_socket


def _allowed_cores(node: NodeFacts) -> int | None:
    """Return the physical cores of the processors in a cpuset; None if there is none, or it is unknown."""
    if node.cpu is None or node.cpus_allowed is None or node.cpus_allowed >= node.cpu.cpus:
        return None
    return max(1, node.cpus_allowed // (node.cpu.threads_per_core or 1))


def allocator(node: NodeFacts, *, expandable: bool) -> Setting | LeftAlone:
    """Return the setting of PyTorch's allocator if it is requested, by the name that the node's PyTorch reads."""
    if not expandable:
        return LeftAlone(
            name="PYTORCH_CUDA_ALLOC_CONF",
            reason="expandable segments disable CUDA IPC in plain containers: --expandable-segments enables them",
        )
    version = _torch_version(node)
    new = version is not None and version >= NEW_NAME
    if version is None:
        which = "the name that all PyTorch versions support; the version is unknown"
    else:
        which = f"the name for PyTorch {version}"
    return Setting(
        name="PYTORCH_ALLOC_CONF" if new else "PYTORCH_CUDA_ALLOC_CONF",
        value="expandable_segments:True",
        reason=f"less memory fragmentation; {which}",
        source="catalog (sources.yml, pt_alloc)",
    )


def _torch_version(node: NodeFacts) -> Version | None:
    """Return the version in the records of a workload, if one was run."""
    for record in node.records or ():
        if record.record == "versions.torch" and record.error is None and record.skipped is None:
            seen = values_of(record, TorchValues)
            if isinstance(seen, TorchValues):
                try:
                    return Version(seen.version)
                except InvalidVersion:
                    return None
    return None


def tensorflow(_: NodeFacts, traits: Traits) -> Iterator[Setting | LeftAlone]:
    """Yield threads and memory as TensorFlow's guide for several GPUs recommends."""
    source = "catalog (sources.yml, tf_tune)"
    yield Setting(
        name="TF_GPU_THREAD_MODE",
        value="gpu_private",
        reason="each GPU has its own launch threads: processor work does not delay kernels",
        source=source,
    )
    yield Setting(name="TF_GPU_THREAD_COUNT", value="2", reason="two per GPU, the default", source=source)
    if traits.shares_gpus:
        yield Setting(
            name="TF_FORCE_GPU_ALLOW_GROWTH",
            value="true",
            reason="memory is allocated on demand: two processes can share a GPU",
            source=source,
        )
    else:
        yield LeftAlone(
            name="TF_FORCE_GPU_ALLOW_GROWTH", reason="a job owns its GPUs: memory is allocated once, contiguously"
        )
