"""Packages that are removed with a role: those that its transactions installed."""

from collections.abc import Sequence

from gpunode.provisioning.locks import lock_lines
from gpunode.provisioning.manifest import AptChange, DnfChange
from gpunode.provisioning.state import NodeState
from gpunode.text import matches_any

MARK = "# installed by gpunode"


def departures(  # noqa: PLR0913
    state: NodeState,
    new: Sequence[str],
    *,
    memory: str,
    lock_wait_s: int,
    held: Sequence[str] = (),
    lock_mark: str = "",
) -> tuple[AptChange | DnfChange | None, list[str]]:
    """Return the transaction that removes a role's packages, and those that are still installed, one line each.

    ``new`` are shell patterns of names: packages are removed if the record ``memory`` on the node shows that the role
    installed them; so are ``held`` if they are held.
    """
    own = installed_by_role(state, memory)
    locked = set(state.apt.held) if state.apt is not None else _locked(state)
    going = {name for name in own if matches_any(name, new) or (name in locked and matches_any(name, held))}
    reasons = [f"{name} must be removed" for name in sorted(going)]
    if state.apt is not None:
        return (
            AptChange(
                state="absent",
                purge_new=tuple(new),
                hold=tuple(held),
                memory=memory,
                lock_wait_s=lock_wait_s,
            ),
            reasons,
        )
    return (
        DnfChange(
            state="absent",
            remove_new=tuple(sorted(going)),
            lock=() if lock_mark else None,
            lock_mark=lock_mark,
            memory=memory,
            lock_wait_s=lock_wait_s,
        ),
        reasons,
    )


def installed_by_role(state: NodeState, memory: str) -> set[str]:
    """Return the installed packages that a role's transactions installed, by its record on the node.

    A record of an earlier release lists what was there before; the node then decides by the time of installation which
    of the others are the role's (``package_record.py``).
    """
    text = state.contents.get(memory)
    if text is None:
        return set()
    before, mark, own = text.partition(MARK)
    found = state.installed.keys() & set(own.split())
    return found if mark and not before.strip() else found | (state.installed.keys() - set(before.split()))


def _locked(state: NodeState) -> set[str]:
    """Return installed packages that dnf's versionlock keeps at their version."""
    lines = set(state.dnf.locks) if state.dnf is not None else set()
    return {name for name in state.installed if lines.intersection(lock_lines(state.installed, (name,)))}
