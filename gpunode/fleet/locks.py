"""Locks of stacks (``gpunode_stack``) in the variable folders of an inventory."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunode.errors import UsageError
from gpunode.fleet.inventory import Inventory, read
from gpunode.stack import LOCK_NAME, Plan, Stack, lock_document
from gpunode.stack.drift import FREE_TEXT, refuse_templates
from gpunode.variables import refuse_unknown, refuse_wrong_values
from gpunode.whole import exists, write_whole
from gpunode.yaml_file import load_bounded

LOCK_FILE = f"{LOCK_NAME}.yml"
HEADER = """\
# Written by gpunode plan --write: the stack resolved for this {subject}. A new plan replaces the whole file;
# remove the file to unlock. Put your own variables into another file.
"""
_UNSAFE = "!unsafe"
_SUFFIXES = ("", ".yml", ".yaml", ".json")
"""The suffixes under which Ansible searches a host's or group's variables, in this order, up to the first match."""


def write_locks(document: Plan, inventory: Inventory, limit: str | None) -> list[Path]:
    """Write the decided stacks; return the files.

    One file for the group if a whole group (``--limit GROUP``, or nothing for ``all``) has one stack, else one for each
    host. Locks of its hosts and of narrower groups inside it are removed: they would take precedence over the new one.
    Nothing is changed, and UsageError raised, if a host has no stack, if a file of the user would be masked, or if
    Ansible would still use an older lock.
    """
    files, outdated, stacks = _locks(document, inventory, limit)
    folder = _folder(inventory.sources)
    before = {path: path.read_bytes() if path.exists() else None for path in (*files, *outdated)}
    try:
        for path, (owner, stack) in files.items():
            subject = f"group ({owner})" if "group_vars" in path.parts else f"host ({owner})"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lock_text(stack, subject))
        for path in outdated:
            _remove(path)
        _must_be_effective(folder, inventory, stacks)
    except BaseException:
        for path, content in before.items():
            _put_back(path, content)
        raise
    return sorted(files)


def locks_to_write(document: Plan, inventory: Inventory, limit: str | None) -> list[str]:
    """Return what ``write_locks`` would do, one line for each file; its reason if it would refuse."""
    try:
        files, outdated, _ = _locks(document, inventory, limit)
    except UsageError as err:
        return [str(err)]
    lines = []
    for path, (owner, stack) in sorted(files.items()):
        old = _as_read(path.read_text(encoding="utf-8")) if path.exists() else None
        same = old == _as_read(lock_text(stack, owner))
        lines.append(
            f"--write: {path} {'has this lock' if same else 'would be replaced' if old else 'would be written'}"
        )
    return [*lines, *(f"--write: {path} would be removed" for path in outdated)]


Locks = tuple[dict[Path, tuple[str, Stack]], list[Path], dict[str, Stack]]


def _locks(document: Plan, inventory: Inventory, limit: str | None) -> Locks:
    """Return the files with their owners and stacks, the outdated locks, and the stack of each host."""
    without = [host for group in document.groups if group.stack is None for host in group.hosts]
    if without:
        raise UsageError(f"--write: nothing was locked: no stack for {', '.join(sorted(without)[:5])}")
    folder = _folder(inventory.sources)
    stacks = {host: group.stack for group in document.groups for host in group.hosts if group.stack is not None}
    name = "all" if limit is None else limit
    if len(document.groups) == 1 and (name == "all" or name in inventory.groups):
        files = {_lock_path(folder / "group_vars", name): (name, next(iter(stacks.values())))}
        outdated = [path for path in _narrower(folder, inventory, set(stacks)) if path not in files]
    else:
        files = {_lock_path(folder / "host_vars", host): (host, stack) for host, stack in stacks.items()}
        outdated = []
    return files, outdated, stacks


def refuse_inventory(root: Path, inventory: Inventory) -> None:
    """Raise UsageError for a variable of the inventory that no role has, for a value that it would refuse, and for a
    lock with a template.
    """
    names = {name for variables in inventory.hosts.values() for name in variables}
    refuse_unknown(names, root, inventory.sources)
    for host, variables in inventory.hosts.items():
        refuse_wrong_values(variables, root, inventory.sources, f"the inventory, host {host}")
    _refuse_poisoned_locks(inventory)


def _refuse_poisoned_locks(inventory: Inventory) -> None:
    """Raise UsageError for a lock with a template: earlier releases wrote a node's report unescaped.

    A lock that consists of one template is the user's own, and code like the rest of the inventory.
    """
    for host, variables in inventory.hosts.items():
        lock = variables.get(LOCK_NAME)
        if not isinstance(lock, dict):
            continue
        try:
            refuse_templates(lock, LOCK_NAME)
        except UsageError as err:
            file = _lock_file(inventory.sources, lock) or f"the inventory, host {host}"
            raise UsageError(f"{file}: {err}, remove this lock, then run gpunode plan --write") from None


def _lock_file(sources: Iterable[str], lock: Any) -> Path | None:
    """Return the variable file of the inventories with this lock."""
    folders = [path if path.is_dir() else path.parent for path in map(Path, sources) if exists(path)]
    files = (file for folder in folders for file in sorted(folder.glob(f"*_vars/*/{LOCK_FILE}")))
    return next((file for file in files if _as_read(file.read_text(encoding="utf-8")) == lock), None)


def _narrower(folder: Path, inventory: Inventory, hosts: set[str]) -> list[Path]:
    """Return earlier locks of some of these hosts and of no other: of a host, or of a group inside the wider one.

    Ansible uses the narrowest, so an older decision would take precedence over the new one.
    """
    locks = [folder / "host_vars" / host / LOCK_FILE for host in sorted(hosts)]
    for path in sorted((folder / "group_vars").glob(f"*/{LOCK_FILE}")):
        if path.parent.name in inventory.groups and _members(inventory, path.parent.name) <= hosts:
            locks.append(path)
    return [path for path in locks if path.exists()]


def _members(inventory: Inventory, group: str) -> set[str]:
    """Return the hosts of a group in the whole inventory."""
    try:
        return set(read(inventory.sources, group, inventory.vault).hosts)
    except UsageError:  # a group without hosts matches no pattern
        return set()


def _must_be_effective(folder: Path, inventory: Inventory, stacks: Mapping[str, Stack]) -> None:
    """Raise UsageError if Ansible, queried again, uses another ``gpunode_stack`` for a host than the decided one."""
    hosts = read(inventory.sources, None, inventory.vault).hosts
    for host, stack in sorted(stacks.items()):
        value = hosts.get(host, {}).get(LOCK_NAME)
        if value == _as_read(lock_text(stack, "")):
            continue
        locks = sorted(folder.glob(f"*_vars/*/{LOCK_FILE}"))
        same = (path for path in locks if _as_read(path.read_text(encoding="utf-8")) == value)
        owner = None if value is None else next(same, None)
        where = f"from {owner}" if owner else f"from another location of the inventory {inventory.sources[0]}"
        raise UsageError(
            f"--write: nothing was locked: {host} would still use {LOCK_NAME} {where}; remove it there first"
        )


def _as_read(text: str) -> Any:
    """Return the lock in a file as Ansible passes it on: JSON; None if the file has none."""
    content = load_bounded(text, LockLoader)
    return json.loads(json.dumps(content.get(LOCK_NAME), default=str)) if isinstance(content, Mapping) else None


def _remove(path: Path) -> None:
    """Remove a lock, and its folder if nothing else is in it: an empty one masks a file HOST.yml next to it."""
    path.unlink(missing_ok=True)
    if path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _put_back(path: Path, content: bytes | None) -> None:
    if content is None:
        _remove(path)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.decode("utf-8"))


def lock_text(stack: Stack, subject: str) -> str:
    """Return the text of a lock file."""
    body: str = yaml.dump(_free_text_marked(lock_document(stack)), Dumper=LockDumper, sort_keys=False, width=110)
    return HEADER.format(subject=subject) + "---\n" + body


class _Unsafe(str):
    """Free text, which Ansible must not treat as a template."""

    __slots__ = ()


class LockDumper(yaml.SafeDumper):
    """Dumper of ``_Unsafe`` with Ansible's tag."""


class LockLoader(yaml.SafeLoader):
    """Loader that reads that tag as Ansible does: as text."""


LockDumper.add_representer(_Unsafe, lambda dumper, text: dumper.represent_scalar(_UNSAFE, str(text)))
LockLoader.add_constructor(_UNSAFE, lambda _, node: str(node.value))


def _free_text_marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _Unsafe(item) if key == FREE_TEXT and isinstance(item, str) else _free_text_marked(item)
            for key, item in value.items()
        }
    return [_free_text_marked(item) for item in value] if isinstance(value, list) else value


def _folder(sources: tuple[str, ...]) -> Path:
    """Return the folder of the inventory's variable folders."""
    if len(sources) != 1:
        raise UsageError("--write needs one inventory: with several the location of the lock is ambiguous")
    path = Path(sources[0])
    if not exists(path):
        raise UsageError(f"--write: {sources[0]} is not a file or directory, so a lock has no location")
    folder = path if path.is_dir() else path.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--write: {folder} is not writable")
    return folder


def _lock_path(folder: Path, name: str) -> Path:
    """Return the lock's path; UsageError if Ansible would then no longer read a file of the user."""
    masked = next((path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)
    if masked is not None:
        inside = folder / name / f"vars{masked.suffix or '.yml'}"
        raise UsageError(
            f"--write: Ansible reads {masked} or the folder {folder / name}/, not both; move the file to {inside} first"
        )
    return folder / name / LOCK_FILE
