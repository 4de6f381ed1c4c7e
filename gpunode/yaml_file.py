"""YAML files of users: read with messages that name file, line and key."""

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gpunode.errors import UsageError

LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader, in C where PyYAML has it."""
MOST_BYTES = 1 << 20
MOST_EXPANDED = 4 << 20
"""Maximum characters and values that aliases may add to a document."""
Pairs = list[tuple[yaml.Node, yaml.Node]]


def read_mapping(option: str, path: Path, known: str) -> tuple[dict[Any, Any], Pairs]:
    """Return a file's mapping and its pairs as they are written. ``known``: the possible keys, for the message.

    Raises UsageError: unreadable, not YAML, empty, not a mapping, a duplicate key.
    """
    where = f"{option} {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UsageError(f"{where}: larger than {MOST_BYTES >> 20} MiB")
        written, construct = composed(data.decode())
        # Merging changes the pairs.
        pairs = list(_pairs(written))
        _each_key_once(written, where, set())
        content = construct()
    except OSError as err:
        raise UsageError(f"{where}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{where}: not UTF-8 text") from None
    except (ValueError, RecursionError) as err:
        raise UsageError(f"{where}: not YAML: {' '.join(str(err).split()) or 'nested too deeply'}") from None
    except Expanded as err:
        raise UsageError(f"{where}: {err}") from None
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"{where}: not YAML{line}: {getattr(err, 'problem', None) or 'unreadable'}") from None
    if content is None:
        raise UsageError(f"{where}: is empty; known: {known}")
    if not isinstance(content, dict):
        raise UsageError(f"{where}: expected KEY: VALUE lines, found {kind_of(content)}")
    return content, pairs


class Expanded(yaml.YAMLError):
    """Aliases make a document larger than any that is meant, or endless."""


def composed(text: str, loader: type[Any] = yaml.SafeLoader) -> tuple[yaml.Node | None, Callable[[], Any]]:
    """Return the nodes of a document, and a function that returns its content.

    Raises YAMLError, Expanded before the content is built: ten lines of aliases can stand for terabytes.
    """
    reader = loader(text)
    try:
        written = reader.get_single_node()
    finally:
        reader.dispose()
    _expanded_size(written, MOST_EXPANDED + 2 * len(text), {})
    return written, lambda: None if written is None else reader.construct_document(written)


def load_bounded(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """Return the content of a YAML text. Raises YAMLError, see ``composed``."""
    return composed(text, loader)[1]()


def _expanded_size(node: yaml.Node | None, most: int, known: dict[int, int | None]) -> int:
    """Return the characters and values of a node with every alias written out. ``known`` has the sizes of nodes that
    were visited, None for those that contain this one.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if not isinstance(node, yaml.CollectionNode):
        return 0
    if id(node) not in known:
        known[id(node)] = None
        parts = (part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_expanded_size(part, most, known) for part in parts)
    size, line = known[id(node)], node.start_mark.line + 1
    if size is None:
        raise Expanded(f"the value in line {line} contains an alias of itself")
    if size > most:
        raise Expanded(
            f"aliases expand the value in line {line} to more than {most >> 20} MiB: write out what it needs"
        )
    return size


def _pairs(written: yaml.Node | None) -> Pairs:
    return written.value if isinstance(written, yaml.MappingNode) else []


def _each_key_once(written: yaml.Node | None, where: str, seen: set[int]) -> None:
    """Raise UsageError for a duplicate key at any depth, of which YAML silently uses the last.

    ``seen`` are nodes that were visited: an alias may lead back to a node that contains it.
    """
    if id(written) in seen:
        return
    seen.add(id(written))
    if isinstance(written, yaml.SequenceNode):
        for entry in written.value:
            _each_key_once(entry, where, seen)
        return
    lines: dict[str, int] = {}
    for key, value in _pairs(written):
        line = key.start_mark.line + 1
        name = str(key.value)
        if name in lines:
            raise UsageError(f"{where}: duplicate key {name} in line {lines[name]} and line {line}")
        lines[name] = line
        _each_key_once(value, where, seen)


def first_error(err: ValidationError) -> str:
    """Return a model's error on its input, as one line: location, error, value found."""
    first = err.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{field}: missing"[:400]
    if first["type"] == "value_error":
        # From a validator of ours; its message contains the value found.
        return f"{field}: {first['ctx']['error']}"[:400]
    return f"{field}: {first['msg'].replace('a valid dictionary', 'KEY: VALUE lines')}, found {shown(first['input'])}"[
        :400
    ]


def kind_of(content: object) -> str:
    """Return the name of a value's kind for people."""
    if isinstance(content, list):
        return "a list"
    if isinstance(content, dict):
        return "a mapping"
    return "text" if isinstance(content, str) else f"a {type(content).__name__}"


def shown(value: object) -> str:
    """Return a value as a message shows it: with its first few parts, at a length for one line."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 3, 200, 200
    return short.repr(value)
