"""Programs that a container engine runs while it creates a container: ``nvidia-container-runtime``, which adds the
GPUs that the container requests to its specification, then runs runc; ``nvidia-container-runtime-hook``, which Docker
calls for ``--gpus`` if its own runtime starts the container; ``nvidia-container-cli`` and ``nvidia-cdi-hook``.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cdi, ctk, state
from .node import NodeSnapshot, SimulatedGpu, package_release

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
        configure(int(container_state["pid"]), root if root.is_absolute() else bundle / root, gpus)
    except cdi.CdiError as err:
        sys.stderr.write(f"nvidia-container-cli: initialization error: nvml error: {words_of(str(err))}\n")
        return 1
    except (CliError, OSError, ValueError, KeyError) as err:
        sys.stderr.write(f"nvidia-container-cli: {err}\n")
        return 1
    return 0


LIMIT_S = 120
MOUNT_S = 20
INTO = "configure-mounted"


class CliError(Exception):
    """nvidia-container-cli fails with this message."""


def container_cli(argv: list[str]) -> int:
    """Run nvidia-container-cli, which lists what a container needs or adds it; return its exit code."""
    words = [word for word in argv if word not in ("-k", "--load-kmods") and not word.startswith(("-d", "--debug"))]
    if words[:1] in (["-V"], ["--version"]):
        sys.stdout.write(
            f"cli-version: {package_release() or 'unknown'}\nlib-version: {package_release() or 'unknown'}\n"
        )
        return 0
    command, rest = (words[0], words[1:]) if words else ("", [])
    try:
        if command == "info":
            sys.stdout.write(info())
        elif command == INTO:
            into(Path(rest[0]), rest[1:])
        else:
            sys.stderr.write(f"nvidia-container-cli: unrecognized command '{command}'\n")
            return 1
    except cdi.CdiError as err:
        sys.stderr.write(f"nvidia-container-cli: initialization error: nvml error: {words_of(str(err))}\n")
        return 1
    except (CliError, HookError, OSError, subprocess.SubprocessError) as err:
        sys.stderr.write(f"nvidia-container-cli: {err}\n")
        return 1
    return 0


def words_of(reason: str) -> str:
    known = {
        "ERROR_DRIVER_NOT_LOADED": "driver not loaded",
        "ERROR_LIB_RM_VERSION_MISMATCH": "driver/library version mismatch",
        "ERROR_LIBRARY_NOT_FOUND": "library not found",
    }
    return next((text for name, text in known.items() if name in reason), reason)


def info() -> str:
    """Return the output of ``info``: driver and GPUs."""
    node, release = cdi.usable()
    lines = [("NVRM version", release), ("CUDA version", node.cuda)]
    text = "".join(f"{name + ':':<16}{value}\n" for name, value in lines)
    for gpu in node.gpus:
        brand = "Tesla" if gpu.name.startswith("Tesla") else "Nvidia"
        about = (
            ("Device Index", str(gpu.index)), ("Device Minor", str(gpu.minor)), ("Model", gpu.name), ("Brand", brand),
            ("GPU UUID", gpu.uuid), ("Bus Location", gpu.bus_id.lower()),
            ("Architecture", str(gpu.get("compute_capability", ""))),
        )  # fmt: skip
        text += "\n" + "".join(f"{name + ':':<16}{value}\n" for name, value in about)
    return text


def configure(pid: int, root: Path, gpus: list[SimulatedGpu]) -> None:
    """Mount the driver's files and create the device files in the mount namespace of that process."""
    names = [path for gpu in gpus for path in cdi.device_files(gpu.minor)]
    program = "/usr/lib/gpunode-lab/bin/nvidia-container-cli"
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--mount", "--", program, INTO, str(root), *names],
        check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        raise CliError(done.stdout.decode(errors="replace").strip())


def into(root: Path, devices: list[str]) -> None:
    """Add, inside the namespace, bind mounts, device files, links and the linker's cache."""
    release = cdi.usable()[1]
    for path in cdi.mounts(release):
        _bind(Path(path), inside(root, path))
    for path in (*cdi.control_devices(), *devices):
        about = Path(path).stat()
        target = inside(root, path)
        if not target.exists():
            os.mknod(target, stat.S_IFCHR | 0o666, about.st_rdev)
            target.chmod(0o666)
    libraries = cdi.libraries(release)
    for target_name, link in cdi.links(libraries):
        make_link(root, target_name, link)
    update_ldcache(root, sorted({path.rpartition("/")[0] for path in libraries}))


def _bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    for words in (["--rbind"], ["-o", "remount,bind,ro"]):
        done = subprocess.run(
            ["mount", *words, str(source), str(target)] if words[0] == "--rbind" else ["mount", *words, str(target)],
            check=False, timeout=MOUNT_S, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        if done.returncode:
            raise CliError(f"mount error: {done.stderr.decode(errors='replace').strip()}")


LDCONFIG_S = 60


class HookError(Exception):
    """The hook failed; the container does not start."""


def cdi_hook(argv: list[str]) -> int:
    """Run one hook of a CDI specification; return its exit code.

    Called by the OCI runtime with the container's state on stdin; works on the root folder that the bundle names.
    """
    words = [word for word in argv if word not in ("--debug", "--quiet")]
    if words[:1] in (["--version"], ["-v"]):
        sys.stdout.write(f"NVIDIA CDI Hook version {package_release() or 'unknown'}\ncommit: gpunode-lab\n")
        return 0
    hooks: dict[str, Callable[[Path, list[str]], None]] = {
        "create-symlinks": _create_symlinks,
        "update-ldcache": _update_ldcache,
        "chmod": lambda _root, _words: None,
        "enable-cuda-compat": lambda _root, _words: None,
        "disable-device-node-modification": lambda _root, _words: None,
    }
    if not words or words[0] not in hooks:
        sys.stderr.write(f"No help topic for '{' '.join(words)}'\n")
        return 1
    try:
        hooks[words[0]](container_root(), words[1:])
    except (HookError, OSError, subprocess.SubprocessError) as err:
        sys.stderr.write(f"nvidia-cdi-hook {words[0]}: {err}\n")
        return 1
    return 0


def container_root() -> Path:
    """Return the container's root folder, from the state on stdin. Raises HookError."""
    try:
        bundle = Path(json.loads(sys.stdin.read())["bundle"])
        config: dict[str, Any] = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        root = Path(str(config["root"]["path"]))
    except (ValueError, KeyError, TypeError, OSError) as err:
        raise HookError(f"failed to determine container root: {err}") from None
    return root if root.is_absolute() else bundle / root


def values_of(words: list[str], option: str) -> list[str]:
    """Return the values of an option that may be given several times."""
    values = [words[index + 1] for index, word in enumerate(words[:-1]) if word == option]
    return values + [word.partition("=")[2] for word in words if word.startswith(option + "=")]


def inside(root: Path, path: str) -> Path:
    """Return a path of the container below its root; raise HookError if a link leads outside."""
    target = root / path.lstrip("/")
    parent = target.parent.resolve()
    if root.resolve() not in (parent, *parent.parents):
        raise HookError(f"{path} leads out of the container")
    return target


def _create_symlinks(root: Path, words: list[str]) -> None:
    for pair in values_of(words, "--link"):
        target, _, link = pair.partition("::")
        make_link(root, target, link)


def make_link(root: Path, target: str, link: str) -> None:
    """Create a symbolic link in the container; an existing one stays."""
    path = inside(root, link)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink() and not path.exists():
        path.symlink_to(target)


def _update_ldcache(root: Path, words: list[str]) -> None:
    update_ldcache(root, values_of(words, "--folder"))


def update_ldcache(root: Path, folders: list[str]) -> None:
    """Add the driver's libraries to the container's linker cache; an image without a linker cache needs none."""
    if not (root / "etc").is_dir():
        return
    if folders and (root / "etc/ld.so.conf.d").is_dir():
        text = "".join(folder + "\n" for folder in folders)
        inside(root, "/etc/ld.so.conf.d/00-nvcr-gpunode-lab.conf").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["ldconfig", "-r", str(root), "-C", "/etc/ld.so.cache", *folders],
        check=False, timeout=LDCONFIG_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    if done.returncode:
        raise HookError(f"error updating ldcache: {done.stderr.decode(errors='replace').strip()}")
