"""Manifests of all roles, each on a node that is bare, settled and to be cleared, as files that people read.

Regenerate: .venv/bin/python tests/unit/provisioning/manifest_snapshots.py

The roles are planned in the playbook's order. After each plan the node gets what the role's tasks would change, until
the role has nothing pending.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from node_samples import settings_of
from site_samples import ORDER, Machine, result_of, settings

from gpunode.onnode import program_text
from gpunode.provisioning.cuda import DRIVER_PACKAGES
from gpunode.provisioning.manifest import ManagedFolder, Manifest, NodeCommand, UnitState

FOLDER = Path(__file__).parent / "manifests"
ROUNDS = 4
"""Plans until a node is settled, at most."""


@dataclass
class Page:
    """The file of one role."""

    role: str
    texts: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def shown(self, manifest: Manifest) -> dict[str, Any]:
        """A manifest in a form that is short and complete, but for the reasons that follow from files and packages."""
        document = manifest.model_dump(mode="json", exclude_defaults=True)
        rows = {
            "refusals": document.get("refusals"),
            "files": {file.path: self._file(file.model_dump(mode="json")) for file in manifest.files},
            "folders": {
                folder.path: f"{folder.mode} {folder.phase}"
                if folder.state == "present"
                else f"removed if empty, {folder.phase}"
                for folder in manifest.folders
            },
            "packages": self._plain({"manager": manifest.packages.manager, **document["packages"]})
            if manifest.packages
            else {},
            "units": _unit_words(manifest.units),
            "pending": list(manifest.pending_reasons),
            "reboot": document.get("reboot_reasons"),
            "restarts": document.get("restarts"),
            "restart mark": manifest.restart_mark,
            "marks": [mark.path for mark in manifest.marks],
            "problems": list(manifest.problems),
            "notes": document.get("notes"),
            "modules": list(manifest.modules),
            "kernel values": manifest.kernel_values,
            "guarded": self._plain(document.get("guarded")),
            "commands": [_command(command) for command in manifest.commands],
            "values": self._plain(result_of(manifest)),
        }
        return {name: value for name, value in rows.items() if value}

    def _file(self, file: Mapping[str, Any]) -> str:
        if file["content"] is None:
            return f"absent, {file.get('phase', 'before')}"
        more = [word for word in ("backup", "private") if file.get(word)]
        if file.get("encoding", "utf-8") != "utf-8":
            more.append(file["encoding"])
        if file.get("validate_with"):
            more.append(f"accepted by `{' '.join(file['validate_with'])}`")
        if file.get("expect_sha256"):
            more.append("unless it was changed meanwhile")
        head = f"{file['mode']} {file['owner']}:{file['group']} {file.get('phase', 'before')}"
        return ", ".join([head, *more, self._label(file["path"], file["content"])])

    def _label(self, path: str, text: str) -> str:
        """The name of a text among those of the page, which has each once."""
        text = text.expandtabs(4)
        for program, name in PROGRAMS.items():
            text = text.replace(program, name)
        label, number = path, 1
        while self.texts.setdefault(label, text) != text:
            number += 1
            label = f"{path} ({number})"
        return f"text {number}" if number > 1 else "text"

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.keys() == UnitState.model_fields.keys():
                return f"{value['name']} {_unit_words([UnitState(**value)])[value['name']]}"
            if value.keys() == ManagedFolder.model_fields.keys():
                return f"{value['path']} {value['mode']}"
            if {"path", "content", "mode"} <= value.keys():
                return {value["path"]: self._file(value)}
            return {
                key: (self._label(key, member) if member else "absent")
                if isinstance(member, str) and key.startswith("/") and ("\n" in member or not member)
                else self._plain(member)
                for key, member in value.items()
            }
        if isinstance(value, list | tuple) and {*DRIVER_PACKAGES} <= {*map(str, value)} and self.role != "cuda":
            return [*(name for name in value if name not in DRIVER_PACKAGES), "(those that cuda never changes)"]
        if isinstance(value, list | tuple):
            return [self._plain(member) for member in value]
        return value

    @property
    def text(self) -> str:
        """The page as YAML."""
        head = f"# Manifests of the role {self.role}. Regenerate: {REGENERATE}\n# {WORDS}\n"
        body = {"settings": settings_given(self.role), "texts": dict(sorted(self.texts.items())), **self.parts}
        shown = {name: value for name, value in body.items() if value}
        for name in ("apt", "dnf"):
            shown[name] = {part: value or "no difference" for part, value in self.parts[name].items()}
        return f"---\n{head}# yamllint disable rule:line-length rule:indentation rule:empty-lines\n" + yaml.dump(
            shown, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True
        )


WORDS = (
    "`check mode`, `plan 2` and `settled` are differences from `bare`, all of `dnf` from the same of `apt`. "
    "Tabs are four blanks."
)
REGENERATE = ".venv/bin/python tests/unit/provisioning/manifest_snapshots.py"
PROGRAMS = {
    program_text("gpu_settings"): "(gpunode/onnode/gpu_settings.py)\n",
    program_text("pending_updates"): "(gpunode/onnode/pending_updates.py)\n",
    program_text("launcher"): "(gpunode/onnode/launcher.py)\n",
}


class _Dumper(yaml.SafeDumper):
    """YAML with texts as blocks, and every list below its key."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_representer(
    list,
    lambda dumper, rows: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", rows, flow_style=all(isinstance(row, str) and "\n" not in row for row in rows)
    ),
)
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _unit_words(units: Iterable[UnitState]) -> dict[str, str]:
    words_by_name: dict[str, list[str]] = {}
    for unit in units:
        words = words_by_name.setdefault(unit.name, [])
        words += [] if unit.enabled is None else ["enabled" if unit.enabled else "disabled"]
        words += [unit.state] if unit.state else []
    return {name: ", ".join(words) for name, words in words_by_name.items()}


def _command(command: NodeCommand) -> str:
    return " ".join(command.argv) + (", before" if command.phase == "before" else "")


def difference(manifest: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest has otherwise than another."""
    differences: dict[str, Any] = {}
    for name in {**other, **manifest}:
        now, then = manifest.get(name), other.get(name)
        if now == then:
            continue
        differences[name] = difference(now, then) if isinstance(now, dict) and isinstance(then, dict) else now
        if name not in manifest:
            differences[name] = "(not there)"
    return differences


def settings_given(role: str) -> dict[str, Any]:
    """The role's settings that are not defaults."""
    defaults = settings_of(role)
    return {f"{role}_{name}": value for name, value in settings(role).items() if value != defaults[name]}


@dataclass(frozen=True)
class Converged:
    """All roles on both nodes."""

    pages: dict[str, Page]
    unsettled: dict[str, tuple[str, ...]]
    """What is pending, or refused, on a node that the role has settled or left, and at the end."""
    machines: dict[str, Machine]
    """The nodes after all roles."""


@cache
def converged() -> Converged:
    """Plan and apply every role in the playbook's order: for real, in check mode, and its removal from a copy."""
    pages, unsettled = {role: Page(role) for role in ORDER}, {}
    machines = {}
    for manager in ("apt", "dnf"):
        machine, checked = Machine(manager), Machine(manager)
        for role in ORDER:
            page, now = pages[role], machine.plan(role)
            bare = page.shown(now)
            shown = page.parts[manager] = {"bare": bare}
            shown["check mode"] = difference(page.shown(checked.preview(role)), bare)
            for at in range(2, ROUNDS + 2):
                if now.refusals or not machine.pending(now):
                    break
                machine.apply(now)
                now = machine.plan(role)
                shown[f"plan {at}"] = difference(page.shown(now), bare)
            shown["settled"] = shown.popitem()[1] if len(shown) > 2 else {}
            unsettled[f"{manager} {role}"] = machine.pending(now)
            if "state" in settings(role):
                left = copy.deepcopy(machine)
                left.absent = role
                now = left.plan(role)
                shown["absent"] = page.shown(now)
                left.apply(now)
                unsettled[f"{manager} {role} absent"] = left.pending(left.plan(role))
            if manager == "dnf":
                shown |= {
                    name: difference(shown[name], part) for name, part in page.parts["apt"].items() if name in shown
                }
        unsettled |= {f"{manager} {role} after all roles": machine.pending(machine.plan(role)) for role in ORDER}
        machines[manager] = machine
    return Converged(pages, unsettled, machines)


if __name__ == "__main__":
    for name, page in converged().pages.items():
        (FOLDER / f"{name}.yml").write_text(page.text, encoding="utf-8")
