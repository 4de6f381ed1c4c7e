"""Common code of the action plugins: the import of gpunode, the state of a node, and the data kept during a run.

Ansible imports an action plugin in its main process and forks a worker for each task, so this module is loaded once.
A worker passes data to later workers through files in the run's own temporary folder, which Ansible removes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import signal
import time
import zlib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars
from ansible_collections.gpunode.node.plugins.plugin_utils.answers import (
    CONTROL,
    DECLARED,
    LONGEST_DOCUMENT,
    MORE,
    READER,
    gated,
    text,
)
from ansible_collections.gpunode.node.plugins.plugin_utils.policy import unusable

try:
    from gpunode.catalog import load
    from gpunode.errors import GpunodeError
    from gpunode.isolation import Exceeded, Workers
    from gpunode.provisioning.answers import parsed
    from gpunode.provisioning.context import PARTS, Context, Planned, probe_text
    from gpunode.provisioning.manifest import USER_IN_URL
    from gpunode.provisioning.roles import LOOKS, NEEDS, PLANS
    from gpunode.provisioning.state import NodeState
    from gpunode.text import printable
    from gpunode.variables import plain

    load()
except ImportError as err:
    MISSING = unusable(err)
    LOOKS, NEEDS, PARTS, PLANS = {}, {}, {}, {}
else:
    MISSING = unusable()

ROOT = Path(__file__).resolve().parents[2]
OLDEST_S = 900
"""Maximum age of a node's state in seconds; an older one is collected again, as other tools may have changed it."""
RESERVED = ("gpunode_", "__")
"""Start of the names of variables that belong to the playbooks; the roles' own are in their specifications."""
OWN_FACTS = ("gpunode_restart_required", "gpunode_reboot_required")
SEALED = "gpunode-sealed:"
CALL_LIMIT_S = 900
LIMITS_S = {
    "driver_exchange": 1800,
    "scratch_disks": 3600,
    "kept_packages": 5400,
    "module_build": 5400,
    "package_transaction": 5400,
    "guarded_change": 1800,
}
"""Seconds within which a module must answer, in addition to the limits in its arguments; others: CALL_LIMIT_S."""


def need_gpunode() -> None:
    """Raise AnsibleActionFail if the package gpunode is missing."""
    if MISSING is not None:
        raise AnsibleActionFail(MISSING)


def specifications() -> dict[str, dict[str, Any]]:
    """Return the options of each role, by role name."""
    by_role = {}
    for file in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        document = yaml.load(file.read_text(encoding="utf-8"), READER)  # noqa: S506 - a safe loader
        by_role[file.parts[-3]] = document["argument_specs"]["main"]["options"]
    return by_role


SPECIFICATIONS = specifications()


class Run:
    """The data that a run keeps about one node."""

    def __init__(self, host: str) -> None:
        digest = hashlib.sha256(host.encode()).hexdigest()[:24]
        self.folder = Path(constants.DEFAULT_LOCAL_TMP) / "gpunode" / digest

    def read(self, name: str) -> Any:
        """Return the JSON value kept under a name; None if nothing was kept."""
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def text(self, name: str, oldest_s: float) -> str | None:
        """Return the text kept under a name; None if nothing was kept or it is older than ``oldest_s``."""
        path = self.folder / name
        try:
            return path.read_text(encoding="utf-8") if time.time() - path.stat().st_mtime < oldest_s else None
        except FileNotFoundError:
            return None

    def keep(self, name: str, text: str) -> None:
        """Keep a text under a name, readable only by the current user."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.folder / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(self.folder / name)

    def forget(self, name: str) -> None:
        """Delete what was kept under a name, or set aside."""
        for path in (self.folder / name, self.folder / f"{name}-aside"):
            path.unlink(missing_ok=True)

    def set_aside(self, name: str) -> None:
        """Forget what was kept under a name, unless it is taken back before it is kept again."""
        with suppress(FileNotFoundError):
            (self.folder / name).replace(self.folder / f"{name}-aside")

    def take_back(self, name: str) -> None:
        """Keep again what was set aside under a name."""
        if not (self.folder / name).exists():
            with suppress(FileNotFoundError):
                (self.folder / f"{name}-aside").replace(self.folder / name)

    def sealed(self, document: Any) -> Any:
        """Return a document with a reference in place of each secret: private contents, and URLs with a user.

        Results and callbacks have the reference; ``unsealed`` has the text, in the actions of this run alone.
        """
        secret = {text for text in _private(document) if text}
        references: dict[str, str] = {}

        def walk(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: walk(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [walk(item) for item in value]
            if not isinstance(value, str) or not (value in secret or USER_IN_URL.search(value)):
                return value
            if value not in references:
                references[value] = f"{SEALED}{secrets.token_hex(16)}"
                self.keep(references[value], value)
            return references[value]

        return walk(document)

    def unsealed(self, value: Any) -> Any:
        """Return the value with the texts that the references in it stand for; a file with such content is private."""
        if isinstance(value, Mapping):
            private = {"private": True} if str(value.get("content")).startswith(SEALED) else {}
            return {key: self.unsealed(item) for key, item in value.items()} | private
        if isinstance(value, list | tuple):
            return [self.unsealed(item) for item in value]
        if isinstance(value, str) and re.fullmatch(rf"{SEALED}[0-9a-f]{{32}}", value):
            return (self.folder / value).read_bytes().decode()
        return value


def _private(value: Any) -> Iterator[str]:
    """Yield the content of each file in a document that is marked as private."""
    if isinstance(value, Mapping):
        if value.get("private") and isinstance(value.get("content"), str):
            yield value["content"]
        value = list(value.values())
    for item in value if isinstance(value, list | tuple) else ():
        yield from _private(item)


class GpunodeAction(ActionBase):  # type: ignore[misc]
    """Base class of the action plugins."""

    LONGEST_ANSWER = LONGEST_DOCUMENT
    """Characters of what a module prints; the gate of the playbooks reads it."""
    task_vars: dict[str, Any]
    node: Run
    keys: Mapping[str, str] = MappingProxyType({})
    """Keys of the answer that is being read, with their types."""
    discovered: Mapping[str, Any] = MappingProxyType({})
    """The interpreter that Ansible discovered on the node, as a fact."""

    def begin(self, task_vars: dict[str, Any] | None) -> None:
        """Read the task's variables; called first by each action."""
        need_gpunode()
        self.task_vars = task_vars or {}
        self.host = str(self._task.delegate_to or self.task_vars.get("inventory_hostname", "the node"))
        self.node = Run(self.host)
        self.refuse_ungated()
        self.refuse_shadowed()

    def refuse_ungated(self) -> None:
        """Raise AnsibleActionFail in a playbook of this collection that runs without its callback node_answers.

        Ansible loads callbacks for the first playbook of a command: those beside a later ``gpunode.node.site`` are not.
        """
        folder = Path(str(self.task_vars.get("playbook_dir", ""))).resolve()
        if folder == ROOT / "playbooks" and not hasattr(ActionBase._parse_returned_data, "of_gpunode"):
            raise AnsibleActionFail(
                "the callback node_answers, which bounds the answers of nodes, is not loaded: run gpunode's playbook "
                "first or alone, or import it in yours (import_playbook: gpunode.node.site)"
            )

    def refuse_shadowed(self) -> None:
        """Raise AnsibleActionFail if a fact has the name of a variable of the roles: it would take precedence."""
        facts = self.task_vars.get("ansible_facts")
        known = {name for options in SPECIFICATIONS.values() for name in options}
        if not constants.INJECT_FACTS_AS_VARS or not isinstance(facts, Mapping):
            return
        for name in facts:
            if str(name) in known or (str(name).startswith(RESERVED) and name not in OWN_FACTS):
                raise AnsibleActionFail(
                    f"{self.host} has a fact named {text(str(name))[:60]}, which is a variable of gpunode: facts take "
                    "precedence over the inventory, so set the variable in the inventory and clear the facts"
                )

    def call(self, module: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a module of the collection on the node and return its answer.

        Its arguments, long or secret, are not logged on the node. Raises AnsibleActionFail if the module failed.
        """
        more = MORE.get(module, {})
        waits = sum(int(arguments.get(name) or 0) for name in ("limit_s", "lock_wait_s"))
        limit_s = LIMITS_S.get(module, CALL_LIMIT_S) + waits
        keys = {**DECLARED[module], **more}
        kept, self._task.no_log = self._task.no_log, True
        try:
            answer = self.answered(f"gpunode.node.{module}", self.node.unsealed(plain(arguments)), keys, limit_s)
        finally:
            self._task.no_log = kept
        if answer.get("failed"):
            raise AnsibleActionFail(f"{self.host}: {answer.get('msg') or _last_line(answer)}")
        missing_keys = [name for name, kind in more.items() if kind == "document" and name not in answer]
        if missing_keys:
            raise AnsibleActionFail(f"{self.host}: the answer of {module} has no {missing_keys[0]}")
        return answer

    def answered(
        self, module: str, arguments: dict[str, Any], keys: Mapping[str, str], limit_s: int = CALL_LIMIT_S
    ) -> dict[str, Any]:
        """Run any module on the node within a time limit; return the known keys of its answer, typed and bounded."""
        self.keys = keys
        with self.limited(limit_s, module):
            answer: dict[str, Any] = self._execute_module(
                module_name=module, module_args=arguments, task_vars=self.task_vars
            )
        # The node's own facts were dropped; what is left is the interpreter that Ansible discovered.
        facts = answer.get("ansible_facts") or {}
        known = {name: value for name, value in facts.items() if name.startswith("discovered_interpreter_")}
        self.discovered = {**self.discovered, **known}
        fields: dict[str, Any] = gated(answer, keys)
        return fields

    def _parse_returned_data(self, res: dict[str, Any], *rest: Any, **options: Any) -> dict[str, Any]:
        """Parse what a module printed; Ansible prints parts of it as they are, and acts on unknown keys."""
        printed = str(res.get("stdout", ""))
        if len(printed) > LONGEST_DOCUMENT:
            raise AnsibleActionFail(f"{self.host}: a module answered more than {LONGEST_DOCUMENT >> 20} MiB")
        safe = {**res, "stdout": CONTROL.sub("", printed), "stderr": text(str(res.get("stderr", "")))}
        fields: dict[str, Any] = gated(super()._parse_returned_data(safe, *rest, **options), self.keys)
        return fields

    @contextmanager
    def limited(self, seconds: int, subject: str) -> Iterator[None]:
        """Raise AnsibleActionFail if the block takes longer, and end the programs that it waits for."""
        started = time.monotonic()

        def end(*_: object) -> None:
            with suppress(OSError):
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
                    os.kill(int(child), signal.SIGTERM)
            raise AnsibleActionFail(f"{self.host}: {subject} did not answer within {seconds} s")

        left = signal.alarm(0)
        if left and left <= seconds:
            # The time limit of the task itself ends first.
            signal.alarm(left)
            yield
            return
        outer = signal.signal(signal.SIGALRM, end)
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, outer)
            if left:
                signal.alarm(max(1, left - int(time.monotonic() - started)))

    def invocation(self) -> dict[str, Any]:
        """Return the task's arguments for ``-vvv``, without contents that are private."""

        def shown(value: Any) -> Any:
            if isinstance(value, Mapping):
                hidden = {"content": "(not shown)"} if value.get("private") and value.get("content") else {}
                return {key: shown(item) for key, item in value.items()} | hidden
            if isinstance(value, list | tuple):
                return [shown(item) for item in value]
            return "(not shown)" if isinstance(value, str) and USER_IN_URL.search(value) else value

        return {"invocation": {"module_args": shown(plain(self._task.args))}}

    def needs(self, role: str) -> frozenset[str]:
        """Return the parts of the state that the plan of a role needs."""
        return frozenset(NEEDS[role]) if role not in SPECIFICATIONS or self.manages(role) else frozenset()

    def state(self, needed: frozenset[str] = frozenset(), fresh: bool = False) -> NodeState:
        """Return the state of the node with the parts in ``needed``; read it if it is unknown or may have changed.

        A run reads first what any of its roles needs, so that a node that does not change is read once. After a change
        it reads what the role needs that comes next.
        """
        known = None if fresh else self.node.text("state", OLDEST_S)
        if known is not None:
            state = NodeState.model_validate_json(known)
            if not needed & {*state.unread}:
                return state
        if fresh or known is not None or self.node.text("read", math.inf) is None:
            needed = needed.union(*map(self.needs, NEEDS))
        unread = tuple(sorted(PARTS.keys() - needed))
        wanted = {
            name: sorted({path for look in LOOKS.values() for path in getattr(look, name)})
            for name in ("paths", "globs", "contents")
        }
        for name, more in wanted.items():
            more += [str(path) for path in plain(self._task.args.get(name) or [])]
        wanted["paths"] += [str(file["path"]) for file in self.settings("gpu_tools")["gpunode_extra_files"]]
        arguments = {
            "probe": probe_text(unread),
            "lock_wait_s": int(self.settings("preflight")["lock_wait_s"]),
            "parts": sorted(name for name in needed if PARTS[name].fields),
            "users": self.named_users(),
            **wanted,
        }
        answer = self.call("node_state", arguments)
        # Ansible waits for the slowest node of a task without a time limit.
        where = f"what {self.host} answered"
        try:
            with Workers(parsed, most=1) as apart:
                text = apart(unpacked(str(answer["state"])), where, unread).decode()
        except GpunodeError as err:
            raise AnsibleActionFail(str(err)) from None
        except (Exceeded, ValueError, zlib.error) as err:
            raise AnsibleActionFail(f"{where}: {err}") from None
        state = NodeState.model_validate_json(text)
        self.node.keep("state", text)
        self.node.keep("read", "")
        return state

    def named_users(self) -> list[str]:
        """Return the users that the roles' settings name: they may come from a directory service."""
        ssh = self.settings("ssh_hardening")
        lists = [ssh[name] for name in ("admin_users", "allow_users", "forwarding_users")]
        admins = [str(admin["name"]) for admin in self.settings("accounts")["admins"]]
        return sorted({*admins, *(str(user) for users in lists for user in users)})

    def manages(self, role: str) -> bool:
        """Return whether an opt-in role is enabled."""
        return role in SPECIFICATIONS and self.settings(role).get("state") != "keep"

    def settings(self, role: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a role's settings by name without the role prefix, converted to the types of its specification."""
        options = SPECIFICATIONS[role]
        values = {name: option.get("default") for name, option in options.items()}
        variables = {**self.task_vars, **dict(self.listed_with(role))}
        values |= {name: variables[name] for name in options if name in variables}
        values = {name: plain(self._templar.template(value)) for name, value in values.items()}
        values |= {name: value for name, value in (extra or {}).items() if name in options}
        empty = [name for name in options if values[name] is None and options[name].get("default") is not None]
        if empty:
            raise AnsibleActionFail(
                f"{self.host}: role {role}: {', '.join(empty)}: no value: remove it for the default"
            )
        set_ = {name: value for name, value in values.items() if value is not None}
        checked = ArgumentSpecValidator(options).validate(set_)
        if checked.error_messages:
            raise AnsibleActionFail(f"{self.host}: role {role}: {'; '.join(checked.error_messages)}")
        result = {**dict.fromkeys(options), **plain(checked.validated_parameters)}
        return {name.removeprefix(f"{role}_"): result[name] for name in options}

    def play_roles(self) -> list[Any]:
        """Return the roles of this collection that the task's play lists."""
        try:
            roles = self._task.get_play().roles
        except AttributeError:  # a task that a test or another plugin made
            return []
        return [role for role in roles if Path(role._role_path).resolve().parent == ROOT / "roles"]

    def listed_with(self, role: str) -> Iterator[tuple[str, Any]]:
        """Yield the variables that the play lists with a role; Ansible passes them to the tasks of this role alone.

        The plan of a role depends on other roles: the repository on the driver, the driver on the toolkit.
        """
        task_role = getattr(self._task, "_role", None)
        if task_role is not None and task_role.get_name(include_role_fqcn=False) == role:
            return
        for play_role in self.play_roles():
            if play_role.get_name(include_role_fqcn=False) == role:
                local = {**play_role.vars, **play_role.get_role_params()}
                yield from ((name, value) for name, value in local.items() if name not in load_extra_vars(self._loader))

    def variable(self, name: str, default: Any = None) -> Any:
        """Return a variable of the host, templated."""
        return plain(self._templar.template(self.task_vars[name])) if name in self.task_vars else default

    def site_path(self, variable: str, requested: str, *, folder: bool = False) -> str:
        """Return the absolute path of a file or folder of the site, which begins at the playbook; empty: none."""
        if not requested:
            return ""
        path = Path(str(self.task_vars.get("playbook_dir") or "."), requested).resolve()
        if not (path.is_dir() if folder else path.is_file()):
            kind = "folder" if folder else "file"
            raise AnsibleActionFail(f"{variable}: {path} is not a {kind} (a relative path begins at the playbook)")
        return str(path)

    def forced(self) -> bool:
        """Return whether changes are made even if none is pending (``gpunode_force``)."""
        return str(self.variable("gpunode_force", False)).lower() in ("true", "yes", "on", "1")

    def context(self, role: str, extra: Mapping[str, Any] | None = None) -> Context:
        """Return the input of a plan besides the state."""
        known: dict[str, dict[str, Any]] = {}

        def settings_of(other: str) -> dict[str, Any]:
            if other not in known:
                known[other] = self.settings(other, extra if other == role else None)
            return known[other]

        planned = planned_of(self.node.read("planned"))
        return Context(
            host=self.host,
            settings_of=settings_of,
            check=bool(self._task.check_mode),
            templates=self.site_path(
                "gpunode_templates", str(settings_of("preflight")["gpunode_templates"]), folder=True
            ),
            lock=self.variable("gpunode_stack") or None,
            planned=Planned(planned["files"], planned["packages"], tuple(planned["purge"]), tuple(planned["users"])),
            variables=tuple(str(name) for name in self.task_vars),
            inventories=tuple(map(str, self.variable("ansible_inventory_sources") or ())),
            reboot_reasons=tuple(reason for reasons in (self.node.read("reboot") or {}).values() for reason in reasons),
            reboot_requested=tuple(str(self.variable("gpunode_reboot_required") or "").split("; ")),
            boot_before=self.node.read("boot") or "",
            restarts={
                unit: why for units in (self.node.read("restarts") or {}).values() for unit, why in units.items()
            },
            drains=bool(self.variable("gpunode_drain_tasks")),
            image=bool(settings_of("preflight")["gpunode_image"]),
            local=str(self.variable("ansible_connection", "ssh")) in ("local", "ansible.builtin.local"),
            boot_id=_first_line("/proc/sys/kernel/random/boot_id"),
            machine_id=_first_line("/etc/machine-id"),
        )


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def planned_of(*parts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the planned ``files``, ``packages``, ``purge`` and ``users`` of all parts in one mapping."""
    whole: dict[str, Any] = {"files": {}, "packages": {}, "purge": [], "users": []}
    for part in parts:
        whole["files"].update((part or {}).get("files") or {})
        whole["packages"].update((part or {}).get("packages") or {})
        for name in ("purge", "users"):
            whole[name] = sorted({*whole[name], *((part or {}).get(name) or ())})
    return whole


def unpacked(packed: str) -> str:
    """Return the text of a document that a module compressed. Raise ValueError or zlib.error if it is malformed."""
    reader = zlib.decompressobj()
    document = reader.decompress(b64decode(packed, validate=True), LONGEST_DOCUMENT)
    if not reader.eof:
        raise ValueError(f"longer than {LONGEST_DOCUMENT >> 20} MiB, or cut")
    return document.decode()


def _last_line(answer: Mapping[str, Any]) -> str:
    """Return the last line that a crashed module printed."""
    lines = [line for name in ("module_stderr", "module_stdout") for line in str(answer.get(name, "")).splitlines()]
    return printable(lines[-1]) if lines else "the module reported no reason"


__all__ = ["LOOKS", "OLDEST_S", "PARTS", "PLANS", "GpunodeAction", "Run", "need_gpunode", "planned_of"]
