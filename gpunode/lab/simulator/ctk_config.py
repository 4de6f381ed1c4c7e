"""Configurations in TOML: the container toolkit's own, containerd's."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from . import state

try:
    import tomllib
except ImportError:  # Python before 3.11 has no TOML reader
    tomllib = None  # type: ignore[assignment]
FILE = "/etc/nvidia-container-runtime/config.toml"


class ConfigError(Exception):
    """A configuration that cannot be read or changed; the message is the reason."""


def read(name: str = FILE) -> dict[str, Any]:
    """Return the toolkit's configuration; empty if there is no file. Raises ConfigError."""
    try:
        text = state.path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise ConfigError(f"unable to load config: {err}") from None
    return parsed(text, name)


def parsed(text: str, name: str) -> dict[str, Any]:
    """Parse TOML to a document. Raises ConfigError."""
    if tomllib is None:
        raise ConfigError(f"cannot read {name}: the simulator needs Python 3.11 for that")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"unable to load config {name}: {err}") from None


def toml(document: dict[str, Any]) -> str:
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


class CtkUsageError(Exception):
    """A command line that nvidia-ctk does not support."""


def note(level: str, text: str) -> None:
    """Write a line of the toolkit's log."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stderr.write(f'time="{stamp}" level={level} msg={json.dumps(text)}\n')


def options_of(words: list[str], with_value: tuple[str, ...], switches: tuple[str, ...]) -> dict[str, list[str]]:
    """Return options to their values; a switch has ``true`` or what follows its ``=``. Raises CtkUsageError."""
    options: dict[str, list[str]] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        name = key.lstrip("-")
        if not key.startswith("-") or name not in (*with_value, *switches):
            raise CtkUsageError(f"flag provided but not defined: {key}")
        if name in switches:
            value = value if equals else "true"
        elif not equals:
            if not left:
                raise CtkUsageError(f"flag needs an argument: {key}")
            value = left.pop(0)
        options.setdefault(name, []).append(value)
    return options
