"""YAML files of users: read with messages that name file, line and key."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gpunode.errors import UsageError

MOST_BYTES = 1 << 20
Pairs = list[tuple[yaml.Node, yaml.Node]]


def read_mapping(option: str, path: Path, known: str) -> tuple[dict[Any, Any], Pairs]:
    """Return a file's mapping and its pairs as they are written. ``known``: the possible keys, for the message.

    Raises UsageError: unreadable, not YAML, empty, not a mapping, a duplicate key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UsageError(f"{option} {path}: larger than {MOST_BYTES >> 20} MiB")
        text = data.decode()
        content = yaml.safe_load(text)
        written = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as err:
        raise UsageError(f"{option} {path}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: not UTF-8 text") from None
    except (ValueError, RecursionError) as err:
        raise UsageError(f"{option} {path}: not YAML: {' '.join(str(err).split()) or 'nested too deeply'}") from None
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"{option} {path}: not YAML{line}: {getattr(err, 'problem', None) or 'unreadable'}") from None
    if content is None:
        raise UsageError(f"{option} {path}: is empty; known: {known}")
    if not isinstance(content, dict):
        raise UsageError(f"{option} {path}: expected KEY: VALUE lines, found {kind_of(content)}")
    _each_key_once(written, f"{option} {path}", set())
    return content, _pairs(written)


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
        if key.value in lines:
            raise UsageError(f"{where}: duplicate key {key.value} in line {lines[key.value]} and line {line}")
        lines[str(key.value)] = line
        _each_key_once(value, where, seen)


def first_error(err: ValidationError) -> str:
    """Return a model's error on its input, as one line: location, error, value found."""
    first = err.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{place}: missing"[:400]
    if first["type"] == "value_error":
        # From a validator of ours; its message contains the value found.
        return f"{place}: {first['ctx']['error']}"[:400]
    return f"{place}: {first['msg'].replace('a valid dictionary', 'KEY: VALUE lines')}, found {first['input']!r}"[:400]


def kind_of(content: object) -> str:
    """Return the name of a value's kind for people."""
    if isinstance(content, list):
        return "a list"
    if isinstance(content, dict):
        return "a mapping"
    return "text" if isinstance(content, str) else f"a {type(content).__name__}"
