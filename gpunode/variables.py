"""Variables from Ansible: conversion of their values to plain ones, and detection of typos in their names."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpunode.errors import UsageError
from gpunode.text import did_you_mean, nearest
from gpunode.whole import exists
from gpunode.yaml_file import LOADER, Expanded, load_bounded

Variables = Mapping[str, Any]
"""Variables of an inventory: what Ansible makes of YAML."""
_OWN_PREFIX = "gpunode_"
_OF_VERBS = ("gpunode_policy", "gpunode_failure_domain")
"""Variables of an inventory that only a verb reads, not a role."""
_TASK_FILE = re.compile(r"\w+_tasks_(?:before|after)|gpunode_(?:un)?drain_tasks")
_TEMPLATE = re.compile(r"\{[{%]")
_INVENTORY_DIR = re.compile(r"\{\{\s*inventory_dir\s*\}\}")
_LONG = 8
"""From this length on, two typing errors are recognised, in place of one."""
_SUFFIXES = frozenset({"", ".yml", ".yaml", ".json", ".ini", ".cfg", ".toml"})
_MAX_FILE_BYTES = 1 << 20


def plain(value: Any) -> Any:
    """Return the value without Ansible's lazy and tagged containers, which Rust code would bypass."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@cache
def known_variables(root: Path) -> tuple[str, ...]:
    """Return the variables of all roles below ``root``, from their ``meta/argument_specs.yml``, of playbooks and of
    verbs.
    """
    names: set[str] = {*_OF_VERBS}
    for file in root.glob("playbooks/**/*.yml"):
        names.update(re.findall(rf"\b{_OWN_PREFIX}\w+", file.read_text(encoding="utf-8")))
    return tuple(sorted(names.union(specifications(root))))


@cache
def specifications(root: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return each variable of the roles below ``root`` with its specification: ``type``, ``choices``.

    They are read once, not once for each host of an inventory.
    """
    by_name: dict[str, Mapping[str, Any]] = {}
    for file in sorted(root.glob("roles/*/meta/argument_specs.yml")):
        document: Any = yaml.load(file.read_text(encoding="utf-8"), LOADER) or {}  # noqa: S506 (a safe one)
        for entry in document.get("argument_specs", {}).values():
            by_name.update(entry.get("options", {}))
    return by_name


def wrong_value(value: Any, specification: Mapping[str, Any]) -> str | None:
    """Return the error in a variable's value; None if Ansible would accept it, or if only Ansible can decide.

    Templates and vaulted values are not checked. Ansible's own conversions apply: text for a switch, a number for text,
    digits for a number.
    """
    if isinstance(value, str) and ("{{" in value or "{%" in value):
        return None
    if isinstance(value, Mapping) and set(value) & {"__ansible_vault", "__ansible_unsafe"}:
        return None
    kind = str(specification.get("type", "str"))
    choices = specification.get("choices")
    shown = "the value" if specification.get("no_log") else value
    known = [str(choice) for choice in choices or ()]
    for item in _items(value) if kind == "list" else [value]:
        if choices is not None and str(item) not in known and "{{" not in str(item):
            hint = did_you_mean(nearest(str(item), known))
            return f"{item} is not one of {', '.join(known)}{hint and f'; {hint}'}"
    if _of_kind(value, kind):
        return None
    types = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "list": "a list",
        "dict": "a mapping",
    }
    return f"{shown} is not {types.get(kind, 'text')}"


def _items(value: Any) -> list[Any]:
    """Return the items that Ansible reads from the value of a list; none of another value."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value] if isinstance(value, int | float) else []


def _of_kind(value: Any, kind: str) -> bool:
    text = str(value).strip().lower()
    if kind == "bool":
        return text in {"true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n", "1.0", "0.0"}
    if kind == "int":
        return not isinstance(value, bool) and re.fullmatch(r"[+-]?\d+", text) is not None
    if kind == "float":
        return not isinstance(value, bool) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text) is not None
    if kind == "list":
        return isinstance(value, str | int | float) or (isinstance(value, Sequence) and not isinstance(value, bytes))
    if kind == "dict":
        return isinstance(value, Mapping) or (
            isinstance(value, str) and ("=" in value or value.lstrip().startswith("{"))
        )
    return not isinstance(value, Mapping | list | tuple) or kind not in {"str", "path"}


def refuse_wrong_values(values: Mapping[str, Any], root: Path, sources: Sequence[str], where: str) -> None:
    """Raise UsageError for the first variable with a value that its role would refuse, with file and line."""
    known = specifications(root)
    for name in sorted(values.keys() & known.keys()):
        problem = wrong_value(values[name], known[name])
        if problem is not None:
            raise UsageError(f"{locate(name, sources) or where}: {name}: {problem}")


def refuse_missing_tasks(hosts: Mapping[str, Variables], root: Path, sources: Sequence[str]) -> None:
    """Raise UsageError for the first task file of the site that does not exist, with the line that names it.

    A relative path begins at the playbook. A path with another template than ``inventory_dir`` is not checked.
    """
    specified = specifications(root)
    known = {*specified, "gpunode_drain_tasks", "gpunode_undrain_tasks"}
    paths = [Path(source).absolute() for source in sources]
    folders = [path if exists(path) and path.is_dir() else path.parent for path in paths]
    for host, values in hosts.items():
        for name in sorted(name for name in values.keys() & known if _TASK_FILE.fullmatch(name)):
            text = values[name]
            state = f"{name.partition('_tasks_')[0]}_state"
            keeps = values.get(state, specified.get(state, {}).get("default")) == "keep"
            if keeps or not isinstance(text, str) or not text or _TEMPLATE.search(_INVENTORY_DIR.sub("", text)):
                continue
            named = [str(folder).join(_INVENTORY_DIR.split(text)) for folder in folders]
            files = [root / "playbooks" / each for each in named]
            if not any(file.is_file() for file in files):
                where = locate(name, sources) or f"host {host}"
                hint = "" if text.startswith(("/", "{{")) else '; write "{{ inventory_dir }}/…"'
                raise UsageError(f"{where}: {name}: {files[0]} is not a file{hint}")


def role_prefixes(root: Path) -> tuple[str, ...]:
    """Return the prefixes of role variables: the names of the roles below ``root``/roles, and ``gpunode_``."""
    roles = sorted(path.name for path in root.glob("roles/*") if path.is_dir())
    return (*(f"{role}_" for role in roles), _OWN_PREFIX)


def unknown_variables(
    names: Iterable[str], known: Iterable[str], prefixes: Sequence[str] = (_OWN_PREFIX,)
) -> list[tuple[str, str | None]]:
    """Return names that are a role's with a typing error, each with the known one that is meant (None: none).

    A role's prefix alone proves nothing: ``docker_packages`` and ``nvidia_driver_branch`` belong to roles of others.
    Only names with ``gpunode_`` in front are ours whatever follows.
    """
    valid = sorted(set(known))
    typos: list[tuple[str, str | None]] = []
    for name in sorted(set(names) - set(valid)):
        if name.startswith(("_", "ansible_")):
            continue
        prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        near = min(
            ((errors, right) for right in valid if (errors := _typing_errors(name, right, prefix))), default=None
        )
        if near is not None or name.startswith(_OWN_PREFIX):
            typos.append((name, near[1] if near is not None else None))
    return typos


def unread_variables(names: Iterable[str], root: Path) -> list[str]:
    """Return names with a role's prefix that no role below ``root`` has: of another collection's role, or wrong."""
    return sorted({name for name in names if name.startswith(role_prefixes(root))} - set(known_variables(root)))


def _typing_errors(name: str, right: str, prefix: str) -> int:
    """Return the number of typing errors that make ``name`` of a known name; 0 if it is another name."""
    least = 1 if len(name.removeprefix(prefix)) < _LONG else 2
    if abs(len(name) - len(right)) > least:
        return 0
    if sorted(name.split("_")) == sorted(right.split("_")):
        return 1
    errors = _edits(name, right, least)
    return errors if errors <= least else 0


def _edits(word: str, other: str, most: int) -> int:
    """Return how many characters are missing, too much, wrong or exchanged with their neighbour; above ``most``, any
    greater number."""
    before, row = list[int](), list(range(len(other) + 1))
    for number, char in enumerate(word, start=1):
        before, last, row = row, before, [number]
        for at, wanted in enumerate(other, start=1):
            cost = min(before[at] + 1, row[at - 1] + 1, before[at - 1] + (char != wanted))
            if number > 1 and at > 1 and char == other[at - 2] and word[number - 2] == wanted:
                cost = min(cost, last[at - 2] + 1)
            row.append(cost)
        if min(row) > most and min(before) > most:  # an exchange looks back two rows, no further
            return most + 1
    return row[-1]


def refuse_unknown(names: Iterable[str], root: Path, sources: Sequence[str], where: str = "the inventory") -> None:
    """Raise UsageError for the first name that is a typo, with the file and line among ``sources`` that has it.

    ``where`` is used for a name that is in none of the files.
    """
    unknown = unknown_variables(names, known_variables(root), role_prefixes(root))
    if not unknown:
        return
    name, near = unknown[0]
    location = locate(name, sources)
    more = f" ({len(unknown) - 1} more like it)" if len(unknown) > 1 else ""
    hint = did_you_mean([near]) if near else "no role has a similar one"
    raise UsageError(f"{location or where}: unknown variable {name}; {hint}{more}")


def locate(name: str, sources: Sequence[str]) -> str | None:
    """Return ``FILE:LINE`` of the first file that sets ``name``: the inventories and their variable folders."""
    return next(locations(name, sources), None)


def locations(name: str, sources: Sequence[str]) -> Iterator[str]:
    """Yield ``FILE:LINE`` for each file that sets ``name``, the first line of each."""
    sets = re.compile(rf"""(?<![\w.]){re.escape(name)}["']?\s*[:=]""")
    for file in _files(sources):
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                continue
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for number, line in enumerate(lines, start=1):
            if sets.search(line.partition(" #")[0]) and not line.lstrip().startswith(("#", ";")):
                yield f"{file}:{number}"
                break


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        path = Path(source.removeprefix("@"))
        if not exists(path):
            continue
        folder = path if path.is_dir() else path.parent
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from sorted(file for file in path.iterdir() if file.is_file() and file.suffix in _SUFFIXES)
        for name in ("group_vars", "host_vars"):
            yield from sorted(
                file for file in folder.glob(f"{name}/**/*") if file.is_file() and file.suffix in _SUFFIXES
            )


def refuse_extra_variables(root: Path, extra_vars: Sequence[str]) -> dict[str, Any]:
    """Return the variables of ``-e``. Raises UsageError for one that no role has, or with a value that it refuses."""
    variables: dict[str, Any] = {}
    for extra in extra_vars:
        values, files = _extra_variables(extra), [extra] if extra.startswith("@") else []
        refuse_unknown(values, root, files, "-e")
        refuse_wrong_values(values, root, files, "-e")
        variables |= values
    return variables


def _extra_variables(extra: str) -> dict[str, Any]:
    """Return the variables in one ``-e``: ``KEY=VALUE …``, JSON or YAML, or ``@FILE``; none of a vaulted file."""
    text, where = extra, f"-e {extra.partition('=')[0]}"
    if extra.startswith("@"):
        where = extra[1:]
        try:
            text = Path(where).expanduser().read_text(encoding="utf-8")
        except RuntimeError:
            raise UsageError(f"-e {extra}: no home directory of this user is known") from None
        except (OSError, UnicodeDecodeError) as err:
            raise UsageError(f"-e {extra}: {getattr(err, 'strerror', None) or 'not a text file'}") from None
        if text.startswith("$ANSIBLE_VAULT"):
            return {}
    elif not extra.lstrip().startswith(("{", "[")):
        names = re.findall(r"(?:^|\s)([A-Za-z_]\w*)=", extra)
        if not names:
            raise UsageError("-e: write KEY=VALUE, a JSON object, or @FILE")
        try:
            arguments = [argument.partition("=") for argument in shlex.split(extra)]
        except ValueError:
            raise UsageError(f"{where}: a quotation mark is missing") from None
        return {
            **dict.fromkeys(names, "{{ not read }}"),
            **{name: value for name, equals, value in arguments if equals},
        }
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else load_bounded(text)
    except Expanded as err:
        raise UsageError(f"{where}: {err}") from None
    except (RecursionError, ValueError, yaml.YAMLError):
        raise UsageError(f"{where}: not valid JSON or YAML") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{where}: variables must be a mapping of names to values")
    return {str(name): value for name, value in document.items()}
