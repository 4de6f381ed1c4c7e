"""A folder made to look like a node, and the tools in it."""

import json
import shlex
from pathlib import Path

from gpunode.onnode.probe import Probe
from gpunode.probe import Bundle


def put(root: Path, path: str, content: str | bytes = "") -> None:
    """A file of the node."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def link(root: Path, path: str, target: str) -> None:
    """A symbolic link of the node; the target as the link has it."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def tool(folder: Path, name: str, body: str) -> None:
    """A program of the node, in the shell's language."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def printing(lines: list[str]) -> str:
    """A tool's body that prints these lines with nothing but the shell."""
    return "printf '%s\\n' " + " ".join(shlex.quote(line) for line in lines)


def collect(root: Path, tools: Path) -> Bundle:
    """The probe's answer."""
    probe = Probe(root=str(root), path=str(tools), command_s=5, nvidia_tool_s=5, passive_s=8)
    return Bundle.from_json(json.dumps(probe.collect()), "the probe")
