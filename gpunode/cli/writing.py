"""Files that verbs write."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from gpunode.errors import UsageError
from gpunode.file_access import FileRefusedError
from gpunode.whole import make_private_folder, refuse_foreign, whole_file


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


def folder_for_bundles(path: Path) -> Path:
    """Create the folder of ``--save``, only for its owner; raise UsageError if that is not possible.

    An existing folder keeps its mode: its owner decides who may read it.
    """
    try:
        make_private_folder(path)
    except FileRefusedError as err:
        raise UsageError(f"--save {err}") from None
    except OSError as err:
        raise UsageError(f"--save {path}: {err.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--save {path}: not writable")
    return path


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


def write_bundle(folder: Path, host: str, document: bytes) -> Path:
    """Write ``FOLDER/HOST.json``, under the requested name of the node; return its path. Raises UsageError.

    Characters that do not belong in a file name are percent-encoded. Only their owner may read bundles.
    """
    path = folder / f"{quote(host, safe='@+,=')}.json"
    write_whole(path, document, private=True)
    return path


def save_bundle(folder: Path, host: str, document: bytes) -> str | None:
    """Write a bundle as ``write_bundle`` does; return why it could not be written."""
    try:
        write_bundle(folder, host, document)
    except OSError as err:
        return f"{folder}: {err.strerror}"
    except UsageError as err:
        return str(err)
    return None
