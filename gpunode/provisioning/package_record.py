"""The packages that a role's transactions installed, by its record on the node: a removal removes these alone."""

from collections.abc import Sequence

from gpunode.provisioning.locks import lock_lines
from gpunode.provisioning.state import NodeState
from gpunode.text import matches_any

MARK = "# installed by gpunode"


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
