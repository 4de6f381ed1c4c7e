"""The page cache of files: pages are removed from it, and what is left in memory is counted."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterable

PAGE = mmap.PAGESIZE
MOST_BYTES = 256 << 20
"""Of one file that is looked at, read and removed from memory."""
PROBED_FILES, PROBED_PAGES = 16, 8
"""Of the second method, which may itself start reading ahead."""
_PROT_READ, _MAP_PRIVATE = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


def open_regular(path: str) -> int:
    """Return a descriptor of a regular file for reading; OSError for anything else. A pipe does not block it."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file


def drop(paths: Iterable[str]) -> None:
    """Remove the files' clean pages from memory (posix_fadvise). Files that cannot be opened are left out."""
    for path in paths:
        try:
            file = open_regular(path)
        except OSError:
            continue
        try:
            os.posix_fadvise(file, 0, MOST_BYTES, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass
        finally:
            os.close(file)


def resident(paths: list[str]) -> tuple[float | None, str | None]:
    """Return the share of the files' bytes in memory, and the method: ``mincore``, ``nowait``; None: unknown.

    For files of other users that this one may not write, mincore(2) reports every page as resident; a read that must
    not wait (preadv2, RWF_NOWAIT) then shows the difference. That may read ahead: the pages are removed afterwards.
    """
    share = _by_mincore(paths)
    if share is not None and share < 1:
        return share, "mincore"
    probed = _by_nowait(paths[:: max(1, len(paths) // PROBED_FILES)])
    if probed is None:
        return share, None if share is None else "mincore"
    return probed, "nowait"


def _by_mincore(paths: list[str]) -> float | None:
    pages = cached = 0
    for path in paths:
        try:
            file = open_regular(path)
        except OSError:
            continue
        try:
            size = min(os.fstat(file).st_size, MOST_BYTES)
            if not size:
                continue
            # Mapped, never read: a file that shrinks in the meantime raises no signal.
            address = _LIBC.mmap(None, size, _PROT_READ, _MAP_PRIVATE, file, 0)
            if address == _FAILED:
                return None
            number = -(-size // PAGE)
            answer = ctypes.create_string_buffer(number)
            failed = _LIBC.mincore(address, size, answer)
            _LIBC.munmap(address, size)
            if failed:
                return None
            pages += number
            cached += sum(byte & 1 for byte in answer.raw)
        finally:
            os.close(file)
    return cached / pages if pages else None


def _by_nowait(paths: list[str]) -> float | None:
    tried = cached = 0
    block = bytearray(1)
    for path in paths:
        try:
            file = open_regular(path)
        except OSError:
            continue
        try:
            size = min(os.fstat(file).st_size, MOST_BYTES)
            # From the end: the kernel may read ahead of each place, and not behind it.
            for offset in reversed(range(0, size, max(PAGE, size // PROBED_PAGES))):
                try:
                    cached += os.preadv(file, [block], offset, os.RWF_NOWAIT)
                except BlockingIOError:
                    pass
                except OSError:  # the file system does not support it
                    return None
                tried += 1
        finally:
            os.close(file)
    drop(paths)
    return cached / tried if tried else None
