"""Answers of a node, in types: hostile until they are parsed and bounded."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from gpunode.catalog.origins import publisher
from gpunode.errors import UndeterminedError, UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.frozen import invalid_field
from gpunode.probe import Bundle
from gpunode.provisioning.state import AptState, DnfState, Names, NodeState, Reported, SshState, Text

M = TypeVar("M", bound=BaseModel)
MAX_BYTES = 64 << 20


def parsed(text: str, where: str, unread: tuple[str, ...] = ()) -> bytes:
    """Return a ``NodeState`` without the parts in ``unread``, as JSON.

    Raise UsageError with one line that names ``where`` for an invalid answer.
    """
    if len(text) > MAX_BYTES:
        raise UsageError(f"{where} is longer than {MAX_BYTES >> 20} MiB")
    try:
        document: Any = from_json(text)
    except ValueError as err:
        raise UsageError(f"{where} is not valid JSON: {err}") from None
    if not isinstance(document, dict) or not isinstance(document.get("bundle"), str):
        raise UsageError(f"{where} contains no bundle of the probe")
    apt = document.get("apt")
    if isinstance(apt, dict) and apt.get("error"):
        raise UsageError(
            f"apt-refuses: apt could not be queried: {apt['error']}: make sure that apt-config dump, apt-cache policy "
            "and apt-get indextargets work on the node, then run this again"
        )
    facts = facts_from_bundle(Bundle.from_json(document["bundle"], where))
    known = _valid(AptState, apt, "apt.", where)
    parts = {
        "facts": with_publishers(facts, known),
        "apt": known,
        "dnf": _valid(DnfState, document.get("dnf"), "dnf.", where),
        "ssh": _valid(SshState, document.get("ssh"), "ssh.", where),
        **{name: document.get(name) or {} for name in ("files", "contents", "engine")},
        "connection": document.get("connection"),
        "unread": unread,
    }
    state = _valid(NodeState, parts, "", where)
    return state.model_dump_json().encode() if state is not None else b""


def _valid(model: type[M], value: Any, prefix: str, where: str) -> M | None:
    """Return a part of the answer as its model; None if it is missing."""
    if value is None:
        return None
    try:
        return model.model_validate(value)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise UsageError(f"{where}: {prefix}{field}: {why}") from None


def with_publishers(facts: NodeFacts, apt: AptState | None) -> NodeFacts:
    """Return facts in which packages have their publisher from apt's lists.

    A package that is in no known repository, or in repositories of two publishers, is not changed: name, version and
    maintainer then decide.
    """
    if facts.packages is None or apt is None:
        return facts
    packages = []
    for package in facts.packages:
        named = {publisher(release, label) for release, label in apt.publishers.get(package.name, ())} - {None}
        packages.append(package.model_copy(update={"published": named.pop()}) if len(named) == 1 else package)
    return facts.model_copy(update={"packages": tuple(packages)})


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


class Mounted(Reported):
    """One mount on a path."""

    source: Text
    fstype: Text


class Place(Reported):
    """One mount point."""

    kind: Literal["folder", "absent", "other"]
    mode: Annotated[str, Field(pattern=r"^[0-7]{4}$")] | None
    """None if it was not read: a remote file system may not answer."""
    owner: int | None = None
    """User id; None if it was not read."""
    entries: int | None
    """Number of entries of the folder; None if something is mounted."""
    mounts: Annotated[tuple[Mounted, ...], Field(max_length=100)]
    users: Annotated[tuple[Text, ...], Field(max_length=100)]
    """Processes that use files below it."""


class Timer(Reported):
    """One timer of systemd."""

    enabled: Annotated[str, Field(pattern=r"^[a-z-]{0,40}$")]
    active: Annotated[str, Field(pattern=r"^[a-z-]{0,40}$")]


class StorageAnswer(Reported):
    """The answer to the question ``block_devices``."""

    error: Text | None = None
    refusals: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    paths: Annotated[dict[Text, Place], Field(default_factory=dict, max_length=1000)]
    target: Text | None = None
    """The device with the file system."""
    filesystem: bool = False
    """Whether the device has the file system."""
    trim: Timer = Timer(enabled="", active="")
    autofs: bool = False

    def at(self, path: str) -> Place:
        """Return a requested mount point."""
        try:
            return self.paths[path]
        except KeyError:
            raise UsageError(f"the node reported nothing about {path}") from None


def storage_of(answer: Mapping[str, Any]) -> StorageAnswer:
    """Parse the answer. Raises UsageError with one line for an invalid one."""
    try:
        return StorageAnswer.model_validate(answer)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise UsageError(f"the answer about disks is malformed: {field}: {why}") from None
