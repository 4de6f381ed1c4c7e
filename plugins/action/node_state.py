"""Look at a node and keep the answer for the rest of the run."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.controller import GpunodeAction


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``node_state``."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        self.state(fresh=True)
        return {**result, "changed": False, "host": self.host}
