"""A slice of a node: some of its GPUs with their share of processors and memory, for a job beside others."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpunode.errors import Exit, GpunodeError, UndeterminedError, UsageError
from gpunode.facts import NodeFacts
from gpunode.facts.models.measured import LoaderValues
from gpunode.facts.models.smi import SmiGpu
from gpunode.facts.models.workload import values_of
from gpunode.facts.pci import PciDevice
from gpunode.onnode.launcher import MOST_CPUS, share
from gpunode.text import listed, number_ranges
from gpunode.tuning.model import LeftAlone, NodeSlice, Setting

MOST_GPUS = 256
MOST_COMPARED = 64
"""Links are compared up to this number of idle GPUs; beyond it, the first ones are taken."""
RESERVED_SHARE = 10
"""Percent of the node's memory that no slice gets: kernel, daemons, page cache. A choice of gpunode."""
RESERVED_MIN_MIB = 4 * 1024
SHM_PER_GPU_GIB = 8
CPUSET = "share of the processors near each GPU: gpunode's rule; the option: catalog (sources.yml, docker_limits)"
MEMORY = (
    f"share per GPU after {RESERVED_SHARE} % for the node: gpunode's rule; the option: catalog (sources.yml, "
    "docker_limits)"
)
WORKERS = "half of the cores, one per worker: gpunode's rule; too many slow down: catalog (sources.yml, pt_loader)"
CLOSENESS = {"NV": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 6}
"""Distance between two GPUs by the word of ``nvidia-smi topo -m``; the number after NV does not count."""
UNKNOWN_LINK = 5


class SliceRefusedError(GpunodeError):
    """The node cannot give the requested GPUs: they are in use, or nothing can run on them."""

    exit_code = Exit.FAILED


@dataclass(frozen=True)
class GpuRequest:
    """GPUs of a slice: named by index or UUID, or a number of idle ones."""

    names: tuple[str, ...] = ()
    idle: int = 0

    @classmethod
    def parse(cls, text: str) -> "GpuRequest":
        """Parse ``0,1``, ``0-3``, ``GPU-8932f937``; raise UsageError for other text."""
        names: list[str] = []
        for word in (part.strip() for part in text.split(",")):
            span = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", word, re.ASCII)
            if span:
                first, last = int(span[1]), int(span[2] or span[1])
                if last < first or last >= MOST_GPUS:
                    raise UsageError(f'--gpus: "{word}" is not a range of GPUs (example: 0-3)')
                names += [str(index) for index in range(first, last + 1)]
            elif re.fullmatch(r"GPU-[0-9a-f-]{1,64}", word, re.ASCII):
                names.append(word)
            else:
                raise UsageError(f'--gpus: "{word}" is not a GPU (examples: 0,1 or 0-3 or GPU-8932f937)')
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"--gpus: {listed(twice)} is named twice")
        return cls(names=tuple(names))


def slice_of(node: NodeFacts, request: GpuRequest) -> NodeSlice:
    """Return the requested GPUs with their share of the node.

    Raises UsageError for a GPU that the node does not have, SliceRefusedError for one that is in use, and
    UndeterminedError if the node does not report which are.
    """
    bus = node.gpus_on_bus
    if bus is None:
        raise UndeterminedError(f"{node.host}: the PCI bus could not be read: {node.gap('pci')}")
    if not bus:
        raise SliceRefusedError(f"{node.host}: no NVIDIA GPU on the node")
    gpus = node.smi_gpus
    if not gpus:
        reason = node.gap("smi") or (node.smi and node.smi.error_message) or "nvidia-smi lists none"
        raise UndeterminedError(f"{node.host}: the driver reports no GPU: {reason}")
    unusable = _unusable(node, gpus)
    if request.names:
        chosen = _named(node, gpus, request.names)
        wrong = [unusable[gpu.index] for gpu in chosen if gpu.index in unusable]
        if wrong:
            raise SliceRefusedError(f"{node.host}: {'; '.join(wrong)}")
    else:
        chosen = _idle(node, gpus, unusable, request.idle)
    return _slice(node, bus, chosen)


def _named(node: NodeFacts, gpus: Sequence[SmiGpu], names: Iterable[str]) -> list[SmiGpu]:
    chosen = []
    for name in names:
        matches = [gpu for gpu in gpus if name == str(gpu.index) or (name.startswith("GPU-") and _starts(gpu, name))]
        if len(matches) != 1:
            has = f"has {number_ranges(gpu.index for gpu in gpus)}"
            raise UsageError(f"--gpus {name}: {node.host} {has if not matches else 'has several GPUs of that name'}")
        chosen.append(matches[0])
    if len({gpu.index for gpu in chosen}) < len(chosen):
        raise UsageError(f"--gpus: a GPU of {node.host} is named twice, by index and by UUID")
    return sorted(chosen, key=lambda gpu: gpu.index)


def _starts(gpu: SmiGpu, name: str) -> bool:
    return gpu.uuid is not None and gpu.uuid.startswith(name)


def _unusable(node: NodeFacts, gpus: Sequence[SmiGpu]) -> dict[int, str]:
    """Return the reason for each GPU that a slice cannot have."""
    if node.gpu_processes is None:
        raise UndeterminedError(f"{node.host}: the GPUs in use are unknown: {node.gap('gpu_processes')}")
    computing = [process for process in node.gpu_processes if process.computes]
    adrift = [process.title for process in computing if process.gpu is None]
    if adrift:
        raise UndeterminedError(f"{node.host}: the GPU of a process is unknown, it may be any: {listed(adrift)}")
    reasons = {}
    for gpu in gpus:
        name = f"gpu{gpu.index}"
        users = [process.title for process in computing if process.gpu == name]
        if users:
            reasons[gpu.index] = f"{name} is in use: {listed(users)}"
        elif gpu.mig_mode:
            reasons[gpu.index] = f"{name} is in MIG mode: slices are whole GPUs"
        elif gpu.compute_mode == "Prohibited":
            reasons[gpu.index] = f"{name} has the compute mode Prohibited"
        elif gpu.reset_required:
            reasons[gpu.index] = f"{name} requires a reset"
    return reasons


def _idle(node: NodeFacts, gpus: Sequence[SmiGpu], unusable: dict[int, str], number: int) -> list[SmiGpu]:
    free = [gpu for gpu in gpus if gpu.index not in unusable]
    if len(free) < number:
        why = f": {'; '.join(unusable.values())}" if unusable else ""
        raise SliceRefusedError(f"{node.host}: {number} idle GPUs were requested, {len(free)} of {len(gpus)} are{why}")
    if len(free) > MOST_COMPARED:
        return free[:number]
    far = _distances(node, free)
    sets = []
    for first in free:
        near = sorted(
            (gpu for gpu in free if gpu is not first), key=lambda gpu: (far[first.index, gpu.index], gpu.index)
        )
        sets.append(sorted([first, *near[: number - 1]], key=lambda gpu: gpu.index))
    return min(sets, key=lambda chosen: (_spread(far, chosen), [gpu.index for gpu in chosen]))


def _spread(far: dict[tuple[int, int], int], chosen: Sequence[SmiGpu]) -> int:
    return sum(far[gpu.index, other.index] for gpu in chosen for other in chosen if gpu.index < other.index)


def _distances(node: NodeFacts, gpus: Sequence[SmiGpu]) -> dict[tuple[int, int], int]:
    """Return the distances of GPUs by link; where the link is the same for all (NVSwitch), by NUMA node."""
    numa = {device.slot: device.numa_node for device in node.gpus_on_bus or ()}
    links = node.gpu_links
    far = {}
    for gpu in gpus:
        row = links.get(f"GPU{gpu.index}", {})
        for other in gpus:
            word = row.get(f"GPU{other.index}", "")
            link = CLOSENESS.get("NV" if word.startswith("NV") else word, UNKNOWN_LINK)
            apart = numa.get(gpu.pci_bus_id or "") != numa.get(other.pci_bus_id or "")
            far[gpu.index, other.index] = 2 * link + apart
    return far


def _slice(node: NodeFacts, bus: Sequence[PciDevice], chosen: Sequence[SmiGpu]) -> NodeSlice:
    slots = [gpu.pci_bus_id or "" for gpu in chosen]
    known = {device.slot for device in bus}
    absent = [f"gpu{gpu.index}" for gpu, slot in zip(chosen, slots, strict=True) if slot not in known]
    if absent:
        raise UndeterminedError(f"{node.host}: the PCI slot of {listed(absent)} is unknown: its share is too")
    shares, cores = processor_shares(node, bus)
    cpus = sorted(cpu for slot in slots for cpu in shares.get(slot, ()))
    each = min((len({cores[cpu] for cpu in shares[slot]}) for slot in slots), default=0) if cpus else 0
    threads, workers = threads_and_workers(each, measured_workers(node))
    memory = memory_gib(node, len(bus)) * len(chosen)
    return NodeSlice(
        gpus=tuple(gpu.index for gpu in chosen),
        of_gpus=len(bus),
        uuids=tuple(gpu.uuid for gpu in chosen if gpu.uuid),
        cpus=number_ranges(cpus),
        processors=len(cpus),
        cores=len({cores[cpu] for cpu in cpus}),
        memory_gib=memory,
        shm_gib=min(SHM_PER_GPU_GIB * len(chosen), max(1, memory // 2)) if memory else 1,
        threads=threads,
        workers=workers,
    )


def processor_shares(node: NodeFacts, bus: Sequence[PciDevice]) -> tuple[dict[str, list[int]], dict[int, int]]:
    """Return the processors of each GPU's slot, of which no two GPUs share a core, and each processor's core.

    No shares if the processors are unknown, or fewer cores than GPUs.
    """
    sets = node.cpu_sets
    confined = node.cpu is not None and node.cpus_allowed is not None and node.cpus_allowed < node.cpu.cpus
    known = sets is not None and (
        sets.first_core is not None or (node.cpu is not None and node.cpu.threads_per_core == 1)
    )
    if sets is None or confined or not known:
        return {}, {}
    online = set(sets.online)
    cores = {cpu: sets.core_of(cpu) for cpu in online}
    slots = sorted(device.slot for device in bus)
    near = {device.slot: _whole_cores(_near(device.local_cpus or "", online), cores) for device in bus}
    groups = {area: [slot for slot in slots if near[slot] == area] for area in near.values()}
    for areas in (groups, {frozenset(online): slots}):
        apart = sum(len({cores[cpu] for cpu in area}) for area in areas) == len(
            {cores[cpu] for area in areas for cpu in area}
        )
        if apart and all(len({cores[cpu] for cpu in area}) >= len(members) for area, members in areas.items()):
            return {
                slot: share(sorted(area), cores, index, len(members))
                for area, members in areas.items()
                for index, slot in enumerate(members)
            }, cores
    return {}, cores


def _whole_cores(area: frozenset[int], cores: Mapping[int, int]) -> frozenset[int]:
    """Return an area with the other processors of its cores: a node may name a part of a core."""
    chosen = {cores[cpu] for cpu in area}
    return frozenset(cpu for cpu, core in cores.items() if core in chosen)


def _near(text: str, online: set[int]) -> frozenset[int]:
    """Return the online processors in a list of the kernel; none for other text, whatever a node sends."""
    cpus: set[int] = set()
    end = -1
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not end < first <= last < MOST_CPUS:
            return frozenset()
        cpus |= online.intersection(range(first, last + 1))
        end = last
    return frozenset(cpus)


def threads_and_workers(cores: int, measured: int | None) -> tuple[int, int]:
    """Return threads of a process and its DataLoader's workers: together one per core; 0 cores: unknown.

    ``measured``: the fewest workers with the best throughput on this node.
    """
    if cores < 1:
        return 0, 0
    workers = min(cores - 1, measured) if measured is not None else cores // 2
    return cores - workers, workers


def measured_workers(node: NodeFacts) -> int | None:
    """Return the number of workers that ``validate --storage`` found to be enough; None if it was not measured."""
    for record in node.records or ():
        if record.record == "storage.dataloader" and record.error is None and record.skipped is None:
            seen = values_of(record, LoaderValues)
            if isinstance(seen, LoaderValues):
                return int(seen.advised_workers)
    return None


def memory_gib(node: NodeFacts, number: int) -> int:
    """Return the memory for each of ``number`` GPUs; 0 if it is unknown or less than 1 GiB."""
    if node.memory is None:
        return 0
    reserved = max(RESERVED_MIN_MIB, node.memory.total_mib * RESERVED_SHARE // 100)
    return max(0, node.memory.total_mib - reserved) // 1024 // max(1, number)


def limits(part: NodeSlice) -> Iterator[Setting | LeftAlone]:
    """Yield the slice's processors and memory as arguments of ``docker run``."""
    if part.cpus:
        yield Setting(
            name="--cpuset-cpus",
            value=part.cpus,
            reason=f"{part.cores} cores with all their threads near {part.title}; no other slice has them",
            source=CPUSET,
        )
        yield Setting(
            name="--cpus",
            value=str(part.processors),
            reason="as many as the cpuset has: programs that read the quota start no more threads",
            source="catalog (sources.yml, docker_limits)",
        )
    else:
        why = "the processors are unknown, fewer than GPUs, or a cpuset confines this session"
        yield from (LeftAlone(name=name, reason=why) for name in ("--cpuset-cpus", "--cpus"))
    if part.memory_gib:
        yield Setting(
            name="--memory",
            value=f"{part.memory_gib}g",
            reason=f"the share of {len(part.gpus)} of {part.of_gpus} GPUs; pinned and shared memory count",
            source=MEMORY,
        )
    else:
        yield LeftAlone(name="--memory", reason="the node's memory is unknown, or too small to be divided")
    yield LeftAlone(
        name="--cpuset-mems", reason="ends processes when one NUMA node is full; the cpuset places memory near already"
    )


def visible(part: NodeSlice) -> Iterator[Setting | LeftAlone]:
    """Yield the variable that limits programs to the slice's GPUs, inside and outside of containers."""
    if len(part.uuids) < len(part.gpus):
        yield LeftAlone(name="CUDA_VISIBLE_DEVICES", reason="nvidia-smi does not report the UUID of each GPU")
        return
    yield Setting(
        name="CUDA_VISIBLE_DEVICES",
        value=",".join(part.uuids),
        reason=f"{part.title} by UUID: indices are others in a container",
        source="catalog (sources.yml, cuda_env)",
    )


def threads(part: NodeSlice, names: Iterable[str]) -> Iterator[Setting | LeftAlone]:
    """Yield the threads of each process of the slice: one process per GPU, beside its DataLoader's workers."""
    if not part.threads:
        yield from (LeftAlone(name=name, reason="the slice's cores are unknown") for name in names)
        return
    for name in names:
        yield Setting(
            name=name,
            value=str(part.threads),
            reason=f"{part.threads + part.workers} cores per GPU, of which {part.workers} are for loader workers",
            source="common practice; torchrun's default: catalog (sources.yml, pt_run)",
        )


PROGRAM = {
    "pytorch": "DataLoader(num_workers)",
    "tensorflow": "tf.data.Options.threading.private_threadpool_size",
}
"""What a program sets to the number of workers; no variable does."""


def program(node: NodeFacts, part: NodeSlice, workload: str) -> Iterator[Setting]:
    """Yield what only the program itself can set: the workers of its input pipeline."""
    if workload not in PROGRAM or not part.threads:
        return
    measured = measured_workers(node)
    yield Setting(
        name=PROGRAM[workload],
        value=str(part.workers),
        reason=f"each of {part.threads + part.workers} cores per GPU runs a thread or a worker"
        + (f"; validate --storage measured {measured} as enough" if measured is not None else ""),
        source="validate --storage on this node" if measured is not None else WORKERS,
    )
