"""The runner of commands on a node: exit status, output, and what becomes of a command past its limit."""

import os
import time
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils import commands


def test_what_a_command_prints_and_how_it_ends() -> None:
    assert commands.run(
        ["sh", "-c", "echo out; echo $GPUNODE >&2; exit 3"], 10, {"GPUNODE": "err", "PATH": "/bin"}
    ) == (
        3,
        "out\n",
        "err\n",
    )
    status, _, errors = commands.run(["/nowhere/tool"], 10)
    assert status == 127
    assert "/nowhere/tool" in errors


def test_a_command_past_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    begun = time.monotonic()
    status, output, _ = commands.run(["sh", "-c", f"sleep 60 & echo $! > {child}; wait"], 1.0)
    assert (status, output) == (124, "")
    assert time.monotonic() - begun < 30
    end = time.monotonic() + 10
    while running(int(child.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(int(child.read_text()))


def running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z" and os.getpid() != pid
