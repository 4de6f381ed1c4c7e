"""Packages that are removed with a role: those that it installed and that were not there before."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gpunode.provisioning.locks import lock_lines
from gpunode.provisioning.manifest import AptChange, DnfChange
from gpunode.provisioning.state import NodeState


def departures(  # noqa: PLR0913
    state: NodeState,
    new: Sequence[str],
    *,
    memory: str,
    lock_wait_s: int,
    always: Sequence[str] = (),
    held: Sequence[str] = (),
    lock_mark: str = "",
) -> tuple[AptChange | DnfChange | None, list[str]]:
    """Return the transaction that removes a role's packages, and those that are still installed, one line each.

    ``always`` and ``new`` are shell patterns of names: the first are removed in any case, the second unless ``memory``
    on the node lists them; ``held`` are removed if they are held and new.
    """
    text = state.contents.get(memory)
    before = set((text or "").split())
    locked = set(state.apt.held) if state.apt is not None else _locked(state)
    going = [name for name in state.installed if _fits(name, always)]
    if text is not None:
        going += [name for name in state.installed if name not in before and _fits(name, new)]
        going += [name for name in locked & state.installed.keys() if name not in before and _fits(name, held)]
    reasons = [f"{name} must be removed" for name in sorted(set(going))]
    if state.apt is not None:
        return (
            AptChange(
                state="absent",
                purge=tuple(always),
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
            remove=tuple(sorted(set(going))),
            lock=() if lock_mark else None,
            lock_mark=lock_mark,
            memory=memory,
            lock_wait_s=lock_wait_s,
        ),
        reasons,
    )


def _locked(state: NodeState) -> set[str]:
    """Return installed packages that dnf's versionlock keeps at their version."""
    lines = set(state.dnf.locks) if state.dnf is not None else set()
    return {name for name in state.installed if lines.intersection(lock_lines(state.installed, (name,)))}


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
