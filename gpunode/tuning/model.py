"""Results of tuning: settings with their reasons, and settings left alone with the reason; and the profiles of use."""

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from gpunode.frozen import FrozenByName
from gpunode.text import listed

SCHEMA: Literal["gpunode.env/1"] = "gpunode.env/1"
Profile = Literal["training", "inference", "development", "hpc"]
PROFILES: tuple[Profile, ...] = get_args(Profile)


class Setting(FrozenByName):
    """One recommended value for a workload or a node."""

    name: str
    """``NCCL_IB_HCA``; for an argument of ``docker run``: ``--shm-size``; of the kernel: ``vm.swappiness``."""
    value: str
    reason: str
    """The property of this node that leads to it."""
    source: str
    """The source of the rule."""


class LeftAlone(FrozenByName):
    """A common setting that is not recommended here, and the reason."""

    name: str
    reason: str


class NodeTuning(FrozenByName):
    """Settings of a node for all its workloads."""

    environment: tuple[Setting, ...] = ()
    """Variables that are harmless for all users of the node."""
    nccl: tuple[Setting, ...] = ()
    """Lines of ``/etc/nccl.conf``, which every program outside of containers reads."""
    kernel: tuple[Setting, ...] = ()
    """Kernel settings by their sysctl names, and ``transparent_hugepage``, ``cpu_governor``, ``cpu_idle_latency_us``,
    ``command_line``."""
    left_alone: tuple[LeftAlone, ...] = ()


class NodeSlice(FrozenByName):
    """Some GPUs of a node with their share of it: shares of different GPUs do not overlap."""

    gpus: tuple[int, ...]
    """Indices of nvidia-smi."""
    of_gpus: int
    """Number of GPUs of the node."""
    uuids: tuple[str, ...]
    cpus: str
    """``0-13,112-125``; empty if the share is unknown."""
    processors: int
    cores: int
    memory_gib: int
    """0: unknown."""
    shm_gib: int
    threads: int
    """Of the process of one GPU; 0: unknown."""
    workers: int
    """Of the input pipeline of one GPU."""

    @property
    def title(self) -> str:
        """Return ``gpu0, gpu1``."""
        return listed((f"gpu{index}" for index in self.gpus), most=16)


class Tuning(FrozenByName):
    """The settings of one node for one workload."""

    host: str
    simulated: bool
    profile: str = "training"
    workload: str
    multi_node: bool = False
    environment: tuple[Setting, ...]
    """Variables of the job."""
    docker: tuple[Setting, ...]
    """Arguments of ``docker run`` without the environment; an argument with an empty value has no value."""
    program: tuple[Setting, ...] = ()
    """Arguments of the program's own calls, which no variable sets."""
    part: NodeSlice | None = None
    """None: the whole node."""
    left_alone: tuple[LeftAlone, ...]
    node: NodeTuning = NodeTuning()


class Tunings(FrozenByName):
    """The document ``gpunode.env/1``."""

    schema_name: Literal["gpunode.env/1"] = Field(SCHEMA, alias="schema")
    nodes: tuple[Tuning, ...]


@dataclass(frozen=True)
class Traits:
    """The way in which the jobs of a profile use a node."""

    shares_gpus: bool
    """True if several processes share a GPU: memory is allocated on demand."""
    saves_power: bool
    """True if the node idles for long: processors may clock down."""
    idle_latency_us: int | None
    """Longest wake-up latency of a processor that its jobs tolerate; None: any."""
    zone_reclaim: bool
    """True if each process uses only the memory of its NUMA node."""
    hugepages: Literal["always", "madvise"]
    swappiness: int


# The slowest process of a training step or an MPI program delays all others; requests are independent.
TRAITS: dict[Profile, Traits] = {
    "training": Traits(False, False, None, False, "madvise", 10),
    "inference": Traits(True, False, 50, False, "madvise", 10),
    "development": Traits(True, True, None, False, "madvise", 30),
    "hpc": Traits(False, False, 50, True, "always", 10),
}
