"""What a container needs to use the node's GPUs: device files, driver files, hooks; the same for CDI and runtimes.

In addition to what the real toolkit finds, a container gets the simulator and the node's state, read-only: the programs
of the lab's driver packages are scripts that need them, and python3 in the image.
"""

from __future__ import annotations

import os
import re
from typing import Any

from . import state
from .node import LIBRARY_FOLDERS, NodeSnapshot, loaded, numbers, package_release

KIND = "nvidia.com/gpu"
PROGRAMS = (
    "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-imex", "nvidia-imex-ctl",
    "nvidia-persistenced", "nvidia-smi",
)  # fmt: skip
CONTROL_DEVICES = ("/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl")
SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")
SIMULATOR = (
    "/usr/lib/gpunode-lab/bin", "/usr/lib/gpunode-lab/simulator", "/etc/gpunode/lab-hardware.json",
    "/run/gpunode-lab", "/var/lib/gpunode-lab",
)  # fmt: skip
READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")
GIDS_SINCE = "1.19.1"
NO_GIDS = "no-additional-gids-for-device-nodes"
HOOK = "/usr/bin/nvidia-cdi-hook"
GROUPS = ("render", "video")


class CdiError(Exception):
    """No specification can be generated; the message is the toolkit's reason."""


def libraries(release: str) -> list[str]:
    """Return the paths of that release's driver libraries on the node."""
    arch = os.uname().machine
    paths = []
    seen: set[str] = set()
    for folder in LIBRARY_FOLDERS:
        name = folder.format(arch=arch)
        where = state.ROOT / name
        real = str(where.resolve())
        if real in seen or not where.is_dir():
            continue
        seen.add(real)
        for entry in sorted(where.glob(f"*.so.{release}")) + sorted(where.glob(f"nvidia/current/*.so.{release}")):
            paths.append("/" + str(entry.relative_to(state.ROOT)))
    return paths


def programs() -> list[str]:
    """Return the paths of the driver's programs that exist."""
    paths = [f"/usr/bin/{name}" for name in PROGRAMS]
    return [path for path in paths if state.path(path).exists()]


def links(paths: list[str]) -> list[tuple[str, str]]:
    """Return (target, link) pairs: ``libcuda.so.1`` and ``…/libcuda.so``, which ldconfig does not create."""
    pairs = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name.startswith("libcuda.so."):
            pairs.append(("libcuda.so.1", f"{folder}/libcuda.so"))
        if name.startswith("libnvidia-opticalflow.so."):
            pairs.append(("libnvidia-opticalflow.so.1", f"{folder}/libnvidia-opticalflow.so"))
    return pairs


def device_files(gpu_minor: int) -> list[str]:
    """Return the device files of one GPU."""
    return [f"/dev/nvidia{gpu_minor}"]


def control_devices() -> list[str]:
    """Return the device files that every container with a GPU gets, those that exist."""
    return [path for path in CONTROL_DEVICES if state.path(path).exists()]


def mounts(release: str) -> list[str]:
    """Return the paths that are mounted into the container under the same name."""
    sockets = [path for path in SOCKETS if state.path(path).exists()]
    simulator = [path for path in SIMULATOR if state.path(path).exists()]
    return [*libraries(release), *programs(), *sockets, *simulator]


def usable() -> tuple[NodeSnapshot, str]:
    """Return the node and its driver's release. Raises CdiError if there is no GPU to pass on."""
    node = loaded()
    release = node.library
    if release is None:
        raise CdiError("failed to initialize NVML: ERROR_LIBRARY_NOT_FOUND")
    if node.release is None:
        raise CdiError("failed to initialize NVML: ERROR_DRIVER_NOT_LOADED")
    if node.release != release:
        raise CdiError("failed to initialize NVML: ERROR_LIB_RM_VERSION_MISMATCH")
    return node, release


def edits(release: str) -> dict[str, Any]:
    """Return the part of a specification that all devices share."""
    paths = libraries(release)
    folders = sorted({path.rpartition("/")[0] for path in paths})
    pairs = [word for target, link in links(paths) for word in ("--link", f"{target}::{link}")]
    hooks = []
    if pairs:
        hooks.append(_hook(["create-symlinks", *pairs]))
    hooks.append(_hook(["enable-cuda-compat", f"--host-driver-version={release}"]))
    hooks.append(_hook(["update-ldcache", *(word for folder in folders for word in ("--folder", folder))]))
    hooks.append(_hook(["disable-device-node-modification"]))
    return {
        "deviceNodes": [{"path": path} for path in control_devices()],
        "env": [*(f"NVIDIA_CTK_LIBCUDA_DIR={folder}" for folder in folders[:1]), "NVIDIA_VISIBLE_DEVICES=void"],
        "hooks": hooks,
        "mounts": [{"containerPath": path, "hostPath": path, "options": list(READ_ONLY)} for path in mounts(release)],
    }


def _hook(words: list[str]) -> dict[str, Any]:
    return {
        "args": ["nvidia-cdi-hook", *words],
        "env": ["NVIDIA_CTK_DEBUG=false"],
        "hookName": "createContainer",
        "path": HOOK,
    }


def specification(strategies: list[str], flags: set[str]) -> dict[str, Any]:
    """Return the CDI specification of this node, as this toolkit's version writes it. Raises CdiError."""
    node, release = usable()
    gid = additional_gid(flags)
    devices = []
    for gpu in node.gpus:
        container_edits = {"deviceNodes": [{"path": path} for path in device_files(gpu.minor)]}
        for name in _names(gpu.index, gpu.uuid, strategies):
            devices.append({"containerEdits": _with_gid(container_edits, gid), "name": name})
    nodes = [{"path": path} for gpu in node.gpus for path in device_files(gpu.minor)]
    devices.append({"containerEdits": _with_gid({"deviceNodes": nodes}, gid), "name": "all"})
    return {
        "cdiVersion": "0.7.0" if gid is not None else "0.5.0",
        "containerEdits": edits(release),
        "devices": devices,
        "kind": KIND,
    }


def additional_gid(flags: set[str]) -> int | None:
    """Return the group of the GPUs' render nodes if this toolkit's version writes it, else None.

    A server's nvidia-drm creates render nodes; a lab node has none, so its group ``render`` is used.
    """
    if NO_GIDS in flags or numbers(package_release() or "0") < numbers(GIDS_SINCE):
        return None
    try:
        lines = state.path("/etc/group").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    ids = {fields[0]: int(fields[2]) for fields in (line.split(":") for line in lines) if len(fields) > 2}
    return next((ids[name] for name in GROUPS if name in ids), None)


def _with_gid(container_edits: dict[str, Any], gid: int | None) -> dict[str, Any]:
    return dict(container_edits) if gid is None else {"additionalGids": [gid], **container_edits}


def _names(index: int, uuid: str, strategies: list[str]) -> list[str]:
    forms = {"index": str(index), "uuid": uuid, "type-index": f"gpu{index}"}
    unknown = [strategy for strategy in strategies if strategy not in forms]
    if unknown:
        raise CdiError(f"invalid device name strategy: {unknown[0]}")
    return [forms[strategy] for strategy in strategies]


def yaml(value: Any, depth: int = 0) -> str:
    """Return the document as YAML, formatted as by Go's library."""
    pad = "    " * depth
    if isinstance(value, dict):
        lines = []
        for key, entry in value.items():
            if isinstance(entry, (dict, list)) and entry:
                lines.append(f"{pad}{key}:\n{yaml(entry, depth + 1)}")
            else:
                lines.append(f"{pad}{key}: {_scalar(entry)}\n")
        return "".join(lines)
    lines = []
    for entry in value:
        if isinstance(entry, dict):
            inner = yaml(entry, depth + 1)
            lines.append(f"{pad}- {inner[len(pad) + 4 :]}".replace("\n" + pad + "    ", "\n" + pad + "  "))
        else:
            lines.append(f"{pad}- {_scalar(entry)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        return "[]" if value == [] else "{}"
    plain = re.fullmatch(r"[A-Za-z/_.][\w./:=@+-]*|--?[a-z][\w=:./-]*|\d+\.\d+\.\d+", value) and not value.endswith(":")
    return value if plain and value not in ("true", "false", "null") and ": " not in value else f'"{value}"'
