"""Files that are written completely or not at all, and as root not where another user leads to."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpunode import file_access
from gpunode.errors import UsageError
from gpunode.file_access import FileRefusedError, OpenPath
from gpunode.text import is_whole


def trusted_users() -> frozenset[int] | None:
    """Return the users with links that root follows: root, and who called sudo. None: all, if this is not root."""
    if os.geteuid() != 0:
        return None
    sudo = os.environ.get("SUDO_UID", "")
    return frozenset({0, int(sudo) if is_whole(sudo) else 0})


def exists(path: Path) -> bool:
    """Return whether a path exists; a name that no file can have, as a long list of hosts, does not. Raises OSError."""
    try:
        return path.exists()
    except OSError as err:
        if err.errno == errno.ENAMETOOLONG:
            return False
        raise


def in_place(path: Path) -> bool:
    """Return True if the existing file is written into: a pipe, a terminal, a device, which must not be replaced."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def refuse_foreign(path: Path) -> None:
    """Raise FileRefusedError if another user could redirect what root writes to a path. Raises OSError."""
    trusted = trusted_users()
    if trusted is not None:
        with file_access.opened(str(path), trusted=trusted) as location:
            _refuse_foreign(location, trusted)


def _refuse_foreign(location: OpenPath, trusted: frozenset[int] | None) -> None:
    inode = location.inode
    if location.folder < 0 or trusted is None:
        return
    if inode is None or stat.S_ISREG(inode.st_mode):
        file_access.refuse_foreign_place(location, 0, trusted)
    elif inode.st_uid not in trusted:
        raise FileRefusedError(f"{location.path} is {file_access.kind(inode)} of another user (uid {inode.st_uid})")


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a file, of a longer one ``most`` bytes and one more. Raises UsageError."""
    try:
        with path.open("rb") as file:
            parts, left = [], most + 1
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file or folder") from None
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None


def make_private_folder(path: Path) -> None:
    """Create a folder and those above it, only for their owner; an existing one keeps its mode. Raises OSError."""
    trusted = trusted_users()
    with file_access.opened(str(path), trusted=trusted, make=0o700) as location:
        if location.inode is None:
            file_access.refuse_foreign_folder(location, 0, trusted)
            os.mkdir(location.name, 0o700, dir_fd=location.folder)
        elif not stat.S_ISDIR(location.inode.st_mode):
            raise FileRefusedError(f"{path} is {file_access.kind(location.inode)}, not a directory")
        elif trusted is not None and location.inode.st_uid not in trusted:
            user = location.inode.st_uid
            raise FileRefusedError(f"{path} belongs to another user (uid {user}): root does not write there")


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream; its content appears at ``path`` at the end, and not at all if the block raises.

    An existing file is replaced by one with its mode and, if that is allowed, its owner; a link stays, and its target
    is replaced. ``private``: only for its owner, independent of the existing file, which must be a regular file. The
    folder stays open: what is exchanged meanwhile changes nothing. Raises OSError.
    """
    trusted = trusted_users()
    with file_access.opened(str(path), trusted=trusted, follow=not private) as location:
        _refuse_foreign(location, trusted)
        inode = location.inode
        if inode is not None and not (stat.S_ISREG(inode.st_mode) and location.folder >= 0):
            if private:
                raise FileRefusedError(f"{path} is {file_access.kind(inode)}; expected a regular file")
            # The very pipe or device that was looked at.
            with Path(f"/proc/self/fd/{location.number}").open("wb") as stream:
                yield stream
            return
        with file_access.draft(location, 0o600 if private else 0o666) as number:
            if inode is not None:
                _like(inode, number)
            if private:
                os.fchmod(number, 0o600)
            with os.fdopen(os.dup(number), "wb") as stream:
                yield stream


def _like(old: os.stat_result, descriptor: int) -> None:
    """Set the owner and the mode of a new file, still empty, to those of the one that it will replace."""
    with suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def write_whole(path: Path, text: str | bytes | Iterator[str], *, private: bool = False) -> None:
    """Write a file, see ``whole_file``; raise UsageError if it cannot be written."""
    try:
        with whole_file(path, private=private) as stream:
            for part in (text,) if isinstance(text, str | bytes) else text:
                stream.write(part.encode() if isinstance(part, str) else part)
    except FileRefusedError as err:
        raise UsageError(str(err)) from None
    except OSError as err:
        raise UsageError(f"{path}: cannot be written: {err.strerror}") from None


def must_not_be_redirected(path: Path, option: str) -> None:
    """Raise UsageError if another user could redirect what root writes.

    Writing verifies the same again, on the folders that it opens.
    """
    try:
        refuse_foreign(path)
    except FileRefusedError as err:
        raise UsageError(f"{option} {err}") from None
    except FileNotFoundError:
        return
    except OSError as err:
        raise UsageError(f"{option} {path}: {err.strerror}") from None
