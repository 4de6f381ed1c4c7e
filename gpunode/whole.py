"""Files that are written completely or not at all."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def in_place(path: Path) -> bool:
    """Return True if the existing file is written into: a pipe, a terminal, a device, which must not be replaced."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream; its content appears at ``path`` at the end, and not at all if the block raises.

    An existing file is replaced by one with its mode and, if that is allowed, its owner; a link stays, and its target
    is replaced. ``private``: only for its owner, independent of the existing file. Raises OSError.
    """
    if in_place(path):
        with path.open("wb") as stream:
            yield stream
        return
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with beside.open("xb") as stream:
            _like(target, stream.fileno())
            if private:
                os.fchmod(stream.fileno(), 0o600)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _like(target: Path, descriptor: int) -> None:
    """Set the owner and the mode of a new file, still empty, to those of the one that it will replace."""
    with suppress(FileNotFoundError):
        old = target.stat()
        with suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
