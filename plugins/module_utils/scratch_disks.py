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
    own = own_of(wanted)
    names = [str(name) for name in wanted["disks"]]
    found = looked_at(names, own)
    against = refusals(found, set(wanted["erase"])) + refused_loss(found, made_of(found), own, wanted)
    if against:
        raise DiskError("nothing was written: " + "; ".join(against))
    devices = [str(found[name]["device"]) for name in names]
    fresh = not all(one["ours"] for one in found.values())
    erasing = {name: one for name, one in found.items() if one["carries"]}
    steps = [f"erase {name} ({one['device']}): {', '.join(one['carries'])}" for name, one in erasing.items()]
    array = array_command(wanted, own, devices, fresh, made_of(found) is not None)
    steps += [" ".join(array)] if array else []
    if check:
        settled = not steps and not fresh and holds(str(made_of(found)), own["filesystem"])
        return steps if settled else [*steps, "create the file system"]
    for one in erasing.values():
        erased(one)
    if array:
        output_of(array)
        output_of(SETTLE)
    now = found if "array" not in own else looked_at(names, own)
    target = devices[0] if "array" not in own else made_of(now)
    if target is None:
        raise DiskError(f"{wanted['name']} was not assembled from {' '.join(devices)}: mdadm --detail --scan shows why")
    if not holds(target, own["filesystem"]):
        if not fresh:
            if against := refused_loss(now, target, own, wanted):
                raise DiskError(*against)
            erased({"device": target, "parts": []})
        force = ["-f"] if fresh and "array" in own else []
        steps.append(f"create the file system on {target}")
        output_of(["mkfs.xfs", "-q", *force, "-m", f"uuid={own['filesystem']}", target], MAKE_LIMIT_S)
        output_of(SETTLE)
    return steps


def refused_loss(
    found: dict[str, dict[str, Any]], target: str | None, own: dict[str, str], wanted: dict[str, Any]
) -> list[str]:
    """Return what would be lost if the file system were created, as one line; none if all its disks are confirmed."""
    lost = loss(found, target, own, bool(wanted.get("used")))
    return [lost] if lost and not set(found) <= set(wanted["erase"]) else []


def array_command(
    wanted: dict[str, Any], own: dict[str, str], devices: list[str], fresh: bool, assembled: bool
) -> list[str]:
    """Return the command that creates or assembles the array; empty if there is nothing to do."""
    if "array" not in own or (not fresh and assembled):
        return []
    path = f"/dev/md/{wanted['name']}"
    if not fresh:
        return ["mdadm", "--assemble", "--run", path, *devices]
    words = ["mdadm", "--create", path, "--run", "--level=0", "--metadata=1.2", f"--raid-devices={len(devices)}"]
    return [*words, f"--name={wanted['name']}", f"--uuid={own['array'].replace('-', '')}", *devices]


def released(wanted: dict[str, Any], check: bool) -> list[str]:
    """Erase the disks of the file system that may be erased; return the steps. Other disks keep their data."""
    own = own_of(wanted)
    names = [str(name) for name in wanted["disks"]]
    found = looked_at(names, own)
    going = {name: one for name, one in found.items() if one.get("ours") and name in wanted["erase"]}
    if not going:
        return []
    if len(going) < len(names):
        kept = [name for name in names if name not in going]
        raise DiskError(
            f"{', '.join(kept)}: shares the file system, and its removal is not confirmed: list all disks or none"
        )
    target = str(made_of(found) or "")
    where = [one["path"] for one in mounted() if target and os.path.realpath(one["source"]) == target]
    if where:
        raise DiskError(f"{target}: is mounted on {', '.join(where)}: unmount it first")
    if not check:
        if "array" in own and target:
            erased({"device": target, "parts": []})
            output_of(["mdadm", "--stop", target])
        for one in going.values():
            erased(one)
        output_of(SETTLE)
    return [f"erase {name} ({one['device']})" for name, one in going.items()]


def own_of(wanted: dict[str, Any]) -> dict[str, str]:
    """Return the UUIDs of the array and the file system that the role creates."""
    return {name: str(wanted[name]) for name in ("array", "filesystem") if wanted.get(name)}


def looked_at(names: list[str], own: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the current state of the disks."""
    mounts = mounted()
    return {name: disk(name, own, mounts) for name in names}


def erased(one: dict[str, Any]) -> None:
    """Erase all signatures and both ends of a disk. The kernel refuses this for a disk in use."""
    for node in [*(f"/dev/{part}" for part in one["parts"]), one["device"]]:
        output_of(["wipefs", "--all", node])
    number = os.open(one["device"], os.O_WRONLY | os.O_EXCL | os.O_SYNC)
    with os.fdopen(number, "wb", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        for start in (0, max(0, size - END_BYTES)):
            stream.seek(start)
            stream.write(bytes(min(END_BYTES, size)))
    output_of(SETTLE)
    if not empty_ends(one["device"]):
        raise DiskError(f"{one['device']}: is not empty after erasing")
    if one["parts"]:
        output_of(["blockdev", "--rereadpt", one["device"]])
