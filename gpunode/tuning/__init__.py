"""Recommended settings of a node, derived from its facts: each value with its reason and source. The package has no
side effects."""

from gpunode.tuning.containers import GPU_ARGUMENTS
from gpunode.tuning.model import PROFILES, LeftAlone, NodeSlice, NodeTuning, Profile, Setting, Tuning, Tunings
from gpunode.tuning.slices import GpuRequest, SliceRefusedError, slice_of
from gpunode.tuning.tune import (
    WORKLOADS,
    Workload,
    docker_args,
    env_file,
    nccl_conf,
    node_shell,
    payload_settings,
    shell,
    systemd,
    tune,
    tune_node,
)

__all__ = [
    "GPU_ARGUMENTS",
    "PROFILES",
    "WORKLOADS",
    "GpuRequest",
    "LeftAlone",
    "NodeSlice",
    "NodeTuning",
    "Profile",
    "Setting",
    "SliceRefusedError",
    "Tuning",
    "Tunings",
    "Workload",
    "docker_args",
    "env_file",
    "nccl_conf",
    "node_shell",
    "payload_settings",
    "shell",
    "slice_of",
    "systemd",
    "tune",
    "tune_node",
]
