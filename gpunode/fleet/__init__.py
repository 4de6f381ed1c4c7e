"""From an inventory to bundles: the nodes, their connections, and parallel collection within time limits."""

from gpunode.fleet.collector import Collected, Then, collect
from gpunode.fleet.node import Node, Stream
from gpunode.fleet.session import MissingProgram, NodeFailure
from gpunode.fleet.targets import Target, local_target, targets_from_hosts, targets_from_inventory

__all__ = [
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
