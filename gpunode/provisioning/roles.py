"""The plan of each role, and the parts of a node that ``node_state`` reads for it."""

from collections.abc import Callable, Mapping
from typing import Any

from gpunode.provisioning import (
    accounts,
    cuda,
    dcgm,
    docker,
    firewall,
    gpu_settings,
    gpu_tools,
    kernel_tuning,
    ml_environment,
    nvidia_container_toolkit,
    nvidia_driver,
    nvidia_fabric,
    nvidia_repository,
    preflight,
    rdma,
    reboot,
    service,
    ssh_hardening,
    storage,
    updates,
)
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.state import Look, NodeState

Plan = Callable[[NodeState, Mapping[str, Any], Context], Manifest]
"""(state, the role's settings without its name in front, the run) to manifest; pure."""

_PLANS: dict[str, Plan] = {
    "preflight": preflight.plan,
    "reboot": reboot.plan,
    "service": service.plan,
    "nvidia_repository": nvidia_repository.plan,
    "nvidia_driver": nvidia_driver.plan,
    "nvidia_fabric": nvidia_fabric.plan,
    "gpu_settings": gpu_settings.plan,
    "gpu_tools": gpu_tools.plan,
    "storage": storage.plan,
    "kernel_tuning": kernel_tuning.plan,
    "rdma": rdma.plan,
    "cuda": cuda.plan,
    "dcgm": dcgm.plan,
    "docker": docker.plan,
    "firewall": firewall.plan,
    "updates": updates.plan,
    "nvidia_container_toolkit": nvidia_container_toolkit.plan,
    "ml_environment": ml_environment.plan,
    "accounts": accounts.plan,
    "ssh_hardening": ssh_hardening.plan,
}
LOOKS: dict[str, Look] = {
    "reboot": reboot.LOOK,
    "service": service.LOOK,
    "nvidia_repository": nvidia_repository.LOOK,
    "nvidia_driver": nvidia_driver.LOOK,
    "nvidia_fabric": nvidia_fabric.LOOK,
    "gpu_settings": gpu_settings.LOOK,
    "gpu_tools": gpu_tools.LOOK,
    "storage": storage.LOOK,
    "kernel_tuning": kernel_tuning.LOOK,
    "rdma": rdma.LOOK,
    "cuda": cuda.LOOK,
    "dcgm": dcgm.LOOK,
    "docker": docker.LOOK,
    "firewall": firewall.LOOK,
    "updates": updates.LOOK,
    "nvidia_container_toolkit": nvidia_container_toolkit.LOOK,
    "ml_environment": ml_environment.LOOK,
    "accounts": accounts.LOOK,
    "ssh_hardening": ssh_hardening.LOOK,
}


def _first_read(role: str, plan: Plan) -> Plan:
    """Return a plan that refuses a node on which a document of the role exists and could not be read."""

    def planned(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
        reasons = [*state.unreadable(LOOKS[role].contents if role in LOOKS else ())]
        if role == "ssh_hardening" and state.ssh is not None:
            reasons += state.ssh.unreadable.values()
        if not reasons or settings.get("state") == "keep":
            return plan(state, settings, context)
        remedy = "the role would lose its content: repair it, or move it away, then run this again"
        return Manifest(role=role, refusals=tuple(f"unreadable: {reason}: {remedy}" for reason in reasons))

    return planned


PLANS = {role: _first_read(role, plan) for role, plan in _PLANS.items()}
