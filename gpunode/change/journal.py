"""The journal of a change on the controller, and the states of a node during it.

The states are data: what leads from one to the next, how long, and how to take it back. What is to be done is on the
disk before it is done: one file per run, written as a whole. ``intent`` of a node names the act that began and is not
known to have ended: the same command begins with it again, and each act may be repeated.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from gpunode.errors import UndeterminedError
from gpunode.frozen import Frozen, FrozenByName, invalid_field
from gpunode.text import now
from gpunode.whole import make_private_folder, whole_file

FILE = "journal.json"


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


class NodeRecord(Frozen):
    """One node of a run."""

    state: ChangeState = ChangeState.PLANNED
    token: str
    """Names the drain and the lease of this node: only what has it is ended."""
    intent: str = ""
    """The act that began."""
    back: bool = False
    """The node is on its way to the earlier release."""
    wave: int = 0
    domain: str = ""
    """The failure domain: its nodes change together. Empty: the node alone."""
    before: str | None = None
    """The driver's release before the change."""
    target: str | None = None
    reason: str = ""
    """Why the last act failed."""
    cause: str = ""
    """Why it goes back."""
    times: tuple[tuple[str, str], ...] = ()
    """ChangeState or act, and when."""

    def began(self, act: str) -> bool:
        """Return whether an act was begun on the node."""
        return any(word == act for word, _ in self.times)

    @property
    def aim(self) -> str | None:
        """Return the release that the node is to get."""
        return self.before if self.back else self.target

    @property
    def open(self) -> bool:
        """Return whether the run has, or may have, something to take back or to finish on the node."""
        return self.state in OUT_OF_SERVICE or bool(self.intent)


class RunRecord(FrozenByName):
    """The document ``gpunode.change/1``."""

    schema_name: Literal["gpunode.change/1"] = Field("gpunode.change/1", alias="schema")
    run: str
    command: tuple[str, ...]
    """What makes two commands the same."""
    owner: str
    started_at: str
    finished_at: str | None = None
    left_out: dict[str, str] = Field(default_factory=dict)
    """Nodes that are no part of the run, with the reason."""
    nodes: dict[str, NodeRecord]
    image: str | None = None
    """The container image that nodes are measured in; None: they are not measured."""

    @property
    def open_nodes(self) -> dict[str, NodeRecord]:
        """Return the nodes that the run has not finished with."""
        return {name: node for name, node in self.nodes.items() if node.open}

    @property
    def changed(self) -> dict[str, str]:
        """Return the nodes that the run changed and that can go back, each with its release before."""
        return {name: before for name, before in self._befores().items() if before is not None}

    @property
    def newly_driven(self) -> set[str]:
        """Return the nodes that the run changed and that had no driver before: there is nothing to go back to."""
        return {name for name, before in self._befores().items() if before is None}

    def _befores(self) -> dict[str, str | None]:
        return {
            name: node.before
            for name, node in self.nodes.items()
            if node.began("change") and node.state is not ChangeState.ROLLED_BACK
        }


def new_token() -> str:
    """Return a token that no other run has."""
    return f"gpunode-upgrade-{secrets.token_hex(6)}"


class Journal:
    """The journal of one run; each change of it is on the disk when the method returns."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder = folder
        self.record = record

    def write(self) -> None:
        """Write the file as a whole."""
        make_private_folder(self.folder)
        with whole_file(self.folder / FILE, private=True) as stream:
            stream.write(self.record.model_dump_json(by_alias=True, indent=1).encode() + b"\n")

    def _set(self, nodes: Mapping[str, NodeRecord]) -> None:
        self.record = self.record.model_copy(update={"nodes": {**self.record.nodes, **nodes}})
        self.write()

    def intend(self, names: Iterable[str], act: str) -> None:
        """Record that an act is about to begin on nodes."""
        stamp = (act, now())
        nodes = {name: self.record.nodes[name] for name in names}
        self._set(
            {
                name: node.model_copy(update={"intent": act, "times": (*node.times, stamp)})
                for name, node in nodes.items()
            }
        )

    def settle(self, results: Mapping[str, str], act: str, failed: ChangeState | None = None) -> None:
        """Record how an act ended: node to the reason why it failed, empty if it did not.

        ``failed``: the state of those that failed, in place of the act's own.
        """
        nodes = {}
        for name, reason in results.items():
            node = self.record.nodes[name]
            state = (failed or ACTS[act].failed) if reason else after(act, back=node.back)
            update = {
                "state": state,
                "intent": "",
                "reason": reason,
                "times": (*node.times, (state.value, now())),
            }
            nodes[name] = node.model_copy(update=update)
        self._set(nodes)

    def turn_back(self, names: Iterable[str]) -> None:
        """Record that nodes are to get their earlier release."""
        nodes = {name: self.record.nodes[name] for name in names}
        self._set(
            {
                name: node.model_copy(update={"back": True, "cause": node.cause or node.reason})
                for name, node in nodes.items()
            }
        )

    def remark(self, results: Mapping[str, str]) -> None:
        """Record why an act did not end; the node's next run begins with it again."""
        self._set({name: self.record.nodes[name].model_copy(update={"reason": why}) for name, why in results.items()})

    def place(self, name: str, state: ChangeState, reason: str) -> None:
        """Record a state that no act led to."""
        self._set({name: self.record.nodes[name].model_copy(update={"state": state, "intent": "", "reason": reason})})

    def measure_in(self, image: str | None) -> None:
        """Record the image that nodes are measured in from now on."""
        self.record = self.record.model_copy(update={"image": image})
        self.write()

    def give(self, names: Iterable[str]) -> None:
        """Remove nodes that belong to a newer run now."""
        gone = set(names)
        nodes = {name: node for name, node in self.record.nodes.items() if name not in gone}
        self.record = self.record.model_copy(update={"nodes": nodes})
        self.write()

    def finish(self) -> None:
        """Record the end of the run."""
        self.record = self.record.model_copy(update={"finished_at": now()})
        self.write()


def read(folder: Path) -> Journal:
    """Return the journal in a run's folder. Raises UndeterminedError with one line if it is unreadable."""
    path = folder / FILE
    try:
        return Journal(folder, RunRecord.model_validate(json.loads(path.read_bytes())))
    except OSError as err:
        raise UndeterminedError(f"{path}: {err.strerror}") from None
    except ValidationError as err:
        field, why = invalid_field(err, "the document")
        raise UndeterminedError(f"{path}: {field}: {why}; it names the nodes that a run drained: restore it") from None
    except (ValueError, RecursionError):
        raise UndeterminedError(f"{path}: not JSON; it names the nodes that a run drained: restore it") from None


def runs(folder: Path) -> Iterator[Journal]:
    """Yield the journals of all runs below a folder, the latest first. Raises UndeterminedError."""
    for path in sorted(folder.glob(f"*/{FILE}"), reverse=True):
        yield read(path.parent)


__all__ = ["FINAL", "Journal", "NodeRecord", "RunRecord", "new_token", "now", "read", "runs"]
