"""Faults of installed files: an additional library, a program of another release. Reverted when they are healed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from . import state
from .state import FaultError

_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_FABRIC_MANAGER = "/usr/bin/nv-fabricmanager"
_SAVED = "/var/lib/gpunode-lab/nv-fabricmanager"
_LIMIT_S = 60
_VERSION = re.compile(r"GPUNODE_LAB_PACKAGE_VERSION=(\S+)")


def _run(*argv: str) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)


def _next(release: str) -> str:
    """Return a release after the given one that does not exist."""
    head, _, last = release.rpartition(".")
    return f"{head}.{int(last) + 1:0{len(last)}d}"


def add_library(fault: dict[str, Any]) -> None:
    """Install the NVML library once more under a later release's name; ldconfig links ``.so.1`` to it."""
    libraries = sorted(state.path(_LIBRARIES).glob("libnvidia-ml.so.*.*"))
    if not libraries:
        raise FaultError("library-mismatch: no driver's library is installed: install a driver first")
    name = "libnvidia-ml.so." + _next(libraries[-1].name.partition(".so.")[2])
    shutil.copyfile(libraries[-1], libraries[-1].with_name(name))
    fault["file"] = f"{_LIBRARIES}/{name}"
    _run("ldconfig")


def remove_library(fault: dict[str, Any]) -> None:
    """Remove the library."""
    state.path(fault["file"]).unlink(missing_ok=True)
    _run("ldconfig")


def swap_fabric_manager(fault: dict[str, Any]) -> None:
    """Replace the fabric manager's program by one of another release, and restart its unit."""
    program = state.path(_FABRIC_MANAGER)
    text = program.read_text(encoding="utf-8") if program.exists() else ""
    match = _VERSION.search(text)
    if not match:
        raise FaultError("fabric-manager-version: no simulated fabric manager is installed: install it first")
    other = fault["version"] or _next(match[1])
    if other == match[1]:
        raise FaultError(f"fabric-manager-version: version={other} is the one that is installed")
    shutil.copy2(program, state.path(_SAVED))
    fault["version"] = other
    _replace(program, text.replace(match[0], f"GPUNODE_LAB_PACKAGE_VERSION={other}"))
    _run("systemctl", "try-restart", "nvidia-fabricmanager.service")


def restore_fabric_manager(fault: dict[str, Any]) -> None:
    """Restore the program, unless another package has been installed in the meantime."""
    program, saved = state.path(_FABRIC_MANAGER), state.path(_SAVED)
    if program.exists() and fault["version"] in program.read_text(encoding="utf-8"):
        _replace(program, saved.read_text(encoding="utf-8"))
    saved.unlink(missing_ok=True)
    _run("systemctl", "reset-failed", "nvidia-fabricmanager.service")
    _run("systemctl", "start", "nvidia-fabricmanager.service")


def _replace(program: Path, text: str) -> None:
    new = program.with_name(f".{program.name}.new")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o755)
    new.replace(program)
