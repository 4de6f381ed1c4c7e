"""The lists of GPUs in the READMEs of NVIDIA's open kernel modules: which release lists which PCI id.

``open_modules.tsv`` contains all releases that were read and, for each id, the releases that list it. Branches are
released side by side, and a later release of a branch may omit an id again, so neither is a range:
``535.154.05-535.161.07`` is from the first of the two releases up to the one before the second, ``550.90.07`` from
there to the last one of the branch that was read, ``570`` all releases of the branch, ``all`` all releases.
``scripts/listed_gpus.py`` rebuilds the file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resource_files
from typing import Any

FILE = "open_modules.tsv"
SOURCE = "okm"
"""The key of the section ``sources``."""


@cache
def branch_of(version: str) -> int:
    """Return the branch of a release: 580 of ``580.95.05``."""
    return int(version.split(".", maxsplit=1)[0])


@dataclass(frozen=True)
class Listing:
    """The releases that list an id, by branch."""

    first: Mapping[int, str | None]
    """The first release of each branch that was read; None: no release of it lists the id."""
    omitted: tuple[str, ...] = ()
    """Later releases of a branch that omit the id."""


@dataclass(frozen=True)
class Table:
    """The content of the file."""

    releases: tuple[str, ...]
    """All releases that were read, in the order of their numbers."""
    listed: Mapping[str, tuple[str, ...]]
    """By id, ``2335:10de:18be`` or ``2684``: the releases that list it."""

    def first_of(self, branch: int) -> str | None:
        """Return the first release of a branch that was read; None if none was."""
        return next((release for release in self.releases if branch_of(release) == branch), None)

    def last_of(self, branch: int) -> str | None:
        """Return the last release of a branch that was read; None if none was."""
        return next((release for release in reversed(self.releases) if branch_of(release) == branch), None)

    def listing(self, releases: Iterable[str]) -> Listing:
        """Return releases that list an id as first releases and omissions."""
        held = set(releases)
        first: dict[int, str | None] = {}
        omitted = []
        for release in self.releases:
            branch = branch_of(release)
            if release in held:
                first[branch] = first.get(branch) or release
            elif first.get(branch):
                omitted.append(release)
            else:
                first[branch] = None
        return Listing(first, tuple(omitted))

    def of_device(self, device: str, subsystems: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
        """Return the releases by subsystem ("" if an entry has none) for a device id, ``10de:2335``.

        Only the entries of ``subsystems`` if there are any: models may share a device id.
        """
        entries = _by_device().get(device.removeprefix("10de:"), {})
        return {subsystem: held for subsystem, held in entries.items() if not subsystems or subsystem in subsystems}


def fields(pci: Sequence[str], subsystems: Sequence[str]) -> dict[str, Any]:
    """Return fields of a raw row of the section ``gpus`` with these ids: the earliest of all its boards, and the later
    ones; {} if no release that was read lists it."""
    return dict(_fields(tuple(pci), tuple(subsystems)))


@cache
def _fields(pci: tuple[str, ...], subsystems: tuple[str, ...]) -> Mapping[str, Any]:
    known = table()
    boards = [board for device in pci for board in known.of_device(device, subsystems).items()]
    if not boards:
        return {}
    earliest = known.listing(release for _, held in boards for release in held)
    later = {subsystem: known.listing(held).first for subsystem, held in boards if subsystem}
    listing: dict[str, Any] = {"first_listed": earliest.first}
    if earliest.omitted:
        listing["omitted"] = earliest.omitted
    if any(first != earliest.first for first in later.values()):
        listing["later_boards"] = {subsystem: first for subsystem, first in later.items() if first != earliest.first}
    return listing


def tsv(listed: Mapping[str, Iterable[str]], releases: Sequence[str], date: str) -> str:
    """Return the text of the file."""
    groups: dict[str, list[str]] = {}
    for key, held in listed.items():
        groups.setdefault(_runs(set(held), releases), []).append(key)
    lines = [
        f"# NVIDIA/open-gpu-kernel-modules, {date}: releases with a list of GPUs, then releases and the ids they list",
        "\t".join(("releases", " ".join(releases))),
        *sorted("\t".join((runs, " ".join(sorted(keys)))) for runs, keys in groups.items()),
    ]
    return "\n".join(lines) + "\n"


def _runs(held: set[str], releases: Sequence[str]) -> str:
    branches: dict[int, list[str]] = {}
    for release in releases:
        branches.setdefault(branch_of(release), []).append(release)
    if held >= set(releases):
        return "all"
    words = []
    for branch, points in branches.items():
        if held.issuperset(points):
            words.append(str(branch))
            continue
        start = None
        for point in points:
            if point in held:
                start = start or point
            elif start is not None:
                words.append(f"{start}-{point}")
                start = None
        words += [start] if start is not None else []
    return " ".join(words)


def parse(text: str) -> Table:
    """Return the content of the file's text."""
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    releases = tuple(rows[0][1].split())
    at = {release: position for position, release in enumerate(releases)}
    branches: dict[str, list[int]] = {"all": list(range(len(releases)))}
    for release, position in at.items():
        branches.setdefault(release.split(".", maxsplit=1)[0], []).append(position)
    listed = {}
    for runs, keys in rows[1:]:
        held = tuple(releases[position] for run in runs.split() for position in _covered(run, at, branches))
        listed.update(dict.fromkeys(keys.split(), held))
    return Table(releases, listed)


def _covered(run: str, at: Mapping[str, int], branches: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """Yield the positions of the releases in one run."""
    start, _, end = run.partition("-")
    if start in branches:
        yield from branches[start]
        return
    after = at[end] if end else branches[start.split(".", maxsplit=1)[0]][-1] + 1
    yield from range(at[start], after)


@cache
def table() -> Table:
    """Return the bundled file's content."""
    return parse(resource_files("gpunode.catalog").joinpath(FILE).read_text(encoding="utf-8"))


@cache
def _by_device() -> dict[str, dict[str, tuple[str, ...]]]:
    by_device: dict[str, dict[str, tuple[str, ...]]] = {}
    for key, held in table().listed.items():
        device, _, subsystem = key.partition(":")
        by_device.setdefault(device, {})[subsystem] = held
    return by_device
