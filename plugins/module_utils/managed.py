"""Compare, validate and replace files and folders, each file by one rename."""

from __future__ import annotations

import base64
import grp
import hashlib
import pwd
import re
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import file_access
from ansible_collections.gpunode.node.plugins.module_utils.file_access import (
    FileRefusedError,
    PathState,
    kind,
    names,
    ours,
    path_state,
    status,
    user_name,
)

FILE_OPTIONS = {
    "path": {"type": "str", "required": True},
    "content": {"type": "str"},
    "encoding": {"type": "str", "choices": ["utf-8", "base64"], "default": "utf-8"},
    "mode": {"type": "str", "default": "0644"},
    "owner": {"type": "str", "default": "root"},
    "group": {"type": "str", "default": "root"},
    "phase": {"type": "str"},
    "validate_with": {"type": "list", "elements": "str"},
    "backup": {"type": "bool", "default": False},
    "expect_sha256": {"type": "str"},
    "private": {"type": "bool", "default": False},
}
FOLDER_OPTIONS = {
    "path": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent_if_empty"], "default": "present"},
    "mode": {"type": "str", "default": "0755"},
    "phase": {"type": "str"},
}
VALIDATION_LIMIT_S = 60
LARGEST_FILE = 8 << 20
"""Maximum size of an existing file that is compared with its requested content, in bytes."""
FILE, LINK = "a file", "a symbolic link"
LARGEST_DIFF = 1 << 18
HIDDEN = "(content not shown)\n"
USER_IN_URL = re.compile(rb"://([^\s/@\"']{1,500}|[^\s/@\"':]{0,200}:[^\s@\"']{1,500})@(?:[^\s/@\"']{0,500}@)*")
"""User information in a URL: the password of a proxy or of a mirror, as in gpunode.provisioning.manifest."""
LONGEST_PROGRAM = 60
"""Maximum number of lines of a program that a diff shows when the program is created or removed."""


def applied(
    files: list[dict[str, Any]], folders: list[dict[str, Any]], check: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (changed paths, diffs). ``check``: change nothing. All files are validated before the first change."""
    changed: list[str] = []
    diffs: list[dict[str, Any]] = []
    pending = [(file, state) for file in files if _differs(file, state := current(file))]
    for file, state in pending:
        refuse_foreign(file, state, check)
        validate(file)
    for folder in folders:
        if folder["state"] == "present":
            _note(changed, diffs, made(folder, check))
    for file, state in pending:
        diffs.append(_difference(file, state))
        if not check:
            remove(file) if file["content"] is None else write(file)
        changed.append(file["path"])
    going = {file["path"] for file in files if file["content"] is None}
    for folder in sorted(folders, key=lambda folder: -len(folder["path"])):
        if folder["state"] == "absent_if_empty":
            gone = emptied(folder, going, check)
            _note(changed, diffs, gone)
            if gone is not None:
                going.add(folder["path"])
    return changed, diffs


def _note(changed: list[str], diffs: list[dict[str, Any]], diff: dict[str, Any] | None) -> None:
    if diff is not None:
        changed.append(diff["before_header"])
        diffs.append(diff)


def attributes(mode: int, uid: int, gid: int) -> str:
    """Return mode, owner and group as one line."""
    return f"mode {mode:04o}, {user_name(uid)}:{_group(gid)}"


def wanted_attributes(file: dict[str, Any]) -> str:
    """Return the requested mode, owner and group of a file as one line."""
    return f"mode {int(file['mode'], 8):04o}, {file['owner']}:{file['group']}"


def current(file: dict[str, Any]) -> PathState | None:
    """Return what is at a file's path; in a folder of its owner, with the owner's rights."""
    try:
        uid = pwd.getpwnam(file["owner"]).pw_uid
    except KeyError:
        uid = 0
    return path_state(file["path"], uid, LARGEST_FILE)


def bytes_of(file: dict[str, Any]) -> bytes | None:
    """Return the requested bytes of a file; None if it must not exist."""
    text: str | None = file["content"]
    if text is None:
        return None
    return base64.b64decode(text) if file.get("encoding") == "base64" else text.encode()


def differs(file: dict[str, Any]) -> bool:
    """Return whether a file differs from its requested state."""
    return _differs(file, current(file))


def _differs(file: dict[str, Any], state: PathState | None) -> bool:
    if file["content"] is None or state is None:
        return (file["content"] is None) != (state is None)
    if state.kind != FILE or attributes(state.mode, state.uid, state.gid) != wanted_attributes(file):
        return True
    return state.data is None or state.data != bytes_of(file)


def refuse_foreign(file: dict[str, Any], state: PathState | None, check: bool) -> None:
    """Raise FileRefusedError if something else than a file is at the path, or it changed since the plan was made."""
    path = file["path"]
    # A link in a folder of root is replaced: nobody else made it.
    if state is not None and state.kind != FILE and (state.shared or state.kind != LINK):
        raise FileRefusedError(f"{path} is {state.kind}, expected a file: move it")
    expected = file["expect_sha256"]
    # In check mode the content may be computed from a file that an earlier role would have written.
    if expected is not None and not check:
        now = state.data if state is not None else None
        if (hashlib.sha256(now).hexdigest() if now is not None else "absent") != expected:
            raise FileRefusedError(f"{path} was changed by another process: run this again")


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
        printed = USER_IN_URL.sub(b"://(not shown)@", done.stderr or done.stdout)
        lines = printed.decode("utf-8", "replace").strip().splitlines()
        reason = "; ".join(lines[-3:]).replace(str(draft), file["path"])
        raise FileRefusedError(f"{file['path']} is not valid: {reason}")


def difference(file: dict[str, Any]) -> dict[str, Any]:
    """Return the diff of a file in Ansible's format, with changed attributes in a line above the content."""
    return _difference(file, current(file))


def _difference(file: dict[str, Any], state: PathState | None) -> dict[str, Any]:
    now, later = state.data if state is not None else None, bytes_of(file)
    if _secret(file, state, later):
        texts = ["" if data is None else HIDDEN for data in (now, later)]
        if now is not None and later is not None and now != later:
            texts[1] = "(other content, not shown)\n"
    elif state is not None and state.uid not in ours():
        texts = _of_another_user(state, now, later)
    else:
        texts = _texts(now, later)
    if state is not None and later is not None:
        before = attributes(state.mode, state.uid, state.gid)
        if before != wanted_attributes(file):
            texts = [f"# {before}\n{texts[0]}", f"# {wanted_attributes(file)}\n{texts[1]}"]
    return {
        "before_header": file["path"],
        "after_header": file["path"] if later is not None else "(removed)",
        "before": texts[0],
        "after": texts[1],
    }


def _secret(file: dict[str, Any], state: PathState | None, later: bytes | None) -> bool:
    """Return whether a diff must not show the content of a file, the old one or the new one."""
    if file["private"] or (later is None and state is not None and not state.mode & stat.S_IROTH):
        return True
    old = state.data if state is not None else None
    return any(USER_IN_URL.search(data) for data in (old, later) if data is not None)


def _texts(now: bytes | None, later: bytes | None) -> list[str]:
    """Return the old and the new text that a diff shows."""
    texts = []
    for data in (now, later):
        text = "" if data is None else data.decode("utf-8", "replace")
        if len(text) > LARGEST_DIFF or "\0" in text:
            text = HIDDEN
        elif (now is None) != (later is None) and text.startswith("#!") and text.count("\n") > LONGEST_PROGRAM:
            # Settings are reviewed in the diff; a program is reviewed in the role that contains it.
            text = f"(program of {text.count(chr(10))} lines, not shown)\n"
        texts.append(text)
    return texts


def _of_another_user(state: PathState, now: bytes | None, later: bytes | None) -> list[str]:
    """Return what a diff shows of a user's file: only the lines that are added, none of the user's."""
    old, new = ((data or b"").decode("utf-8", "replace").splitlines() for data in (now, later))
    added = [line for line in new if line not in old]
    kept, owner = sum(1 for line in old if line in new), user_name(state.uid)
    stay = f"({kept} lines of {owner} that stay, not shown)\n" if kept else ""
    go = f"({len(old) - kept} lines of {owner} that are removed, not shown)\n" if len(old) > kept else ""
    return [stay + go, stay + "".join(f"{line}\n" for line in added)]


def write(file: dict[str, Any]) -> None:
    """Replace a file by one rename. If the path is a link, the link is replaced."""
    owner = _uid(file["owner"]), _gid(file["group"])
    file_access.write(file["path"], bytes_of(file) or b"", int(file["mode"], 8), owner, keep_as=_suffix(file))


def remove(file: dict[str, Any]) -> None:
    """Remove a file; keep a copy if a backup is requested."""
    file_access.remove(file["path"], _uid(file["owner"]), keep_as=_suffix(file))


def _suffix(file: dict[str, Any]) -> str | None:
    """Return the suffix of the copy of an old file; None if none is requested."""
    return f".{time.strftime('%Y-%m-%d@%H:%M:%S')}~" if file["backup"] else None


def made(folder: dict[str, Any], check: bool) -> dict[str, Any] | None:
    """Create a folder or set its mode; return the diff, None without a change."""
    path, mode = folder["path"], int(folder["mode"], 8)
    inode = status(path)
    if inode is not None and not stat.S_ISDIR(inode.st_mode):
        raise FileRefusedError(f"{path} is {kind(inode)} and is not a directory: move it")
    if inode is not None:
        file_access.refuse_foreign_owner(path, inode)
        if stat.S_IMODE(inode.st_mode) == mode:
            return None
    if not check:
        file_access.make_folder(path, mode)
    before = "(absent)\n" if inode is None else f"folder, mode {stat.S_IMODE(inode.st_mode):04o}\n"
    return {"before_header": path, "after_header": path, "before": before, "after": f"folder, mode {mode:04o}\n"}


def emptied(folder: dict[str, Any], going: set[str], check: bool) -> dict[str, Any] | None:
    """Remove a folder that is empty, or contains only removed paths; return the diff, None if the folder stays."""
    path = folder["path"]
    inode = status(path)
    if inode is None or not stat.S_ISDIR(inode.st_mode):
        return None
    if any(f"{path}/{name}" not in going for name in names(path)):
        return None
    if not check:
        file_access.remove_folder(path)
    return {"before_header": path, "after_header": "(removed)", "before": "folder\n", "after": ""}


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
