# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Open, read, write and remove files as root in folders to which other users may write.

Every path is opened component by component, each relative to the open folder before it:

- A symbolic link is followed only if it and its folder belong to root and nobody else may write to the folder, as with
  ``/var/run``. The user who called sudo counts as root on the controller.
- Only regular files are opened, by the descriptor on which that was verified: no pipe, no device, no socket.
- In a folder that others may write to, root reads only files that have one name and belong to the folder's owner.
- Files are written to a temporary file in the same open folder and renamed there. Root writes to folders of root only;
  to a user's folder, it writes that user's files, with that user's rights.
- What concerns a user's home runs in a child process with the user's rights and a time limit (``limited``): that folder
  may be a file system of theirs that never answers.

Nodes and the controller share this file (``gpunode/file_access.py`` is a link to it); it imports no other.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import pwd
import secrets
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Tuple  # noqa: UP035

LARGEST = 1 << 20
"""Maximum size of a text, in bytes."""
PART = 1 << 16
LARGEST_ANSWER = 8 << 20
"""Maximum size of what a child process returns, in bytes."""
LIMIT_S = 10.0
"""Maximum duration of a child process, in seconds."""
MOST_LINKS = 40
LABEL = "security.selinux"
KEPT_ATTRIBUTES = ("system.posix_acl_access", LABEL, "user.")
LONGEST_NAME = 200
BY_OTHERS = 0o022
KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
Ids = Tuple[int, int]  # noqa: UP006 - evaluated by the Python of nodes
"""A user and a group."""


class FileRefusedError(OSError):
    """The reason why a file was not read or changed, in one line."""


class OpenPath(NamedTuple):
    """A path with its folder open."""

    path: str
    folder: int
    """Descriptor of the folder."""
    name: str
    """Name in the folder."""
    parent: os.stat_result
    """Status of the folder."""
    inode: os.stat_result | None
    """Status of what is there, without following a link; None: nothing."""
    number: int
    """Descriptor of what is there, which can neither read nor write; -1: nothing."""
    folder_path: str
    """Path of the folder without links."""


STARTED_AS = os.geteuid()


def ours() -> frozenset[int]:
    """Return the users with trusted links and folders: root, and who started this process."""
    return frozenset({0, STARTED_AS})


def own_ids() -> Ids:
    """Return user and group of this process."""
    return os.geteuid(), os.getegid()


def kind(inode: os.stat_result) -> str:
    """Return what is at a path, in words: ``a file``, ``a named pipe``."""
    return next((name for is_kind, name in KINDS if is_kind(inode.st_mode)), "no file")


def user_name(number: int) -> str:
    """Return the name of a user; the number if it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def only_trusted(folder: os.stat_result, trusted: frozenset[int]) -> bool:
    """Return whether nobody but trusted users may write to a folder."""
    return folder.st_uid in trusted and not folder.st_mode & BY_OTHERS


@contextlib.contextmanager
def opened(
    path: str, *, trusted: frozenset[int] | None, follow: bool = True, make: int | None = None
) -> Iterator[OpenPath]:
    """Open the folder of a path, and look at what is there.

    ``trusted``: users with links that are followed; None: all users. ``follow``: also follow the last component.
    ``make``: mode of folders that are created if they are missing. Raises OSError.
    """
    walk = _Walk(path, trusted, follow, make)
    try:
        yield walk.to_the_end()
    finally:
        for number in walk.numbers:
            os.close(number)


class _Walk:
    """The way along the components of one path."""

    def __init__(self, path: str, trusted: frozenset[int] | None, follow: bool, make: int | None) -> None:
        if "\0" in path:
            raise FileRefusedError(errno.EINVAL, "the path contains a NUL character")
        self.path, self.trusted, self.follow, self.make = path, trusted, follow, make
        self.numbers: list[int] = []
        self.links = 0
        absolute = path if path.startswith("/") else f"{os.getcwd()}/{path}"  # noqa: PTH109 - keeps "..", as the kernel
        self.rest = _components(absolute)
        self.to_root()

    def to_root(self) -> None:
        """Open the root folder and continue there."""
        self.folder = self.root = self.hold(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self.parent, self.shown = os.fstat(self.folder), list[str]()

    def hold(self, number: int) -> int:
        """Return a descriptor that is closed at the end."""
        self.numbers.append(number)
        return number

    def to_the_end(self) -> OpenPath:
        """Return the place of the path."""
        while True:
            standard = self.standard_stream()
            if standard is not None:
                return standard
            name = self.rest.pop(0) if self.rest else "."
            last = not self.rest
            number = self.number_of(name, last)
            if number is None:
                return self.at(name, None, -1)
            inode = os.fstat(number)
            if stat.S_ISLNK(inode.st_mode) and (self.follow or not last):
                self.follow_link(name, number, inode)
            elif last:
                return self.at(name, inode, number)
            elif stat.S_ISDIR(inode.st_mode):
                self.folder, self.parent, self.shown = number, inode, [*self.shown, name]
            else:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path)

    def at(self, name: str, inode: os.stat_result | None, number: int) -> OpenPath:
        """Return what was found in the current folder."""
        return OpenPath(self.path, self.folder, name, self.parent, inode, number, "/" + "/".join(self.shown))

    def number_of(self, name: str, last: bool) -> int | None:
        """Return a descriptor of a component; None if it is the last one and missing."""
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return self.hold(os.open(name, flags, dir_fd=self.folder))
        except FileNotFoundError:
            if last:
                return None
            if self.make is None:
                raise
        refuse_foreign_folder(self.at(name, None, -1), os.geteuid(), self.trusted)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.folder)
        number = self.hold(os.open(name, flags | os.O_DIRECTORY, dir_fd=self.folder))
        # Where all can write, another user may have exchanged it.
        if os.fstat(number).st_uid == os.geteuid():
            _set_mode(number, self.make)
        return number

    def follow_link(self, name: str, number: int, inode: os.stat_result) -> None:
        """Read the target of a link and continue there. Raise FileRefusedError if another user could have made it."""
        if self.trusted is not None and not (inode.st_uid in self.trusted and only_trusted(self.parent, self.trusted)):
            raise FileRefusedError(
                f"{self.path}: {name} is a symbolic link that user {user_name(inode.st_uid)} or others can change: "
                "root does not follow it: replace it with what it leads to"
            )
        self.links += 1
        if self.links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.path)
        target = os.readlink("", dir_fd=number)
        if target.startswith("/"):
            self.to_root()
        self.rest = [*_components(target), *self.rest]

    def standard_stream(self) -> OpenPath | None:
        """Return the place of an own open file, such as ``/dev/stdout``: its link has no target that has a path."""
        if self.rest[:3] != ["proc", "self", "fd"] or len(self.rest) != 4 or self.folder != self.root:
            return None
        number = self.hold(os.open("/" + "/".join(self.rest), os.O_PATH | os.O_CLOEXEC))
        return self.at(self.rest[3], os.fstat(number), number)._replace(folder=-1)


def _components(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _set_mode(number: int, mode: int) -> None:
    """Set the mode of what a descriptor of ``opened`` leads to."""
    os.chmod(f"/proc/self/fd/{number}", mode)  # noqa: PTH101 - fchmod does not accept such a descriptor


def refuse_foreign_folder(location: OpenPath, owner: int, trusted: frozenset[int] | None) -> None:
    """Raise FileRefusedError if the folder belongs to a user other than the trusted ones, None: all.

    A process with the rights of ``owner`` also writes to folders of that user.
    """
    user = location.parent.st_uid
    if trusted is not None and user not in trusted and not user == owner == os.geteuid():
        raise FileRefusedError(
            f"{location.path}: {location.folder_path} belongs to another user ({user_name(user)}, uid {user}): root "
            "does not write there"
        )


def status(path: str) -> os.stat_result | None:
    """Return the status of a path without following its last component; None if it does not exist. Raises OSError."""
    try:
        with opened(path, trusted=ours(), follow=False) as location:
            return location.inode
    except (FileNotFoundError, NotADirectoryError):
        return None


class PathState(NamedTuple):
    """What is at a path."""

    kind: str
    mode: int
    uid: int
    gid: int
    data: bytes | None
    """Content of a regular file; None if it is larger than requested."""
    shared: bool
    """Whether users other than root can write to the folder."""


def path_state(path: str, uid: int = 0, most: int = LARGEST) -> PathState | None:
    """Return what is at a path, without following its last component; None if nothing is.

    In a folder of the user ``uid``, with that user's rights. Raises OSError.
    """
    if os.geteuid() != 0 or uid == 0:
        return _path_state(path, most)
    fields = limited(uid if in_folder_of(path, uid) else None, lambda: _as_json(_path_state(path, most)))
    return None if fields is None else PathState(**{**fields, "data": _from_base64(fields["data"])})


def _path_state(path: str, most: int) -> PathState | None:
    try:
        with opened(path, trusted=ours(), follow=False) as location:
            inode = location.inode
            if inode is None:
                return None
            readable = stat.S_ISREG(inode.st_mode) and inode.st_size <= most
            data = content(location, most) if readable else None
            shared = not only_trusted(location.parent, ours())
            return PathState(kind(inode), stat.S_IMODE(inode.st_mode), inode.st_uid, inode.st_gid, data, shared)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _as_json(state: PathState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    data = state.data
    return {**state._asdict(), "data": None if data is None else base64.b64encode(data).decode()}


def _from_base64(data: str | None) -> bytes | None:
    return None if data is None else base64.b64decode(data)


def read(path: str, most: int = LARGEST, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. Raises OSError."""
    with opened(path, trusted=ours(), follow=follow) as location:
        return content(location, most)


def content(location: OpenPath, most: int = LARGEST) -> bytes:
    """Return the content of the regular file at a place. Raises OSError."""
    inode = location.inode
    if inode is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location.path)
    if not stat.S_ISREG(inode.st_mode):
        raise FileRefusedError(f"{location.path} is {kind(inode)}, not a file")
    shared = not only_trusted(location.parent, ours()) and os.geteuid() == 0
    if shared and (inode.st_uid != location.parent.st_uid or inode.st_nlink != 1):
        raise FileRefusedError(
            f"{location.path} is in a directory that other users can write to, and is not a file of the directory's "
            "owner with one name: root does not read it"
        )
    # The same file that was looked at, whatever is at the path now. No terminal becomes the controlling one.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        number = os.open(f"/proc/self/fd/{location.number}", flags)
    except OSError as err:
        raise OSError(err.errno, err.strerror, location.path) from None
    data = bytearray()
    try:
        if inode.st_size <= most:
            # The kernel's own files refuse to fill a large buffer.
            while len(data) <= most and (part := os.read(number, PART)):
                data += part
    finally:
        os.close(number)
    if len(data) > most or inode.st_size > most:
        raise FileRefusedError(f"{location.path} is larger than {most >> 10} KiB")
    return bytes(data)


def text(path: str, most: int = LARGEST) -> str:
    """Return the text of a regular file. Raises OSError: also if it is not valid UTF-8."""
    try:
        return read(path, most).decode("utf-8")
    except UnicodeDecodeError as err:
        raise FileRefusedError(f"{path} is not UTF-8 text (byte {err.start})") from None


def names(path: str) -> list[str]:
    """Return the names in a folder, which is not a link. Raises OSError."""
    with opened(path, trusted=ours(), follow=False) as location:
        return names_at(location)


def names_at(location: OpenPath) -> list[str]:
    """Return the names in the folder at a place. Raises OSError."""
    number = os.open(f"/proc/self/fd/{location.number}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.listdir(number)  # noqa: PTH208
    finally:
        os.close(number)


def write(path: str, data: bytes, mode: int, owner: Ids, *, keep_as: str | None = None) -> None:
    """Replace a file by one rename that survives a power failure. If the path is a link, the link is replaced.

    Missing folders are created: for all users to read in folders of root, for their owner alone in those of a user.
    ``owner``: user and group. ``keep_as``: suffix of a copy of the old file. Raises OSError.
    """
    _for_owner(path, owner[0], lambda: _write(path, data, mode, owner, keep_as))


def remove(path: str, uid: int, *, keep_as: str | None = None) -> None:
    """Remove a file of a user if it exists; ``keep_as``: suffix of a copy of it. Raises OSError."""
    _for_owner(path, uid, lambda: _remove(path, uid, keep_as))


def rename(path: str, name: str, uid: int) -> None:
    """Give a file of a user another name in its folder, in place of what is there. Needs no space. Raises OSError."""
    _for_owner(path, uid, lambda: _rename(path, name))


def _rename(path: str, name: str) -> None:
    with opened(path, trusted=ours(), follow=False) as location:
        refuse_foreign_folder(location, os.geteuid(), ours())
        os.rename(location.name, name, src_dir_fd=location.folder, dst_dir_fd=location.folder)
        _sync(location)


def copy_attributes(source: str, target: str, uid: int) -> None:
    """Give a file of a user the access list, the attributes and the SELinux label of another file of that user.

    Raises OSError, for a file of root also if the label cannot be set: programs may not read it then.
    """
    _for_owner(target, uid, lambda: _copy_attributes(source, target, uid == 0))


def _copy_attributes(source: str, target: str, labelled: bool) -> None:
    with opened(source, trusted=ours()) as original, opened(target, trusted=ours(), follow=False) as other:
        paths = [f"/proc/self/fd/{location.number}" for location in (original, other)]
        _keep_attributes(*paths, labelled=labelled)


def _for_owner(path: str, uid: int, act: Callable[[], None]) -> None:
    """Act as root, or with a user's rights if the path is in a folder of that user."""
    with_rights = ""
    try:
        if os.geteuid() == 0 and uid != 0 and in_folder_of(path, uid):
            with_rights = f" for user {user_name(uid)}, who must own the file and its directory"
            limited(uid, act)
        else:
            act()
    except FileRefusedError as err:
        raise FileRefusedError(str(err) if path in str(err) else f"{path}: {err}") from None
    except OSError as err:
        raise FileRefusedError(f"{path}: {err.strerror or err}{with_rights}") from None


def in_folder_of(path: str, uid: int) -> bool:
    """Return whether one of the folders of a path, before the first one that is missing, belongs to a user."""
    return bool(limited(None, lambda: _in_folder_of(path, uid)))


def _in_folder_of(path: str, uid: int) -> bool:
    folder = ""
    for part in _components(path)[:-1]:
        folder += f"/{part}"
        inode = status(folder)
        if inode is None or inode.st_uid == uid:
            return inode is not None
    return False


def _write(path: str, data: bytes, mode: int, owner: Ids, keep_as: str | None) -> None:
    with opened(path, trusted=ours(), follow=False, make=0o755 if os.geteuid() == 0 else 0o700) as location:
        refuse_foreign_place(location, owner[0], ours())
        if keep_as is not None:
            _keep(location, keep_as)
        replace(location, data, mode, owner)


def _remove(path: str, uid: int, keep_as: str | None) -> None:
    try:
        with opened(path, trusted=ours(), follow=False) as location:
            if location.inode is None:
                return
            refuse_foreign_place(location, uid, ours())
            if keep_as is not None:
                _keep(location, keep_as)
            os.unlink(location.name, dir_fd=location.folder)
    except (FileNotFoundError, NotADirectoryError):
        return


def refuse_foreign_place(location: OpenPath, owner: int, trusted: frozenset[int] | None) -> None:
    """Raise FileRefusedError if root must not replace what is there with a file of ``owner``."""
    refuse_foreign_folder(location, owner, trusted)
    if location.inode is None or trusted is None or only_trusted(location.parent, trusted):
        return
    if location.inode.st_uid not in {*trusted, owner}:
        user = location.inode.st_uid
        raise FileRefusedError(
            f"{location.path} belongs to another user ({user_name(user)}, uid {user}), in a directory that others can "
            "write to: root does not replace it: remove it, or select another directory"
        )


def _keep(location: OpenPath, suffix: str) -> None:
    """Copy the old file to its name with a suffix."""
    inode = location.inode
    if inode is not None and stat.S_ISREG(inode.st_mode):
        copy = location._replace(name=location.name + suffix)
        replace(copy, content(location, LARGEST_ANSWER), stat.S_IMODE(inode.st_mode), (inode.st_uid, inode.st_gid))


def replace(location: OpenPath, data: bytes, mode: int, owner: Ids) -> None:
    """Write a file in the open folder of a place: a temporary file, renamed when it is on the disk. Raises OSError."""
    with draft(location) as number:
        with os.fdopen(os.dup(number), "wb") as stream:
            stream.write(data)
        inode = os.fstat(number)
        if (inode.st_uid, inode.st_gid) != owner:
            os.fchown(number, *owner)
        if location.inode is not None and stat.S_ISREG(location.inode.st_mode):
            # Before the mode: it also limits what the access list allows.
            _keep_attributes(f"/proc/self/fd/{location.number}", f"/proc/self/fd/{number}")
        os.fchmod(number, mode)


def _keep_attributes(old: str, new: str, *, labelled: bool = False) -> None:
    """Copy the access list, the SELinux label and the user's attributes; ``labelled``: fail without the label."""
    try:
        names = os.listxattr(old)
    except OSError:
        return
    for name in names:
        if name.startswith(KEPT_ATTRIBUTES):
            try:
                os.setxattr(new, name, os.getxattr(old, name))
            except OSError:
                # Not every file system, and not every user, may set each of them.
                if labelled and name == LABEL:
                    raise


@contextlib.contextmanager
def draft(location: OpenPath, mode: int = 0o600) -> Iterator[int]:
    """Yield the descriptor of a temporary file, which replaces what is at the path at the end if nothing is raised."""
    name = f".{location.name[:LONGEST_NAME]}.{secrets.token_hex(4)}.gpunode"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(name, flags, mode, dir_fd=location.folder)
    try:
        yield number
        os.fsync(number)
        os.rename(name, location.name, src_dir_fd=location.folder, dst_dir_fd=location.folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=location.folder)
        raise
    finally:
        os.close(number)
    _sync(location)


def _sync(location: OpenPath) -> None:
    """Write the folder of a place to the disk, if that is possible."""
    with contextlib.suppress(OSError):
        number = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=location.folder)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def make_folder(path: str, mode: int) -> None:
    """Create a folder of root, or set the mode of an existing one. Raises OSError: also if it belongs to others."""
    with opened(path, trusted=ours(), follow=False, make=0o755) as location:
        refuse_foreign_folder(location, os.geteuid(), ours())
        if location.inode is None:
            # Before a umask and after the next line, nobody else may enter.
            os.mkdir(location.name, 0o700, dir_fd=location.folder)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            number = os.open(location.name, flags, dir_fd=location.folder)
        except OSError as err:
            if err.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise FileRefusedError(f"{path} is not a directory: move it") from None
        try:
            refuse_foreign_owner(path, os.fstat(number))
            os.fchmod(number, mode)
        finally:
            os.close(number)


def refuse_foreign_owner(path: str, inode: os.stat_result) -> None:
    """Raise FileRefusedError if a folder belongs to another user."""
    if inode.st_uid not in ours():
        raise FileRefusedError(
            f"{path} belongs to another user ({user_name(inode.st_uid)}, uid {inode.st_uid}), who can change what is "
            "in it: move it, or give it to root with its content"
        )


def remove_folder(path: str) -> None:
    """Remove an empty folder. Raises OSError."""
    with opened(path, trusted=ours(), follow=False) as location:
        refuse_foreign_folder(location, os.geteuid(), ours())
        os.rmdir(location.name, dir_fd=location.folder)


def limited(uid: int | None, work: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Return what ``work`` returns, JSON or bytes, from a child process with the rights of a user and a time limit.

    None: with the rights of this process. Raises OSError: what ``work`` raised, and at the limits.
    """
    rights = None if uid is None or os.geteuid() != 0 else _rights(uid)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(writing, rights, work, limit_s)
    os.close(writing)
    try:
        return _answer(_all_of(reading, time.monotonic() + limit_s))
    finally:
        os.close(reading)
        _end(child)


def _rights(uid: int) -> tuple[int, int, list[int]]:
    """Return user, group and all groups of a user. Without an entry in the database: no group but nogroup."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return uid, 65534, []
    return uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)


def _in_child(
    writing: int, rights: tuple[int, int, list[int]] | None, work: Callable[[], Any], limit_s: float
) -> NoReturn:
    """Work, write the answer and end. Nothing of the parent process is flushed or closed here."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit_s) + 2)
        os.setpgid(0, 0)
        if rights is not None:
            uid, gid, groups = rights
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        os.umask(0o077)
        try:
            value = work()
            answer = {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"value": value}
        except FileRefusedError as err:
            answer = {"refused": str(err)}
        except OSError as err:
            answer = {"errno": err.errno or 0, "text": err.strerror or str(err), "path": str(err.filename or "")}
        except Exception as err:
            answer = {"refused": f"{type(err).__name__}: {err}"}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(0)


def _all_of(reading: int, deadline: float) -> bytes:
    """Return all that a child process writes. Raise FileRefusedError at the limits."""
    data = bytearray()
    waiting = select.poll()
    waiting.register(reading, select.POLLIN | select.POLLHUP)
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1000):
            raise FileRefusedError("the file system did not answer in time")
        part = os.read(reading, PART)
        if not part:
            return bytes(data)
        data += part
        if len(data) > LARGEST_ANSWER:
            raise FileRefusedError(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB")


def _answer(data: bytes) -> Any:
    """Return the value of a child process, or raise what it raised."""
    try:
        answer = json.loads(data)
    except ValueError:
        raise FileRefusedError("the process with the user's rights ended early") from None
    if "refused" in answer:
        raise FileRefusedError(answer["refused"])
    if "errno" in answer:
        raise OSError(answer["errno"], answer["text"], answer["path"])
    return _from_base64(answer["bytes"]) if "bytes" in answer else answer["value"]


def _end(child: int) -> None:
    """Kill a child process. One that hangs in the kernel is left to init."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    for number in range(20):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(number / 1000)
