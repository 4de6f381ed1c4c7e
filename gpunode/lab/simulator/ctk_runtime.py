"""``nvidia-ctk runtime configure``: the NVIDIA runtime in Docker's or containerd's configuration."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any, NamedTuple

from . import ctk_config, state
from .node import package_release
from .versions import numbers

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
    options = ctk_config.options_of(
        words,
        ("runtime", "config", "nvidia-runtime-name", "nvidia-runtime-path", "drop-in-config"),
        ("dry-run", "set-as-default", "cdi.enabled"),
    )
    chosen = {key: values[-1] for key, values in options.items()}
    runtime = chosen.get("runtime", "docker")
    if runtime not in FILES:
        raise ctk_config.CtkUsageError(f"unrecognized runtime '{runtime}'")
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
            ctk_config.note("info", f"Wrote updated config to {target}")
    if chosen.get("dry-run") != "true":
        ctk_config.note("info", RESTART.format(runtime))
    return 0


def _text(file: str) -> str | None:
    ctk_config.note("info", f"Loading config from {file}")
    try:
        return state.path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        ctk_config.note("info", "Config file does not exist; using empty config")
        return None
    except OSError as err:
        raise ctk_config.ConfigError(f"unable to load config: {err}") from None


def docker(text: str | None, name: str, path: str, default: bool, with_cdi: bool) -> str:
    """Return daemon.json with the runtime added; other keys stay. Raises ConfigError if it is not a JSON object."""
    try:
        document: dict[str, Any] = json.loads(text) if text and text.strip() else {}
    except ValueError as err:
        raise ctk_config.ConfigError(f"unable to load config for runtime docker: {err}") from None
    if not isinstance(document, dict):
        raise ctk_config.ConfigError("unable to load config for runtime docker: no object")
    document.setdefault("runtimes", {})[name] = {"args": [], "path": path}
    if default:
        document["default-runtime"] = name
    if with_cdi:
        document.setdefault("features", {})["cdi"] = True
    return json.dumps(document, indent=4, sort_keys=True) + "\n"


def _containerd_files(file: str, chosen: dict[str, str], runtime: ContainerdRuntime) -> dict[str, str]:
    """Return file to text: a drop-in from toolkit 1.18 on; before, or on request, the runtime's own file."""
    text = _text(file)
    document = ctk_config.parsed(text, file) if text else {}
    drop_in = chosen.get("drop-in-config")
    if drop_in is None and numbers(package_release() or "0") >= numbers(DROP_INS_SINCE):
        drop_in = DROP_IN
    if not drop_in:
        _containerd(document, document, runtime)
        return {file: ctk_config.toml(document)}
    target: dict[str, Any] = {}
    _containerd(target, document, runtime)
    changed = {drop_in: ctk_config.toml(target)}
    folder = drop_in.rpartition("/")[0] + "/*.toml"
    if folder not in document.get("imports", []):
        document["imports"] = [*document.get("imports", []), folder]
        document.setdefault("version", 2)
        changed[file] = ctk_config.toml(document)
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
