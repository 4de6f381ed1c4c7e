"""Set systemd units with the builtin module; in check mode include units of packages that are not installed yet."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible_collections.gpunode.node.plugins.plugin_utils.answers import covered
from ansible_collections.gpunode.node.plugins.plugin_utils.controller import GpunodeAction, plain, printable

NOT_LOADED = ("Could not find the requested service", "Error loading unit file")
"""Starts of the builtin module's messages for a unit that does not exist on the node or has a damaged file."""
LONGEST_LINE = 300
READY_S = 15
"""Seconds within which the command in ``ready`` has to print ``true``."""
ON = ("enabled", "enabled-runtime", "static", "indirect", "generated", "alias")


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``unit_states``."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        lines: list[str] = []
        reload = bool(self._task.args.get("daemon_reload")) or self.node.text("reload", math.inf) is not None
        units = plain(self._task.args.get("units") or [])
        # Where no unit is left, systemd forgets the files that were removed.
        for unit in units or ([{}] if reload else []):
            lines += self.brought(unit, reload=reload)
            reload = False
        self.node.forget("reload")
        self.assert_running([line.partition(" ")[2] for line in lines if line.startswith(("start ", "restart "))])
        if lines and not self._task.check_mode:
            self.node.forget("state")
        text = "".join(f"{line}\n" for line in lines)
        return {**result, "changed": bool(lines), "units": lines, "diff": {"prepared": text} if text else {}}

    def brought(self, unit: Mapping[str, Any], *, reload: bool) -> list[str]:
        """Set one unit; return what was changed, one line each."""
        arguments = {name: unit[name] for name in ("name", "enabled", "state") if unit.get(name) is not None}
        act = not self._task.check_mode
        if act and unit.get("state") == "restarted":
            self.prepare(unit)
        call = partial(self.answered, "ansible.builtin.systemd_service", keys={"status": "dict"})
        answer = call({**arguments, "daemon_reload": reload})
        if act and answer.get("failed") and unit.get("state") == "started":
            # If it failed several times with the file that this run repaired, systemd refuses to start it again.
            self.printed(["systemctl", "reset-failed", unit["name"]])
            answer = call({**arguments, "daemon_reload": False})
        if answer.get("failed"):
            message = str(answer.get("msg") or "the module reported no reason")
            # In check mode the package of the unit may not be installed yet, and its file not be repaired.
            if self._task.check_mode and message.startswith(NOT_LOADED):
                return list(steps(arguments, {}))
            log = self.logged(str(arguments.get("name")))
            raise AnsibleActionFail(f"{self.host}: {arguments.get('name')}: {message}{log}")
        if act and unit.get("mark") and unit.get("state") in ("restarted", "reloaded"):
            self.call("managed_files", {"files": [{"path": unit["mark"], "content": None}]})
        if not answer.get("changed") or not unit:
            return []
        return list(steps(arguments, answer.get("status") or {})) or [f"change {arguments['name']}"]

    def assert_running(self, units: Sequence[str]) -> None:
        """Raise AnsibleActionFail with the log of a unit that was started and has failed since."""
        if not units or self._task.check_mode:
            return
        argv = ["systemctl", "is-failed", *units]
        answer = self.answered("ansible.builtin.command", {"argv": argv}, {"stdout": "str"})
        for unit, state in zip(units, str(answer.get("stdout") or "").split(), strict=False):
            if state == "failed":
                raise AnsibleActionFail(f"{self.host}: {unit} was started and has failed.{self.logged(unit)}")

    def prepare(self, unit: Mapping[str, Any]) -> None:
        """Wait until a unit may be restarted."""
        # systemd allows few starts in a short time (StartLimitBurst): the last of several changes would find it ended.
        self.printed(["systemctl", "reset-failed", unit["name"]])
        for _ in range(READY_S):
            if not unit.get("ready") or self.printed(unit["ready"]).strip() == "true":
                return
            time.sleep(1)
        command = " ".join(unit["ready"])
        raise AnsibleActionFail(f"{self.host}: {unit['name']}: {command} did not print true within {READY_S} s")

    def logged(self, unit: str) -> str:
        """Return the end of a unit's log as a sentence; empty if the log cannot be read."""
        if self._task.check_mode:
            return ""
        # First what its processes wrote: systemd's own lines on restarts come after it. Those of a short-lived process
        # may lack the unit.
        for source in (f"_SYSTEMD_UNIT={unit}", f"--unit={unit}"):
            text = self.printed(["journalctl", source, "--lines=4", "--output=cat", "--no-pager", "--quiet"])
            if text.strip():
                break
        lines = [printable(line.strip())[:LONGEST_LINE] for line in covered(text).splitlines()]
        return f" Its log ends: {'; '.join(filter(None, lines[-4:]))}" if any(lines) else ""

    def printed(self, argv: list[str]) -> str:
        """Return what a command prints on the node; empty if it fails."""
        answer = self.answered("ansible.builtin.command", {"argv": argv}, {"stdout": "str"})
        return str(answer.get("stdout") or "")


def steps(unit: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """Yield the steps that bring a unit to its requested state, given the state that systemd reported before."""
    name, wanted = unit["name"], unit.get("state")
    on, runs = before.get("UnitFileState") in ON, before.get("ActiveState") in ("active", "activating", "reloading")
    if unit.get("enabled") is not None and bool(unit["enabled"]) != on:
        yield f"{'enable' if unit['enabled'] else 'disable'} {name}"
    if wanted in ("restarted", "reloaded"):
        yield f"{wanted.removesuffix('ed')} {name}"
    elif wanted == "started" and not runs:
        yield f"start {name}"
    elif wanted == "stopped" and runs:
        yield f"stop {name}"
