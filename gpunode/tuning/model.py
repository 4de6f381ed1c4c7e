"""What tuning answers: settings with their reasons, and what was left alone with the reason for that."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Literal["gpunode.env/1"] = "gpunode.env/1"


class Part(BaseModel):
    """Base: immutable, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Setting(Part):
    """One value that a workload should be given."""

    name: str
    """``NCCL_IB_HCA``; for an argument of ``docker run``: ``--shm-size``."""
    value: str
    reason: str
    """What of this node leads to it."""
    source: str
    """Where the rule comes from."""


class LeftAlone(Part):
    """Something that people set by habit, and why it is not set here."""

    name: str
    reason: str


class Tuning(Part):
    """The settings of one node for one workload."""

    host: str
    simulated: bool
    workload: str
    multi_node: bool = False
    environment: tuple[Setting, ...]
    docker: tuple[Setting, ...]
    """Arguments of ``docker run`` without the environment; one with an empty value stands alone."""
    left_alone: tuple[LeftAlone, ...]


class Tunings(Part):
    """The document ``gpunode.env/1``."""

    schema_name: Literal["gpunode.env/1"] = Field(SCHEMA, alias="schema")
    nodes: tuple[Tuning, ...]
