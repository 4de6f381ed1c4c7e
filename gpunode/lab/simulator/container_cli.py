"""``nvidia-container-cli``: lists what a container needs, and adds it to a container that is being created."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from . import cdi
from .cdi_hook import HookError, inside, make_link, update_ldcache
from .node import SimulatedGpu, package_release

LIMIT_S = 120
MOUNT_S = 20
INTO = "configure-mounted"


class CliError(Exception):
    """nvidia-container-cli fails with this message."""


def main(argv: list[str]) -> int:
    """Run nvidia-container-cli with these arguments; return its exit code."""
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
