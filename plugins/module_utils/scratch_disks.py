# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Create one file system on scratch disks, and release the disks. Each disk is read again right before a write."""

from __future__ import annotations

import os
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils.block_devices import (
    END_BYTES,
    DiskError,
    disk,
    empty_ends,
    holds,
    loss,
    made_of,
    mounted,
    output_of,
    refusals,
)

MAKE_LIMIT_S = 900
SETTLE = ["udevadm", "settle", "--timeout=30"]


def made(wanted: dict[str, Any], check: bool) -> list[str]:
    """Create the file system on the disks; return the steps. Raise DiskError if a disk must not be changed."""
    uuids = own_of(wanted)
    names = [str(name) for name in wanted["disks"]]
    disks = looked_at(names, uuids)
    against = refusals(disks, set(wanted["erase"])) + refused_loss(disks, made_of(disks), uuids, wanted)
    if against:
        raise DiskError("nothing was written: " + "; ".join(against))
    devices = [str(disks[name]["device"]) for name in names]
    fresh = not all(state["ours"] for state in disks.values())
    erasing = {name: state for name, state in disks.items() if state["carries"]}
    steps = [f"erase {name} ({state['device']}): {', '.join(state['carries'])}" for name, state in erasing.items()]
    array = array_command(wanted, uuids, devices, fresh, made_of(disks) is not None)
    steps += [" ".join(array)] if array else []
    if check:
        settled = not steps and not fresh and holds(str(made_of(disks)), uuids["filesystem"])
        return steps if settled else [*steps, "create the file system"]
    for state in erasing.values():
        erased(state)
    if array:
        output_of(array)
        output_of(SETTLE)
    now = disks if "array" not in uuids else looked_at(names, uuids)
    target = devices[0] if "array" not in uuids else made_of(now)
    if target is None:
        raise DiskError(f"{wanted['name']} was not assembled from {' '.join(devices)}: mdadm --detail --scan shows why")
    if not holds(target, uuids["filesystem"]):
        if not fresh:
            if against := refused_loss(now, target, uuids, wanted):
                raise DiskError(*against)
            erased({"device": target, "parts": []})
        force = ["-f"] if fresh and "array" in uuids else []
        steps.append(f"create the file system on {target}")
        output_of(["mkfs.xfs", "-q", *force, "-m", f"uuid={uuids['filesystem']}", target], MAKE_LIMIT_S)
        output_of(SETTLE)
    return steps


def refused_loss(
    disks: dict[str, dict[str, Any]], target: str | None, uuids: dict[str, str], wanted: dict[str, Any]
) -> list[str]:
    """Return what would be lost if the file system were created, as one line; none if all its disks are confirmed."""
    lost = loss(disks, target, uuids, bool(wanted.get("used")))
    return [lost] if lost and not set(disks) <= set(wanted["erase"]) else []


def array_command(
    wanted: dict[str, Any], uuids: dict[str, str], devices: list[str], fresh: bool, assembled: bool
) -> list[str]:
    """Return the command that creates or assembles the array; empty if there is nothing to do."""
    if "array" not in uuids or (not fresh and assembled):
        return []
    path = f"/dev/md/{wanted['name']}"
    if not fresh:
        return ["mdadm", "--assemble", "--run", path, *devices]
    words = ["mdadm", "--create", path, "--run", "--level=0", "--metadata=1.2", f"--raid-devices={len(devices)}"]
    return [*words, f"--name={wanted['name']}", f"--uuid={uuids['array'].replace('-', '')}", *devices]


def released(wanted: dict[str, Any], check: bool) -> list[str]:
    """Erase the disks of the file system that may be erased; return the steps. Other disks keep their data."""
    uuids = own_of(wanted)
    names = [str(name) for name in wanted["disks"]]
    disks = looked_at(names, uuids)
    going = {name: state for name, state in disks.items() if state.get("ours") and name in wanted["erase"]}
    if not going:
        return []
    if len(going) < len(names):
        kept = [name for name in names if name not in going]
        raise DiskError(
            f"{', '.join(kept)}: shares the file system, and its removal is not confirmed: list all disks or none"
        )
    target = str(made_of(disks) or "")
    where = [mount["path"] for mount in mounted() if target and os.path.realpath(mount["source"]) == target]
    if where:
        raise DiskError(f"{target}: is mounted on {', '.join(where)}: unmount it first")
    if not check:
        if "array" in uuids and target:
            erased({"device": target, "parts": []})
            output_of(["mdadm", "--stop", target])
        for state in going.values():
            erased(state)
        output_of(SETTLE)
    return [f"erase {name} ({state['device']})" for name, state in going.items()]


def own_of(wanted: dict[str, Any]) -> dict[str, str]:
    """Return the UUIDs of the array and the file system that the role creates."""
    return {name: str(wanted[name]) for name in ("array", "filesystem") if wanted.get(name)}


def looked_at(names: list[str], uuids: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the current state of the disks."""
    mounts = mounted()
    return {name: disk(name, uuids, mounts) for name in names}


def erased(state: dict[str, Any]) -> None:
    """Erase all signatures and both ends of a disk. The kernel refuses this for a disk in use."""
    for node in [*(f"/dev/{part}" for part in state["parts"]), state["device"]]:
        output_of(["wipefs", "--all", node])
    number = os.open(state["device"], os.O_WRONLY | os.O_EXCL | os.O_SYNC)
    with os.fdopen(number, "wb", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        for start in (0, max(0, size - END_BYTES)):
            stream.seek(start)
            stream.write(bytes(min(END_BYTES, size)))
    output_of(SETTLE)
    if not empty_ends(state["device"]):
        raise DiskError(f"{state['device']}: is not empty after erasing")
    if state["parts"]:
        output_of(["blockdev", "--rereadpt", state["device"]])
