# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Make a change that reverts itself unless a new login proves that the node is still reachable."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guarded_change
short_description: Make a change that reverts itself unless a new login succeeds
description:
  - For changes that can lock the controller out, such as the settings of the SSH daemon and firewall rules.
  - Before the change, the node keeps the old state of all files and units on disk, starts a systemd timer that restores
    it, and enables a unit that restores it at boot before SSH and the firewall start.
  - After the change, the controller opens a new connection with the connection settings of the host, not the one that
    Ansible keeps open, and runs the confirmation over it with the privileges of the task. Only then the timer and the
    unit are removed.
  - Where that login fails, the old state is restored at once over the connection that is still open, or by the timer,
    and the task fails with what was reverted. A controller that was killed, a lost network and a reboot of the node end
    in the old state too.
  - A change that waits for its confirmation when the module starts is reverted first.
  - Fails before anything is changed where the node cannot revert by itself, as without systemd, or where one of
    O(validate) fails.
options:
  name:
    description: Name of the change. One change of a name can wait for its confirmation at a time.
    type: str
    required: true
  files:
    description: Files as O(gpunode.node.managed_files#module:files) has them. Their old state is kept.
    type: list
    elements: dict
    default: []
  folders:
    description: Folders as O(gpunode.node.managed_files#module:folders) has them. They are not reverted.
    type: list
    elements: dict
    default: []
  keep:
    description: Further files whose old state is kept, because O(activate) changes them.
    type: list
    elements: str
    default: []
  units:
    description: Units of systemd that are enabled, disabled, masked, started or stopped as they were by a revert.
    type: list
    elements: str
    default: []
  validate:
    description:
      - Commands, each a list of words, that have to succeed as if the files were in place already, before anything is
        changed, and again when they are in place, before O(activate).
    type: list
    elements: list
    default: []
  show:
    description: Command whose output before and after is shown as a diff, in check mode too.
    type: list
    elements: str
    default: []
  activate:
    description: Commands, each a list of words, that put the change into force.
    type: list
    elements: list
    default: []
  restore:
    description:
      - Commands that put the old state into force when the files are restored. Without it those of O(activate).
    type: list
    elements: list
  due:
    description: Run O(activate) also where all files are as they have to be.
    type: bool
    default: false
  limit_s:
    description:
      - Seconds from arming the timer until the old state is restored, 20 to 900.
      - V(0) makes the change without a revert, for image builds that nobody logs in to afterwards.
    type: int
    default: 60
  step:
    description: Part of the change that the node runs. The action plugin sets it.
    type: str
    choices: [apply, confirm, revert, outcome]
    default: apply
  token:
    description: Identifies one attempt. The action plugin sets it.
    type: str
    default: ""
  program:
    description: Source text of the program that restores. The action plugin hands it in.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Validates the change where the node has mount namespaces, and shows it. Nothing is armed.
  diff_mode:
    support: full
    description: Shows each file, and the output of O(show) before and after.
seealso:
  - module: gpunode.node.managed_files
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Let sshd refuse passwords, or restore what was there within a minute
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
  description: What was restored, where the change was reverted.
  returned: when the change was reverted
  type: dict
"""

import shutil
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils import as_if, managed
from ansible_collections.gpunode.node.plugins.module_utils.guard import Guard, GuardError, last_line
from ansible_collections.gpunode.node.plugins.module_utils.managed import FileRefusedError

FILE_DEFAULTS: dict[str, Any] = {
    "content": None,
    "encoding": "utf-8",
    "mode": "0644",
    "owner": "root",
    "group": "root",
    "validate_with": None,
    "backup": False,
    "expect_sha256": None,
    "private": False,
}
FOLDER_DEFAULTS = {"state": "present", "mode": "0755"}
SHORTEST_S, LONGEST_S = 20, 900


def outcome_text(outcome: dict[str, Any]) -> str:
    """Return what a revert did, in one line."""
    files = ", ".join(outcome["restored"]) or "no file differed"
    text = f"reverted {outcome['by']} after {outcome['after_s']} s: {files}"
    return f"{text}; failed: {'; '.join(outcome['failed'])}" if outcome["failed"] else text


class GuardedChange:
    """The change as the module got it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        given = module.params
        self.files = [{**FILE_DEFAULTS, **file} for file in given["files"]]
        self.folders = [{**FOLDER_DEFAULTS, **folder} for folder in given["folders"]]
        self.guard = Guard(given["name"])
        self.restore = given["activate"] if given["restore"] is None else given["restore"]

    def validated(self, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Validate as if the files were in place; return the diff of what ``show`` prints."""
        given = self.module.params
        show = [given["show"]] if given["show"] else []
        try:
            before = as_if.answered([], show)[0][1] if show else ""
            *judged, shown = as_if.answered(files, [*given["validate"], *(show or [["true"]])])
        except as_if.UnavailableError as err:
            self.module.warn(f"the change cannot be validated in advance: {err}")
            return []
        for argv, (status, output, errors) in zip(given["validate"], judged):  # noqa: B905 - Python 3.9 on nodes
            if status != 0:
                raise FileRefusedError(f"{' '.join(argv)}: {last_line(errors or output)}: nothing was changed")
        if not show or shown[1] == before:
            return []
        name = f"output of {' '.join(show[0])}"
        return [{"before_header": name, "after_header": name, "before": before, "after": shown[1]}]

    def accepted(self, *argv: str) -> None:
        """Run a validating command on what is in place now; raise GuardError where it fails."""
        try:
            ((status, output, errors),) = as_if.answered([], [list(argv)])
        except as_if.UnavailableError:
            self.guard.must(*argv)
            return
        if status != 0:
            raise GuardError(f"{' '.join(argv[:3])}: exit status {status}: {last_line(errors or output)}")

    def apply(self) -> dict[str, Any]:
        """Validate, arm, change, activate."""
        module, given = self.module, self.module.params
        # The lock is released before commands run: one that hangs must not keep the timer waiting.
        with self.guard.locked():
            result = self.changed()
            if not result["changed"] or module.check_mode:
                return result
        steps = [(self.accepted, argv) for argv in given["validate"]]
        steps += [(self.guard.must, argv) for argv in given["activate"]]
        for step, argv in steps:
            if given["limit_s"] and not self.guard.armed:
                break  # The timer was faster: the confirmation fails and reports it.
            try:
                step(*argv)
            except GuardError as err:
                with self.guard.locked():
                    self.undo(err)
        return {**result, "waits": bool(given["limit_s"])}

    def changed(self) -> dict[str, Any]:
        """Write the files where something is due; return what changed, or would in check mode."""
        module, given = self.module, self.module.params
        if not module.check_mode:
            outcome = self.guard.restore("by the next run")
            if outcome is not None:
                module.warn(f"an earlier change {given['name']} was not confirmed: {outcome_text(outcome)}")
        due = [file for file in self.files if managed.differs(file)]
        paths, diffs = managed.brought_about(self.files, self.folders, pretend=True)
        if not paths and not given["due"]:
            return {"changed": False, "changed_paths": [], "diff": []}
        shown = self.validated(due)
        if not module.check_mode:
            if given["limit_s"]:
                self.arm()
            try:
                managed.brought_about(self.files, self.folders, pretend=False)
            except (FileRefusedError, OSError) as err:
                self.undo(err)
        return {"changed": True, "changed_paths": paths, "diff": [*diffs, *shown] if module._diff else []}

    def arm(self) -> None:
        """Have the node revert by itself, or refuse."""
        given = self.module.params
        if shutil.which("systemd-run") is None:
            raise FileRefusedError("the node has no systemd-run and cannot revert on its own: nothing was changed")
        record = {
            "name": given["name"],
            "token": given["token"],
            "paths": [*(file["path"] for file in self.files), *given["keep"]],
            "units": given["units"],
            "restore": self.restore,
        }
        try:
            self.guard.arm(record, given["program"], given["limit_s"])
        except GuardError as err:
            raise FileRefusedError(f"the node cannot revert on its own: {err}: nothing was changed") from None

    def undo(self, err: Exception) -> None:
        """Restore all after a step that failed, and fail with its error. The caller holds the guard's lock."""
        if not self.module.params["limit_s"]:
            raise err
        outcome = self.guard.restore("at once")
        said = outcome_text(outcome) if outcome else "it was reverted already"
        raise FileRefusedError(f"{err}: {said}") from None


def stepped(module: AnsibleModule) -> dict[str, Any]:
    """Run one step."""
    given = module.params
    guard = Guard(given["name"])
    if given["step"] == "apply":
        return GuardedChange(module).apply()
    if given["step"] == "outcome":
        return {"changed": False, "armed": guard.armed, "outcome": guard.read("outcome.json")}
    with guard.locked():
        if given["step"] == "confirm":
            guard.confirm(given["token"])
            return {"changed": False}
        guard.restore("by the controller")
    return {"changed": False, "outcome": guard.read("outcome.json")}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
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
            "due": {"type": "bool", "default": False},
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
