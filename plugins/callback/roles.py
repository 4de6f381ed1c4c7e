"""Print roles as they begin, and at the end why nodes failed: node, task and message, equal ones once."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: roles
type: aggregate
short_description: Print roles as they begin, and failures in short
description:
  - Prints a line on stderr for each role that begins, with the time since the start.
  - At the end, prints each failure that ended a node's run as one line with nodes, role, task and message. Equal
    failures of several nodes are one line.
  - If the environment variable C(GPUNODE_NODES_FILE) is set, a JSON list is written to that file at the end. It has
    each node with its status, the tasks that changed it, and the failure that ended its run.
  - Ansible's own output does not change.
author: gpunode
requirements:
  - enable in configuration
"""

MOST_CHARACTERS = 400
MOST_LINES = 20
MOST_CHANGES = 1000


class NodeOutcome(TypedDict):
    """What was done to a node, as ``gpunode provision --format json`` reads it."""

    host: str
    status: str
    changed: list[dict[str, str | None]]
    failure: dict[str, str | None] | None


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
        self._failures: dict[str, tuple[str, str, str]] = {}
        self._changed: dict[str, list[tuple[str, str]]] = {}
        self._file = os.environ.get("GPUNODE_NODES_FILE")

    def v2_playbook_on_task_start(self, task: Any, **_: bool) -> None:
        """Print the role of a task if it is another than that of the task before."""
        name = _role(task)
        if name and name not in (self._role, "common"):
            self._role = name
            _print(f"role {name} ({time.monotonic() - self._began:.0f} s)")

    def v2_runner_on_ok(self, result: Any) -> None:
        """Record a task that changed a node."""
        changed = self._changed.setdefault(result._host.get_name(), [])
        if result.is_changed() and len(changed) < MOST_CHANGES:
            changed.append(_role_and_task(result))

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
        self._failures[result._host.get_name()] = (*_role_and_task(result), _one_line(str(text)))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the failures of nodes that did not recover."""
        folded: dict[tuple[str, str, str], list[str]] = {}
        for host, failure in self._failures.items():
            if stats.failures.get(host) or stats.dark.get(host):
                folded.setdefault(failure, []).append(host)
        for (role, task, text), hosts in list(folded.items())[:MOST_LINES]:
            _print(f"failed on {_names(hosts)}: {f'{role}: ' if role else ''}{task}: {text}")
        if len(folded) > MOST_LINES:
            _print(f"{len(folded) - MOST_LINES} more failures, see the output of Ansible")
        if self._file:
            nodes = [self._node(host, stats) for host in sorted(stats.processed)]
            Path(self._file).write_text(json.dumps(nodes), encoding="utf-8")

    def _node(self, host: str, stats: Any) -> NodeOutcome:
        failure = None
        status = "changed" if stats.changed.get(host) else "unchanged"
        if stats.failures.get(host) or stats.dark.get(host):
            status = "failed" if stats.failures.get(host) else "unreachable"
            role, task, message = self._failures.get(host, ("", "unknown", "no message"))
            failure = {"role": role or None, "task": task, "message": message}
        changed = [{"role": role or None, "task": task} for role, task in self._changed.get(host, ())]
        return NodeOutcome(host=host, status=status, changed=changed, failure=failure)


def _role(task: Any) -> str:
    role = getattr(task, "_role", None)
    return str(role.get_name()).rpartition(".")[2] if role is not None else ""


def _role_and_task(result: Any) -> tuple[str, str]:
    """Return role and name of a result's task."""
    role = getattr(result._task, "_role", None)
    name = str(result.task_name)
    return _role(result._task), _one_line(name.removeprefix(f"{role.get_name()} : ") if role is not None else name)


def _names(hosts: list[str]) -> str:
    if find_spec("gpunode") is None:
        return ",".join(sorted(hosts))
    return str(import_module("gpunode.names").fold(hosts))


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))[:MOST_CHARACTERS]


def _print(text: str) -> None:
    sys.stderr.write(f"gpunode: {_one_line(text)}\n")
    sys.stderr.flush()
