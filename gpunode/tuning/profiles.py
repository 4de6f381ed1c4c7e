"""Profiles of use: the same machine has different settings in each."""

from dataclasses import dataclass
from typing import Literal, get_args

Profile = Literal["training", "inference", "development", "hpc"]
PROFILES: tuple[Profile, ...] = get_args(Profile)


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
