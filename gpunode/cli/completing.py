"""Values that Tab completes: checks, hosts of the inventory, GPUs, systems, files."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpunode.errors import GpunodeError
from gpunode.whole import make_private_folder, whole_file

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
FILES = frozenset({"FILE", "DIR", "INVENTORY", "KIND=FILE", "KEY=VALUE|@FILE"})
"""Metavars of options with a file."""


def complete_checks(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids of checks that complete the last one of a list ``ID[,ID]``."""
    from gpunode.checks import registry  # noqa: PLC0415 (the checks are slow to load)

    before, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(before + comma + check.id, help=check.category)
        for check in registry
        if check.id.startswith(last)
    ]


def complete_hosts(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return hosts and groups of the inventory (-i) that complete the last part of a pattern ``gpu-01,gpu-02``."""
    begun = re.match(r"(.*[,:][!&]?|[!&]?)([^,:]*)$", incomplete)
    before, last = (begun[1], begun[2]) if begun else ("", incomplete)
    names = _hosts_of(tuple(ctx.params.get("inventories") or ()))
    return [CompletionItem(before + name) for name in names if name.startswith(last)]


def complete_files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion of a file's name to the shell."""
    return [CompletionItem(incomplete, type="file")]


def _one_of(names: Callable[[], Iterable[str]]) -> Completer:
    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def _gpus() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (slow to load)

    return load().gpus


def _platforms() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (the same)

    return load().platforms


def _systems() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (the same)

    return load().systems


def _drivers() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (the same)
    from gpunode.stack.question import WORDS  # noqa: PLC0415 (the same)

    return [*WORDS, *load().branches]


def _hardware() -> Iterable[str]:
    from gpunode.lab.hardware import names  # noqa: PLC0415 (slow to load)

    return names()


def _lab_systems() -> Iterable[str]:
    from gpunode.lab.recipe import SYSTEMS  # noqa: PLC0415 (slow to load)

    return SYSTEMS


def _schemas() -> Iterable[str]:
    # By name, as the group of all verbs loads it: it imports this module.
    models: dict[str, Any] = import_module("gpunode.cli.schema").MODELS
    return models


def _parsers() -> Iterable[str]:
    from gpunode.facts.parsers.kinds import ANSWERS  # noqa: PLC0415 (slow to load)

    return ANSWERS


def _roles() -> Iterable[str]:
    from gpunode.content import collection_root  # noqa: PLC0415 (only needed here)
    from gpunode.provisioning.role import role_tags  # noqa: PLC0415 (slow to load)

    roles = sorted(path.parts[-3] for path in collection_root().glob("roles/*/meta/main.yml"))
    return [tag for role in roles for tag in role_tags(role)]


COMPLETERS: dict[tuple[str, str], Completer] = {
    ("", "limit"): complete_hosts,
    ("", "gpus"): _one_of(_gpus),
    ("", "platform"): _one_of(_platforms),
    ("", "driver"): _one_of(_drivers),
    ("", "hardware"): _one_of(_hardware),
    ("plan", "system"): _one_of(_systems),
    ("up", "system"): _one_of(_lab_systems),
    ("schema", "name"): _one_of(_schemas),
    ("parse", "kind"): _one_of(_parsers),
    ("provision", "tags"): _one_of(_roles),
    ("provision", "skip_tags"): _one_of(_roles),
    ("env", "gpus"): _one_of(list),
}
"""By the name of a command (empty: any) and of a parameter."""


def add_completer(command: click.Command, param: click.Parameter) -> None:
    """Give a parameter its completion, unless its type or its declaration has one."""
    if param._custom_shell_complete is not None or not isinstance(param.type, type(click.STRING)):
        return
    known = COMPLETERS.get((command.name or "", param.name or "")) or COMPLETERS.get(("", param.name or ""))
    if known is None and param.metavar in FILES:
        known = complete_files
    if known is not None:
        param._custom_shell_complete = known


def _hosts_of(inventories: tuple[str, ...]) -> list[str]:
    """Return hosts and groups of inventory files, from a cache if the files are unchanged. Nothing is run for a
    program: Tab must not query a cloud.
    """
    files = [Path(text) for text in inventories]
    with suppress(OSError, RuntimeError, ValueError, GpunodeError):
        if not files or not all(file.is_dir() or (file.is_file() and not os.access(file, os.X_OK)) for file in files):
            return []
        state = [[str(file.resolve()), *sorted(_stamps(file))] for file in files]
        kept = _cache_folder() / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}.json"
        if kept.is_file():
            return _names_in(json.loads(kept.read_text(encoding="utf-8")))
        from gpunode.fleet import inventory  # noqa: PLC0415 (slow to load)

        contents = inventory.read(inventories)
        names = sorted({*contents.hosts, *contents.groups})
        make_private_folder(kept.parent)
        with whole_file(kept, private=True) as stream:
            stream.write(json.dumps(names).encode())
        return names
    return []


def _names_in(content: Any) -> list[str]:
    return [str(name) for name in content] if isinstance(content, list) else []


def _stamps(file: Path) -> Iterable[str]:
    members = file.iterdir() if file.is_dir() else [file]
    return (f"{member.name} {member.stat().st_mtime_ns}" for member in members)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpunode" / "completion"
