"""dockerd's answers, in types: parsed from ``NodeState.engine`` and bounded."""

from typing import Annotated

from pydantic import Field, ValidationError

from gpunode.errors import UndeterminedError
from gpunode.frozen import invalid_field
from gpunode.provisioning.ssh_state import Reported, Text
from gpunode.provisioning.state import Names, NodeState


class DockerInfo(Reported):
    """Output of ``docker info``."""

    version: Text = ""
    running: int = 0
    live_restore: bool = False
    swarm: Text | None = None
    cgroup_driver: Text | None = None

    @property
    def in_swarm(self) -> bool:
        """Return whether the node is a member of a swarm."""
        return self.swarm not in (None, "", "inactive")


class DockerState(Reported):
    """dockerd on a node, and the facts that decide about its restart."""

    started: float | None = None
    """Time of the daemon's pid file; None: it does not run."""
    info: DockerInfo | None = None
    command: Annotated[str, Field(max_length=1 << 17)] = ""
    """The unit's command line, and the options of the package's settings."""
    options: Names = ()
    """Options of this dockerd, without dashes."""
    group: Names | None = None
    """Members of the group docker; None: the group does not exist."""
    hook_changed: float | None = None
    """Time of the toolkit's hook; None: it does not exist."""

    @property
    def silent(self) -> bool:
        """Return whether the daemon runs and does not answer: its containers are unknown, and unknown is not idle."""
        return self.started is not None and self.info is None

    @property
    def in_use(self) -> str | None:
        """Return why the engine must not be removed or replaced, in one sentence; None if it may."""
        if self.silent:
            return "dockerd does not answer, so its containers are unknown: see journalctl -u docker"
        running = self.info.running if self.info else 0
        return f"{running} container{'s run' if running > 1 else ' runs'}: stop them" if running else None


def docker_of(state: NodeState) -> DockerState:
    """Return dockerd's answer. Raises UndeterminedError if it cannot be parsed."""
    try:
        return DockerState.model_validate(state.engine)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise UndeterminedError(f"the container engine's answer cannot be read: {field}: {why}") from None
