"""Saved bundles: files and folders of them, read and written."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from gpunode.errors import UsageError
from gpunode.file_access import FileRefusedError
from gpunode.probe import Answer, Collected
from gpunode.probe.bundle import MAX_BYTES
from gpunode.whole import exists, make_private_folder, read_bounded, write_whole


def bundle_files(places: Sequence[str]) -> list[Path]:
    """Return the files of the named bundles: a folder stands for all ``*.json`` in it, a duplicate is listed once.

    Raises UsageError where there is nothing to read.
    """
    if not places:
        raise UsageError("--replay needs a bundle or a folder of bundles: --replay FILE|DIR...")
    return list(_each_once([path for name in places for path in _files(Path(name))]))


def saved_answers(files: Sequence[Path]) -> Iterator[Collected]:
    """Yield the content of each file, read when it is requested; of several, one that cannot be read has a reason.

    Raises UsageError if the only one cannot be read.
    """
    for path in files:
        try:
            answer = Answer(read_file(path), where=str(path))
        except UsageError as err:
            if len(files) == 1:
                raise
            yield Collected(str(path), None, str(err).removeprefix(f"{path}: "), None)
        else:
            yield Collected(str(path), answer, None, None)


def _each_once(paths: Sequence[Path]) -> Iterable[Path]:
    """Yield each file once: a link and its target are one."""
    names: dict[Path, Path] = {}
    for path in paths:
        names.setdefault(path.resolve(), path)
    return names.values()


def _files(location: Path) -> list[Path]:
    # Before the first is judged: a mistyped name is wrong usage and not a node without data.
    if not exists(location):
        raise UsageError(f"{location}: no such file or folder")
    if not location.is_dir():
        return [location]
    files = sorted(path for path in location.glob("*.json") if path.is_file())
    if not files:
        raise UsageError(f"{location}: no bundle (*.json) in this directory")
    return files


def read_file(path: Path) -> bytes:
    """Return the text of a bundle, and one byte more for one that is too large. Raises UsageError."""
    return read_bounded(path, MAX_BYTES)


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
    except UsageError as err:
        return str(err)
    return None
