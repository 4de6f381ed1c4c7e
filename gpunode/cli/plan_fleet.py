"""The machine side of ``gpunode plan``: hosts of an inventory, and the locks beside their variables."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from gpunode.catalog import Catalog
from gpunode.cli.selection import ask_password, shown_progress
from gpunode.cli.writing import write_whole
from gpunode.errors import UsageError
from gpunode.fleet import collect
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.stack import LOCK_NAME, Plan, PlanHost, Stack, lock_document

LOCK_FILE = f"{LOCK_NAME}.yml"
HEADER = """\
# Written by gpunode plan --write: the stack that was decided for this {what}. A new decision replaces the whole file;
# take the file away to unlock. Your own variables belong into a file beside it.
"""
_SUFFIXES = ("", ".yml", ".yaml", ".json")
"""What Ansible looks for as a host's or group's variables, in this order, stopping at the first."""


class Options(Protocol):
    """What of the command line matters here."""

    @property
    def inventories(self) -> tuple[str, ...]: ...
    @property
    def limit(self) -> str | None: ...
    @property
    def parallel(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def ask_become_pass(self) -> bool: ...


@dataclass(frozen=True)
class Answers:
    """Hosts as they answer, and the inventory they are from."""

    inventory: Inventory
    hosts: Iterable[PlanHost]


def of_inventory(options: Options, catalog: Catalog) -> Answers:
    """Collect from the hosts of an inventory. Raises UsageError where it cannot be read."""
    inventory, config = read_with_settings(options.inventories, options.limit, SETTINGS)
    found = targets(inventory, config)
    password = ask_password() if options.ask_become_pass else None

    def hosts() -> Iterator[PlanHost]:
        from gpunode.cli.plan import host_of  # noqa: PLC0415 (it imports this module)

        answers = collect(found, parallel=options.parallel, timeout_s=options.timeout_s, become_password=password)
        with shown_progress([target.name for target in found]) as update:
            for answer in answers:
                update(answer.host)
                if answer.bundle is None:
                    yield PlanHost(answer.host, None, answer.reason)
                else:
                    yield host_of(answer.host, answer.bundle, catalog, inventory.hosts[answer.host].get(LOCK_NAME))

    return Answers(inventory, hosts())


def write_locks(document: Plan, inventory: Inventory, limit: str | None) -> list[Path]:
    """Write what was decided; return the files.

    One file for the group where a whole group (``--limit GROUP``, or nothing for ``all``) has one stack, else one for
    each host. Nothing is written where a host has no stack, or where a file of the user would be masked: UsageError.
    """
    without = [host for group in document.groups if group.stack is None for host in group.hosts]
    if without:
        raise UsageError(f"--write: nothing is locked, for there is no stack for {', '.join(sorted(without)[:5])}")
    folder = _folder(inventory.sources)
    stacks = {host: group.stack for group in document.groups for host in group.hosts if group.stack is not None}
    name = "all" if limit is None else limit
    if len(document.groups) == 1 and (name == "all" or name in inventory.groups):
        files = {_place(folder / "group_vars", name): (name, next(iter(stacks.values())))}
        outdated = [folder / "host_vars" / host / LOCK_FILE for host in stacks]
    else:
        files = {_place(folder / "host_vars", host): (host, stack) for host, stack in stacks.items()}
        outdated = []
    for path, (owner, stack) in files.items():
        what = f"group ({owner})" if "group_vars" in path.parts else f"host ({owner})"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lock_text(stack, what))
    for path in outdated:
        path.unlink(missing_ok=True)
    return sorted(files)


def lock_text(stack: Stack, what: str) -> str:
    """A lock file's text."""
    body: str = yaml.safe_dump(lock_document(stack), sort_keys=False, width=110)
    return HEADER.format(what=what) + "---\n" + body


def _folder(sources: tuple[str, ...]) -> Path:
    """Where the inventory's variable folders stand."""
    if len(sources) != 1:
        raise UsageError("--write needs one inventory: with several it is not said beside which one the lock belongs")
    path = Path(sources[0])
    if not path.exists():
        raise UsageError(f"--write: {sources[0]} is no file or folder; there is nothing a lock could stand beside")
    folder = path if path.is_dir() else path.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--write: {folder} is not writable")
    return folder


def _place(folder: Path, name: str) -> Path:
    """The lock's path; UsageError where Ansible would then no longer read a file of the user."""
    masked = next((path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)
    if masked is not None:
        inside = folder / name / f"vars{masked.suffix or '.yml'}"
        raise UsageError(
            f"--write: Ansible reads {masked} or the folder {folder / name}/, not both; move the file to {inside} first"
        )
    return folder / name / LOCK_FILE
