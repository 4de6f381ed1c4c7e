"""Read the state of the container engine of this node. Nothing is started."""

from __future__ import annotations

import grp
import json
import os
import re
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils.commands import run

PID_FILE = "/run/docker.pid"
HOOK = "/usr/bin/nvidia-container-runtime-hook"
SETTINGS = Path("/etc/default/docker")
LIMIT_S = 30
LARGEST = 1 << 20
INFO = (
    '{"version":{{json .ServerVersion}},"running":{{json .ContainersRunning}},'
    '"live_restore":{{json .LiveRestoreEnabled}},"swarm":{{json .Swarm.LocalNodeState}},'
    '"cgroup_driver":{{json .CgroupDriver}}}'
)


def collected() -> dict[str, Any]:
    """Return the answer of dockerd, and the state that decides whether it must be restarted."""
    started = changed(PID_FILE, "st_mtime")
    # docker info would start a stopped daemon through its socket unit; the pid file shows that it is running.
    info = document(output(["docker", "info", "--format", INFO])) if started is not None else None
    return {
        "started": started,
        "info": info,
        "command": output(["systemctl", "show", "--property=ExecStart", "docker.service"]) + settings(),
        "options": sorted(set(re.findall(r"--([a-z0-9-]+)", output(["dockerd", "--help"])))),
        "group": members("docker"),
        "hook_changed": changed(HOOK, "st_ctime"),
    }


def output(argv: list[str]) -> str:
    """Return the output of a command; empty if it is missing, fails or exceeds its time limit."""
    code, text, _ = run(argv, LIMIT_S, {**os.environ, "LC_ALL": "C"})
    return text[:LARGEST] if code == 0 else ""


def document(text: str) -> dict[str, Any] | None:
    """Return the JSON object in docker's output; None without one."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def settings() -> str:
    """Return the TCP addresses and the names of options in /etc/default/docker, without values: they may be secret."""
    try:
        lines = SETTINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return " ".join(re.findall(r"tcp://[^\s;\"']*|(?<![\w-])--[a-z0-9-]+", text))


def members(group: str) -> list[str] | None:
    """Return the members of a group; None if the group does not exist."""
    try:
        return list(grp.getgrnam(group).gr_mem)
    except KeyError:
        return None


def changed(path: str, field: str) -> float | None:
    """Return a time of a file, as seconds since the epoch; None if the file is missing."""
    try:
        return float(getattr(os.stat(path), field))  # noqa: PTH116
    except OSError:
        return None
