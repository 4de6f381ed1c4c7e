"""From an inventory to bundles: who is to be reached, how, and all of them at once within time limits."""

from gpunode.fleet.collector import Collected, collect
from gpunode.fleet.targets import Target, local_target, targets_from_hosts, targets_from_inventory

__all__ = ["Collected", "Target", "collect", "local_target", "targets_from_hosts", "targets_from_inventory"]
