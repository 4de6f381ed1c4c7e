"""Configurations in TOML: the container toolkit's own, containerd's."""

from __future__ import annotations

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
