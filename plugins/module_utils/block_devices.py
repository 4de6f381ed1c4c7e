# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Read the disks of a node: their users, their content and the mount points. Nothing is written."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import commands

BY_ID = Path("/dev/disk/by-id")
BLOCK = Path("/sys/class/block")
PROC = Path("/proc")
AUTOFS = Path("/dev/autofs")
FSTAB = Path("/etc/fstab")
ARRAY = "/dev/md/gpunode-scratch"
LIMIT_S = 60
END_BYTES = 1 << 20
"""Bytes at each end of a disk that have to be empty."""
MOST = 32
LOCAL = ("xfs", "ext4", "btrfs")
_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_ESCAPED = re.compile(r"\\([0-7]{3})")


class DiskError(Exception):
    """The reason why a disk could not be read or changed, in one line."""


def output_of(argv: list[str], limit_s: float = LIMIT_S) -> str:
    """Return the standard output of a command. Raise DiskError if it fails or exceeds its time limit."""
    status, output, errors = commands.run(argv, limit_s, _ENVIRONMENT)
    if status != 0:
        lines = (errors or output).split("\n")
        text = "; ".join(" ".join(line.split()) for line in lines if line.strip())[:300]
        raise DiskError(f"{argv[0]} failed: {text or status}")
    return str(output)


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """Return the state of disks and mount points; ``error`` is the reason if it cannot be determined."""
    uuids = {str(name): str(value) for name, value in (question.get("own") or {}).items()}
    try:
        mounts = mounted()
        disks = {name: disk(name, uuids, mounts) for name in question.get("disks") or ()}
        paths = {path: state_of(path, mounts) for path in question.get("paths") or ()}
        target = made_of(disks)
        erase = set(question.get("erase") or ())
        lost = loss(disks, target, uuids, bool(question.get("used")))
        return {
            "disks": disks,
            "paths": paths,
            "target": target,
            "filesystem": target is not None and holds(target, uuids.get("filesystem")),
            "refusals": [*refusals(disks, erase), *([lost] if lost and not erase.issuperset(disks) else [])],
            "trim": timer("fstrim.timer"),
            "autofs": AUTOFS.exists(),
        }
    except (DiskError, OSError, ValueError, KeyError) as err:
        return {"error": " ".join(str(err).split())[:500]}


def refusals(disks: dict[str, dict[str, Any]], erase: set[str]) -> list[str]:
    """Return why disks must not be written to, one line each. ``erase``: ids of disks that may be erased."""
    lines = []
    by_device: dict[str, str] = {}
    for name, state in disks.items():
        if state["missing"]:
            lines.append(f"{name}: no such disk: ls /dev/disk/by-id lists the ids of this node")
            continue
        which = f"{name} ({state['device']})"
        if state["device"] in by_device:
            lines.append(f"{which}: is the same disk as {by_device[state['device']]}: list each disk once")
        by_device[state["device"]] = name
        if state["in_use"]:
            lines.append(f"{which}: {'; '.join(state['in_use'])}: a disk in use is never erased")
        elif state["carries"] and name not in erase:
            lines.append(
                f"{which}: carries {', '.join(state['carries'])}: it is not changed unless storage_confirm_erase lists "
                "this id"
            )
    members = [name for name, state in disks.items() if state.get("ours")]
    if members and len(members) < len(disks):
        others = [name for name in disks if name not in members]
        lines.append(f"{', '.join(members)}: already belongs to the array, {', '.join(others)} does not")
    return lines


def loss(disks: dict[str, dict[str, Any]], target: str | None, uuids: dict[str, str], used: bool) -> str:
    """Return what would be lost if the role's file system were created again; empty if there is nothing to lose.

    ``used``: the role created it before. A file system with a damaged superblock has no signature and looks new.
    """
    if not disks or any(state["missing"] for state in disks.values()):
        return ""
    if target is None:
        where = ", ".join(disks)
        lost = "the role's file system was created on them before, and it cannot be found" if used else ""
        # An array of the role that is not assembled is assembled and read first.
        lost = "" if all(state["ours"] for state in disks.values()) else lost
    elif holds(target, uuids.get("filesystem")):
        return ""
    else:
        where = target
        carries = carried(target, {Path(target).name: signatures(target)})
        carries += ["the role's file system with an unreadable superblock"] if used else []
        lost = f"carries {', '.join(carries)}" if carries else ""
    if not lost:
        return ""
    device = target or (ARRAY if "array" in uuids else next(iter(disks.values()))["device"])
    return (
        f"{where}: {lost}: nothing is formatted. Repair it ({'mdadm --assemble --scan; ' if 'array' in uuids else ''}"
        f"xfs_repair -n {device} shows the damage, xfs_repair {device} repairs it), or create it again by listing all "
        "its disks in storage_confirm_erase"
    )


def disk(name: str, uuids: dict[str, str], mounts: list[dict[str, str]]) -> dict[str, Any]:
    """Return a disk by its id: ``device``, ``ours``, ``in_use`` and ``carries`` (one line each), ``holders``."""
    link = BY_ID / name
    if not link.exists():
        return {"missing": True}
    device = os.path.realpath(link)
    base = BLOCK / Path(device).name
    parts = sorted(path.parent.name for path in base.glob("*/partition"))[:MOST]
    nodes = [base.name, *parts]
    signed = {node: signatures(f"/dev/{node}") for node in nodes}
    holders = sorted({holder.name for node in nodes for holder in (BLOCK / node / "holders").glob("*")})
    whole = signed[base.name]
    is_own = not parts and len(whole) == 1 and _is_own(whole[0], uuids)
    state: dict[str, Any] = {
        "missing": False,
        "device": device,
        "bytes": int((base / "size").read_text()) * 512,
        "ours": is_own,
        "in_use": [],
        "carries": [],
        "holders": holders,
        "parts": parts,
    }
    if not is_own:
        state["in_use"] = in_use(base, nodes, holders, mounts)
        state["carries"] = carried(device, signed)
    return state


def _is_own(signature: dict[str, Any], uuids: dict[str, str]) -> bool:
    kind, uuid = signature.get("type"), signature.get("uuid")
    if "array" in uuids:
        return kind == "linux_raid_member" and uuid == uuids["array"]
    return kind == "xfs" and uuid is not None and uuid == uuids.get("filesystem")


def signatures(device: str) -> list[dict[str, Any]]:
    """Return the signatures that wipefs finds on a device, each with ``type``, ``uuid``, ``label``."""
    text = output_of(["wipefs", "--json", "--no-act", device])
    return list(json.loads(text)["signatures"]) if text.strip() else []


def in_use(base: Path, nodes: list[str], holders: list[str], mounts: list[dict[str, str]]) -> list[str]:
    """Return what uses a disk or its partitions now, one line each."""
    uses = []
    if (base / "partition").exists():
        uses.append("is a partition, expected a whole disk")
    if composed(base):
        uses.append("consists of other devices, expected a disk")
    if (base / "ro").read_text().strip() == "1":
        uses.append("is read-only")
    numbers = {(BLOCK / node / "dev").read_text().strip() for node in nodes}
    devices = {f"/dev/{node}" for node in nodes}
    uses += [
        f"is mounted on {mount['path']}"
        for mount in mounts
        if mount["number"] in numbers or os.path.realpath(mount["source"]) in devices
    ]
    uses += [f"is held by {holder}" for holder in holders]
    uses += [f"is swap ({source})" for source in swaps() if os.path.realpath(source) in devices]
    uses += [f"{line} in /etc/fstab" for line in in_fstab(devices)]
    why = withheld(f"/dev/{base.name}")
    return uses or ([f"the kernel does not release it ({why})"] if why else [])


def composed(base: Path) -> bool:
    """Return whether a device is an array, a mapping or a file instead of a disk."""
    return any((base / kind).exists() for kind in ("md", "dm", "loop"))


def withheld(device: str) -> str:
    """Return why the kernel refuses exclusive access to a device; empty if it grants it."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
    except OSError as err:
        return str(err.strerror)
    return ""


def carried(device: str, signed: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the content of a disk that would be lost, one line each."""
    contents = []
    for node, rows in signed.items():
        location = "" if device == f"/dev/{node}" else f" on {node}"
        for signature in rows:
            label = f" '{signature['label']}'" if signature.get("label") else ""
            contents.append(f"{signature.get('type')}{label}{location}")
    if not contents and not empty_ends(device):
        contents.append("data of an unknown kind")
    return list(dict.fromkeys(contents))


def empty_ends(device: str) -> bool:
    """Return whether both ends of a disk contain only zeros."""
    with Path(device).open("rb", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        for start in (0, max(0, size - END_BYTES)):
            stream.seek(start)
            if stream.read(min(END_BYTES, size)).strip(b"\0"):
                return False
    return True


def mounted() -> list[dict[str, str]]:
    """Return the mounts, the newest last."""
    mounts = []
    for line in (PROC / "self/mountinfo").read_text("utf-8", "replace").split("\n"):
        head, _, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if len(fields) > 5 and len(kinds) > 1:
            mounts.append(
                {
                    "number": fields[2],
                    "path": plain(fields[4]),
                    "options": fields[5],
                    "fstype": kinds[0],
                    "source": plain(kinds[1]),
                }
            )
    return mounts


def plain(text: str) -> str:
    """Return a word of mountinfo or fstab without its octal escapes."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def swaps() -> list[str]:
    """Return the devices in use as swap."""
    return [plain(line.split()[0]) for line in (PROC / "swaps").read_text().splitlines()[1:] if line.split()]


def in_fstab(devices: set[str]) -> list[str]:
    """Return the mount points of the lines in /etc/fstab that refer to one of these devices."""
    try:
        table = FSTAB.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    # findmnt fails on a table without lines.
    if not any(line.strip() and not line.lstrip().startswith("#") for line in table):
        return []
    text = output_of(["findmnt", "--fstab", "--evaluate", "--json", "--output", "SOURCE,TARGET"])
    lines = json.loads(text)["filesystems"]
    return [
        f"is the source of {line.get('target')}"
        for line in lines
        if os.path.realpath(str(line.get("source"))) in devices
    ]


def made_of(disks: dict[str, dict[str, Any]]) -> str | None:
    """Return the device that carries the file system: the array that holds all disks, or the only disk; or None."""
    if not disks or not all(state.get("ours") for state in disks.values()):
        return None
    holders = [state["holders"] for state in disks.values()]
    if len(disks) == 1:
        return str(next(iter(disks.values()))["device"])
    same = all(names == holders[0] for names in holders) and len(holders[0]) == 1
    return f"/dev/{holders[0][0]}" if same else None


def holds(device: str, uuid: str | None) -> bool:
    """Return whether a device carries the file system with this UUID, and nothing else."""
    signed = signatures(device)
    return len(signed) == 1 and signed[0].get("type") == "xfs" and signed[0].get("uuid") == uuid


def state_of(path: str, mounts: list[dict[str, str]]) -> dict[str, Any]:
    """Return the state of a mount point (``Place`` on the controller); a remote one is not read."""
    layers = [mount for mount in mounts if mount["path"] == path]
    state: dict[str, Any] = {"mounts": layers, "kind": "folder", "mode": None, "owner": None, "entries": None}
    state["users"] = users(path) if layers else []
    if layers and layers[-1]["fstype"] not in LOCAL:
        return state
    state["owner"] = owner(path)
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {**state, "kind": "absent"}
    if not stat.S_ISDIR(status.st_mode):
        return {**state, "kind": "other"}
    state["mode"] = f"{stat.S_IMODE(status.st_mode):04o}"
    state["entries"] = None if layers else len(list(Path(path).iterdir()))
    return state


def owner(path: str) -> int:
    """Return the first user other than root who owns a path or a folder above it, and so can exchange it; else 0."""
    for location in (Path(path), Path(os.path.realpath(path))):
        for part in (*reversed(location.parents), location):
            try:
                user = os.lstat(part).st_uid
            except (FileNotFoundError, NotADirectoryError):
                break
            if user != 0:
                return user
    return 0


def users(path: str) -> list[str]:
    """Return processes that use something below a path: ``NAME (PID)``."""
    processes = []
    for process in PROC.glob("[0-9]*"):
        links = [process / "cwd", process / "root", process / "exe", *_open_files(process)]
        if any(_below(link, path) for link in links):
            try:
                name = (process / "comm").read_text("utf-8", "replace").strip()
            except OSError:
                continue
            processes.append(f"{name} ({process.name})")
        if len(processes) >= MOST:
            break
    return processes


def _open_files(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []


def _below(link: Path, path: str) -> bool:
    try:
        target = str(link.readlink())
    except OSError:
        return False
    return target == path or target.startswith(f"{path}/")


def timer(name: str) -> dict[str, str]:
    """Return the ``enabled`` and ``active`` states of a unit; empty if they are unknown."""
    try:
        text = output_of(["systemctl", "show", "-p", "UnitFileState", "-p", "ActiveState", name])
    except DiskError:
        text = ""
    properties = dict(line.partition("=")[::2] for line in text.splitlines())
    return {"enabled": properties.get("UnitFileState", ""), "active": properties.get("ActiveState", "")}
