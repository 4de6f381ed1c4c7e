"""External programs that measure: run if the image or the node has them; their output is parsed on the controller."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble

FOLDERS = (
    "/usr/local/bin",
    "/usr/local/cuda/bin",
    "/opt/nccl-tests/build",
    "/opt/nccl_tests/build",
    "/nccl-tests/build",
    "/usr/local/nvbandwidth",
)
"""Their paths in images, searched in addition to PATH."""
MAX_STDOUT_BYTES, MAX_STDERR_BYTES = 40 * 1024, 4 * 1024
"""A record has room for 64 KiB as JSON, in which a line's end takes two bytes."""


def nvbandwidth(limit_s: float) -> dict[str, Any]:
    """Return the values of ``tools.nvbandwidth``: its JSON, in which each test has its matrix."""
    return output_of("nvbandwidth", ("-j",), limit_s)


def dcgm_diag(level: int, limit_s: float) -> dict[str, Any]:
    """Return the values of ``tools.dcgm-diag``: JSON of DCGM 3 and 4. The host engine has to run."""
    return output_of("dcgmi", ("diag", "-r", str(level), "-j"), limit_s)


def nccl_tests(gpus: int, limit_s: float) -> dict[str, Any]:
    """Return the values of ``tools.nccl-tests``: an all-reduce from 8 bytes to 8 GiB, one process with all GPUs,
    compared.
    """
    return output_of("all_reduce_perf", ("-b", "8", "-e", "8G", "-f", "2", "-g", str(gpus), "-c", "1"), limit_s)


def output_of(name: str, arguments: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """Run a program; return its output in the form of ``ToolValues``. Raises SkipPart if it does not exist."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *FOLDERS))
    program = shutil.which(name, path=path)
    if program is None:
        raise SkipPart(f"{name} is not installed")
    try:
        # In this process's own group, which is ended with it: nothing that the program starts is left.
        done = subprocess.run(
            [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Trouble(f"{name} did not return within {limit_s:g} s") from None
    return {
        "device": "cuda" if Path("/dev/nvidiactl").exists() else "cpu",
        "program": program,
        "arguments": list(arguments),
        "exit_code": done.returncode,
        "stdout": done.stdout[:MAX_STDOUT_BYTES].decode(errors="replace"),
        "stderr": done.stderr[:MAX_STDERR_BYTES].decode(errors="replace"),
        "cut": len(done.stdout) > MAX_STDOUT_BYTES,
    }
