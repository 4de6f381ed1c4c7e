"""What a node should be set to, derived from its facts: each value with its reason and source. Pure."""

from gpunode.tuning.containers import GPU_ARGUMENTS
from gpunode.tuning.model import LeftAlone, Setting, Tuning, Tunings
from gpunode.tuning.payload import payload_settings
from gpunode.tuning.render import docker_args, env_file, shell
from gpunode.tuning.tune import WORKLOADS, Workload, tune

__all__ = [
    "GPU_ARGUMENTS",
    "WORKLOADS",
    "LeftAlone",
    "Setting",
    "Tuning",
    "Tunings",
    "Workload",
    "docker_args",
    "env_file",
    "payload_settings",
    "shell",
    "tune",
]
