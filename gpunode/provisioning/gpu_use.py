"""Change of a driver on a running node: services to stop, required versions, refusals."""

import re
from collections.abc import Iterator

from gpunode.catalog.origins import upstream_version
from gpunode.facts import NodeFacts
from gpunode.provisioning.context import Context
from gpunode.provisioning.state import NodeState
from gpunode.stack import Stack

FABRIC_MANAGER = "nvidia-fabricmanager.service"
IMEX = "nvidia-imex.service"
STOPPABLE = ("nvidia-dcgm.service", IMEX, FABRIC_MANAGER, "nvidia-persistenced.service")
"""Our units that keep the module in use, in the order in which they are stopped."""
_MANAGER_PACKAGE = re.compile(r"nvidia-fabric-?manager(-[0-9]+)?")
_IMEX_PACKAGE = re.compile(r"nvidia-imex(-[0-9]+)?")


def manager_version(state: NodeState) -> str:
    """Return the fabric manager's release: the program's own report takes precedence over its package."""
    return (state.facts.nvidia_tool_versions or {}).get("nv-fabricmanager") or _packaged(state, _MANAGER_PACKAGE)


def imex_version(state: NodeState) -> str:
    """Return the release of IMEX; empty if it is not installed."""
    return _packaged(state, _IMEX_PACKAGE)


def _packaged(state: NodeState, name: re.Pattern[str]) -> str:
    versions = (version for package, version in sorted(state.installed.items()) if name.fullmatch(package))
    return next((upstream_version(version) for version in versions), "")


def gpus_in_use(facts: NodeFacts) -> bool:
    """Return whether a process computes on a GPU; True if that could not be determined."""
    return facts.gpu_processes is None or any(process.computes for process in facts.gpu_processes)


def must_be_idle(context: Context) -> bool:
    """Return whether the driver must not change while processes compute."""
    return not context.settings_of("preflight")["gpunode_allow_busy"]


def unserved_fabric(stack: Stack, context: Context) -> Iterator[str]:
    """Yield why a board with NVSwitches would have a driver without the fabric manager, which CUDA needs there."""
    if stack.fabric_manager is not None and context.settings_of("nvidia_fabric")["state"] == "absent":
        yield (
            "fabric-manager: CUDA does not start on a board with NVSwitches until its fabric manager runs, and "
            "nvidia_fabric_state is absent: set it to present, or remove the driver too (nvidia_driver_state: absent)"
        )
