"""The plan of each role, and the parts of a node that ``node_state`` reads for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

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
    nvidia_fabric,
    nvidia_repository,
    preflight,
    rdma,
    reboot,
    service,
    ssh_hardening,
    storage,
    updates,
    way_back,
)
from gpunode.provisioning.context import Context
from gpunode.provisioning.driver import plan as driver
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.role import Role
from gpunode.provisioning.state import Look, NodeState

Plan = Callable[[NodeState, Mapping[str, Any], Context], Manifest]
"""(state, the role's settings without its name in front, the run) to manifest; pure."""


class RolePolicy(Protocol):
    """A module of a role without a ``Role``, or a plan that belongs to the playbooks."""

    __name__: str
    LOOK: Look

    def plan(self, state: NodeState, settings: Mapping[str, Any], context: Context, /) -> Manifest:
        """Return the manifest."""


_POLICIES: tuple[RolePolicy | Role[Any], ...] = (
    preflight.ROLE,
    reboot,
    service,
    way_back,
    nvidia_repository.ROLE,
    driver.ROLE,
    nvidia_fabric.ROLE,
    gpu_settings.ROLE,
    gpu_tools.ROLE,
    storage.ROLE,
    kernel_tuning.ROLE,
    rdma.ROLE,
    cuda.ROLE,
    dcgm.ROLE,
    docker.ROLE,
    firewall.ROLE,
    updates.ROLE,
    nvidia_container_toolkit.ROLE,
    ml_environment.ROLE,
    accounts.ROLE,
    ssh_hardening.ROLE,
)
ROLES: dict[str, Role[Any]] = {policy.name: policy for policy in _POLICIES if isinstance(policy, Role)}
_BY_NAME = {
    policy.name if isinstance(policy, Role) else policy.__name__.rpartition(".")[2]: policy for policy in _POLICIES
}
LOOKS: dict[str, Look] = {
    name: policy.look if isinstance(policy, Role) else policy.LOOK for name, policy in _BY_NAME.items()
}


def _owned(files: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Yield files of the site that a role writes: each file has one owner."""
    owners = {path: name for name, one in ROLES.items() for path in one.files}
    for path in (str(file["path"]) for file in files):
        if path in owners:
            yield f"gpunode_extra_files: {path} belongs to the role {owners[path]}"


def _first_read(role: str, plan: Plan) -> Plan:
    """Return a plan that refuses a node on which a document of the role exists and could not be read."""

    def planned(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
        reasons = [*state.unreadable(LOOKS[role].contents)]
        if role == "ssh_hardening" and state.ssh is not None:
            reasons += state.ssh.unreadable.values()
        if settings.get("state") == "keep":
            return plan(state, settings, context)
        if taken := [*_owned(settings.get("gpunode_extra_files") or ())]:
            return Manifest(role=role, refusals=tuple(taken))
        if not reasons:
            return plan(state, settings, context)
        remedy = "the role would lose its content: repair it, or move it away, then run this again"
        return Manifest(role=role, refusals=tuple(f"unreadable: {reason}: {remedy}" for reason in reasons))

    return planned


PLANS = {role: _first_read(role, policy.plan) for role, policy in _BY_NAME.items()}
