"""What a node should be set to, derived from its facts: each value with its reason and source. Pure."""

from gpunode.tuning.model import LeftAlone, Setting, Tuning
from gpunode.tuning.payload import payload_settings
from gpunode.tuning.tune import WORKLOADS, Workload, tune

__all__ = ["WORKLOADS", "LeftAlone", "Setting", "Tuning", "Workload", "payload_settings", "tune"]
