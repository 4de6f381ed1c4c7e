"""``nvidia-container-runtime``: adds the GPUs that a container requests to its specification, then runs runc.

``nvidia-container-runtime-hook`` is what Docker calls for ``--gpus`` if its own runtime starts the container.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

from . import cdi, container_cli, ctk, state
from .node import NodeSnapshot

RUNTIMES = ("runc", "crun")
ASKED = "NVIDIA_VISIBLE_DEVICES"


class UnknownDeviceError(ValueError):
    """A requested GPU does not exist."""


def main(argv: list[str]) -> int:
    """Replace this process by the low-level runtime; return an exit code only if there is none."""
    if "create" in argv:
        bundle = Path(_value(argv, "--bundle", "-b") or Path.cwd())
        try:
            file = bundle / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            if with_gpus(config):
                state.write_text(file, json.dumps(config))
        except (cdi.CdiError, ctk.ConfigError, OSError, ValueError) as err:
            _fail(argv, f"could not apply required modification to OCI specification: {err}")
            return 1
    runtime = next((path for name in _runtimes() if (path := shutil.which(name))), None)
    if runtime is None:
        sys.stderr.write(
            "nvidia-container-runtime: error locating runtime: no runtime binary found from candidate list\n"
        )
        return 1
    os.execv(runtime, [runtime, *argv])  # noqa: S606
    return 1


def _runtimes() -> list[str]:
    """Return the runtimes of config.toml, without this program itself."""
    try:
        listed = ctk.read().get("nvidia-container-runtime", {}).get("runtimes")
    except ctk.ConfigError:
        listed = None
    return [name for name in listed or RUNTIMES if not str(name).endswith("nvidia-container-runtime")]


def _value(argv: list[str], *options: str) -> str | None:
    for index, word in enumerate(argv):
        if word in options and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith("--") and word.partition("=")[0] in options:
            return word.partition("=")[2]
    return None


def _fail(argv: list[str], why: str) -> None:
    """Write the reason to stderr, and to the log, of which the container engine shows the last line."""
    sys.stderr.write(f"nvidia-container-runtime: {why}\n")
    log = _value(argv, "--log")
    if log:
        with Path(log).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"level": "error", "msg": why}) + "\n")


def environment(config: dict[str, Any]) -> dict[str, str]:
    """Return the container's environment."""
    pairs = (entry.partition("=") for entry in (config.get("process") or {}).get("env") or [])
    return {name: value for name, _, value in pairs}


def chosen(devices: str | None) -> list[Any] | None:
    """Return the GPUs that ``NVIDIA_VISIBLE_DEVICES`` names; None if it names none. Raises CdiError."""
    if devices in (None, "", "void"):
        return None
    node: NodeSnapshot
    node, _ = cdi.usable()
    if devices == "none":
        return []
    if devices == "all":
        return list(node.gpus)
    gpus = []
    for word in devices.split(","):
        name = word.strip().rpartition("=")[2]
        match = [gpu for gpu in node.gpus if name in (str(gpu.index), gpu.uuid) or name == "all"]
        if not match:
            raise UnknownDeviceError(f"unresolvable CDI devices runtime.nvidia.com/gpu={name}: unknown device")
        gpus += match
    return gpus


def with_gpus(config: dict[str, Any]) -> bool:
    """Add the GPUs that its environment requests to the OCI specification; return False if it requests none."""
    gpus = chosen(environment(config).get(ASKED))
    if gpus is None:
        return False
    release = cdi.usable()[1]
    edits = cdi.edits(release)
    paths = [entry["path"] for entry in edits["deviceNodes"]]
    paths += [path for gpu in gpus for path in cdi.device_files(gpu.minor)]
    linux = config.setdefault("linux", {})
    devices = linux.setdefault("devices", [])
    allowed = linux.setdefault("resources", {}).setdefault("devices", [])
    for path in paths:
        device = _device(path)
        if device and path not in [entry.get("path") for entry in devices]:
            devices.append(device)
            numbers = {"type": "c", "major": device["major"], "minor": device["minor"], "access": "rwm"}
            allowed.append({"allow": True, **numbers})
    mounts = config.setdefault("mounts", [])
    for entry in edits["mounts"]:
        mounts.append({
            "destination": entry["containerPath"], "source": entry["hostPath"], "type": "bind",
            "options": entry["options"],
        })  # fmt: skip
    hooks = config.setdefault("hooks", {})
    # Docker's own hook for --gpus would do the same a second time.
    hooks["prestart"] = [entry for entry in hooks.get("prestart") or [] if not _is_own(entry)]
    for entry in edits["hooks"]:
        hooks.setdefault(entry["hookName"], []).append({key: entry[key] for key in ("path", "args", "env")})
    return True


def _is_own(entry: dict[str, Any]) -> bool:
    return str(entry.get("path", "")).endswith("nvidia-container-runtime-hook")


def _device(path: str) -> dict[str, Any] | None:
    try:
        about = state.path(path).stat()
    except OSError:
        return None
    if not stat.S_ISCHR(about.st_mode):
        return None
    numbers = {"major": os.major(about.st_rdev), "minor": os.minor(about.st_rdev)}
    return {"path": path, "type": "c", "fileMode": 0o666, "uid": 0, "gid": 0, **numbers}


def hook(argv: list[str]) -> int:
    """Run ``nvidia-container-runtime-hook prestart``: add the GPUs to a container that is being created."""
    if argv[:1] != ["prestart"]:
        return 0
    try:
        container_state = json.loads(sys.stdin.read())
        bundle = Path(container_state["bundle"])
        config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        gpus = chosen(environment(config).get(ASKED))
        if gpus is None:
            return 0
        root = Path(str(config["root"]["path"]))
        container_cli.configure(int(container_state["pid"]), root if root.is_absolute() else bundle / root, gpus)
    except cdi.CdiError as err:
        sys.stderr.write(
            f"nvidia-container-cli: initialization error: nvml error: {container_cli.words_of(str(err))}\n"
        )
        return 1
    except (container_cli.CliError, OSError, ValueError, KeyError) as err:
        sys.stderr.write(f"nvidia-container-cli: {err}\n")
        return 1
    return 0
