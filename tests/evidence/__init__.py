"""Facts of the outside world that tests compare with, as data of the project: README.md describes their origin."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
INDEXES = HERE.parents[1] / "gpunode" / "lab" / "packages" / "data" / "recorded"


def _loaded(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 (a safe one)
    return content


@cache
def compat() -> dict[str, Any]:
    """Which versions, GPUs and systems go together. Not to be changed."""
    return _loaded(HERE / "compat.yml")


@cache
def index(name: str) -> dict[str, Any]:
    """One recorded package index, without what the lab assumes beside it. Not to be changed."""
    return _loaded(INDEXES / f"{name}.yml")


BOARDS = HERE / "open-modules.tsv"
"""Which releases of NVIDIA's open kernel modules list which GPU."""
HEADING = "# A branch alone stands for its first release with a list: "
LAST = "# The last release of each branch that was read: "


def named(heading: str) -> dict[int, str]:
    """The release of each branch that a line of the head names."""
    lines = BOARDS.read_text(encoding="utf-8").splitlines()
    releases = next(line.removeprefix(heading) for line in lines if line.startswith(heading)).split()
    return by_branch(releases)


def by_branch(releases: Iterable[str]) -> dict[int, str]:
    """The releases by their branch."""
    return {int(release.split(".")[0]): release for release in releases}


@cache
def boards() -> dict[str, dict[int, str]]:
    """By id, ``2335:10de:18be`` or ``2684``: the first release of each branch that lists it. Not to be changed."""
    lines = BOARDS.read_text(encoding="utf-8").splitlines()
    full = named(HEADING)
    by_id = {}
    for key, _, words in (line.split("\t") for line in lines if not line.startswith("#")):
        releases = [full[int(word)] if word.isdigit() else word for word in words.split()]
        by_id[key] = full if words == "all" else by_branch(releases)
    return by_id


@cache
def device(pci: str, subsystem: str | None) -> dict[int, str]:
    """The same for ``10de:2335``, the earliest of its boards: of one subsystem if models share the id."""
    releases: dict[int, str] = {}
    for key, firsts in boards().items():
        device_id, _, board = key.partition(":")
        if device_id != pci.removeprefix("10de:") or subsystem not in (None, board):
            continue
        for branch, release in firsts.items():
            releases[branch] = min(releases.get(branch, release), release, key=_numbers)
    return releases


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
