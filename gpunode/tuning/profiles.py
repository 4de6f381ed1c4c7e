"""What a node is for: the profile decides where the same machine is set differently."""

from dataclasses import dataclass
from typing import Literal, get_args

Profile = Literal["training", "inference", "development", "hpc"]
PROFILES: tuple[Profile, ...] = get_args(Profile)


@dataclass(frozen=True)
class Traits:
    """How the jobs of a profile use a node."""

    shares_gpus: bool
    """Several processes use one GPU: memory is taken as it is needed."""
    saves_power: bool
    """The node idles for long: processors may clock down."""
    idle_latency_us: int | None
    """Deepest sleep of a processor that its jobs tolerate; None: any."""
    zone_reclaim: bool
    """Each process keeps to the memory of its NUMA node."""
    hugepages: Literal["always", "madvise"]
    swappiness: int


# What a job waits for decides: a training step and an MPI program wait for the slowest process, a request for one.
TRAITS: dict[Profile, Traits] = {
    "training": Traits(False, False, None, False, "madvise", 10),
    "inference": Traits(True, False, 50, False, "madvise", 10),
    "development": Traits(True, True, None, False, "madvise", 30),
    "hpc": Traits(False, False, 50, True, "always", 10),
}
