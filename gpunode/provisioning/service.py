"""Decision on a node's return to service: a node that this project drained returns only when nothing is pending.

The drain is recorded on the node, with the findings before the change: a later run knows that it may end this drain,
and what to compare with.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.running_driver import gpus_in_use
from gpunode.provisioning.state import BOOT_ID, Look, NodeState

ROLE = "service"
MARK = "/var/lib/gpunode/drained.json"
LEASE = "/var/lib/gpunode/change.json"
"""Written by ``gpunode upgrade`` (gpunode/onnode/lease.py) for as long as a run of it owns the node."""
LOOK = Look(contents=(MARK, LEASE, BOOT_ID))
Short = Annotated[str, Field(max_length=200)]


class FindingBefore(Frozen):
    """One check that did not pass before the change."""

    check: Short
    component: Short
    status: Short


class Drain(Frozen):
    """Content of the mark."""

    since: Short
    """Time of the drain, ISO 8601."""
    token: Short = ""
    """Names the drain of ``gpunode upgrade``."""
    findings: Annotated[tuple[FindingBefore, ...], Field(max_length=5000)]


class ServiceResult(Frozen):
    """What the playbooks read."""

    drained: bool
    busy: bool
    """GPUs are in use, or this is unknown."""
    drain_wait_s: int
    """How long a drained node may be busy."""
    before: tuple[FindingBefore, ...]


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return a manifest with pending changes if a drained node may return once its validation is not worse than before.

    ``settings`` are those of preflight.
    """
    before = recorded(state.contents.get(MARK))
    result = ServiceResult(
        drained=drained(state),
        busy=gpus_in_use(state.facts) and not settings["gpunode_allow_busy"],
        drain_wait_s=settings["gpunode_drain_wait_s"],
        before=before.findings if before is not None else (),
    )
    if not result.drained:
        return Manifest(role=ROLE, result=result)
    owner = holder(state)
    if owner is not None:
        return Manifest(role=ROLE, result=result, notes=(f"the node stays drained: {owner}",))
    pending = [f"a reboot is pending: {reason}" for reason in context.reasons_to_reboot(state.boot_id)]
    pending += [f"a restart of {unit} is pending: {reason}" for unit, reason in sorted(context.restarts.items())]
    if pending:
        return Manifest(role=ROLE, result=result, notes=(f"the node stays drained: {'; '.join(pending)}",))
    lost = f"{MARK} is not readable: every check must pass" if before is None else ""
    return Manifest(
        role=ROLE, result=result, notes=(lost,) if lost else (), pending_reasons=("the node is to return to service",)
    )


def holder(state: NodeState, token: str = "") -> str | None:
    """Return who holds the node by ``gpunode upgrade``; None if nobody does, or the run with ``token``."""
    text = state.contents.get(LEASE)
    if text is None:
        return None
    try:
        lease = json.loads(text)
        owner, lease_token, since = (str(lease[name])[:200] for name in ("owner", "token", "since"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"gpunode upgrade holds it, and {LEASE} is not readable"
    return None if lease_token == token else f"gpunode upgrade of {owner} holds it since {since} ({LEASE})"


def drained(state: NodeState) -> bool:
    """Return whether the node carries the mark of a drain; True if that is unknown."""
    return state.kind(MARK) != "absent"


def recorded(text: str | None) -> Drain | None:
    """Return the content of the mark; None if it is unknown or damaged."""
    try:
        return Drain.model_validate(json.loads(text or ""))
    except (ValidationError, ValueError, RecursionError):
        return None
