"""Make a guarded change and confirm it over a new connection; report what was reverted if the confirmation fails."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible_collections.gpunode.node.plugins.plugin_utils.controller import ROOT, GpunodeAction

TRIES = 3
PAUSE_S = 2.0
GRACE_S = 45
"""Seconds after the timer's limit within which the node must be reachable as before."""
MODULE = "guarded_change"
NO_SHARING = "-o ControlMaster=no -o ControlPath=none -o ConnectTimeout=10"


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``guarded_change``."""

    TRANSFERS_FILES = False
    _connection: Any

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        arguments = dict(self._task.args)
        name, limit_s = str(arguments.get("name", "")), int(arguments.get("limit_s", 60))
        token = secrets.token_hex(16)
        program = (ROOT / "plugins" / "module_utils" / "guard.py").read_text(encoding="utf-8")
        started = time.monotonic()
        lost = ""
        if not self._task.check_mode:
            self.node.forget("state")
        try:
            answer = self.call(MODULE, {**arguments, "step": "apply", "token": token, "program": program})
        except AnsibleActionFail:
            raise
        except AnsibleError as err:
            # New rules may cut the connection before the module has answered.
            answer, lost = {"changed": True, "waits": bool(limit_s)}, one_line(err)
        if not answer.pop("waits", False):
            if lost:
                raise AnsibleActionFail(f"{self.host}: the connection broke during the change {name}: {lost}")
            return {**result, **answer, **self.invocation()}
        failure = self.proved(name, token)
        if failure:
            self.reverted(name, token, failure, started + limit_s)
        return {**result, **answer, **self.invocation()}

    def proved(self, name: str, token: str) -> str:
        """Confirm the change over a new connection; return why that failed, empty on success."""
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            try:
                with self.new_connection():
                    self.call(MODULE, {"name": name, "step": "confirm", "token": token})
            except AnsibleError as err:
                reason = one_line(err)
            else:
                return ""
        return reason

    def reverted(self, name: str, token: str, failure: str, deadline: float) -> None:
        """Raise AnsibleActionFail with what was reverted: at once over the open connection, or by the node's timer."""
        outcome: dict[str, Any] | None = None
        try:
            outcome = self.call(MODULE, {"name": name, "step": "revert", "token": token}).get("outcome")
        except AnsibleError:
            outcome = None
        while time.monotonic() < deadline + GRACE_S:
            try:
                with self.new_connection():
                    answer = self.call(MODULE, {"name": name, "step": "outcome", "token": token})
            except AnsibleError:
                time.sleep(PAUSE_S)
                continue
            outcome = answer.get("outcome") or outcome
            if not answer.get("armed") or (isinstance(outcome, dict) and outcome.get("failed")):
                break
            time.sleep(PAUSE_S)
        else:
            raise AnsibleActionFail(
                f"{self.host}: no new login works after the change {name} ({failure}), and none worked "
                f"{GRACE_S} s after the time at which the node reverts: log in at the console and run journalctl -u "
                f"'gpunode-guard-{name}*'"
            )
        done = outcome if isinstance(outcome, dict) and outcome.get("token") == token else {}
        files = ", ".join(map(str, done.get("restored") or [])) or "no file"
        failed = "".join(
            f"; failed, and tried again by the node: {message}" for message in map(str, done.get("failed") or [])
        )
        raise AnsibleActionFail(
            f"{self.host}: the change {name} was reverted {done.get('by', 'on the node')}, because no new login worked "
            f"with it: {failure}. Restored: {files}{failed}. A new login works again"
        )

    @contextmanager
    def new_connection(self) -> Iterator[None]:
        """Run tasks over a newly opened connection with the same settings."""
        kept: Any = self._connection
        loader = self._shared_loader_obj.connection_loader
        fresh = loader.get(kept.ansible_name, kept._play_context, shell=kept._shell)
        fresh._options = dict(kept._options)
        fresh.become = kept.become
        if kept.ansible_name.rpartition(".")[2] == "ssh":
            # ssh uses the first value that it reads.
            fresh.set_option("ssh_args", f"{NO_SHARING} {kept.get_option('ssh_args') or ''}".strip())
            fresh.set_option("reconnection_retries", 0)
        elif hasattr(fresh, "reset"):
            fresh.reset()
        self._connection = fresh
        try:
            yield
        finally:
            self._connection = kept
            fresh.close()


def one_line(err: Exception) -> str:
    """Return an error as one line of at most 300 characters."""
    return " ".join(str(err).split())[:300]
