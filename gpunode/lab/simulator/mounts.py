"""Bind mounts that show simulated files where programs look for the kernel's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container, Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_READ_ONLY = 1
_REMOUNT = 32
_BIND = 4096
_REC = 16384


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2); raise OSError with the target's name."""
    words = [word.encode() for word in (source, target, kind, options)]
    if _LIBC.mount(words[0], words[1], words[2] or None, ctypes.c_ulong(flags), words[3] or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Show ``source`` at ``target``, which must exist."""
    mount(source, target, flags=_BIND | _REC)
    if read_only:
        mount("none", target, flags=_REMOUNT | _BIND | _READ_ONLY)


def with_additions(folder: str, stand_in: str, without: Container[str] = ()) -> None:
    """Make entries in a folder of sysfs possible: mount ``stand_in`` over it, which shows all that was in it.

    What is added to ``stand_in`` from then on appears in ``folder``. Entries named in ``without`` are left out.
    """
    Path(stand_in).mkdir(parents=True, exist_ok=True)
    for entry in _entries(folder):
        target = Path(stand_in, entry.name)
        if entry.name in without:
            continue
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            target.mkdir()
            mount(str(entry), str(target), flags=_BIND | _REC)
        else:
            target.touch()
            mount(str(entry), str(target), flags=_BIND)
    bind(stand_in, folder)


def overlay(folder: str, stand_in: str) -> None:
    """Make entries possible by an overlay: for folders with many entries that do not change."""
    upper, work = stand_in + ".added", stand_in + ".work"
    for each in (stand_in, upper, work):
        Path(each).mkdir(parents=True, exist_ok=True)
    mount("overlay", stand_in, "overlay", options=f"lowerdir={folder},upperdir={upper},workdir={work}")
    bind(stand_in, folder)


def _entries(folder: str) -> Iterable[Path]:
    entries: list[Path] = sorted(Path(folder).iterdir())
    return entries
