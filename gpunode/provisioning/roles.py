"""The plan of each role, and what it has ``node_state`` look at."""

from collections.abc import Callable, Mapping
from typing import Any

<<<<<<< HEAD
from gpunode.provisioning import cuda, dcgm, docker, nvidia_container_toolkit, nvidia_driver, nvidia_fabric
=======
from gpunode.provisioning import docker, nvidia_driver, nvidia_fabric, nvidia_repository, preflight
>>>>>>> main
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.state import Look, NodeState

Plan = Callable[[NodeState, Mapping[str, Any], Context], Manifest]
"""(state, the role's settings without its name in front, the run) to manifest; pure."""

PLANS: dict[str, Plan] = {
<<<<<<< HEAD
    "cuda": cuda.plan,
    "dcgm": dcgm.plan,
    "docker": docker.plan,
    "nvidia_container_toolkit": nvidia_container_toolkit.plan,
=======
    "preflight": preflight.plan,
    "nvidia_repository": nvidia_repository.plan,
>>>>>>> main
    "nvidia_driver": nvidia_driver.plan,
    "nvidia_fabric": nvidia_fabric.plan,
    "docker": docker.plan,
}
LOOKS: dict[str, Look] = {
<<<<<<< HEAD
    "cuda": cuda.LOOK,
    "dcgm": dcgm.LOOK,
    "docker": docker.LOOK,
    "nvidia_container_toolkit": nvidia_container_toolkit.LOOK,
=======
    "nvidia_repository": nvidia_repository.LOOK,
>>>>>>> main
    "nvidia_driver": nvidia_driver.LOOK,
    "nvidia_fabric": nvidia_fabric.LOOK,
    "docker": docker.LOOK,
}
