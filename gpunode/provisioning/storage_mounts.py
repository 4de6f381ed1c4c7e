"""Mounts of the role storage, as lines of /etc/fstab and as units of systemd."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gpunode.frozen import Frozen
from gpunode.provisioning.role import option
from gpunode.provisioning.state import Reported

NAME = "gpunode (role storage)"
BEGIN, END = f"# BEGIN {NAME}", f"# END {NAME}"
CACHE = "/var/cache/rclone"
"""Where rclone keeps files without a cache: in a unit it has no HOME and would use /tmp, where users make links."""
LONG_HOURS = 8760
"""Age of files in a cache that only its size limits."""
KINDS = {"nfs": "nfs", "cephfs": "ceph", "rclone": "rclone", "s3fs": "fuse.s3fs"}
"""Kinds of remote data, and the type in fstab for each."""
DEVICE_LIMIT_S = 30
"""How long a boot waits for the scratch disks before it continues without them, in seconds."""
DISK_ID = "[A-Za-z0-9][A-Za-z0-9._:+@=,-]{2,200}"
"""Pattern of a name in /dev/disk/by-id."""
Uuid = Annotated[str, Field(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
_PATH = re.compile(r"(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)+")
_SOURCE = re.compile(r"[A-Za-z0-9\[][^\s#,'\"\\]{1,400}")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9._-]*(=[^\s#,'\"\\]{1,400})?")
_IS_CACHE = re.compile(r"(?:cache[-_]dir|use[-_]cache)=")
_SECRET = re.compile(r"(?i)^(?!.*file=)[^=]*(secret|password|passwd|token|access_key|pass)[^=]*=")
SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/root", "/run", "/sbin", "/sys", "/usr", "/var")


class ScratchDisks(Frozen):
    """Disks of the scratch space, and what the role creates on them."""

    disks: tuple[Annotated[str, Field(pattern=f"^{DISK_ID}$")], ...]
    array: Uuid | None = None
    filesystem: Uuid


class RecordedMount(Reported):
    """One mount in the role's record, as far as the role reads it again."""

    remote: bool = False


class StorageRecord(Reported):
    """The role's record on the node."""

    version: Literal["gpunode.storage/1"] = Field(alias="schema")
    disks: ScratchDisks | None
    mounts: tuple[RecordedMount, ...]

    @model_validator(mode="after")
    def _local_mounts_have_disks(self) -> Self:
        if self.disks is None and not all(mount.remote for mount in self.mounts):
            raise ValueError("a local mount without disks")
        return self


class Remote(Frozen):
    """One element of ``storage_mounts``."""

    path: str = option(..., "Mount point.")
    type: Literal["nfs", "cephfs", "rclone", "s3fs"] = option(..., "Kind of the remote data.")
    source: str = option(..., "What is mounted, in the syntax of the client.")
    options: Annotated[tuple[str, ...], Field(max_length=64)] = option(
        (), "Further mount options. Secrets belong in files that these reference."
    )
    cache: str | None = option(None, "Local cache directory of V(rclone) and V(s3fs).")
    cache_gib: Annotated[int, Field(ge=1, le=1 << 20)] | None = option(None, "Size of that cache for V(rclone).")
    cache_hours: Annotated[int, Field(ge=1, le=87600)] | None = option(
        None,
        "Hours without access after which V(rclone) removes a file from that cache, whatever its size. By default only "
        "the size limits it: the least recently used files leave first.",
    )
    limit_s: Annotated[int, Field(ge=1, le=600)] = option(30, "Time limit for a mount, in seconds.")
    idle_s: Annotated[int, Field(ge=0, le=1 << 20)] = option(
        0, "Idle time before it is unmounted, in seconds; V(0) keeps it mounted."
    )

    @field_validator("path", "cache")
    @classmethod
    def _is_a_place(cls, value: str | None) -> str | None:
        return None if value is None else checked_path(value)

    @field_validator("source")
    @classmethod
    def _has_no_blank(cls, value: str) -> str:
        if _SOURCE.fullmatch(value) is None:
            raise ValueError(f"{value} is not a valid source (examples: server:/export, remote:bucket/folder, bucket)")
        return value

    @field_validator("options")
    @classmethod
    def _hold_no_secret(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(_IS_CACHE.match(word) for word in value):
            raise ValueError("set the cache directory as cache: root must own it")
        return checked_options(value)

    @model_validator(mode="after")
    def _may_have_a_cache(self) -> Self:
        if self.cache and self.type not in ("rclone", "s3fs"):
            raise ValueError(f"{self.type} has no cache")
        if self.cache_hours and not (self.cache and self.type == "rclone"):
            raise ValueError("cache_hours applies to the cache of rclone")
        return self


class HookMount(Frozen):
    """One element of ``storage_hook_mounts``: a mount that a hook makes."""

    path: str = option(..., "Mount point.")
    type: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$")] = option(
        ..., "Type of the file system, as C(/proc/mounts) has it."
    )
    source: str = option(..., "What is mounted, for messages.")

    @field_validator("path")
    @classmethod
    def _is_a_place(cls, value: str) -> str:
        return checked_path(value)

    @field_validator("source")
    @classmethod
    def _has_no_blank(cls, value: str) -> str:
        if _SOURCE.fullmatch(value) is None:
            raise ValueError(f"{value} is not a valid source (example: 10.0.0.1@o2ib:/train)")
        return value


@dataclass(frozen=True)
class Mount:
    """One mount of the role."""

    path: str
    source: str
    fstype: str
    options: tuple[str, ...]
    automatic: bool
    """Mounted on first access."""
    limit_s: int = DEVICE_LIMIT_S

    @property
    def line(self) -> str:
        """Return the line of fstab."""
        return f"{self.source} {self.path} {self.fstype} {','.join(self.options)} 0 0"

    @property
    def unit(self) -> str:
        """Return the unit to start."""
        return f"{escaped(self.path)}.{'automount' if self.automatic else 'mount'}"


def checked_path(path: str) -> str:
    """Return a mount point. Raise ValueError for an invalid one, or a folder of the system."""
    if _PATH.fullmatch(path) is None:
        raise ValueError(f"{path} is not a valid mount point (example: /scratch)")
    if path in SYSTEM:
        raise ValueError(f"{path} is a system directory: use a path below it or another one")
    return path


def checked_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return mount options. Raise ValueError for an invalid one, and for one that contains a secret."""
    for word in options:
        # First: the message of an invalid option has all of it.
        if _SECRET.match(word):
            name = word.partition("=")[0]
            raise ValueError(f"{name}: all users can read /etc/fstab: put it into a file and set its path")
        if _OPTION.fullmatch(word) is None:
            raise ValueError(f"{word} is not a valid mount option (example: noatime)")
    return options


def scratch_mount(path: str, uuid: str, options: Sequence[str]) -> Mount:
    """Return the mount of the scratch file system. A boot continues without it."""
    every = (*options, "nofail", f"x-systemd.device-timeout={DEVICE_LIMIT_S}s")
    return Mount(path=path, source=f"UUID={uuid}", fstype="xfs", options=tuple(dict.fromkeys(every)), automatic=False)


def remote_mount(remote: Remote, scratch: str | None) -> Mount:
    """Return a mount of remote data: on first access, with a time limit, and without effect on a boot."""
    every = [*remote.options, "nofail", "_netdev", "x-systemd.automount", f"x-systemd.mount-timeout={remote.limit_s}s"]
    if remote.idle_s:
        every.append(f"x-systemd.idle-timeout={remote.idle_s}s")
    if remote.cache:
        every += _cache(remote)
        if scratch is not None and below(remote.cache, scratch):
            every.append(f"x-systemd.requires-mounts-for={scratch}")
    if remote.type == "rclone":
        every += [] if remote.cache else [f"cache_dir={CACHE}"]
        # mount(8) runs the program without its environment: this makes it pass the options on.
        every.append("args2env")
    return Mount(
        path=remote.path,
        source=remote.source,
        fstype=KINDS[remote.type],
        options=tuple(dict.fromkeys(every)),
        automatic=True,
        limit_s=remote.limit_s,
    )


def _cache(remote: Remote) -> list[str]:
    if remote.type == "s3fs":
        # It has no upper limit, but keeps this much of the disk free.
        return [f"use_cache={remote.cache}"]
    limit = [f"vfs_cache_max_size={remote.cache_gib}G"] if remote.cache_gib else []
    # rclone's own age is one hour, less than many an epoch.
    age = remote.cache_hours or LONG_HOURS
    return ["vfs_cache_mode=full", f"cache_dir={remote.cache}", *limit, f"vfs_cache_max_age={age}h"]


def below(path: str, folder: str) -> bool:
    """Return whether a path is a folder or below it."""
    return path == folder or path.startswith(f"{folder}/")


def escaped(path: str) -> str:
    """Return a path as the name of a unit, as systemd-escape --path does."""
    text = path.strip("/")
    return "".join(
        "-"
        if char == "/"
        else char
        if re.match(r"[A-Za-z0-9:_]", char) or (char == "." and at)
        else f"\\x{ord(char):02x}"
        for at, char in enumerate(text)
    )


def _parts(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return the lines of fstab before, in and after the role's section; all are before it if a mark is missing."""
    lines = text.split("\n")
    if BEGIN not in lines or END not in lines[lines.index(BEGIN) :]:
        return lines, [], []
    begin = lines.index(BEGIN)
    end = lines.index(END, begin)
    return lines[:begin], lines[begin + 1 : end], lines[end + 1 :]


def section_problem(text: str) -> str | None:
    """Return why the role's lines of fstab cannot be distinguished from those of others; None if they can.

    A lost mark would make lines of others part of the section, or the section a part of their lines.
    """
    marks = [line for line in text.split("\n") if NAME in line]
    if marks and marks != [BEGIN, END]:
        return (
            f"{len(marks)} lines name {NAME}, expected one line '{BEGIN}' and below it one line '{END}': restore the "
            "marks around the lines that gpunode wrote"
        )
    foreign = next((line for line in own_lines(text) if not _is_written(line)), None)
    if foreign is not None:
        return f"the line {foreign!r} is between gpunode's marks and is not gpunode's: move it below '{END}'"
    return None


def _is_written(line: str) -> bool:
    """Return whether a line has the form that the role writes."""
    fields = line.split(" ")
    options = fields[3].split(",") if len(fields) == 6 else []
    names = {option.partition("=")[0] for option in options}
    kinds = {"x-systemd.device-timeout"}, {"_netdev", "x-systemd.automount", "x-systemd.mount-timeout"}
    return "nofail" in options and any(kind <= names for kind in kinds) and fields[4:] == ["0", "0"]


def own_lines(text: str) -> list[str]:
    """Return the role's lines of fstab."""
    return _parts(text)[1]


def with_lines(text: str, mounts: Sequence[Mount]) -> str:
    """Return fstab with these lines in the role's section; without the section if there are none."""
    part = [BEGIN, *(mount.line for mount in mounts), END] if mounts else []
    if BEGIN in text.split("\n"):
        before, _, after = _parts(text)
        return "\n".join([*before, *part, *after])
    end = "" if not text or text.endswith("\n") or not mounts else "\n"
    return text + end + "".join(f"{line}\n" for line in part)


def foreign_paths(text: str) -> dict[str, str]:
    """Return mount points of lines that are not the role's, to their sources."""
    before, _, after = _parts(text)
    sources = {}
    for line in (*before, *after):
        fields = line.split()
        if len(fields) > 2 and not fields[0].startswith("#"):
            sources[fields[1].rstrip("/") or "/"] = fields[0]
    return sources


def path_of(line: str) -> str:
    """Return the mount point of a line of fstab."""
    fields = line.split()
    return fields[1] if len(fields) > 1 else ""


def record_text(mounts: Sequence[Mount], disks: ScratchDisks | None, hooked: Sequence[HookMount] = ()) -> str:
    """Return the record that a validation compares with the node, and by which a removal finds its disks."""
    document = {
        "schema": "gpunode.storage/1",
        "disks": disks and disks.model_dump(mode="json"),
        "mounts": [
            {
                "path": mount.path,
                "source": mount.source,
                "type": mount.fstype,
                "options": [option for option in mount.options if plain_option(option)],
                "remote": mount.automatic,
            }
            for mount in mounts
        ]
        + [{**mount.model_dump(), "options": [], "remote": True} for mount in hooked],
    }
    return json.dumps(document, indent=1) + "\n"


def plain_option(option: str) -> bool:
    """Return whether the kernel lists an option of this name unchanged: not one of systemd, mount, or a program."""
    return option in ("noatime", "nodiratime", "nodev", "nosuid", "noexec", "ro")
