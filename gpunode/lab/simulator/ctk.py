"""``nvidia-ctk``: the command line of the container toolkit."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable

from . import cdi, ctk_runtime, state
from .ctk_config import ConfigError, CtkUsageError, note, options_of
from .node import package_release

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
        ("runtime", "configure"): ctk_runtime.configure,
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
