"""Write files and folders on a node; a change invalidates the stored node state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.controller import GpunodeAction

UNITS = "/etc/systemd/"
"""Folder of the files that systemd reads again at ``daemon-reload``; the action ``unit_states`` runs it."""


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``managed_files``."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        arguments = dict(self._task.args)
        if not any(self.selected(arguments.get(name), arguments.get("phase")) for name in ("files", "folders")):
            return {**result, "changed": False, "changed_paths": [], **self.invocation()}
        answer = self.call("managed_files", arguments)
        if answer.get("changed") and not self._task.check_mode:
            self.node.forget("state")
            if any(str(path).startswith(UNITS) for path in answer.get("changed_paths") or ()):
                self.node.keep("reload", "")
        return {**result, **answer, **self.invocation()}

    @staticmethod
    def selected(entries: Any, phase: Any) -> bool:
        """Return whether the module would process an entry; the module judges malformed ones."""
        if not isinstance(entries, list):
            return entries is not None
        return any(
            phase is None or not isinstance(entry, Mapping) or entry.get("phase") in (None, phase) for entry in entries
        )
