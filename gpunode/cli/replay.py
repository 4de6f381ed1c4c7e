"""Saved bundles: files, and folders of them."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpunode.errors import UsageError
from gpunode.probe.bundle import MAX_BYTES, Bundle


def bundle_files(places: Sequence[str]) -> list[Path]:
    """The files of the bundles named: a folder stands for all ``*.json`` in it, a file named twice is there once.

    Raises UsageError where there is nothing to read.
    """
    if not places:
        raise UsageError("--replay needs a bundle or a folder of bundles: --replay FILE|DIR...")
    return list(_each_once([path for place in places for path in _files(Path(place))]))


def read_bundles(places: Sequence[str]) -> Iterator[Bundle]:
    """Every bundle named, one in memory at a time; a folder stands for all ``*.json`` in it.

    A file that is named twice is read once. Where a second file is of a host that was read already, its bundle's host
    is followed by the file: ``localhost (saved/gpu-2.json)``.

    Raises UsageError at once where there is nothing to read, and later at the first file that is no bundle.
    """
    return _told_apart(bundle_files(places))


def _each_once(paths: Sequence[Path]) -> Iterable[Path]:
    """By the file itself: a link and what it leads to are one."""
    names: dict[Path, Path] = {}
    for path in paths:
        names.setdefault(path.resolve(), path)
    return names.values()


def _told_apart(paths: Iterable[Path]) -> Iterator[Bundle]:
    hosts: set[str] = set()
    for path in paths:
        bundle = Bundle.from_json(read_file(path), str(path))
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


def read_file(path: Path) -> bytes:
    """The text of a bundle, and a byte more of one that is too large. Raises UsageError."""
    try:
        with path.open("rb") as file:
            parts, left = [], MAX_BYTES + 1
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file or folder") from None
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
