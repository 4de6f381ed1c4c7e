"""States of nodes and runs for the tests of plans."""

from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from driver_samples import APT, DAY

from gpunode.facts import NodeFacts
from gpunode.provisioning.context import Context, Planned
from gpunode.provisioning.manifest import Manifest, compared
from gpunode.provisioning.roles import PLANS
from gpunode.provisioning.state import AptState, DnfState, FileState, NodeState

ROLES = Path(__file__).parents[3] / "roles"
_MORE = {"publishers": {}, "policy_left": False, "key": None, "lock_holder": None, "runfile": False}


def settings_of(role: str, **changes: Any) -> dict[str, Any]:
    """The role's defaults as its argument specification has them, names without the role's."""
    values = _defaults(role)
    assert not changes.keys() - values.keys(), changes
    return {**values, **changes}


@cache
def _defaults(role: str) -> dict[str, Any]:
    text = (ROLES / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    options = yaml.load(text, yaml.CSafeLoader)["argument_specs"]["main"]["options"]
    return {name.removeprefix(f"{role}_"): option.get("default") for name, option in options.items()}


def context_of(settings: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> Context:
    """A run in which roles have these settings."""
    by_role = settings or {}
    return Context(
        host="node",
        settings_of=lambda role: settings_of(role, **by_role.get(role, {})),
        today=date.fromisoformat(DAY),
        **changes,
    )


def state_of(
    facts: Mapping[str, Any],
    apt: Mapping[str, Any] | None = None,
    dnf: Mapping[str, Any] | None = None,
    files: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> NodeState:
    """A node with apt, or with dnf where that is given; files that are not named are absent."""
    node = NodeFacts.model_validate(facts)
    installed = {package.name: package.version for package in node.packages or () if package.installed}
    apt_state = (
        None if dnf is not None else AptState.model_validate({**APT, **_MORE, "installed": installed, **(apt or {})})
    )
    paths = {path: FileState.model_validate(row) for path, row in (files or {}).items()}
    return NodeState(
        facts=node, apt=apt_state, dnf=None if dnf is None else DnfState.model_validate(dnf), files=paths, **more
    )


def planned(
    role: str, state: NodeState, settings: Mapping[str, Mapping[str, Any]] | None = None, **context: Any
) -> Manifest:
    """The manifest of a role, judged against the state."""
    run = context_of(settings, **context)
    return compared(PLANS[role](state, run.settings_of(role), run), state)


__all__ = ["Planned", "context_of", "planned", "settings_of", "state_of"]
