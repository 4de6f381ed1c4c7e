"""Compare, validate and replace files and folders, each file by one rename."""

from __future__ import annotations

import base64
import grp
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

VALIDATION_LIMIT_S = 60
LARGEST_DIFF = 1 << 18
LONGEST_PROGRAM = 60
"""Maximum number of lines of a program that a diff shows when the program is created or removed."""


class FileRefusedError(Exception):
    """The reason why a file was not changed, in one line."""


def brought_about(
    files: list[dict[str, Any]], folders: list[dict[str, Any]], pretend: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (changed paths, diffs). ``pretend``: change nothing. All files are validated before the first change."""
    changed: list[str] = []
    diffs: list[dict[str, Any]] = []
    due = [file for file in files if differs(file)]
    for file in due:
        refuse_foreign(file, pretend)
        validate(file)
    for folder in folders:
        if folder["state"] == "present":
            _note(changed, diffs, made(folder, pretend))
    for file in due:
        diffs.append(difference(file))
        if not pretend:
            remove(file) if file["content"] is None else write(file)
        changed.append(file["path"])
    going = {file["path"] for file in files if file["content"] is None}
    for folder in sorted(folders, key=lambda one: -len(one["path"])):
        if folder["state"] == "absent_if_empty":
            _note(changed, diffs, emptied(folder, going, pretend))
            going.add(folder["path"])
    return changed, diffs


def _note(changed: list[str], diffs: list[dict[str, Any]], diff: dict[str, Any] | None) -> None:
    if diff is not None:
        changed.append(diff["before_header"])
        diffs.append(diff)


def there(path: str) -> os.stat_result | None:
    """Return the status of a path without following links; None if the path does not exist."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def attributes(found: os.stat_result) -> str:
    """Return mode, owner and group as one line."""
    return f"mode {stat.S_IMODE(found.st_mode):04o}, {_user(found.st_uid)}:{_group(found.st_gid)}"


def wanted_attributes(file: dict[str, Any]) -> str:
    """Return the requested mode, owner and group of a file as one line."""
    return f"mode {int(file['mode'], 8):04o}, {file['owner']}:{file['group']}"


def content_of(path: str, found: os.stat_result | None) -> bytes | None:
    """Return the bytes of a file; None if it is not a regular file."""
    return Path(path).read_bytes() if found is not None and stat.S_ISREG(found.st_mode) else None


def bytes_of(file: dict[str, Any]) -> bytes | None:
    """Return the requested bytes of a file; None if it must not exist."""
    text: str | None = file["content"]
    if text is None:
        return None
    return base64.b64decode(text) if file.get("encoding") == "base64" else text.encode()


def differs(file: dict[str, Any]) -> bool:
    """Return whether a file differs from its requested state."""
    found = there(file["path"])
    if file["content"] is None or found is None:
        return (file["content"] is None) != (found is None)
    if not stat.S_ISREG(found.st_mode) or attributes(found) != wanted_attributes(file):
        return True
    data = bytes_of(file)
    return data is None or found.st_size != len(data) or content_of(file["path"], found) != data


def refuse_foreign(file: dict[str, Any], pretend: bool) -> None:
    """Raise FileRefusedError if the path is a folder, or the file changed since the plan was made."""
    found = there(file["path"])
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise FileRefusedError(f"{file['path']} is a directory, expected a file: move it")
    expected = file["expect_sha256"]
    # In check mode the content may be computed from a file that an earlier role would have written.
    if expected is not None and not pretend:
        now = content_of(file["path"], found)
        if (hashlib.sha256(now).hexdigest() if now is not None else "absent") != expected:
            raise FileRefusedError(f"{file['path']} was changed by another process: run this again")


def validate(file: dict[str, Any]) -> None:
    """Run the file's validation command on its new content. Raise FileRefusedError if it fails."""
    if not file["validate_with"] or file["content"] is None:
        return
    with tempfile.TemporaryDirectory(prefix="gpunode-") as folder:
        draft = Path(folder) / Path(file["path"]).name
        draft.write_bytes(bytes_of(file) or b"")
        argv = [word.replace("%s", str(draft)) for word in file["validate_with"]]
        try:
            done = subprocess.run(
                argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=VALIDATION_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            raise FileRefusedError(f"{file['path']} was not validated: {err}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        reason = "; ".join(lines[-3:]).replace(str(draft), file["path"])
        raise FileRefusedError(f"{file['path']} is not valid: {reason}")


def difference(file: dict[str, Any]) -> dict[str, Any]:
    """Return the diff of a file in Ansible's format, with changed attributes in a line above the content."""
    found = there(file["path"])
    now, later = content_of(file["path"], found), bytes_of(file)
    texts = []
    for data in (now, later):
        text = "" if data is None else data.decode("utf-8", "replace")
        if file["private"] or len(text) > LARGEST_DIFF or "\0" in text:
            text = "" if data is None else "(content not shown)\n"
        elif (now is None) != (later is None) and text.startswith("#!") and text.count("\n") > LONGEST_PROGRAM:
            # Settings are reviewed in the diff; a program is reviewed in the role that contains it.
            text = f"(program of {text.count(chr(10))} lines, not shown)\n"
        texts.append(text)
    if file["private"] and now is not None and later is not None and now != later:
        texts[1] = "(other content, not shown)\n"
    if found is not None and later is not None and attributes(found) != wanted_attributes(file):
        texts = [f"# {attributes(found)}\n{texts[0]}", f"# {wanted_attributes(file)}\n{texts[1]}"]
    return {
        "before_header": file["path"],
        "after_header": file["path"] if later is not None else "(removed)",
        "before": texts[0],
        "after": texts[1],
    }


def write(file: dict[str, Any]) -> None:
    """Replace a file by one rename. If the path is a link, the link is replaced."""
    path = Path(file["path"])
    make_parents(path)
    if file["backup"] and path.is_file() and not path.is_symlink():
        shutil.copy2(path, f"{path}.{time.strftime('%Y-%m-%d@%H:%M:%S')}~")
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".gpunode", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as out:
            out.write(bytes_of(file) or b"")
            os.fchown(out.fileno(), _uid(file["owner"]), _gid(file["group"]))
            os.fchmod(out.fileno(), int(file["mode"], 8))
            out.flush()
            os.fsync(out.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def remove(file: dict[str, Any]) -> None:
    """Remove a file; keep a copy if a backup is requested."""
    path = Path(file["path"])
    if file["backup"] and path.is_file() and not path.is_symlink():
        shutil.copy2(path, f"{path}.{time.strftime('%Y-%m-%d@%H:%M:%S')}~")
    path.unlink(missing_ok=True)


def make_parents(path: Path) -> None:
    """Create the folders above a file, readable for all users regardless of the umask."""
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)


def made(folder: dict[str, Any], pretend: bool) -> dict[str, Any] | None:
    """Create a folder or set its mode; return the diff, None without a change."""
    path, mode = Path(folder["path"]), int(folder["mode"], 8)
    found = there(folder["path"])
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise FileRefusedError(f"{path} is not a directory: move it")
    if found is not None and stat.S_IMODE(found.st_mode) == mode:
        return None
    if not pretend:
        if found is None:
            make_parents(path / "any")
        path.chmod(mode)
    before = "(absent)\n" if found is None else f"folder, mode {stat.S_IMODE(found.st_mode):04o}\n"
    return {
        "before_header": str(path),
        "after_header": str(path),
        "before": before,
        "after": f"folder, mode {mode:04o}\n",
    }


def emptied(folder: dict[str, Any], going: set[str], pretend: bool) -> dict[str, Any] | None:
    """Remove a folder that is empty, or contains only removed paths; return the diff, None if the folder stays."""
    path = Path(folder["path"])
    found = there(folder["path"])
    if found is None or not stat.S_ISDIR(found.st_mode) or any(str(one) not in going for one in path.iterdir()):
        return None
    if not pretend:
        path.rmdir()
    return {"before_header": str(path), "after_header": "(removed)", "before": "folder\n", "after": ""}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _uid(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise FileRefusedError(f"user {name} does not exist on the node") from None


def _gid(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise FileRefusedError(f"group {name} does not exist on the node") from None
