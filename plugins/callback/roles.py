"""Print roles as they begin, and at the end why nodes failed: node, task and message, equal ones once."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: roles
type: aggregate
short_description: Print roles as they begin, and failures in short
description:
  - Prints a line on stderr for each role that begins, with the time since the start.
  - At the end, prints each failure that ended a node's run as one line with nodes, role, task and message. Equal
    failures of several nodes are one line.
  - Ansible's own output does not change.
author: gpunode
requirements:
  - enable in configuration
"""

MOST_CHARACTERS = 400
MOST_LINES = 20


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """The callback plugin."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpunode.node.roles"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()
        self._role = ""
        self._failures: dict[str, tuple[str, str]] = {}

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:  # noqa: ARG002
        """Print the role of a task if it is another than that of the task before."""
        role = getattr(task, "_role", None)
        name = role.get_name() if role is not None else ""
        name = name.rpartition(".")[2]
        if name and name not in (self._role, "common"):
            self._role = name
            _print(f"role {name} ({time.monotonic() - self._began:.0f} s)")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Record the failure; the last one of a node is the one that ended its run."""
        if not ignore_errors:
            self._record(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Record a node that could not be reached."""
        self._record(result)

    def _record(self, result: Any) -> None:
        answer = result._result
        text = (
            answer.get("msg") or answer.get("censored") or answer.get("stderr") or answer.get("stdout") or "no message"
        )
        task = str(result._task.get_name()).replace(" : ", ": ")
        self._failures[result._host.get_name()] = (task, _one_line(str(text)))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the failures of nodes that did not recover."""
        folded: dict[tuple[str, str], list[str]] = {}
        for host, failure in self._failures.items():
            if stats.failures.get(host) or stats.dark.get(host):
                folded.setdefault(failure, []).append(host)
        for (task, text), hosts in list(folded.items())[:MOST_LINES]:
            _print(f"failed on {_names(hosts)}: {task}: {text}")
        if len(folded) > MOST_LINES:
            _print(f"{len(folded) - MOST_LINES} more failures, see the output of Ansible")


def _names(hosts: list[str]) -> str:
    if find_spec("gpunode") is None:
        return ",".join(sorted(hosts))
    return str(import_module("gpunode.names").fold(hosts))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))[:MOST_CHARACTERS]


def _print(text: str) -> None:
    sys.stderr.write(f"gpunode: {_one_line(text)}\n")
    sys.stderr.flush()
