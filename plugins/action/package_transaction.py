"""Change packages; in check mode record what would have been done, for the roles that follow."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.controller import GpunodeAction, planned_of

with suppress(ImportError):  # GpunodeAction.begin reports it
    from gpunode.variables import plain


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``package_transaction``."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        options = plain(self._task.args)
        arguments = {**(options.pop("change", None) or {}), **options}
        if not self._task.check_mode:
            self.node.forget("state")
            return {**result, **self.call("package_transaction", arguments), **self.invocation()}
        before = planned_of(self.node.read("planned"))
        additions = {"files": self.node.unsealed(arguments.get("files") or {})}
        arguments |= {"planned": before, "files": {**before["files"], **additions["files"]}}
        answer = self.call("package_transaction", arguments)
        done = {"packages": answer.get("install") or {}, "purge": answer.get("remove") or []}
        whole = planned_of(before, additions, done)
        self.node.keep("planned", json.dumps(whole))
        return {**result, **answer, **self.invocation()}
