"""From an inventory to answers: the nodes, their connections, and parallel collection within time limits."""

from gpunode.fleet.asking import Then, collect
from gpunode.fleet.node import Node, Stream
from gpunode.fleet.session import MissingProgram, NodeFailure
from gpunode.fleet.targets import Target, local_target, targets_from_hosts, targets_from_inventory
from gpunode.probe import Answer, Collected

__all__ = [
    "Answer",
    "Collected",
    "MissingProgram",
    "Node",
    "NodeFailure",
    "Stream",
    "Target",
    "Then",
    "collect",
    "local_target",
    "targets_from_hosts",
    "targets_from_inventory",
]
