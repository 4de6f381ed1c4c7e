"""Programs that tests run: with a limit, and nothing of them is left behind."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpunode.fleet.process import kill_tree

SETTLE_S = 10.0


def run_program(
    argv: Sequence[object],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    stdin: str | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, whatever its exit code; at its limit it is killed with all that it started."""
    words = [str(word) for word in argv]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if env is None else dict(env),
        cwd=cwd,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout=limit_s)
    except BaseException:
        kill_tree(process)
        process.wait(SETTLE_S)
        raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def runs(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be taken in by its parent does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


def beside_python(name: str) -> Path:
    """Return a program of the environment that runs the tests."""
    return Path(sys.executable).with_name(name)
