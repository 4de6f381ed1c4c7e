"""The plan of each role, and what it has ``node_state`` look at."""

from collections.abc import Callable, Mapping
from typing import Any

from gpunode.provisioning import docker, nvidia_driver, nvidia_repository, preflight
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.state import Look, NodeState

Plan = Callable[[NodeState, Mapping[str, Any], Context], Manifest]
"""(state, the role's settings without its name in front, the run) to manifest; pure."""

PLANS: dict[str, Plan] = {
    preflight.ROLE: preflight.plan,
    nvidia_repository.ROLE: nvidia_repository.plan,
    "docker": docker.plan,
}
LOOKS: dict[str, Look] = {
    nvidia_repository.ROLE: nvidia_repository.LOOK,
    nvidia_driver.ROLE: nvidia_driver.LOOK,
    "docker": docker.LOOK,
}
