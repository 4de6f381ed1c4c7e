"""``nvidia-ctk``: CDI specifications, the NVIDIA runtime in Docker's or containerd's configuration, and its TOML."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from . import cdi, state
from .node import numbers, package_release

try:
    import tomllib
except ImportError:  # Python before 3.11 has no TOML reader
    tomllib = None  # type: ignore[assignment]

DEFAULT_STRATEGIES = ("index", "uuid")
SPECIFICATIONS = ("/etc/cdi", "/var/run/cdi")


def main(argv: list[str]) -> int:
    """Run nvidia-ctk with these arguments; return its exit code."""
    words = [word for word in argv if word not in ("--debug", "-d", "--quiet", "-q")]
    if words[:1] in (["--version"], ["-v"]):
        sys.stdout.write(
            f"NVIDIA Container Toolkit CLI version {package_release() or 'unknown'}\ncommit: gpunode-lab\n"
        )
        return 0
    commands: dict[tuple[str, str], Callable[[list[str]], int]] = {
        ("cdi", "generate"): generate,
        ("cdi", "list"): listing,
        ("runtime", "configure"): configure,
    }
    try:
        command = commands.get((words[0], words[1])) if len(words) > 1 else None
        return command(words[2:]) if command else _unknown(words)
    except (CtkUsageError, cdi.CdiError, ConfigError) as err:
        note("error", str(err))
        return 1


def _unknown(words: list[str]) -> int:
    sys.stderr.write(f"No help topic for '{' '.join(words)}'\n")
    return 3


def generate(words: list[str]) -> int:
    """Run ``cdi generate``: write the node's specification."""
    options = options_of(
        words,
        ("output", "format", "mode", "device-name-strategy", "feature-flag", "feature-flags"),
        (),
    )
    strategies = _listed(options.get("device-name-strategy", [])) or list(DEFAULT_STRATEGIES)
    flags = set(_listed([*options.get("feature-flag", []), *options.get("feature-flags", [])]))
    flags |= set(_listed([os.environ.get("NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS", "")]))
    document = cdi.specification(strategies, flags)
    output = (options.get("output") or [os.environ.get("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", "")])[-1]
    form = (options.get("format") or ["json" if output.endswith(".json") else "yaml"])[-1]
    if form not in ("yaml", "json"):
        raise CtkUsageError(f"invalid format: {form}")
    text = json.dumps(document, indent=2) + "\n" if form == "json" else "---\n" + cdi.yaml(document)
    note("info", f"Using driver version {cdi.usable()[1]}")
    if output:
        state.write_text(state.path(output), text)
    else:
        sys.stdout.write(text)
    note("info", f"Generated CDI spec with version {document['cdiVersion']}")
    return 0


def _listed(values: list[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def listing(words: list[str]) -> int:
    """Run ``cdi list``: print the names of all devices in the specifications of the node."""
    options = options_of(words, ("spec-dir",), ())
    names = []
    for folder in _listed(options.get("spec-dir", [])) or SPECIFICATIONS:
        for file in sorted(state.path(folder).glob("*")):
            if file.suffix in (".yaml", ".yml", ".json"):
                names += devices_in(file.read_text(encoding="utf-8"))
    note("info", f"Found {len(names)} CDI devices")
    sys.stdout.write("".join(name + "\n" for name in sorted(set(names))))
    return 0


def devices_in(text: str) -> list[str]:
    """Return the full names of a specification's devices."""
    kind = re.search(r'^\s*"?kind"?:\s*"?([^\s",]+)', text, re.M)
    names = re.findall(r'^[\s-]*"?name"?:\s*"?([^\s",]+)', text, re.M)
    return [f"{kind[1]}={name}" for name in names] if kind else []


FILES = {"docker": "/etc/docker/daemon.json", "containerd": "/etc/containerd/config.toml"}
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
DROP_INS_SINCE = "1.18.0"
PROGRAM = "nvidia-container-runtime"
PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
# The runtime's options if the configuration has no runtime to copy.
RUNC = {
    "privileged_without_host_devices": False,
    "runtime_engine": "",
    "runtime_root": "",
    "runtime_type": "io.containerd.runc.v2",
}
RESTART = "It is recommended that {} daemon be restarted."


class ContainerdRuntime(NamedTuple):
    """The runtime's name, its program, whether it is the default one, whether CDI is switched on."""

    name: str
    path: str
    default: bool
    with_cdi: bool


def configure(words: list[str]) -> int:
    """Merge the runtime into the existing configuration."""
    options = options_of(
        words,
        ("runtime", "config", "nvidia-runtime-name", "nvidia-runtime-path", "drop-in-config"),
        ("dry-run", "set-as-default", "cdi.enabled"),
    )
    chosen = {key: values[-1] for key, values in options.items()}
    runtime = chosen.get("runtime", "docker")
    if runtime not in FILES:
        raise CtkUsageError(f"unrecognized runtime '{runtime}'")
    default = chosen.get("set-as-default") == "true"
    with_cdi = chosen.get("cdi.enabled") == "true"
    name = chosen.get("nvidia-runtime-name", "nvidia")
    path = chosen.get("nvidia-runtime-path", PROGRAM)
    file = chosen.get("config", FILES[runtime])
    if runtime == "docker":
        changed = {file: docker(_text(file), name, path, default, with_cdi)}
    else:
        whole = path if "/" in path else f"/usr/bin/{path}"
        changed = _containerd_files(file, chosen, ContainerdRuntime(name, whole, default, with_cdi))
    for target, text in changed.items():
        if chosen.get("dry-run") == "true":
            sys.stdout.write(text)
        else:
            state.write_text(state.path(target), text)
            note("info", f"Wrote updated config to {target}")
    if chosen.get("dry-run") != "true":
        note("info", RESTART.format(runtime))
    return 0


def _text(file: str) -> str | None:
    note("info", f"Loading config from {file}")
    try:
        return state.path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        note("info", "Config file does not exist; using empty config")
        return None
    except OSError as err:
        raise ConfigError(f"unable to load config: {err}") from None


def docker(text: str | None, name: str, path: str, default: bool, with_cdi: bool) -> str:
    """Return daemon.json with the runtime added; other keys stay. Raises ConfigError if it is not a JSON object."""
    try:
        document: dict[str, Any] = json.loads(text) if text and text.strip() else {}
    except ValueError as err:
        raise ConfigError(f"unable to load config for runtime docker: {err}") from None
    if not isinstance(document, dict):
        raise ConfigError("unable to load config for runtime docker: no object")
    document.setdefault("runtimes", {})[name] = {"args": [], "path": path}
    if default:
        document["default-runtime"] = name
    if with_cdi:
        document.setdefault("features", {})["cdi"] = True
    return json.dumps(document, indent=4, sort_keys=True) + "\n"


def _containerd_files(file: str, chosen: dict[str, str], runtime: ContainerdRuntime) -> dict[str, str]:
    """Return file to text: a drop-in from toolkit 1.18 on; before, or on request, the runtime's own file."""
    text = _text(file)
    document = parsed(text, file) if text else {}
    drop_in = chosen.get("drop-in-config")
    if drop_in is None and numbers(package_release() or "0") >= numbers(DROP_INS_SINCE):
        drop_in = DROP_IN
    if not drop_in:
        _containerd(document, document, runtime)
        return {file: toml(document)}
    target: dict[str, Any] = {}
    _containerd(target, document, runtime)
    changed = {drop_in: toml(target)}
    folder = drop_in.rpartition("/")[0] + "/*.toml"
    if folder not in document.get("imports", []):
        document["imports"] = [*document.get("imports", []), folder]
        document.setdefault("version", 2)
        changed[file] = toml(document)
    return changed


def _containerd(target: dict[str, Any], main: dict[str, Any], runtime: ContainerdRuntime) -> None:
    name, path, default, with_cdi = runtime
    version = int(main.get("version", 2))
    target["version"] = version
    key = PLUGINS.get(version, PLUGINS[2])
    # containerd before 2 uses the last file's section as a whole: a drop-in repeats the main file's section.
    plugin = target.setdefault("plugins", {}).setdefault(key, copy.deepcopy(main.get("plugins", {}).get(key, {})))
    settings = plugin.setdefault("containerd", {})
    runtimes = settings.setdefault("runtimes", {})
    usual = str(settings.get("default_runtime_name", "runc"))
    models = [runtimes[each] for each in (usual, "runc", "crun") if each in runtimes and not each.startswith("nvidia")]
    runtimes[name] = copy.deepcopy(models[0] if models else RUNC)
    runtimes[name].setdefault("options", {})["BinaryName"] = path
    if default:
        settings["default_runtime_name"] = name
    if with_cdi:
        plugin["enable_cdi"] = True


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
