"""Actions for findings, as data: a closed vocabulary that a scheduler or a script can evaluate."""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator

from gpunode.frozen import Frozen

Verb = Literal[
    "restart_service",
    "run_role",
    "reset_gpu",
    "reload_driver",
    "restart_os",
    "power_cycle",
    "replace_hardware",
    "open_support_case",
    "fix_configuration",
    "none",
]
VERBS: tuple[Verb, ...] = get_args(Verb)
TARGETS: dict[str, tuple[str, re.Pattern[str]]] = {
    "restart_service": ("UNIT", re.compile(r"[\w@.-]+\.(?:service|socket|timer|target)")),
    "run_role": ("ROLE[:TAG]", re.compile(r"[a-z_]+(?::[a-z_]+)?")),
}
"""The verbs with a target, and its format."""


PROVISION = "gpunode provision -i INVENTORY -l HOST"
"""Begins the command of a remedy. INVENTORY and HOST are the user's: a node does not know its name there."""


class State(StrEnum):
    """The recommended state of a node in a scheduler; ``observe`` keeps it in service."""

    NONE = "none"
    OBSERVE = "observe"
    DRAIN = "drain"


STATES: tuple[State, ...] = (State.NONE, State.OBSERVE, State.DRAIN)
"""From the least to the most severe."""


class Action(Frozen):
    """One step of a remedy."""

    action: Verb
    target: str | None = None
    """The unit of ``restart_service``; the role of ``run_role``, with a tag as ROLE:TAG."""
    component: str = "node"
    """The component that it applies to: ``gpu3``, ``node``."""

    def __str__(self) -> str:
        """Return ``VERB`` or ``VERB:TARGET``."""
        return f"{self.action}:{self.target}" if self.target else self.action


def action(text: str) -> Action:
    """Return the action of ``VERB`` or ``VERB:TARGET``; raise ValueError for one outside the vocabulary."""
    name, colon, target = text.partition(":")
    if name not in VERBS:
        raise ValueError(f"unknown action {name}: known: {', '.join(VERBS)}")
    form = TARGETS.get(name)
    if form is None and colon:
        raise ValueError(f"action {name} takes no target, found {text}")
    if form is not None and not form[1].fullmatch(target):
        raise ValueError(f"action {text}: expected {name}:{form[0]}")
    return Action(action=name, target=target or None)


Step = Annotated[Action, BeforeValidator(lambda value: action(value) if isinstance(value, str) else value)]
"""An action in a declaration, which may be written as text."""


def command(actions: Iterable[Action]) -> str | None:
    """Return the command that applies the first role of a remedy; None if no action runs a role."""
    target = next((step.target for step in actions if step.action == "run_role" and step.target), None)
    if target is None:
        return None
    role, _, tag = target.partition(":")
    return f"{PROVISION} -t {tag or role}"


def most_severe(states: Iterable[State]) -> State:
    """Return the most severe of the states, ``none`` if there are no states."""
    return max(states, key=STATES.index, default=State.NONE)
