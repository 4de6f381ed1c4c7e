"""TOML for the toolkit's files: tables, keys, comments kept when a line is changed in place."""

from __future__ import annotations

from typing import Any


def dump(document: dict[str, Any]) -> str:
    """Return a document of tables, texts, numbers, booleans and lists as TOML, formatted as by the toolkit."""
    return _table(document, (), 0)


def _table(table: dict[str, Any], path: tuple[str, ...], depth: int) -> str:
    pad = "  " * depth
    lines = [f"{pad}{key(name)} = {value(entry)}" for name, entry in table.items() if not isinstance(entry, dict)]
    text = "".join(line + "\n" for line in lines)
    for name, entry in table.items():
        if isinstance(entry, dict):
            inner = (*path, key(name))
            text += f"\n{pad}[{'.'.join(inner)}]\n" + _table(entry, inner, depth + 1)
    return text


def key(name: str) -> str:
    """Return a key, quoted if necessary."""
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'


def value(entry: Any) -> str:
    """Return a value as TOML."""
    if isinstance(entry, bool):
        return "true" if entry else "false"
    if isinstance(entry, list):
        return "[" + ", ".join(value(item) for item in entry) + "]"
    if isinstance(entry, str):
        escaped = entry.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(entry)
