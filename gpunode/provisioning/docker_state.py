"""What dockerd answers, in types: parsed from ``NodeState.engine`` and bounded."""

from typing import Annotated

from pydantic import Field, ValidationError

from gpunode.errors import UndeterminedError
from gpunode.provisioning.ssh_state import Reported
from gpunode.provisioning.state import Names, NodeState, Text


class DockerInfo(Reported):
    """What ``docker info`` prints."""

    version: Text = ""
    running: int = 0
    live_restore: bool = False
    swarm: Text | None = None
    cgroup_driver: Text | None = None

    @property
    def in_swarm(self) -> bool:
        """The node is a member of a swarm."""
        return self.swarm not in (None, "", "inactive")


class DockerState(Reported):
    """dockerd on a node, and what decides about its restart."""

    started: float | None = None
    """Time of the daemon's pid file; None: it does not run."""
    info: DockerInfo | None = None
    command: Annotated[str, Field(max_length=1 << 17)] = ""
    """The unit's command line, and what the package's settings add."""
    options: Names = ()
    """Options of this dockerd, without dashes."""
    group: Names | None = None
    """Members of the group docker; None: there is no such group."""
    hook_changed: float | None = None
    """When the toolkit's hook came; None: it is not there."""

    @property
    def silent(self) -> bool:
        """The daemon runs and does not answer: what else runs is unknown, and unknown is not idle."""
        return self.started is not None and self.info is None

    @property
    def in_use(self) -> str | None:
        """Why the engine must not be removed or replaced, in one sentence; None where it may."""
        if self.silent:
            return "dockerd does not answer, so its containers are unknown: see journalctl -u docker"
        running = self.info.running if self.info else 0
        return f"{running} container{'s run' if running > 1 else ' runs'}: stop them" if running else None


def docker_of(state: NodeState) -> DockerState:
    """Return what dockerd answers. Raises UndeterminedError for an answer that cannot be read."""
    try:
        return DockerState.model_validate(state.engine)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:200]
        raise UndeterminedError(f"the container engine's answer cannot be read: {place}: {first['msg']}") from None
