"""What tuning answers: settings with their reasons, and what was left alone with the reason for that."""

from typing import Literal

from pydantic import Field

from gpunode.frozen import FrozenByName

SCHEMA: Literal["gpunode.env/1"] = "gpunode.env/1"


class Setting(FrozenByName):
    """One value that a workload or a node should be given."""

    name: str
    """``NCCL_IB_HCA``; for an argument of ``docker run``: ``--shm-size``; of the kernel: ``vm.swappiness``."""
    value: str
    reason: str
    """What of this node leads to it."""
    source: str
    """Where the rule comes from."""


class LeftAlone(FrozenByName):
    """Something that people set by habit, and why it is not set here."""

    name: str
    reason: str


class NodeTuning(FrozenByName):
    """What belongs to a node, whatever runs on it."""

    environment: tuple[Setting, ...] = ()
    """Variables that are harmless for everybody on the node."""
    nccl: tuple[Setting, ...] = ()
    """Lines of ``/etc/nccl.conf``, which every program outside of containers reads."""
    kernel: tuple[Setting, ...] = ()
    """Kernel settings by their sysctl names, and ``transparent_hugepage``, ``cpu_governor``, ``cpu_idle_latency_us``,
    ``command_line``."""
    left_alone: tuple[LeftAlone, ...] = ()


class Tuning(FrozenByName):
    """The settings of one node for one workload."""

    host: str
    simulated: bool
    profile: str = "training"
    workload: str
    multi_node: bool = False
    environment: tuple[Setting, ...]
    """Of the job."""
    docker: tuple[Setting, ...]
    """Arguments of ``docker run`` without the environment; one with an empty value stands alone."""
    left_alone: tuple[LeftAlone, ...]
    node: NodeTuning = NodeTuning()


class Tunings(FrozenByName):
    """The document ``gpunode.env/1``."""

    schema_name: Literal["gpunode.env/1"] = Field(SCHEMA, alias="schema")
    nodes: tuple[Tuning, ...]
