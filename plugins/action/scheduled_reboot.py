"""Reboot a node as ansible.builtin.reboot does; the scheduler that drained it requests the reboot, if it can."""

from __future__ import annotations

import shlex
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action.reboot import ActionModule as Reboot
from ansible_collections.gpunode.node.plugins.plugin_utils.controller import need_gpunode

try:
    from gpunode.change.adapters import scheduler_of
    from gpunode.change.scheduler import Scheduler, SchedulerError
    from gpunode.errors import GpunodeError
except ImportError:
    pass  # need_gpunode reports it

Answer = dict[str, "bool | str | int | datetime"]
PERMIT = "/run/gpunode/reboot"
"""Read by the role's RebootProgram (roles/slurm_node/files/gpunode-reboot); gone after the boot."""


# Ansible has no types: as in every action plugin here, its class is of type Any for mypy.
class ActionModule(Reboot):  # type: ignore[misc]
    """The action plugin of ``scheduled_reboot``."""

    _VALID_ARGS = Reboot._VALID_ARGS | {"scheduler", "token"}
    _scheduler: Scheduler | None = None
    _withdrawn = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> Answer:
        """Run the action."""
        need_gpunode()
        self._name = str((task_vars or {}).get("inventory_hostname"))
        self._token = str(self._task.args.get("token") or "")
        result: Answer = super().run(tmp, task_vars)
        return result

    def perform_reboot(self, task_vars: Any, distribution: Any) -> Answer:
        """Request the reboot of the scheduler; begin it over the connection if the scheduler has not taken it."""
        kind = str(self._task.args.get("scheduler") or "none")
        if kind == "none":
            over_connection: Answer = super().perform_reboot(task_vars, distribution)
            return over_connection
        scheduler: Scheduler | None = None
        try:
            scheduler = scheduler_of(kind)
            permit = f"mkdir -p -m 755 /run/gpunode && printf %s {shlex.quote(self._token)} > {PERMIT}"
            done = self._low_level_execute_command(permit, sudoable=self.DEFAULT_SUDOABLE)
            if done.get("rc", 0) != 0:
                return not_requested(f"{PERMIT} cannot be written: {done.get('stderr') or done.get('stdout')}")
            left = scheduler.reboot(self._name, self._token)
        except (SchedulerError, GpunodeError) as err:
            # Whether it took the request is unknown.
            left = self._withdraw(scheduler) if scheduler is not None else ""
            return not_requested(f"{err}; the request is not withdrawn: {left}" if left else str(err))
        if left:
            self._display.display(f"gpunode: {self._name}: rebooted over the connection: {left}")
            answer: Answer = super().perform_reboot(task_vars, distribution)
            return answer
        self._scheduler = scheduler
        return {"failed": False, "start": datetime.now(UTC)}

    def check_boot_time(self, distribution: Any, previous_boot_time: str) -> None:
        """Return once the boot id has changed, or the request was withdrawn; raise an error else."""
        try:
            super().check_boot_time(distribution, previous_boot_time)
        except ValueError:
            if self._scheduler is None or self._scheduler.rebooting(self._name, self._token):
                raise
            self._withdrawn = True

    def validate_reboot(self, *words: Any, **named: Any) -> Answer:
        """Wait for the boot, at most ``reboot_timeout`` seconds."""
        result: Answer = super().validate_reboot(*words, **named)
        if self._withdrawn:
            result = {"failed": True, "rebooted": False, "msg": "the reboot was withdrawn from the scheduler"}
        if result.get("failed") and self._scheduler is not None:
            left = self._withdraw(self._scheduler)
            if not self._withdrawn:
                how = f"not withdrawn: {left}; see the log of its daemon on the node" if left else "withdrawn"
                result["msg"] = f"{result['msg']} (requested of the scheduler, {how})"
        return result

    def _withdraw(self, scheduler: Scheduler) -> str:
        """Remove the permit and the request; return why the reboot may still come."""
        with suppress(AnsibleError):
            self._low_level_execute_command(f"rm -f {PERMIT}", sudoable=self.DEFAULT_SUDOABLE)
        try:
            return scheduler.cancel_reboot(self._name, self._token)
        except (SchedulerError, GpunodeError) as err:
            return str(err)


def not_requested(why: str) -> Answer:
    """Return the answer of a reboot that did not begin."""
    return {"failed": True, "rebooted": False, "msg": why, "start": datetime.now(UTC)}
