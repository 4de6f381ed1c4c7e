"""Run a module of the collection that needs nothing from the controller; the routing is in meta/runtime.yml."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.controller import GpunodeAction


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of modules without one of their own."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        answer = self.call(self._task.action.rpartition(".")[2], dict(self._task.args))
        return {**result, **answer, **self.invocation()}
