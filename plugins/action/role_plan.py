"""Compute the plan of a role on the controller from the state of the node."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.gpunode.node.plugins.plugin_utils.answers import covered
from ansible_collections.gpunode.node.plugins.plugin_utils.controller import (
    PLANS,
    ROOT,
    SPECIFICATIONS,
    GpunodeAction,
    planned_of,
)

try:
    from gpunode.errors import GpunodeError
    from gpunode.provisioning.context import Context, NotReadError
    from gpunode.provisioning.manifest import Manifest, NodeQuery, compared
    from gpunode.provisioning.role import role_tags
    from gpunode.provisioning.roles import IMAGE_ROLES, of_image, offline
    from gpunode.provisioning.state import NodeState
    from gpunode.text import printable
    from gpunode.variables import plain
except ImportError:
    pass  # GpunodeAction.begin reports it

COMMON = ROOT / "roles" / "common" / "tasks"
GATE = "preflight"
ROUNDS = 5
"""Maximum number of rounds of questions to the node before a plan is complete."""


class ActionModule(GpunodeAction):  # type: ignore[misc]
    """The action plugin of ``role_plan``."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.begin(task_vars)
        role = str(self._task.args.get("role", ""))
        if role not in PLANS:
            raise AnsibleActionFail(f"role: {role or 'nothing'} has no plan; known: {', '.join(sorted(PLANS))}")
        extra = plain(self._task.args.get("settings") or {})
        refuse = boolean(self._task.args.get("refuse", True))
        begins = boolean(self._task.args.get("begin", False))
        if begins and not self.selected(role):
            return {**result, "changed": False, "skipped": True, "pending": False, "tasks": []}
        settings = self.settings(role, extra) if role in SPECIFICATIONS else {}
        if begins and self.settings(GATE).get("gpunode_image") and role not in IMAGE_ROLES:
            raise AnsibleActionFail(f"gpunode_image: the role {role} is not for images: leave it to the first boot")
        removes = settings.get("state") == "absent"
        before, after = (self.site_file(role, name, settings) for name in ("tasks_before", "tasks_after"))
        if refuse and role in SPECIFICATIONS and role != GATE and not removes:
            self.refuse_unfit(role)
        if begins and before:
            more = {"settings": self.node.sealed(extra), "tasks": [before, str(COMMON / "after_site.yml")]}
            return {**result, "changed": False, "pending": False, **more}
        self.hand_on_state()
        manifest = self.planned(role, extra)
        if refuse:
            self.refuse(manifest)
        if role == GATE and refuse:
            self.keep_fit(role)
        self.remember_reboot(role, manifest)
        # gpunode_force repeats the changes of roles that manage something; it never reboots a node.
        if role == "reboot" and manifest.pending and self.node.read("boot") is None:
            self.node.keep("boot", json.dumps(self.state().boot_id))
        pending = refuse and (
            manifest.pending or (role in SPECIFICATIONS and role != GATE and manifest.manages and self.forced())
        )
        if pending and self._task.check_mode:
            # Previews of the roles that follow include these files.
            before = self.node.read("planned")
            coming = {"files": manifest.source_files, "users": getattr(manifest.result, "create", ())}
            self.node.keep("planned", json.dumps(planned_of(before, coming)))
            texts = {file.path: file.content for file in manifest.files if file.encoding == "utf-8"}
            self.node.keep("files", json.dumps({**(self.node.read("files") or {}), role: texts}))
        elif pending or (not begins and (manifest.commands or manifest.modules)):
            # The tasks that follow change the node: the next plan collects its state again.
            self.node.set_aside("state")
            self.node.keep("begun", "")
        tasks_file = own_tasks(role, removes)
        change = [str(COMMON / "removal.yml") if removes else tasks_file] if pending else []
        self.fail_with_problems(manifest)
        result["ansible_facts"] = {**self.discovered, "gpunode_restart_required": self.restarts(role, manifest)}
        result["warnings"] = shown(*manifest.notes, *manifest.refusals)
        return {
            **result,
            "changed": False,
            "pending": pending,
            "own_tasks": tasks_file,
            "tasks": [*change, *([after] if after else [])],
            "pending_reasons": shown(*manifest.pending_reasons),
            "reboot_reasons": list(manifest.reboot_reasons),
            "settings": self.node.sealed(extra),
            "manifest": self.node.sealed(manifest.model_dump(mode="json", exclude={"questions"})),
            "_ansible_verbose_override": True,
        }

    def hand_on_state(self) -> None:
        """Forget the state of the node, or use that of the plan before, as the task requests."""
        if boolean(self._task.args.get("fresh", False)):
            self.node.forget("state")
        if boolean(self._task.args.get("unchanged", False)):
            self.node.take_back("state")

    def selected(self, role: str, tags: Iterable[str] | None = None) -> bool:
        """Return whether the run includes a part of the role, by its tags and those of the task (of its play)."""
        own_tags = {*(self._task.tags if tags is None else tags)} - {"always"}
        skipped = {*(self.task_vars.get("ansible_skip_tags") or ())}
        requested = {*(self.task_vars.get("ansible_run_tags") or ("all",))}
        return not skipped & {role, *own_tags} and bool(requested & {"all", "tagged", *own_tags, *role_tags(role)})

    def site_file(self, role: str, name: str, settings: dict[str, Any]) -> str:
        """Return the path of a task file that the site includes before or after a role; empty: none."""
        requested = "" if settings.get("state") == "keep" else str(settings.get(name) or "")
        return str(self.site_path(f"{role}_{name}", requested))

    def refuse(self, manifest: Manifest) -> None:
        """Raise AnsibleActionFail with all reasons why the node must not be changed."""
        if manifest.refusals:
            begun = self.node.text("begun", math.inf) is not None
            head = "refused, earlier changes of this run remain:" if begun else "refused, nothing was changed:"
            raise AnsibleActionFail("\n  - ".join([head, *shown(*manifest.refusals)]))

    def fail_with_problems(self, manifest: Manifest) -> None:
        """Raise AnsibleActionFail with what the named field of the result reports; not in check mode."""
        name = str(self._task.args.get("problems") or "")
        if name and not self._task.check_mode and (problems := getattr(manifest.result, name)):
            raise AnsibleActionFail("; ".join(shown(*([problems] if isinstance(problems, str) else problems))))

    def refuse_unfit(self, role: str) -> None:
        """Raise AnsibleActionFail if preflight refuses the node; a role that is used alone runs no preflight before."""
        if GATE in PLANS and role not in (self.node.read("fit") or ()):
            self.refuse(self.planned(GATE, {}, self.judged_for(role)))
            self.keep_fit(role)

    def keep_fit(self, role: str) -> None:
        """Record for which roles preflight found the node fit."""
        self.node.keep("fit", json.dumps([*(self.node.read("fit") or ()), *self.judged_for(role)]))

    def judged_for(self, role: str) -> tuple[str, ...]:
        """Return the roles that preflight judges a node for: this one and others of the play that the run includes.

        In a play with preflight alone these are those of ``gpunode_roles``.
        """
        known = self.settings(GATE)["gpunode_roles"]
        listed = [(play_role.get_name(include_role_fqcn=False), play_role.tags) for play_role in self.play_roles()]
        roles = {name for name, tags in listed if name in known and name != GATE and self.selected(name, tags)}
        if role != GATE:
            roles.add(role)
        return tuple(sorted(roles or {name for name in known if self.selected(name, ())}))

    def planned(self, role: str, extra: dict[str, Any], roles: tuple[str, ...] = ()) -> Manifest:
        """Return the complete manifest; the plan is recomputed with the answers to its questions."""
        context = replace(self.context(role, extra), roles=roles or (self.judged_for(role) if role == GATE else ()))
        needed = self.needs(role)
        while True:
            try:
                return self.planned_from(self.state(needed), role, context)
            except NotReadError as err:
                needed |= {err.part}

    def planned_from(self, state: NodeState, role: str, context: Context) -> Manifest:
        """Return the manifest that follows from a state. Raises NotReadError if the plan needs another part of it."""
        if self._task.check_mode:
            # Files that several roles write, such as daemon.json, contain what earlier roles would have written.
            others = (self.node.read("files") or {}).items()
            state = state.with_files(
                {path: text for name, texts in others if name != role for path, text in texts.items()}
            )
        if context.image:
            state = of_image(state)
        # A plan that belongs to a playbook uses the settings of preflight.
        settings = context.settings_of(role if role in SPECIFICATIONS else GATE)
        answers: dict[str, Any] = {}
        for _ in range(ROUNDS):
            try:
                manifest = PLANS[role](state, settings, context)
            except GpunodeError as err:
                raise AnsibleActionFail(*shown(f"{self.host}: role {role}: {err}")) from None
            questions = {name: query for name, query in manifest.questions.items() if name not in answers}
            if not questions or manifest.refusals:
                return compared(offline(manifest) if context.image else manifest, state)
            answers.update(self.answers(questions))
            context = context.with_answers(answers)
        raise AnsibleActionFail(
            f"{self.host}: role {role}: the plan needed more than {ROUNDS} rounds: report this as a bug"
        )

    def answers(self, questions: dict[str, NodeQuery]) -> dict[str, Any]:
        """Return the node's answers; a question that was answered in this run is not asked again."""
        digests = {
            name: hashlib.sha256(json.dumps([query.kind, query.body], sort_keys=True).encode()).hexdigest()[:24]
            for name, query in questions.items()
        }
        answers = {name: self.node.read(f"answer-{digest}") for name, digest in digests.items()}
        for name in [name for name, answer in answers.items() if answer is None]:
            query = questions[name]
            answer = self.call("node_query", {"kind": query.kind, "question": query.body})
            answers[name] = json.loads(str(answer["answer"]))
            self.node.keep(f"answer-{digests[name]}", json.dumps(answers[name]))
        return answers

    def restarts(self, role: str, manifest: Manifest) -> dict[str, str]:
        """Return the units with a deferred restart and the reasons, of all roles of this run."""
        by_role = self.node.read("restarts") or {}
        if manifest.restarts != by_role.get(role, {}):
            by_role[role] = dict(manifest.restarts)
            self.node.keep("restarts", json.dumps(by_role))
        return {unit: reason for units in by_role.values() for unit, reason in units.items()}

    def remember_reboot(self, role: str, manifest: Manifest) -> None:
        """Record why the node has to be rebooted, by role, for the playbook that reboots it."""
        reasons = self.node.read("reboot") or {}
        if list(manifest.reboot_reasons) != reasons.get(role, []):
            reasons[role] = list(manifest.reboot_reasons)
            self.node.keep("reboot", json.dumps(reasons))


def shown(*texts: str) -> list[str]:
    """Return texts for the output of the run, without the user information of URLs."""
    return [covered(printable(text)) for text in texts]


def own_tasks(role: str, removes: bool) -> str:
    """Return the file of the tasks that apply a role's manifest: its own, or the common one."""
    folder = ROOT / "roles" / role / "tasks"
    names = ("absent.yml", "change.yml") if removes else ("change.yml",)
    return str(next((folder / name for name in names if (folder / name).is_file()), COMMON / "apply.yml"))
