"""Nodes as ``node_state`` reports them, for the tests of the plans."""

import hashlib
from functools import cache
from typing import Any

import yaml
from driver_samples import APT, BUNDLE, facts_of

from gpunode.content import collection_root
from gpunode.provisioning.context import Context, Planned
from gpunode.provisioning.manifest import ManagedFile, Manifest, compared
from gpunode.provisioning.roles import LOOKS, PLANS
from gpunode.provisioning.state import NodeState

APT_STATE: dict[str, Any] = {
    **APT,
    "publishers": {},
    "policy_left": False,
    "key": None,
    "lock_holder": None,
    "runfile": False,
}
DNF_STATE: dict[str, Any] = {"error": None, "versionlock": True, "version": "4"}
RHEL = {"id": "rocky", "version_id": "9.4", "pretty_name": "Rocky Linux 9.4", "codename": None}
ABSENT = {"kind": "absent"}


def file(text: str, mtime: float = 100.0, mode: str = "0644") -> dict[str, Any]:
    """What is reported of a file with this text."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"kind": "file", "sha256": digest, "mode": mode, "owner": "root", "group": "root", "mtime": mtime}


def node(
    installed: dict[str, str] | None = None,
    texts: dict[str, str] | None = None,
    *,
    dnf: bool = False,
    held: tuple[str, ...] = (),
    files: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> NodeState:
    """A node of the fixture with these packages and documents; every other path that a role looks at is absent."""
    looked = {path for look in LOOKS.values() for path in (*look.paths, *look.contents)}
    contents = {path for look in LOOKS.values() for path in look.contents}
    documents = {path: file(text) for path, text in (texts or {}).items()}
    base = dict(_facts())
    if dnf:
        base["os"] = {**base["os"], **RHEL}
    return NodeState.model_validate(
        {
            "facts": {**base, **(facts or {})},
            "apt": None if dnf else {**APT_STATE, "installed": installed or {}, "held": held},
            "dnf": {**DNF_STATE, "installed": installed or {}} if dnf else None,
            "files": {**dict.fromkeys(looked, ABSENT), **documents, **(files or {})},
            "contents": {**dict.fromkeys(contents), **(texts or {})},
            "engine": engine or {},
        }
    )


def settings_of(role: str, /, **changes: Any) -> dict[str, Any]:
    """The role's defaults, without its name in front, with changes."""
    return {**_defaults(role), **changes}


@cache
def _defaults(role: str) -> dict[str, Any]:
    file = collection_root() / "roles" / role / "meta" / "argument_specs.yml"
    options = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)["argument_specs"]["main"]["options"]
    return {name.removeprefix(f"{role}_"): option.get("default") for name, option in options.items()}


@cache
def _facts() -> dict[str, Any]:
    return facts_of(BUNDLE)


def context(**changes: Any) -> Context:
    """A run with the defaults of every other role; ``others``: role to changes of its settings."""
    others = changes.pop("others", {})
    return Context(host="a node", settings_of=lambda role: settings_of(role, **others.get(role, {})), **changes)


def planned(role: str, state: NodeState, run: Context | None = None, /, **settings: Any) -> Manifest:
    """The judged manifest of a role."""
    return compared(PLANS[role](state, settings_of(role, **settings), run or context()), state)


def contents(manifest: Manifest) -> dict[str, str | None]:
    """Path to text of each file."""
    return {each.path: each.content for each in manifest.files}


def by_path(manifest: Manifest, path: str) -> ManagedFile:
    return next(each for each in manifest.files if each.path == path)


def after(manifest: Manifest, state: NodeState, **changes: Any) -> NodeState:
    """The node when the manifest's files are as they have to be."""
    document = state.model_dump()
    for each in manifest.files:
        entry = ABSENT if each.content is None else file(each.content, mode=each.mode)
        document["files"][each.path] = entry
        if each.path in document["contents"]:
            document["contents"][each.path] = each.content
    for folder in manifest.folders:
        document["files"][folder.path] = {"kind": "folder", "mode": folder.mode, "entries": 1}
    return NodeState.model_validate({**document, **changes})


__all__ = [
    "Planned",
    "after",
    "by_path",
    "collection_root",
    "contents",
    "context",
    "file",
    "node",
    "planned",
    "settings_of",
]
