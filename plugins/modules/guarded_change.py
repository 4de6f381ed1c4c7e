# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Make a change that reverts itself unless a new login proves that the node is still reachable."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guarded_change
short_description: Make a change that reverts itself unless a new login succeeds
description:
  - Makes changes that can lock the controller out, such as settings of the SSH daemon and firewall rules.
  - Before the change, the module saves the state of all files and units on the node's disk, starts a systemd timer
    that restores it, and enables a unit that restores it at boot before SSH and the firewall start.
  - After the change, the controller opens a new connection with the connection settings of the host and runs the
    confirmation over it with the privileges of the task. It does not reuse the connection that Ansible keeps open.
    The timer and the unit are removed only after this confirmation.
  - If that login fails, the old state is restored, either at once over the connection that is still open or by the
    timer. The task then fails and reports what was reverted. The old state is also restored after a killed
    controller, a lost network or a reboot of the node.
  - An unconfirmed change of an earlier run is reverted first.
  - Fails before any change if the node cannot revert by itself, for example without systemd, or if one of the
    commands of O(validate) fails.
options:
  name:
    description: Name of the change. Only one change of each name can await confirmation at a time.
    type: str
    required: true
  files:
    description: Files, in the format of O(gpunode.node.managed_files#module:files). Their old state is saved.
    type: list
    elements: dict
    default: []
  folders:
    description: Folders, in the format of O(gpunode.node.managed_files#module:folders). They are not reverted.
    type: list
    elements: dict
    default: []
  keep:
    description: Further files that O(activate) changes. Their old state is saved too.
    type: list
    elements: str
    default: []
  units:
    description: systemd units. A revert restores whether each is enabled, masked and running.
    type: list
    elements: str
    default: []
  validate:
    description:
      - Commands that must succeed, each a list of arguments. They run before any change as if the files were already
        in place, and again when the files are in place, before O(activate).
    type: list
    elements: list
    default: []
  show:
    description: Command that prints the effective configuration. Its output before and after the change is shown as a
      diff, also in check mode.
    type: list
    elements: str
    default: []
  activate:
    description: Commands that activate the change, each a list of arguments.
    type: list
    elements: list
    default: []
  restore:
    description:
      - Commands that activate the old state after the files were restored. The default is O(activate).
    type: list
    elements: list
  lock:
    description:
      - Users with passwords to lock. C(*) is put before the hash, so that no password matches. sshd accepts the keys of
        such an account also with C(UsePAM no), unlike those of an account with C(!).
    type: list
    elements: str
    default: []
  pending:
    description: Run O(activate) even if no file changes.
    type: bool
    default: false
  limit_s:
    description:
      - Seconds from arming the timer until the old state is restored, 20 to 900.
      - V(0) makes the change without a revert, for image builds without a later login.
    type: int
    default: 60
  step:
    description: Step of the change to run on the node. Set by the action plugin.
    type: str
    choices: [apply, confirm, revert, outcome]
    default: apply
  token:
    description: Identifier of one attempt. Set by the action plugin.
    type: str
    default: ""
  program:
    description: Source text of the program that restores the old state. Set by the action plugin.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Validates the change if the node supports mount namespaces, and shows it. No timer is started.
  diff_mode:
    support: full
    description: Shows the difference of each file and of the output of O(show).
seealso:
  - module: gpunode.node.managed_files
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Disable password logins, and restore the old configuration if no new login succeeds
  gpunode.node.guarded_change:
    name: passwords_off
    files:
      - path: /etc/ssh/sshd_config.d/00-passwords.conf
        content: "PasswordAuthentication no\n"
    validate: [[sshd, -t]]
    show: [sshd, -T]
    activate: [[systemctl, reload, ssh.service]]
  become: true
"""

RETURN = r"""
changed_paths:
  description: Files and folders that were changed, or would be in check mode.
  returned: success
  type: list
  elements: str
reverted:
  description: What was restored.
  returned: when the change was reverted
  type: dict
"""

import inspect
import pwd
import shutil
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import commands, file_access, managed
from ansible_collections.gpunode.node.plugins.module_utils.guard import (
    LARGEST,
    SHADOW,
    Guard,
    GuardError,
    last_line,
    lock_passwords,
    to_lock,
)
from ansible_collections.gpunode.node.plugins.module_utils.managed import FileRefusedError
from ansible_collections.gpunode.node.plugins.module_utils.quiet import QuietModule

FILE_DEFAULTS: dict[str, Any] = {name: option.get("default") for name, option in managed.FILE_OPTIONS.items()}
FOLDER_DEFAULTS = {name: option.get("default") for name, option in managed.FOLDER_OPTIONS.items()}
SHORTEST_S = 20
LONGEST_S = 900


def outcome_text(outcome: dict[str, Any]) -> str:
    """Return what a revert did, in one line."""
    files = ", ".join(outcome["restored"]) or "no file differed"
    text = f"reverted {outcome['by']} after {outcome['after_s']} s: {files}"
    return f"{text}; failed: {'; '.join(outcome['failed'])}" if outcome["failed"] else text


def user_id(name: str) -> int:
    """Return the id of a user; 0 for an unknown one, which the write of the file reports."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return 0


class GuardedChange:
    """A change, from the module's parameters."""

    def __init__(self, module: QuietModule) -> None:
        self.module = module
        options = module.params
        self.files = [{**FILE_DEFAULTS, **file} for file in options["files"]]
        self.folders = [{**FOLDER_DEFAULTS, **folder} for folder in options["folders"]]
        self.guard = Guard(options["name"])
        self.restore = options["activate"] if options["restore"] is None else options["restore"]

    def validated(self, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the validation as if the files were in place; return the diff of the output of ``show``."""
        options = self.module.params
        show = [options["show"]] if options["show"] else []
        if not show and not options["validate"]:
            return []
        try:
            before = commands.run_with_files([], show)[0][1] if show else ""
            *judged, shown = commands.run_with_files(files, [*options["validate"], *(show or [["true"]])])
        except commands.UnavailableError as err:
            self.module.warn(f"the change cannot be validated in advance: {err}")
            return []
        for argv, (status, output, errors) in zip(options["validate"], judged):  # noqa: B905 - Python 3.9 on nodes
            if status != 0:
                raise FileRefusedError(f"{' '.join(argv)}: {last_line(errors or output)}: nothing was changed")
        if not show or shown[1] == before:
            return []
        name = f"output of {' '.join(show[0])}"
        return [{"before_header": name, "after_header": name, "before": before, "after": shown[1]}]

    def accepted(self, *argv: str) -> None:
        """Run a validation command on the files in place. Raise GuardError if it fails."""
        try:
            ((status, output, errors),) = commands.run_with_files([], [list(argv)])
        except commands.UnavailableError:
            self.guard.must(*argv)
            return
        if status != 0:
            raise GuardError(f"{' '.join(argv[:3])}: exit status {status}: {last_line(errors or output)}")

    def apply(self) -> dict[str, Any]:
        """Validate, arm, change and activate; return the module's result."""
        module, options = self.module, self.module.params
        # The lock is released before commands run: a hanging command must not block the timer.
        with self.guard.locked():
            result = self.changed()
            if not result["changed"] or module.check_mode:
                return result
        steps = [(self.accepted, argv) for argv in options["validate"]]
        steps += [(self.guard.must, argv) for argv in options["activate"]]
        for step, argv in steps:
            if options["limit_s"] and not self.guard.waits(options["token"]):
                break  # The timer was faster: the confirmation fails and reports it.
            try:
                step(*argv)
            except GuardError as err:
                with self.guard.locked():
                    self.undo(err)
        return {**result, "waits": bool(options["limit_s"])}

    def changed(self) -> dict[str, Any]:
        """Write the files if a change is pending; return what changed, or would change in check mode."""
        module, options = self.module, self.module.params
        if not module.check_mode:
            outcome = self.guard.restore("by the next run")
            if outcome is not None:
                module.warn(f"an earlier change {options['name']} was not confirmed: {outcome_text(outcome)}")
            if outcome is not None and outcome["failed"]:
                raise FileRefusedError(
                    f"an earlier change {options['name']} could not be reverted: {'; '.join(outcome['failed'])}: "
                    "nothing was changed: remove the cause, then run this again"
                )
        pending = [file for file in self.files if managed.differs(file)]
        paths, diffs = managed.applied(self.files, self.folders, check=True)
        locks = self.locks()
        if locks:
            paths.append(SHADOW)
            lines = "".join(f"lock the password of {name}\n" for name in locks)
            diffs.append({"before_header": SHADOW, "after_header": SHADOW, "before": "", "after": lines})
        if not paths and not options["pending"]:
            return {"changed": False, "changed_paths": [], "diff": []}
        shown = self.validated(pending)
        if not module.check_mode:
            if options["limit_s"]:
                self.arm(locks)
            try:
                managed.applied(self.files, self.folders, check=False)
                if locks:
                    lock_passwords(locks)
            except (FileRefusedError, OSError) as err:
                self.undo(err)
        return {"changed": True, "changed_paths": paths, "diff": [*diffs, *shown] if module._diff else []}

    def locks(self) -> list[str]:
        """Return the users among ``lock`` with a password to lock."""
        names = list(self.module.params["lock"])
        shadow = file_access.path_state(SHADOW, 0, LARGEST) if names else None
        return to_lock(shadow.data or b"", names) if shadow is not None else []

    def arm(self, locks: list[str]) -> None:
        """Save the old state and start the timer. Raise FileRefusedError if the node cannot revert by itself."""
        options = self.module.params
        if shutil.which("systemd-run") is None:
            raise FileRefusedError("the node has no systemd-run and cannot revert on its own: nothing was changed")
        record = {
            "name": options["name"],
            "token": options["token"],
            "paths": [*(file["path"] for file in self.files), *options["keep"], *([SHADOW] if locks else [])],
            "owners": {file["path"]: user_id(file["owner"]) for file in self.files},
            "locked": locks,
            "units": options["units"],
            "restore": self.restore,
        }
        programs = {"program.py": options["program"], "file_access.py": inspect.getsource(file_access)}
        try:
            self.guard.arm(record, programs, options["limit_s"])
        except (GuardError, OSError) as err:
            raise FileRefusedError(f"the node cannot revert on its own: {err}: nothing was changed") from None

    def undo(self, err: Exception) -> None:
        """Restore everything after a failed step and raise FileRefusedError. The caller holds the guard's lock."""
        if not self.module.params["limit_s"]:
            raise err
        outcome = self.guard.restore("at once")
        reverted = outcome_text(outcome) if outcome else "it was reverted already"
        raise FileRefusedError(f"{err}: {reverted}") from None


def stepped(module: QuietModule) -> dict[str, Any]:
    """Run one step and return the module's result."""
    options = module.params
    guard = Guard(options["name"])
    if options["step"] == "apply":
        return GuardedChange(module).apply()
    if options["step"] == "outcome":
        return {"changed": False, "armed": guard.armed, "outcome": guard.read("outcome.json")}
    with guard.locked():
        if options["step"] == "confirm":
            guard.confirm(options["token"])
            return {"changed": False}
        guard.restore("by the controller")
    return {"changed": False, "outcome": guard.read("outcome.json")}


def main() -> None:
    """Run the module."""
    module = QuietModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "dict", "default": []},
            "folders": {"type": "list", "elements": "dict", "default": []},
            "keep": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "validate": {"type": "list", "elements": "list", "default": []},
            "show": {"type": "list", "elements": "str", "default": []},
            "activate": {"type": "list", "elements": "list", "default": []},
            "restore": {"type": "list", "elements": "list"},
            "lock": {"type": "list", "elements": "str", "default": []},
            "pending": {"type": "bool", "default": False},
            "limit_s": {"type": "int", "default": 60},
            "step": {"type": "str", "choices": ["apply", "confirm", "revert", "outcome"], "default": "apply"},
            "token": {"type": "str", "default": "", "no_log": False},
            "program": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    limit = module.params["limit_s"]
    if limit and not SHORTEST_S <= limit <= LONGEST_S:
        module.fail_json(msg=f"limit_s: {limit} is not 0 and not between {SHORTEST_S} and {LONGEST_S}")
    if not module.params["name"].replace("_", "").isalnum():
        module.fail_json(msg=f"name: {module.params['name']!r} has characters other than letters, digits and _")
    try:
        module.exit_json(**stepped(module))
    except (FileRefusedError, GuardError, OSError) as err:
        module.fail_json(msg=" ".join(str(err).split()))


if __name__ == "__main__":
    main()
