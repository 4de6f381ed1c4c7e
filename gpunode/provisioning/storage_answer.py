"""A node's answer on disks and mount points: hostile until it is parsed and bounded."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from gpunode.errors import UsageError
from gpunode.frozen import invalid_field
from gpunode.provisioning.ssh_state import Reported, Text


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


def parsed(answer: Mapping[str, Any]) -> StorageAnswer:
    """Parse the answer. Raises UsageError with one line for an invalid one."""
    try:
        return StorageAnswer.model_validate(answer)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise UsageError(f"the answer about disks is malformed: {field}: {why}") from None
