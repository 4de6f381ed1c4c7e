"""The role storage: scratch space on disks that are named one by one, and remote data that does not delay a boot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from uuid import NAMESPACE_URL, uuid5

from gpunode.errors import UsageError
from gpunode.provisioning.context import Context
from gpunode.provisioning.departures import departures
from gpunode.provisioning.manifest import (
    AptChange,
    DnfChange,
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeQuestion,
    no_package_manager,
)
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.storage_answer import StorageAnswer, parsed
from gpunode.provisioning.storage_mounts import (
    Mount,
    Remote,
    checked_options,
    checked_path,
    escaped,
    foreign_paths,
    own_lines,
    path_of,
    record_of,
    remote_mount,
    remotes,
    scratch_mount,
    section_problem,
    with_lines,
)

ROLE = "storage"
FSTAB = "/etc/fstab"
RECORD = "/etc/gpunode/storage.json"
MEMORY = "/var/lib/gpunode/storage"
BEFORE = f"{MEMORY}/before.json"
PACKAGES = f"{MEMORY}/packages-before"
HELPER = "/usr/sbin/mount.rclone"
ARRAY = "gpunode-scratch"
ARRAYS = {"apt": "/etc/mdadm/mdadm.conf.d/gpunode.conf", "dnf": "/etc/mdadm.conf.d/gpunode.conf"}
LOOK = Look(
    paths=(RECORD, MEMORY, HELPER, "/etc/gpunode", *ARRAYS.values()),
    contents=(FSTAB, RECORD, BEFORE, PACKAGES),
)
TOOLS = {
    "apt": {
        "xfs": "xfsprogs",
        "array": "mdadm",
        "nfs": "nfs-common",
        "cephfs": "ceph-common",
        "rclone": "rclone",
        "s3fs": "s3fs",
        "fuse": "fuse3",
    },
    "dnf": {
        "xfs": "xfsprogs",
        "array": "mdadm",
        "nfs": "nfs-utils",
        "cephfs": "ceph-common",
        "rclone": "rclone",
        "s3fs": "s3fs-fuse",
        "fuse": "fuse3",
    },
}
"""Packages by package manager; a missing one is requested before anything is changed."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+@=,-]{2,200}")
_PART = re.compile(r".*(-part[0-9]+|_[0-9]+-part.*)")
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MODE = re.compile("[01]?[0-7]{3}")


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for a malformed setting."""
    if state.manager is None:
        return no_package_manager(ROLE)
    if settings["state"] == "keep":
        return Manifest(role=ROLE)
    erase = _ids("storage_confirm_erase", settings["confirm_erase"])
    if settings["state"] == "absent":
        return _absent(state, settings, context, erase, state.manager)
    disks = _disks(settings, erase)
    requested, its_remotes = _mounts(settings, disks)
    text = state.contents.get(FSTAB)
    problem = _unreadable(state)
    if text is None or problem:
        return Manifest(role=ROLE, refusals=(problem,))
    against = [
        f"fstab: {mount.path} already has an entry, with {there}: remove that entry, or choose another path"
        for mount in requested
        if (there := foreign_paths(text).get(mount.path)) is not None
    ]
    made = _recorded_disks(state)
    used = _is_used(state, disks)
    if made is not None and made["filesystem"] != (disks or {}).get("filesystem"):
        against.append(
            f"scratch: the role created it from {', '.join(made['disks'])}, and storage_scratch_disks lists others: "
            "run storage_state: absent first to release them"
        )
    caches = sorted({one.cache for one in its_remotes if one.cache})
    names = _packages(state.manager, disks, its_remotes)
    questions = _questions(state, disks, [mount.path for mount in requested], caches, erase, names, text, used)
    if unanswered := {name: one for name, one in questions.items() if name not in context.answers}:
        return Manifest(role=ROLE, questions=unanswered)
    seen, offers = parsed(context.answers["disks"]), context.answers.get("offers") or {}
    if error := seen.error or offers.get("error"):
        return Manifest(role=ROLE, refusals=(f"storage: the node could not be queried: {error}",))
    against += [f"disk: {line}" for line in seen.refusals]
    if not seen.autofs and any(mount.automatic for mount in requested):
        against.append("automount: the node has no /dev/autofs, as in a container: nothing can be mounted on demand")
    against += [
        f"package: no configured repository has {name}"
        for name in names
        if name not in state.installed and name not in (offers.get("offered") or {})
    ]
    lines, fresh = own_lines(text), [mount.line for mount in requested]
    leaving = [path_of(line) for line in lines if line not in fresh]
    for mount in requested:
        against += _in_the_way(mount, seen, leaving, disks)
    against += _of_users(caches, seen)
    against += _busy(leaving, seen)
    if against:
        return Manifest(role=ROLE, refusals=tuple(against))
    return _present(state, settings, seen, requested, disks, caches, names, leaving)


def _ids(name: str, given: Any) -> list[str]:
    found = [str(one).removeprefix("/dev/disk/by-id/") for one in given or ()]
    for one in found:
        if _ID.fullmatch(one) is None:
            raise UsageError(f"{name}: {one} is not a disk id: use the full name in /dev/disk/by-id, without *")
        if _PART.fullmatch(one):
            raise UsageError(f"{name}: {one} is a partition: use the id of a whole disk")
    if len(set(found)) < len(found):
        raise UsageError(f"{name}: names a disk twice")
    return found


def _disks(settings: Mapping[str, Any], erase: Sequence[str]) -> dict[str, Any] | None:
    """Return the module's input: the UUIDs are derived from the ids, by which the role recognises its disks."""
    ids = _ids("storage_scratch_disks", settings["scratch_disks"])
    unknown = [one for one in erase if one not in ids]
    if unknown:
        raise UsageError(f"storage_confirm_erase: {unknown[0]} is not in storage_scratch_disks")
    if not ids:
        return None
    seed = " ".join(sorted(ids))
    return {
        "disks": ids,
        "array": str(uuid5(NAMESPACE_URL, f"gpunode:scratch-array {seed}")) if len(ids) > 1 else None,
        "filesystem": str(uuid5(NAMESPACE_URL, f"gpunode:scratch {seed}")),
    }


def _mounts(settings: Mapping[str, Any], disks: Mapping[str, Any] | None) -> tuple[list[Mount], list[Remote]]:
    scratch, found = None, []
    if disks is not None:
        try:
            scratch = checked_path(str(settings["scratch_path"]))
            options = checked_options(settings["scratch_options"] or [])
        except ValueError as err:
            raise UsageError(f"storage_scratch: {err}") from None
        if _MODE.fullmatch(str(settings["scratch_mode"])) is None:
            raise UsageError(f"storage_scratch_mode: {settings['scratch_mode']} is not a valid mode (example: '1777')")
        found.append(scratch_mount(scratch, disks["filesystem"], options))
    its = remotes(settings["mounts"])
    found += [remote_mount(one, scratch) for one in its]
    paths = [mount.path for mount in found]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"storage_mounts: two entries use the mount point {path}")
    if not found:
        raise UsageError("storage_state: present requires storage_scratch_disks or storage_mounts")
    return found, its


def _packages(manager: str, disks: Mapping[str, Any] | None, its: Sequence[Remote]) -> list[str]:
    kinds = {one.type for one in its}
    requested = ["xfs"] if disks is not None else []
    requested += ["array"] if disks is not None and disks["array"] else []
    requested += [kind for kind in ("nfs", "cephfs", "rclone", "s3fs") if kind in kinds]
    requested += ["fuse"] if "rclone" in kinds else []
    return [TOOLS[manager][tool] for tool in requested]


def _questions(  # noqa: PLR0913, PLR0917
    state: NodeState,
    disks: Mapping[str, Any] | None,
    paths: Sequence[str],
    caches: Sequence[str],
    erase: Sequence[str],
    names: Sequence[str],
    text: str,
    used: bool,
) -> dict[str, NodeQuestion]:
    its_paths = {*paths, *caches, *(path_of(line) for line in own_lines(text))}
    found = {"disks": _about_disks(disks, its_paths, erase, used)}
    missing = [name for name in names if name not in state.installed]
    if missing:
        found["offers"] = NodeQuestion(kind="package_offers", body={"names": missing})
    return found


def _about_disks(
    disks: Mapping[str, Any] | None, paths: Iterable[str], erase: Sequence[str], used: bool = False
) -> NodeQuestion:
    """Return the question for the content of these disks and mount points; that of the disks in ``erase`` may be
    erased. ``used``: the role's file system was created on them before.
    """
    given = disks or {"disks": []}
    own = {name: given[name] for name in ("array", "filesystem") if given.get(name)}
    body = {"disks": given["disks"], "own": own, "paths": sorted(paths), "erase": list(erase), "used": used}
    return NodeQuestion(kind="block_devices", body=body)


def _in_the_way(
    mount: Mount, seen: StorageAnswer, leaving: Sequence[str], disks: Mapping[str, Any] | None
) -> list[str]:
    """Return why nothing can be mounted on a path: another mount exists, or files would be hidden."""
    place = seen.place(mount.path)
    if place.kind == "other":
        return [f"path: {mount.path} is not a directory"]
    if mount.path in leaving:
        return []
    if place.entries:
        return [f"path: {mount.path} holds {place.entries} entries, which a mount would hide: move them"]
    kinds = ("autofs", mount.fstype, "nfs4" if mount.fstype == "nfs" else mount.fstype, "fuse.rclone")
    for one in place.mounts:
        own = one.source == seen.target if not mount.automatic and disks is not None else one.fstype in kinds
        if not own:
            return [f"path: {one.source} is mounted on {mount.path}: unmount it, or choose another path"]
    return []


def _of_users(caches: Sequence[str], seen: StorageAnswer) -> list[str]:
    """Return why a cache directory must not be used: another user could read or replace its content."""
    places = {path: seen.place(path) for path in caches}
    return [
        f"cache: {path} is not a directory of root: users could read or replace the cache: remove it"
        for path, place in places.items()
        if place.kind == "other" or place.owner not in (None, 0)
    ]


def _busy(paths: Sequence[str], seen: StorageAnswer) -> list[str]:
    return [
        f"in use: {path} must be unmounted, and {', '.join(users[:5])} uses it: stop that first"
        for path in paths
        if path in seen.paths and (users := seen.paths[path].users)
    ]


def _present(  # noqa: PLR0913, PLR0917
    state: NodeState,
    settings: Mapping[str, Any],
    seen: StorageAnswer,
    requested: Sequence[Mount],
    disks: dict[str, Any] | None,
    caches: Sequence[str],
    names: Sequence[str],
    leaving: Sequence[str],
) -> Manifest:
    text = str(state.contents[FSTAB])
    due = []
    if disks is not None and not seen.filesystem:
        due.append(f"{', '.join(disks['disks'])}: the file system must be created")
    start = []
    for mount in requested:
        kinds = [one.fstype for one in seen.place(mount.path).mounts]
        if mount.path in leaving or ("autofs" if mount.automatic else "xfs") not in kinds:
            start.append(mount)
            due.append(f"{mount.path} is not mounted" + (" on demand" if mount.automatic else ""))
    scratch = next((mount.path for mount in requested if not mount.automatic), None)
    mode = f"{int(str(settings['scratch_mode']), 8):04o}"
    if scratch is not None and seen.place(scratch).mode != mode:
        due.append(f"{scratch} does not have mode {mode}")
    due += [f"{path} is missing" for path in caches if seen.place(path).kind == "absent"]
    due += ["hooks are run each time"] if settings["hooks"] else []
    trim = disks is not None and bool(settings["trim"]) and seen.trim.enabled != ""
    if trim and (seen.trim.enabled != "enabled" or seen.trim.active != "active"):
        due.append("fstrim.timer does not run")
    helper = any(mount.fstype == "rclone" for mount in requested)
    link = state.files.get(HELPER)
    if helper and (link is None or link.kind != "link" or link.target != "/usr/bin/rclone"):
        due.append(f"{HELPER} is not a link to rclone")
    conf = ARRAYS[state.manager or "dnf"]
    array = disks["array"] if disks is not None else None
    change = AptChange if state.manager == "apt" else DnfChange
    return Manifest(
        role=ROLE,
        files=(
            ManagedFile(path=BEFORE, content=_memory(state, seen, requested, caches)),
            ManagedFile(path=conf, content=_array_line(array)),
            ManagedFile(path=RECORD, content=json.dumps(record_of(requested, disks), indent=1) + "\n", phase="after"),
            _fstab(state, with_lines(text, requested), "after"),
        ),
        folders=(ManagedFolder(path=MEMORY),),
        packages=change(install=tuple(names), memory=PACKAGES, lock_wait_s=int(settings["lock_wait_s"])),
        due_reasons=tuple(due),
        values={
            "state": "present",
            "disks": None
            if disks is None
            else {
                **disks,
                "name": ARRAY,
                "erase": list(settings["confirm_erase"] or ()),
                "used": _is_used(state, disks),
            },
            "stop": _units([line for line in own_lines(text) if path_of(line) in leaving]),
            "start": [mount.unit for mount in start],
            "folders": [{"path": one.path} for one in requested if seen.place(one.path).kind == "absent"],
            "caches": [{"path": path, "mode": "0700"} for path in caches],
            "scratch": None if scratch is None else {"path": scratch, "mode": mode},
            "helper": HELPER if helper else None,
            "trim": trim,
            "hooks": list(settings["hooks"] or ()),
        },
    )


def _fstab(state: NodeState, content: str, phase: Literal["before", "after"]) -> ManagedFile:
    there = state.files[FSTAB]
    return ManagedFile(
        path=FSTAB,
        content=content,
        mode=there.mode or "0644",
        owner=there.owner or "root",
        group=there.group or "root",
        phase=phase,
        # It fails for a table without a line.
        validate_with=("findmnt", "--tab-file", "%s", "--noheadings") if foreign_paths(content) else None,
        expect_sha256=there.sha256,
    )


def _array_line(array: str | None) -> str | None:
    if array is None:
        return None
    digits = array.replace("-", "")
    uuid = ":".join(digits[at : at + 8] for at in range(0, 32, 8))
    return (
        "# Managed by gpunode (role storage): the scratch disks, independent of the rest of mdadm.conf.\n"
        f"ARRAY /dev/md/{ARRAY} metadata=1.2 UUID={uuid}\n"
    )


def _memory(state: NodeState, seen: StorageAnswer, requested: Sequence[Mount], caches: Sequence[str]) -> str:
    """Return what a removal restores: whether the timer started at boot, and which folders did not exist."""
    before = _document(state, BEFORE)
    paths = [*(mount.path for mount in requested), *caches]
    absent = [path for path in paths if seen.place(path).kind == "absent"]
    folders = sorted({*_folders(before), *absent})
    return json.dumps({"trim": before.get("trim", seen.trim.model_dump()), "folders": folders}, indent=1) + "\n"


def _folders(before: Mapping[str, Any]) -> list[str]:
    """Return the folders that did not exist before the role."""
    found = before.get("folders")
    return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []


def _units(lines: Sequence[str]) -> list[str]:
    """Return the units to stop for these lines of fstab: mounts first, then automounts."""
    found = []
    for line in lines:
        kinds = ("mount", "automount") if "x-systemd.automount" in line else ("mount",)
        found += [f"{escaped(path_of(line))}.{kind}" for kind in kinds]
    return found


def _unreadable(state: NodeState) -> str:
    """Return why the role's traces on the node cannot be read; empty if they can."""
    text = state.contents.get(FSTAB)
    if text is None:
        return f"fstab: {FSTAB} is missing or cannot be read"
    if problem := section_problem(text):
        return f"fstab: {FSTAB}: {problem}"
    there = state.files.get(RECORD)
    if there is not None and there.kind != "absent" and not _is_record(_document(state, RECORD)):
        return (
            f"record: {RECORD} is damaged, and it is unknown which disks are in use: restore it, or remove it if the "
            "role's file system is mounted"
        )
    return ""


def _is_record(found: Mapping[str, Any]) -> bool:
    """Return whether a document is what ``record_of`` writes."""
    disks, mounts = found.get("disks", ""), found.get("mounts")
    if found.get("schema") != "gpunode.storage/1" or not isinstance(mounts, list):
        return False
    if disks is None:
        return all(isinstance(one, dict) and one.get("remote") is True for one in mounts)
    names = disks.get("disks") if isinstance(disks, dict) else None
    if not isinstance(names, list) or not all(isinstance(one, str) and _ID.fullmatch(one) for one in names):
        return False
    uuids = [disks.get("filesystem"), *([disks.get("array")] if disks.get("array") is not None else [])]
    return all(isinstance(uuid, str) and _UUID.fullmatch(uuid) is not None for uuid in uuids)


def _recorded_disks(state: NodeState) -> dict[str, Any] | None:
    """Return the disks with the role's scratch space; None if there are none, or the record is damaged."""
    found = _document(state, RECORD)
    disks = found.get("disks") if _is_record(found) else None
    return None if disks is None else {name: disks.get(name) for name in ("disks", "array", "filesystem")}


def _is_used(state: NodeState, disks: Mapping[str, Any] | None) -> bool:
    """Return whether the record or fstab shows that the scratch file system was created on the disks before."""
    lines = own_lines(state.contents.get(FSTAB) or "")
    mounted = disks is not None and any(line.split()[:1] == [f"UUID={disks['filesystem']}"] for line in lines)
    return mounted or (disks is not None and _recorded_disks(state) is not None)


def _document(state: NodeState, path: str) -> dict[str, Any]:
    """Return a JSON document of the role; a malformed one counts as missing."""
    try:
        found = json.loads(state.contents.get(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _absent(
    state: NodeState, settings: Mapping[str, Any], context: Context, erase: Sequence[str], manager: str
) -> Manifest:
    text = state.contents.get(FSTAB) or ""
    disks = _recorded_disks(state)
    lines = own_lines(text)
    paths = [path_of(line) for line in lines]
    before = _document(state, BEFORE)
    ours = bool(lines) or any(
        path in state.files and state.files[path].kind != "absent" for path in (RECORD, BEFORE, *ARRAYS.values())
    )
    packages, leaving = departures(
        state,
        list(TOOLS[manager].values()),
        memory=PACKAGES,
        lock_wait_s=int(settings["lock_wait_s"]),
    )
    if not ours and not leaving:
        return Manifest(role=ROLE)
    if problem := _unreadable(state):
        return Manifest(role=ROLE, refusals=(problem,))
    unknown = [one for one in erase if not disks or one not in disks["disks"]]
    if unknown:
        return Manifest(
            role=ROLE, refusals=(f"disk: {unknown[0]}: the role did not create it, and erases only what it created",)
        )
    if "disks" not in context.answers:
        return Manifest(role=ROLE, questions={"disks": _about_disks(disks, paths, [])})
    seen = parsed(context.answers["disks"])
    if seen.error:
        return Manifest(role=ROLE, refusals=(f"storage: the node could not be queried: {seen.error}",))
    if against := _busy(paths, seen):
        return Manifest(role=ROLE, refusals=tuple(against))
    folders = _folders(before)
    kept = [one for one in (disks or {"disks": []})["disks"] if one not in erase]
    return Manifest(
        role=ROLE,
        files=(
            *((_fstab(state, with_lines(text, []), "before"),) if lines else ()),
            *(
                ManagedFile(path=path, content=None, phase="after")
                for path in (*ARRAYS.values(), RECORD, BEFORE, PACKAGES)
            ),
        ),
        folders=tuple(
            ManagedFolder(path=path, state="absent_if_empty", phase="after")
            for path in (*folders, *(path.rpartition("/")[0] for path in ARRAYS.values()), MEMORY, "/etc/gpunode")
        ),
        packages=packages,
        notes=(f"{', '.join(kept)}: keeps its data; storage_confirm_erase erases it",) if kept else (),
        due_reasons=(*leaving, *(f"{path} has to be unmounted" for path in paths)),
        values={
            "state": "absent",
            "disks": {**disks, "name": ARRAY, "erase": list(erase)} if disks and erase else None,
            "stop": _units(lines),
            "helper": HELPER if any(line.split()[2:3] == ["rclone"] for line in lines) else None,
            "trim_off": before.get("trim") == {"enabled": "disabled", "active": "inactive"},
        },
    )
