"""Files that verbs write."""

import os
from pathlib import Path
from urllib.parse import quote

from gpunode.errors import UsageError
from gpunode.probe.bundle import Bundle
from gpunode.whole import whole_file


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file, see ``whole_file``; raise UsageError if it cannot be written."""
    try:
        with whole_file(path, private=private) as stream:
            stream.write(text.encode())
    except OSError as err:
        raise UsageError(f"{path}: cannot be written: {err.strerror}") from None


def folder_for_bundles(path: Path) -> Path:
    """Create the folder of ``--save``, only for its owner; raise UsageError if that is not possible.

    An existing folder keeps its mode: its owner decides who may read it.
    """
    try:
        refuse_foreign(path, "--save")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(f"--save {path}: {err.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--save {path}: not writable")
    return path


def refuse_foreign(path: Path, option: str) -> None:
    """Raise UsageError if another user could redirect what root writes: by a link, or in a folder of theirs.

    The user who called sudo does not count as another user. Raises OSError.
    """
    if os.geteuid() != 0:
        return
    ours = {0, int(sudo) if (sudo := os.environ.get("SUDO_UID", "")).isdigit() else 0}
    if path.is_symlink() and path.lstat().st_uid not in ours:
        raise UsageError(f"{option} {path}: is a symbolic link of another user, which root does not follow")
    nearest = path.resolve()
    while not nearest.is_dir():
        nearest = nearest.parent
    owner = nearest.stat().st_uid
    if owner not in ours:
        raise UsageError(f"{option} {path}: {nearest} belongs to another user (uid {owner}), root does not write there")


def write_bundle(folder: Path, host: str, bundle: Bundle) -> Path:
    """Write ``FOLDER/HOST.json``, under the requested name of the node; return its path.

    Characters that do not belong in a file name are percent-encoded. Only their owner may read bundles.
    """
    path = folder / f"{quote(host, safe='@+,=')}.json"
    if path.is_symlink():
        raise UsageError(f"{path}: is a symbolic link; bundles are written to regular files")
    write_whole(path, bundle.model_copy(update={"host": host}).to_json(), private=True)
    return path
