"""``nvidia-ctk config``: /etc/nvidia-container-runtime/config.toml."""

from __future__ import annotations

import sys
from typing import Any

from . import state, toml_text

try:
    import tomllib
except ImportError:  # Python before 3.11 has no reader of TOML
    tomllib = None  # type: ignore[assignment]

FILE = "/etc/nvidia-container-runtime/config.toml"
DEFAULT: dict[str, Any] = {
    "disable-require": False,
    "supported-driver-capabilities": "compat32,compute,display,graphics,ngx,utility,video",
    "nvidia-container-cli": {"environment": [], "ldconfig": "@/sbin/ldconfig", "load-kmods": True},
    "nvidia-container-runtime": {
        "log-level": "info",
        "mode": "auto",
        "runtimes": ["runc", "crun"],
        "modes": {
            "cdi": {
                "annotation-prefixes": ["cdi.k8s.io/"],
                "default-kind": "nvidia.com/gpu",
                "spec-dirs": ["/etc/cdi", "/var/run/cdi"],
            },
            "csv": {"mount-spec-path": "/etc/nvidia-container-runtime/host-files-for-container.d"},
        },
    },
    "nvidia-container-runtime-hook": {"path": "nvidia-container-runtime-hook", "skip-mode-detection": False},
    "nvidia-ctk": {"path": "nvidia-ctk"},
}


class ConfigError(Exception):
    """A configuration that cannot be read or changed; the message says why."""


def read(name: str = FILE) -> dict[str, Any]:
    """The configuration; the default where there is no file. Raises ConfigError."""
    try:
        text = state.path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return DEFAULT
    except OSError as err:
        raise ConfigError(f"unable to load config: {err}") from None
    return parsed(text, name)


def parsed(text: str, name: str) -> dict[str, Any]:
    """TOML as a document. Raises ConfigError."""
    if tomllib is None:
        raise ConfigError(f"cannot read {name}: the simulator needs Python 3.11 for that")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"unable to load config {name}: {err}") from None


def run(words: list[str]) -> int:
    """``config [default] [--config-file F] [--set K=V]… [--in-place | --output F]``."""
    name, output, in_place, settings = FILE, "", False, []
    left = list(words)
    document = None
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if word == "default":
            document = DEFAULT
        elif option in ("--in-place", "-i"):
            in_place = value != "false"
        elif option in ("--set", "--config-file", "--config", "-c", "--output", "-o"):
            value = value if equals else left.pop(0) if left else ""
            if option == "--set":
                settings.append(value)
            elif option in ("--output", "-o"):
                output = value
            else:
                name = value
        else:
            raise ConfigError(f"flag provided but not defined: {word}")
    document = read(name) if document is None else document
    for setting in settings:
        document = with_setting(document, setting)
    text = toml_text.dump(document)
    if in_place or output:
        state.write_text(state.path(name if in_place else output), text)
    else:
        sys.stdout.write(text)
    return 0


def with_setting(document: dict[str, Any], setting: str) -> dict[str, Any]:
    """The document with ``nvidia-container-cli.no-cgroups=true`` set; a switch may stand without its value."""
    path, equals, text = setting.partition("=")
    first, dot, rest = path.partition(".")
    if dot:
        inner = document.get(first, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"invalid config option: {setting}")
        return {**document, first: with_setting(inner, rest + equals + text)}
    old = document.get(first)
    if isinstance(old, list):
        return {**document, first: [word for word in text.split(",") if word]}
    if isinstance(old, bool) or not equals or text in ("true", "false"):
        return {**document, first: text != "false"}
    return {**document, first: text}
