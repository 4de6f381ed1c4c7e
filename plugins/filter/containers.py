"""Why a restart would hurt, for the playbooks: gpunode.provisioning decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.policy import room


def restart_obstacles(state: Mapping[str, Any], facts: Mapping[str, Any], text: str | None) -> list[str]:
    """Return why a restart of Docker would hurt; ``state`` is the answer of ``docker info``, empty without a daemon."""
    running, live = int(state.get("running") or 0), bool(state.get("live_restore"))
    node = room("provisioning.documents").node_of(facts)
    found: list[str] = room("provisioning.engines").restart_obstacles(running, live, node, text)
    return found


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"restart_obstacles": restart_obstacles}
