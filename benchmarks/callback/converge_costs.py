"""Record the cost of a playbook run: for each task its role, its seconds, how many modules ran on a node. One JSON line
each.

Enabled by ``ANSIBLE_CALLBACK_PLUGINS`` and ``ANSIBLE_CALLBACKS_ENABLED=converge_costs``; the lines are appended to the
file in ``CONVERGE_COSTS``.
"""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: converge_costs
type: aggregate
short_description: Costs of a run for benchmarks/converge.py
description: Writes one JSON line for each task and each module run.
"""

PATH = os.environ["CONVERGE_COSTS"]


def note(**row: Any) -> None:
    """Append a line; workers and the main process write to the same file."""
    with open(PATH, "a", encoding="utf-8") as file:  # noqa: PTH123 - one append, as short as it can be
        file.write(json.dumps(row) + "\n")


def counted(run: Any) -> Any:
    """Return ``ActionBase._execute_module``, counting."""

    @functools.wraps(run)
    def execute(self: Any, module_name: str | None = None, *arguments: Any, **named: Any) -> Any:
        note(module=module_name or self._task.action, task=self._task._uuid)
        return run(self, module_name, *arguments, **named)

    return execute


# Before the first worker is forked.
ActionBase._execute_module = counted(ActionBase._execute_module)


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """The callback plugin."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "converge_costs"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_task_start(self, task: Any, **_: bool) -> None:
        """Record when a task begins; the previous one ends then."""
        role = task._role.get_name(include_role_fqcn=False) if task._role else ""
        note(start=task._uuid, role=role, name=task.get_name(), at=time.monotonic())

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Record that a task was skipped on a host."""
        note(skipped=result._task._uuid)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Record the end, and the changes."""
        changed = {host: stats.summarize(host)["changed"] for host in stats.processed}
        failed = {host: stats.summarize(host)["failures"] for host in stats.processed}
        note(end=time.monotonic(), changed=changed, failed=failed)
