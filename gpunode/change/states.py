"""The states of a node during a change, as data: what leads from one to the next, how long, and how to take it back."""

from dataclasses import dataclass
from enum import StrEnum


class ChangeState(StrEnum):
    """Where a node is in the change."""

    PLANNED = "planned"
    """Selected; nothing was done on it."""
    PREPARED = "prepared"
    """What the change needs is on the node, which still works."""
    DRAINED = "drained"
    """It gets no work and is idle."""
    CHANGED = "changed"
    """The roles ran; a reboot may be pending."""
    REBOOTED = "rebooted"
    """Nothing is pending any more, with or without a reboot."""
    VALIDATED = "validated"
    """Compared with its state before the change: nothing is worse."""
    RETURNED = "returned"
    """It gets work again."""
    HELD = "held"
    """It stays drained, with the reason."""
    ROLLED_BACK = "rolled-back"
    """It has the earlier release again, was validated, and gets work."""
    NOT_RETURNED = "not-returned"
    """It did not answer after a reboot."""


@dataclass(frozen=True)
class Edge:
    """One act and the states that it leads to."""

    act: str
    start: ChangeState
    end: ChangeState
    failed: ChangeState
    """Where the node is if the act fails, or does not end within its limit."""
    limit_s: float
    undo: str
    """How the act is taken back; empty: it leaves nothing to take back."""


EDGES = (
    Edge("prepare", ChangeState.PLANNED, ChangeState.PREPARED, ChangeState.PLANNED, 7200, ""),
    Edge("drain", ChangeState.PREPARED, ChangeState.DRAINED, ChangeState.PLANNED, 3600, "cancel"),
    Edge("change", ChangeState.DRAINED, ChangeState.CHANGED, ChangeState.HELD, 14400, "restore"),
    Edge("reboot", ChangeState.CHANGED, ChangeState.REBOOTED, ChangeState.NOT_RETURNED, 7200, "restore"),
    Edge("validate", ChangeState.REBOOTED, ChangeState.VALIDATED, ChangeState.HELD, 600, "restore"),
    Edge("return", ChangeState.VALIDATED, ChangeState.RETURNED, ChangeState.VALIDATED, 600, ""),
    # A node that failed is tried again by the next run, or gets its earlier release; both begin drained and idle.
    Edge("again", ChangeState.HELD, ChangeState.DRAINED, ChangeState.HELD, 3600, ""),
    Edge("reach", ChangeState.NOT_RETURNED, ChangeState.DRAINED, ChangeState.NOT_RETURNED, 3600, ""),
)
ACTS = {edge.act: edge for edge in EDGES}
PATH = ("prepare", "drain", "change", "reboot", "validate", "return")
"""The acts of a node for which all goes well, in their order."""
FINAL = frozenset({ChangeState.RETURNED, ChangeState.ROLLED_BACK})
"""The node gets work, and nobody owns it any more."""
OUT_OF_SERVICE = frozenset(ChangeState) - {ChangeState.PLANNED, ChangeState.PREPARED, *FINAL}
"""The node is, or may be, drained by this run."""
IN_CHANGE = frozenset({ChangeState.DRAINED, ChangeState.CHANGED, ChangeState.REBOOTED, ChangeState.VALIDATED})
"""The change began, or may begin, and has not ended."""


def after(act: str, *, back: bool) -> ChangeState:
    """Return the state that an act leads to; ``back``: it is part of a return to the earlier release."""
    end = ACTS[act].end
    return ChangeState.ROLLED_BACK if back and end is ChangeState.RETURNED else end
