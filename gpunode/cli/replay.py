"""Saved bundles: files, and folders of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunode.cli.apart import Apart
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.isolation import Exceeded
from gpunode.probe.bundle import MAX_BYTES


@dataclass(frozen=True)
class Replayed:
    """The content of one saved bundle."""

    host: str
    """The file, if nothing in it could be read."""
    facts: NodeFacts | None
    reason: str | None
    """Why there are no facts."""


def bundle_files(places: Sequence[str]) -> list[Path]:
    """Return the files of the named bundles: a folder stands for all ``*.json`` in it, a duplicate is listed once.

    Raises UsageError where there is nothing to read.
    """
    if not places:
        raise UsageError("--replay needs a bundle or a folder of bundles: --replay FILE|DIR...")
    return list(_each_once([path for place in places for path in _files(Path(place))]))


def read_bundles(places: Sequence[str], apart: Apart) -> Iterator[Replayed]:
    """Yield the facts of every named bundle, each read in a worker; a folder stands for all ``*.json`` in it.

    A file that is named twice is read once. For a second file of the same host, the file follows the node's name:
    ``localhost (saved/gpu-2.json)``.

    Raises UsageError at once if there is nothing to read, and later if the only file is not a bundle; of several files
    one that is not a bundle has no facts.
    """
    return _distinguished(bundle_files(places), apart)


def _each_once(paths: Sequence[Path]) -> Iterable[Path]:
    """Yield each file once: a link and its target are one."""
    names: dict[Path, Path] = {}
    for path in paths:
        names.setdefault(path.resolve(), path)
    return names.values()


def _distinguished(paths: Sequence[Path], apart: Apart) -> Iterator[Replayed]:
    hosts: set[str] = set()
    for path in paths:
        try:
            facts = apart.replayed(read_file(path), str(path))
        except Exceeded as err:
            yield Replayed(str(path), None, str(err))
            continue
        except UsageError as err:
            if len(paths) == 1:
                raise
            yield Replayed(str(path), None, reason_of(path, err))
            continue
        host = f"{facts.host} ({path})" if facts.host in hosts else facts.host
        hosts.add(facts.host)
        yield Replayed(host, facts.model_copy(update={"host": host}), None)


def reason_of(path: Path, err: UsageError) -> str:
    """Return why a file is not a bundle, for a result that is named after the file."""
    return str(err).removeprefix(f"{path}: ")


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        # Before the first is judged: a mistyped name is wrong usage and not a node without data.
        if not place.exists():
            raise UsageError(f"{place}: no such file or folder")
        return [place]
    found = sorted(path for path in place.glob("*.json") if path.is_file())
    if not found:
        raise UsageError(f"{place}: no bundle (*.json) in this directory")
    return found


def read_file(path: Path) -> bytes:
    """Return the text of a bundle, and one byte more for one that is too large. Raises UsageError."""
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
