"""Saved bundles: files, and folders of them."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpunode.errors import UsageError
from gpunode.probe.bundle import Bundle


def read_bundles(places: Sequence[str]) -> Iterator[Bundle]:
    """Every bundle named, one in memory at a time; a folder stands for all ``*.json`` in it.

    A file that is named twice is read once. Where a second file is of a host that was read already, its bundle's host
    is followed by the file: ``localhost (saved/gpu-2.json)``.

    Raises UsageError at once where there is nothing to read, and later at the first file that is no bundle.
    """
    if not places:
        raise UsageError("--replay needs a bundle or a folder of bundles: --replay FILE|DIR...")
    paths = [path for place in places for path in _files(Path(place))]
    return _told_apart(_each_once(paths))


def _each_once(paths: Sequence[Path]) -> Iterable[Path]:
    """By the file itself: a link and what it leads to are one."""
    names: dict[Path, Path] = {}
    for path in paths:
        names.setdefault(path.resolve(), path)
    return names.values()


def _told_apart(paths: Iterable[Path]) -> Iterator[Bundle]:
    hosts: set[str] = set()
    for path in paths:
        bundle = _read(path)
        again = bundle.host in hosts
        hosts.add(bundle.host)
        yield bundle.model_copy(update={"host": f"{bundle.host} ({path})"}) if again else bundle


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    found = sorted(path for path in place.glob("*.json") if path.is_file())
    if not found:
        raise UsageError(f"{place}: no bundle (*.json) in this folder")
    return found


def _read(path: Path) -> Bundle:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file or folder") from None
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    return Bundle.from_json(text, str(path))
