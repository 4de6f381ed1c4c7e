"""The one gate for what modules return: declared keys of the declared types, bounded, without control characters.

Ansible gives meaning to other keys of a result (``ansible_facts`` sets variables, ``add_host`` adds hosts), and a node
can add any key to any answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

READER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FOLDER = Path(__file__).resolve().parents[1] / "modules"
LONGEST = 1 << 16
"""Characters in one text of an answer that people read."""
LONGEST_DOCUMENT = 1 << 27
"""Characters of an answer, and of a JSON document in it; the parsers that read it have narrower limits."""
MOST = 1 << 16
"""Entries of a list or mapping."""
LONGEST_LINE, MOST_WARNINGS = 2000, 50
LONGEST_DIFF, MOST_COMPARED = 1 << 22, 500_000
"""Characters of all differences in an answer, and pairs of lines: Ansible compares them in its main process, line by
line, and all nodes wait."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

USER_IN_URL = re.compile(r"://([^\s/@\"']{1,500}|[^\s/@\"':]{0,200}:[^\s@\"']{1,500})@(?:[^\s/@\"']{0,500}@)*")
"""As in gpunode.provisioning.manifest, which may be missing here."""

ALWAYS = {
    "changed": "bool",
    "failed": "bool",
    "skipped": "bool",
    "msg": "message",
    "diff": "diff",
    "rc": "int",
    "warnings": "warnings",
}
"""Keys of every module, with their types."""
CRASHED = {"module_stderr": "message", "module_stdout": "message"}
"""What Ansible adds to the answer of a module that returned no JSON document."""
MORE: dict[str, dict[str, str]] = {
    "node_state": {"state": "document"},
    "node_query": {"answer": "document"},
    "guarded_change": {"waits": "bool", "armed": "bool", "outcome": "dict"},
}
"""Keys that a module returns to its action plugin alone."""


def text(value: Any) -> str:
    """Return a text with control characters replaced, cut to its limit."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", value[:LONGEST]) if isinstance(value, str) else ""


def covered(value: Any) -> str:
    """Return a text without the user information of URLs: programs name the proxy that they could not use."""
    return USER_IN_URL.sub("://(not shown)@", text(value))


def readable(value: Any, depth: int = 6) -> Any:
    """Return a JSON value with readable texts and bounded lists and mappings; deeper than ``depth`` None."""
    if depth == 0:
        return None
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(key): readable(item, depth - 1) for key, item in list(value.items())[:MOST]}
    if isinstance(value, list | tuple):
        return [readable(item, depth - 1) for item in value[:MOST]]
    return value if isinstance(value, bool | int | float) else None


def _document(value: Any) -> Any:
    return value if isinstance(value, str) and len(value) <= LONGEST_DOCUMENT else None


def _whole(value: Any) -> Any:
    return value if isinstance(value, int) and abs(value) < 1 << 63 else None


def diff(value: Any) -> list[dict[str, str]]:
    """Return the differences of an answer as texts that are compared and printed in a second."""
    diffs, left, pairs = [], LONGEST_DIFF, MOST_COMPARED
    for part in (value if isinstance(value, list) else [value])[:MOST]:
        if not isinstance(part, Mapping):
            continue
        sides = {key: _side(part[key]) for key in ("before", "after", "prepared") if key in part}
        sides |= {key: text(part[key])[:LONGEST_LINE] for key in ("before_header", "after_header") if key in part}
        compared = (sides.get("before", "").count("\n") + 1) * (sides.get("after", "").count("\n") + 1)
        if sides.get("before") and sides.get("after") and compared > pairs:
            sides = {"prepared": f"{sides.get('after_header', 'a file')}: changed; too long for a comparison\n"}
        else:
            pairs -= compared
        left -= sum(map(len, sides.values()))
        if left < 0:
            break
        diffs.append(sides)
    return diffs


def _side(value: Any) -> str:
    """Return one side of a difference; those of Ansible's modules can be mappings."""
    return text(json.dumps(readable(value), indent=4, sort_keys=True) if isinstance(value, Mapping) else value)


def _warnings(value: Any) -> Any:
    """Return warnings as lines. ansible-core 2.19 reads them as objects, which have the message in an event."""
    lines = [getattr(getattr(entry, "event", None), "msg", entry) for entry in value] if isinstance(value, list) else []
    return [covered(line)[:LONGEST_LINE] for line in lines[:MOST_WARNINGS] if isinstance(line, str)]


TYPES: dict[str, Callable[[Any], Any]] = {
    "str": lambda value: text(value) if isinstance(value, str) else None,
    "message": lambda value: covered(value) if isinstance(value, str) else None,
    "bool": lambda value: value if isinstance(value, bool) else None,
    "int": _whole,
    "list": lambda value: readable(value) if isinstance(value, list) else None,
    "dict": lambda value: readable(value) if isinstance(value, Mapping) else None,
    "lines": lambda value: (
        [text(line) for line in value[:MOST] if isinstance(line, str)] if isinstance(value, list) else None
    ),
    "document": _document,
    "diff": diff,
    "warnings": _warnings,
}


def declared() -> dict[str, dict[str, str]]:
    """Return the type of each key that a module of the collection returns, by module, from its documentation."""
    by_module = {}
    for file in FOLDER.glob("[a-z]*.py"):
        block = re.search(r'^RETURN = r?"""(.*?)"""', file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        keys = yaml.load(block[1], READER) if block else {}  # noqa: S506 - a safe loader
        by_module[file.stem] = {
            name: "lines" if field.get("elements") == "str" else field["type"] for name, field in keys.items()
        }
    return by_module


DECLARED = declared()


def gated(answer: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the known keys of a module's answer, each of its type and bounded; other keys are dropped."""
    values = {name: TYPES[kind](answer[name]) for name, kind in {**ALWAYS, **CRASHED, **keys}.items() if name in answer}
    return {name: value for name, value in values.items() if value is not None}
