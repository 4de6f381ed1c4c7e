"""Shared parts of the demos: a printed and executed command, and the comparison of a report with the expected one."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

BIN = Path(__file__).resolve().parents[1] / ".venv" / "bin"


def step(title: str, *argv: str, limit_s: float) -> int:
    """Print a command, run it with its output passed through, return its exit code."""
    print(f"\n=== {title}\n$ gpunode {' '.join(argv)}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen([BIN / "gpunode", *argv])
    try:
        rc = process.wait(timeout=limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # Each verb cleans up after itself on an interrupt; in a terminal it has received the same Ctrl-C.
        process.terminate()
        process.wait(timeout=60)
        raise
    print(f"--- exit {rc} after {time.monotonic() - started:.0f} s", flush=True)
    return rc


def inventory(lab: str) -> str:
    """Return the path of a lab's inventory."""
    asked = [str(BIN / "gpunode"), "lab", "inventory", "--path", "--name", lab]
    return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def verdict(title: str, folder: str, *argv: str) -> tuple[int, dict[str, Any]]:
    """Validate as ``step`` does; return the exit code and the report."""
    target = Path(folder) / "report.json"
    outputs = ("--format", "console", "--output", "-", "--format", "json", "--output", str(target))
    target.unlink(missing_ok=True)
    rc = step(title, "validate", *argv, *outputs, limit_s=600)
    return rc, json.loads(target.read_text(encoding="utf-8"))


def statuses(report: dict[str, Any], host: str) -> dict[str, set[str]]:
    """Return check id to its statuses on one node of the report."""
    found: dict[str, set[str]] = {}
    node = next(node for node in report["nodes"] if node["host"] == host)
    for finding in node["findings"]:
        found.setdefault(finding["check"], set()).add(finding["status"])
    return found
