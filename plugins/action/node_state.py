"""Collect the state of a node and keep it for the rest of the run."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.controller import PARTS, GpunodeAction


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``node_state``."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        whole = bool(self._task.args.get("return_state"))
        # The facts in a document are complete: checks read them.
        state = self.state(frozenset(PARTS) - {"engine", "ssh"} if whole else frozenset(), fresh=not whole)
        result |= {"changed": False, "host": self.host, "_ansible_verbose_override": True}
        if not whole:
            return result
        parts = {"node": state.facts, "apt": state.apt, "dnf": state.dnf}
        return result | {name: part.model_dump(mode="json") if part else None for name, part in parts.items()}
