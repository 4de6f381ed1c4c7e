"""Packages of a role: the transaction and its preview, the packages that it installed, and the locks of dnf."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from gpunode.frozen import Frozen
from gpunode.provisioning.state import Content, DnfState, Names, NodeState, Reported, Text, Versions
from gpunode.text import matches_any

RELEASE = "@RELEASE@"
"""Placeholder of the release of ``bound`` in a transaction."""
LOCK_PLUGIN = "python3-dnf-plugin-versionlock"
MARK = "# installed by gpunode"
"""In a role's record of packages, in front of those that it installed."""


class Transaction(Frozen):
    """Changes of packages in one transaction of apt or dnf: the module ``package_transaction`` previews or makes them.

    Entries are ``NAME`` or ``NAME=PATTERN``, a shell pattern of versions: with dnf ``VERSION-RELEASE`` or
    ``EPOCH:VERSION-RELEASE``.
    """

    manager: Literal["apt", "dnf"]
    state: Literal["present", "absent"] = "present"
    install: tuple[str, ...] = ()
    """Entries of required packages. Installed packages that match are not changed."""
    remove: tuple[str, ...] = ()
    """Shell patterns of packages to remove."""
    remove_new: tuple[str, ...] = ()
    """With absent: shell patterns of packages to remove too if ``memory`` shows that the role installed them."""
    restore: tuple[str, ...] = ()
    """For apt: packages that stay and return from NVIDIA's version to the distribution's."""
    never: tuple[str, ...] = ()
    """Shell patterns of packages that the transaction must not change."""
    hold: tuple[str, ...] = ()
    """Shell patterns of packages that are held at their versions afterwards. With absent, apt removes those that are
    held and new.
    """
    unhold: tuple[str, ...] = ()
    """For apt: names of packages to unhold."""
    memory: str | None = None
    """File on the node with the packages that the role's transactions installed."""
    bound: tuple[str, ...] = ()
    """Required packages (apt: entries), all at one release: the newest that matches ``constraint`` and that all have.
    It is ``RELEASE`` in patterns of versions and in preferences.
    """
    constraint: str = "*"
    closure: tuple[str, ...] = ()
    """Installed packages that move to that release, or are removed if they do not exist in it."""
    fresh: bool = False
    """For apt: of ``closure`` only what the other packages need stays, as on a node that had none of it."""
    optional: tuple[str, ...] = ()
    """For apt: entries of further packages, which are installed if the sources have them."""
    alternatives: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """For apt: bound packages to those that take their place, in this order, if no source has them."""
    lift: tuple[str, ...] = ()
    """For apt: packages that may come from any source if the preferred one is too old."""
    line: dict[str, tuple[str, ...]] = Field({"names": (), "except": ()})
    """For dnf: shell patterns of packages that are installed at that release or not at all, as dependencies too."""
    expendable: tuple[str, ...] = ()
    """Shell patterns of packages that may be removed in addition; with apt, held ones may also change version."""
    stream: str | None = None
    """For dnf: ``MODULE:STREAM`` that is enabled in the same transaction."""
    reset: str | None = None
    """For dnf: module of the stream to reset."""
    files: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    """Planned files of the package manager, path to text; empty text: absent. apt's preferences are applied before they
    are written, so that a refusal leaves none behind; the others are used in previews.
    """
    repositories: tuple[dict[str, str], ...] = ()
    """For dnf: ``id``, ``url`` and ``proxy`` of planned repositories."""
    lock_mark: str = "gpunode"
    """For dnf: end of the two lines around the role's section of the versionlock list, which has what is held."""
    drop_locks: tuple[str, ...] = ()
    """For dnf: foreign lines in that list that are removed."""
    ignore_locks: tuple[str, ...] = ()
    """For dnf: foreign lines in that list that the transaction ignores."""
    idle_gpus: bool = False
    """Fail if a process computes on a GPU when all packages are fetched and nothing is changed yet."""
    lock_wait_s: int = 300
    limit_s: int = 3600


class Preview(Reported):
    """What a transaction would change: the answer of the package manager to a simulation of it."""

    target: Text | None = None
    """The release of ``bound``."""
    exact: Names = ()
    """With apt: entries of ``install`` with which a transaction has exactly this result."""
    install: Versions = Field(default_factory=dict)
    """Name to version."""
    sources: Versions = Field(default_factory=dict)
    """With apt: name to the name of the source package."""
    remove: Names = ()
    stream: Text | None = None
    """With dnf: the module stream that would be enabled."""
    error: Content | None = None
    lacking: Annotated[dict[Text, Names], Field(max_length=1000)] | None = None
    """Releases of each package, if there is none that all have."""
    common: Names = ()
    constraint: Text = ""


def lock_lines(installed: Mapping[str, str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each installed package that matches one of the shell patterns, for any architecture."""
    selected = tuple(patterns)
    return tuple(
        f"{name}-{version if ':' in version else '0:' + version}.*"
        for name, version in sorted(installed.items())
        if matches_any(name, selected)
    )


def lock_plugin(dnf: DnfState | None) -> tuple[str, ...]:
    """Return the package of the plugin that applies the lines, if the node lacks it."""
    return (LOCK_PLUGIN,) if dnf is not None and not dnf.versionlock else ()


def removable(state: NodeState, memory: str, new: Sequence[str], held: Sequence[str]) -> list[str]:
    """Return the packages that a removal removes: those of the record that match ``new``, or ``held`` if they are held.

    Both are shell patterns of names.
    """
    locked = set(state.apt.held) if state.apt is not None else _locked(state)
    names = sorted(installed_by_role(state, memory))
    return [name for name in names if matches_any(name, new) or (name in locked and matches_any(name, held))]


def installed_by_role(state: NodeState, memory: str) -> set[str]:
    """Return the installed packages that a role's transactions installed, by its record on the node.

    A record of an earlier release lists what was there before; the node then decides by the time of installation which
    of the others are the role's (``package_record.py``).
    """
    text = state.contents.get(memory)
    if text is None:
        return set()
    before, mark, added = text.partition(MARK)
    recorded = state.installed.keys() & set(added.split())
    return recorded if mark and not before.strip() else recorded | (state.installed.keys() - set(before.split()))


def _locked(state: NodeState) -> set[str]:
    """Return installed packages that dnf's versionlock keeps at their version."""
    lines = set(state.dnf.locks) if state.dnf is not None else set()
    return {name for name in state.installed if lines.intersection(lock_lines(state.installed, (name,)))}
