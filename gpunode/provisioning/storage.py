"""The role storage: scratch space on disks that are named one by one, and remote data that does not delay a boot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from uuid import NAMESPACE_URL, uuid5

from pydantic import JsonValue, ValidationError, field_validator

from gpunode.errors import UsageError
from gpunode.frozen import Frozen
from gpunode.provisioning.answers import StorageAnswer, storage_of
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, NodeQuery, UnitState
from gpunode.provisioning.role import PackageSettings, Role, Texts, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.storage_mounts import (
    DISK_ID,
    HookMount,
    Mount,
    Remote,
    ScratchDisks,
    StorageRecord,
    checked_options,
    checked_path,
    escaped,
    foreign_paths,
    own_lines,
    path_of,
    record_text,
    remote_mount,
    scratch_mount,
    section_problem,
    with_lines,
)

FSTAB = "/etc/fstab"
RECORD = "/etc/gpunode/storage.json"
BEFORE = "/var/lib/gpunode/storage/before.json"
HOOKS = "/var/lib/gpunode/storage/hooks.json"
"""Digests of the hooks that ran: of their files, of ``storage_hook_vars`` and of ``storage_hook_mounts``."""
HELPER = "/usr/sbin/mount.rclone"
TRIM = "fstrim.timer"
ARRAY = "gpunode-scratch"
ARRAYS = {"apt": "/etc/mdadm/mdadm.conf.d/gpunode.conf", "dnf": "/etc/mdadm.conf.d/gpunode.conf"}
TOOLS = {
    "xfs": "xfsprogs",
    "array": "mdadm",
    "nfs": "nfs-common",
    "cephfs": "ceph-common",
    "rclone": "rclone",
    "s3fs": "s3fs",
    "fuse": "fuse3",
}
"""Packages with apt; a missing one is requested before anything is changed."""
DNF_TOOLS = {**TOOLS, "nfs": "nfs-utils", "s3fs": "s3fs-fuse"}
_PART = re.compile(r".*(-part[0-9]+|_[0-9]+-part.*)")
_MODE = re.compile("[01]?[0-7]{3}")


class StorageSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): not changed. V(present): the storage below is set up. V(absent): mounts and files of the role are "
        "removed.",
    )
    scratch_disks: tuple[str, ...] = option(
        (), "Disks for scratch space, each by its id in C(/dev/disk/by-id); several disks become a RAID 0 array."
    )
    scratch_path: str = option("/scratch", "Where the scratch space is mounted.")
    scratch_mode: str = option(
        "1777", "Mode of the scratch directory; by default all users may write, and remove their own files."
    )
    scratch_options: tuple[str, ...] = option(
        ("noatime",), "Mount options of the scratch space beside those that keep a boot going without it."
    )
    trim: bool = option(True, "Discard unused blocks weekly with C(fstrim.timer).")
    mounts: tuple[Remote, ...] = option((), "Remote data, mounted on first access.")
    confirm_erase: tuple[str, ...] = option(
        (),
        "Ids of disks that may be erased: foreign signatures with V(present), the role's own disks with V(absent).",
    )
    hooks: tuple[str, ...] = option(
        (),
        "Task files that are included after all other changes, for storage without a client in the distribution "
        "(examples: contrib/storage): in the first run, and after a change of the file or of O(storage_hook_vars).",
    )
    hook_vars: dict[str, JsonValue] = option(
        {}, "What the hooks read as C(storage_hook_vars.NAME); a change runs them again."
    )
    hook_mounts: tuple[HookMount, ...] = option(
        (), "Mounts that the hooks make: validated as remote data, and a missing one runs the hooks again."
    )

    @field_validator("scratch_disks", "confirm_erase")
    @classmethod
    def _ids_of_disks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        ids = tuple(disk.removeprefix("/dev/disk/by-id/") for disk in value)
        for disk in ids:
            if re.fullmatch(DISK_ID, disk) is None:
                raise ValueError(f"{disk} is not a disk id: use the full name in /dev/disk/by-id, without *")
            if _PART.fullmatch(disk):
                raise ValueError(f"{disk} is a partition: use the id of a whole disk")
        if len(set(ids)) < len(ids):
            raise ValueError("names a disk twice")
        return ids

    @field_validator("scratch_path")
    @classmethod
    def _path(cls, value: str) -> str:
        return checked_path(value)

    @field_validator("scratch_options")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_options(value)

    @field_validator("scratch_mode")
    @classmethod
    def _mode(cls, value: str) -> str:
        if _MODE.fullmatch(value) is None:
            raise ValueError(f"{value} is not a valid mode (example: '1777')")
        return f"{int(value, 8):04o}"


class StorageResult(Frozen):
    """What the role's own tasks read."""

    leaves: bool = False
    """The role is removed."""
    disks: ScratchDisks | None = None
    """Disks to create the file system on; disks to erase if the role is removed."""
    erase: tuple[str, ...] = ()
    """Disks with data that may be erased."""
    used: bool = False
    helper: Literal["link", "absent"] | None = None
    """State of rclone as a mount helper; None: not changed."""
    stop: tuple[UnitState, ...] = ()
    mount_points: tuple[ManagedFolder, ...] = ()
    start: tuple[UnitState, ...] = ()
    mounted: tuple[ManagedFolder, ...] = ()
    """Folders on what is mounted by then."""
    hooks: tuple[str, ...] = ()
    """Those that are pending."""
    ran: tuple[ManagedFile, ...] = ()
    """The record of the hooks, written after they ran."""


ROLE = Role(
    name="storage",
    title="Scratch space on local disks, and remote data",
    about=(
        "Creates XFS on the listed disks, mounts it by its UUID, and discards unused blocks (fstrim).",
        "Mounts NFS, CephFS and S3 on demand, so that no boot waits for a server.",
        "A disk in use is refused; a disk with data is refused unless O(storage_confirm_erase) lists it.",
        "Removes mounts and files with O(storage_state=absent). By default the node is not changed.",
    ),
    settings=StorageSettings,
    result=StorageResult,
    files=(*ARRAYS.values(), RECORD, BEFORE, HOOKS),
    folders=(*(path.rpartition("/")[0] for path in ARRAYS.values()), "/etc/gpunode"),
    packages=tuple(dict.fromkeys((*TOOLS.values(), *DNF_TOOLS.values()))),
    more=Look(paths=(HELPER,), contents=(FSTAB, RECORD, BEFORE, HOOKS)),
)


@ROLE.present
def present(state: NodeState, settings: StorageSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for settings that contradict each other."""
    disks = _disks(settings)
    requested = _mounts(settings, disks)
    if problem := _unreadable(state):
        return Manifest(role=ROLE.name, refusals=(problem,))
    text = state.contents[FSTAB] or ""
    lines, used = own_lines(text), _is_used(state, disks)
    caches = sorted({mount.cache for mount in settings.mounts if mount.cache})
    names = _packages(state, disks, settings.mounts)
    missing = [name for name in names if name not in state.installed]
    hooked = {mount.path for mount in settings.hook_mounts}
    paths = {*(mount.path for mount in requested), *hooked, *caches, *map(path_of, lines)}
    questions = {"disks": _question(disks, paths, settings.confirm_erase, used)}
    if missing:
        questions["offers"] = NodeQuery(kind="package_offers", body={"names": missing})
    if unanswered := {name: question for name, question in questions.items() if name not in context.answers}:
        return Manifest(role=ROLE.name, questions=unanswered)
    seen, offers = storage_of(context.answers["disks"]), context.answers.get("offers") or {}
    if error := seen.error or offers.get("error"):
        return Manifest(role=ROLE.name, refusals=(f"storage: the node could not be queried: {error}",))
    fresh = [mount.line for mount in requested]
    changing = [line for line in lines if line not in fresh]
    leaving = [path_of(line) for line in changing]
    against = (
        *_contradictions(state, requested, disks),
        *(f"disk: {line}" for line in seen.refusals),
        *_without_autofs(requested, seen),
        *(
            f"package: no configured repository has {name}"
            for name in missing
            if name not in (offers.get("offered") or {})
        ),
        *(line for mount in requested for line in _in_the_way(mount, seen, leaving, disks)),
        *_of_users(caches, seen),
        *_busy(leaving, seen),
    )
    if against:
        return Manifest(role=ROLE.name, refusals=against)
    start = [mount for mount in requested if mount.path in leaving or not _is_mounted(mount, seen)]
    # A mounted one with this mode may belong to another user, to whom an administrator gave it.
    scratch = [
        ManagedFolder(path=mount.path, mode=settings.scratch_mode)
        for mount in requested
        if not mount.automatic and not (_is_mounted(mount, seen) and seen.at(mount.path).mode == settings.scratch_mode)
    ]
    trim = disks is not None and settings.trim and seen.trim.enabled != ""
    stopped_trim = trim and (seen.trim.enabled, seen.trim.active) != ("enabled", "active")
    helper = any(mount.fstype == "rclone" for mount in requested)
    link = state.files.get(HELPER)
    pending = [
        *(
            f"{', '.join(scratch_disks.disks)}: the file system must be created"
            for scratch_disks in (disks,)
            if scratch_disks and not seen.filesystem
        ),
        *(f"{mount.path} is not mounted{' on demand' if mount.automatic else ''}" for mount in start),
        *(f"{area.path} does not have mode {area.mode}" for area in scratch if seen.at(area.path).mode != area.mode),
        *(f"{path} is missing" for path in caches if seen.at(path).kind == "absent"),
        *(waiting := _pending_hooks(state, settings, seen)),
        *([f"{TRIM} does not run"] if stopped_trim else []),
    ]
    if helper and (link is None or link.kind != "link" or link.target != "/usr/bin/rclone"):
        pending.append(f"{HELPER} is not a link to rclone")
    units = [UnitState(name=mount.unit, state="started") for mount in start]
    return Manifest(
        role=ROLE.name,
        files=(
            ManagedFile(path=BEFORE, content=_memory(state, seen, requested, caches), phase="first"),
            ManagedFile(
                path=state.by_manager(**ARRAYS),
                content=_array_text(disks.array if disks else None, ROLE.texts(context)),
                phase="first",
            ),
            ManagedFile(path=RECORD, content=record_text(requested, disks, settings.hook_mounts), phase="after"),
            _fstab(state, with_lines(text, requested), "after"),
        ),
        folders=(ManagedFolder(path=ROLE.folder, phase="first"),),
        packages=ROLE.transaction(state, settings, names),
        pending_reasons=tuple(pending),
        result=StorageResult(
            disks=disks,
            erase=settings.confirm_erase,
            used=used,
            helper="link" if helper else None,
            stop=_stopped(changing),
            mount_points=tuple(
                ManagedFolder(path=mount.path) for mount in requested if seen.at(mount.path).kind == "absent"
            ),
            start=(*units, *([UnitState(name=TRIM, enabled=True, state="started")] if trim else [])),
            mounted=(*scratch, *(ManagedFolder(path=path, mode="0700") for path in caches)),
            hooks=settings.hooks if waiting else (),
            ran=(ManagedFile(path=HOOKS, content=hooks_record(settings)),) if waiting else (),
        ),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with mounts, confirmed disks and fstab; empty on a node without a trace of the role."""
    erase = ROLE.of(context).confirm_erase
    text = state.contents.get(FSTAB) or ""
    disks, lines, before = _recorded_disks(state), own_lines(text), _document(state, BEFORE)
    traces = map(state.exists, ROLE.files)
    if not lines and not any(traces) and not manifest.pending_reasons:
        return Manifest(role=ROLE.name)
    if problem := _unreadable(state):
        return Manifest(role=ROLE.name, refusals=(problem,))
    unknown = [disk for disk in erase if disks is None or disk not in disks.disks]
    if unknown:
        refusal = f"disk: {unknown[0]}: the role did not create it, and erases only what it created"
        return Manifest(role=ROLE.name, refusals=(refusal,))
    paths = [path_of(line) for line in lines]
    if "disks" not in context.answers:
        return Manifest(role=ROLE.name, questions={"disks": _question(disks, paths, ())})
    seen = storage_of(context.answers["disks"])
    if seen.error:
        return Manifest(role=ROLE.name, refusals=(f"storage: the node could not be queried: {seen.error}",))
    if against := _busy(paths, seen):
        return Manifest(role=ROLE.name, refusals=tuple(against))
    made = [ManagedFolder(path=path, state="absent_if_empty", phase="after") for path in _folders(before)]
    kept = [disk for disk in (disks.disks if disks else ()) if disk not in erase]
    # The timer did not start at boot before the role.
    trim_off = before.get("trim") == {"enabled": "disabled", "active": "inactive"}
    return manifest.updated(
        files=(*([_fstab(state, with_lines(text, []), "first")] if lines else []), *manifest.files),
        folders=(*made, *manifest.folders),
        notes=(f"{', '.join(kept)}: keeps its data; storage_confirm_erase erases it",) if kept else (),
        pending_reasons=(*manifest.pending_reasons, *(f"{path} has to be unmounted" for path in paths)),
        result=StorageResult(
            leaves=True,
            disks=disks if erase else None,
            erase=erase,
            helper="absent" if any(line.split()[2:3] == ["rclone"] for line in lines) else None,
            stop=(
                *_stopped(lines),
                *([UnitState(name=TRIM, enabled=False, state="stopped")] if trim_off else []),
            ),
        ),
    )


def _disks(settings: StorageSettings) -> ScratchDisks | None:
    """Return the module's input: the UUIDs are derived from the ids, by which the role recognises its disks."""
    ids = settings.scratch_disks
    unknown = [disk for disk in settings.confirm_erase if disk not in ids]
    if unknown:
        raise UsageError(f"storage_confirm_erase: {unknown[0]} is not in storage_scratch_disks")
    if not ids:
        return None
    seed = " ".join(sorted(ids))
    return ScratchDisks(
        disks=ids,
        array=str(uuid5(NAMESPACE_URL, f"gpunode:scratch-array {seed}")) if len(ids) > 1 else None,
        filesystem=str(uuid5(NAMESPACE_URL, f"gpunode:scratch {seed}")),
    )


def _mounts(settings: StorageSettings, disks: ScratchDisks | None) -> list[Mount]:
    scratch = settings.scratch_path if disks is not None else None
    mounts = [] if disks is None else [scratch_mount(settings.scratch_path, disks.filesystem, settings.scratch_options)]
    mounts += [remote_mount(mount, scratch) for mount in settings.mounts]
    paths = [*(mount.path for mount in mounts), *(mount.path for mount in settings.hook_mounts)]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"storage_mounts: two entries use the mount point {path}")
    if settings.hook_mounts and not settings.hooks:
        raise UsageError("storage_hook_mounts: storage_hooks is empty, so that nothing would mount them")
    if not mounts and not settings.hooks:
        raise UsageError("storage_state: present requires storage_scratch_disks, storage_mounts or storage_hooks")
    return mounts


def hooks_record(settings: StorageSettings) -> str:
    """Return the record of the hooks: a digest of all that they are made of, without what it is.

    A relative path begins where Ansible looks for it; its file is not read, and the path alone counts.
    """
    digests = {}
    for hook in settings.hooks:
        path = Path(hook)
        content = path.read_bytes() if path.is_absolute() and path.is_file() else b""
        digests[hook] = sha256(content).hexdigest()
    mounts = [mount.model_dump() for mount in settings.hook_mounts]
    values = sha256(json.dumps([settings.hook_vars, mounts], sort_keys=True).encode()).hexdigest()
    return json.dumps({"hooks": digests, "values": values}, indent=1) + "\n"


def _pending_hooks(state: NodeState, settings: StorageSettings, seen: StorageAnswer) -> list[str]:
    """Return why the hooks have to run; empty if they ran as they are and what they mount is mounted."""
    if not settings.hooks:
        return []
    if relative := [hook for hook in settings.hooks if not hook.startswith("/")]:
        return [f"hooks are run each time: {relative[0]} is not an absolute path"]
    if state.contents.get(HOOKS) != hooks_record(settings):
        return ["hooks, their variables or mounts changed since they ran"]
    return [
        f"{mount.path} is not mounted by a hook" for mount in settings.hook_mounts if not seen.at(mount.path).mounts
    ]


def _packages(state: NodeState, disks: ScratchDisks | None, mounts: Sequence[Remote]) -> list[str]:
    kinds = {mount.type for mount in mounts}
    requested = [*(["xfs"] if disks else []), *(["array"] if disks and disks.array else [])]
    requested += [kind for kind in ("nfs", "cephfs", "rclone", "s3fs") if kind in kinds]
    requested += ["fuse"] if "rclone" in kinds else []
    names = state.by_manager(apt=TOOLS, dnf=DNF_TOOLS)
    return [names[tool] for tool in requested]


def _question(disks: ScratchDisks | None, paths: Iterable[str], erase: Sequence[str], used: bool = False) -> NodeQuery:
    """Return the question for the content of these disks and mount points; that of the disks in ``erase`` may be
    erased. ``used``: the role's file system was created on them before.
    """
    uuids = disks.model_dump(exclude={"disks"}, exclude_none=True) if disks else {}
    ids = list(disks.disks) if disks else []
    body = {"disks": ids, "own": uuids, "paths": sorted(paths), "erase": list(erase), "used": used}
    return NodeQuery(kind="block_devices", body=body)


def _contradictions(state: NodeState, requested: Sequence[Mount], disks: ScratchDisks | None) -> Iterator[str]:
    """Yield what fstab or the role's record has otherwise than requested."""
    foreign = foreign_paths(state.contents[FSTAB] or "")
    for mount in requested:
        if mount.path in foreign:
            source = foreign[mount.path]
            yield f"fstab: {mount.path} already has an entry, with {source}: remove that entry, or choose another path"
    made = _recorded_disks(state)
    if made is not None and (disks is None or made.filesystem != disks.filesystem):
        yield (
            f"scratch: the role created it from {', '.join(made.disks)}, and storage_scratch_disks lists others: "
            "run storage_state: absent first to release them"
        )


def _without_autofs(requested: Sequence[Mount], seen: StorageAnswer) -> Iterator[str]:
    if not seen.autofs and any(mount.automatic for mount in requested):
        yield "automount: the node has no /dev/autofs, as in a container: nothing can be mounted on demand"


def _is_mounted(mount: Mount, seen: StorageAnswer) -> bool:
    return ("autofs" if mount.automatic else "xfs") in [mounted.fstype for mounted in seen.at(mount.path).mounts]


def _in_the_way(mount: Mount, seen: StorageAnswer, leaving: Sequence[str], disks: ScratchDisks | None) -> list[str]:
    """Return why nothing can be mounted on a path: another mount exists, or files would be hidden."""
    folder = seen.at(mount.path)
    if folder.kind == "other":
        return [f"path: {mount.path} is not a directory"]
    if mount.path in leaving:
        return []
    if folder.entries:
        return [f"path: {mount.path} holds {folder.entries} entries, which a mount would hide: move them"]
    kinds = ("autofs", mount.fstype, "nfs4" if mount.fstype == "nfs" else mount.fstype, "fuse.rclone")
    for other in folder.mounts:
        expected = other.source == seen.target if not mount.automatic and disks is not None else other.fstype in kinds
        if not expected:
            return [f"path: {other.source} is mounted on {mount.path}: unmount it, or choose another path"]
    return []


def _of_users(caches: Sequence[str], seen: StorageAnswer) -> list[str]:
    """Return why a cache directory must not be used: another user could read or replace its content."""
    places = {path: seen.at(path) for path in caches}
    return [
        f"cache: {path} is not a directory of root: users could read or replace the cache: remove it"
        for path, folder in places.items()
        if folder.kind == "other" or folder.owner not in (None, 0)
    ]


def _busy(paths: Sequence[str], seen: StorageAnswer) -> list[str]:
    return [
        f"in use: {path} must be unmounted, and {', '.join(users[:5])} uses it: stop that first"
        for path in paths
        if path in seen.paths and (users := seen.paths[path].users)
    ]


def _fstab(state: NodeState, content: str, phase: Literal["first", "after"]) -> ManagedFile:
    return ManagedFile(
        path=FSTAB,
        content=content,
        **state.attributes(FSTAB),
        phase=phase,
        # It fails for a table without a line.
        validate_with=("findmnt", "--tab-file", "%s", "--noheadings") if foreign_paths(content) else None,
        expect_sha256=state.files[FSTAB].sha256,
    )


def _array_text(array: str | None, render: Texts) -> str | None:
    if array is None:
        return None
    digits = array.replace("-", "")
    return render("mdadm.conf.j2", array=ARRAY, uuid=":".join(digits[at : at + 8] for at in range(0, 32, 8)))


def _memory(state: NodeState, seen: StorageAnswer, requested: Sequence[Mount], caches: Sequence[str]) -> str:
    """Return what a removal restores: whether the timer started at boot, and which folders did not exist."""
    before = _document(state, BEFORE)
    paths = [*(mount.path for mount in requested), *caches]
    absent = [path for path in paths if seen.at(path).kind == "absent"]
    folders = sorted({*_folders(before), *absent})
    return json.dumps({"trim": before.get("trim", seen.trim.model_dump()), "folders": folders}, indent=1) + "\n"


def _folders(before: Mapping[str, Any]) -> list[str]:
    """Return the folders that did not exist before the role."""
    folders = before.get("folders")
    return [path for path in folders if isinstance(path, str)] if isinstance(folders, list) else []


def _stopped(lines: Sequence[str]) -> tuple[UnitState, ...]:
    """Return the units to stop for these lines of fstab: mounts first, then automounts."""
    units = []
    for line in lines:
        kinds = ("mount", "automount") if "x-systemd.automount" in line else ("mount",)
        units += [UnitState(name=f"{escaped(path_of(line))}.{kind}", state="stopped") for kind in kinds]
    return tuple(units)


def _unreadable(state: NodeState) -> str:
    """Return why the role's traces on the node cannot be read; empty if they can."""
    text = state.contents.get(FSTAB)
    if text is None:
        return f"fstab: {FSTAB} is missing or cannot be read"
    if problem := section_problem(text):
        return f"fstab: {FSTAB}: {problem}"
    if state.exists(RECORD) and _record(state) is None:
        return (
            f"record: {RECORD} is damaged, and it is unknown which disks are in use: restore it, or remove it if the "
            "role's file system is mounted"
        )
    return ""


def _record(state: NodeState) -> StorageRecord | None:
    """Return the role's record; None if there is none, or it is damaged."""
    try:
        return StorageRecord.model_validate_json(state.contents.get(RECORD) or "")
    except ValidationError:
        return None


def _recorded_disks(state: NodeState) -> ScratchDisks | None:
    """Return the disks with the role's scratch space; None if there are none, or the record is damaged."""
    record = _record(state)
    return record.disks if record is not None else None


def _is_used(state: NodeState, disks: ScratchDisks | None) -> bool:
    """Return whether the record or fstab shows that the scratch file system was created on the disks before."""
    lines = own_lines(state.contents.get(FSTAB) or "")
    mounted = disks is not None and any(line.split()[:1] == [f"UUID={disks.filesystem}"] for line in lines)
    return mounted or (disks is not None and _recorded_disks(state) is not None)


def _document(state: NodeState, path: str) -> dict[str, Any]:
    """Return a JSON document of the role; a malformed one counts as missing."""
    try:
        document = json.loads(state.contents.get(path) or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
