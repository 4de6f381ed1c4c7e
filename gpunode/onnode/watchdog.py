# ruff: noqa: PTH102, PTH110, PTH118, PTH123, S606
"""Run the payload where it is measured: as PID 1 of a container, or as a process of the node. Python 3.8, standard
library.

The launcher sends this text with the payload over stdin and leaves that open: its end means that the launcher is gone,
for any reason. Then, and at the time limit, everything started here is killed; a container ends with its PID 1. The
last line on stdout reports how it ended: ``{"record": "watchdog", "ended": "exit", "exit_code": 0}``; ``ended`` is
``exit``, ``signal`` (the code is its number), ``time-limit``, ``alone`` (the launcher is gone) or ``stopped``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

LOOK_S = 0.2
COMPAT = "/usr/local/cuda/compat/lib.real"
"""Folder of NVIDIA's images for the libraries of forward compatibility, outside the linker's path."""
COMPAT_S = 60


def enable_compat(limit_s: float) -> None:
    """Do as the entrypoint of NVIDIA's images, which does not run here: add the libraries of forward compatibility to
    the linker's path if the driver is older than the image's CUDA and they work with it.

    The entrypoint writes into the image; the environment of the processes started here has the same effect.
    """
    if not os.path.exists(os.path.join(COMPAT, "libcuda.so.1")):
        return
    compat = cuda_version(os.path.join(COMPAT, "libcuda.so.1"), limit_s)
    if compat > cuda_version("libcuda.so.1", limit_s):
        known = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = COMPAT + (":" + known if known else "")


def cuda_version(library: str, limit_s: float) -> int:
    """Return the version that a libcuda reports (12080 is 12.8); 0 if it does not start here. Called in a child,
    because a library is never unloaded.
    """
    text = (
        "import ctypes, sys\n"
        "cuda, version = ctypes.CDLL(sys.argv[1]), ctypes.c_int()\n"
        "ok = cuda.cuInit(0) == 0 and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0\n"
        "print(version.value if ok else 0)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", text, library],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=min(limit_s, COMPAT_S),
            check=False,
            start_new_session=True,
        )
        return int(done.stdout or b"0")
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def watch(payload: bytes, arguments: list[str], limit_s: float) -> None:
    """Write the payload (a zip application) to a folder, run it, report how it ended, and remove all of it."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # PID 1 receives only signals for which it has a handler.
        signal.signal(number, lambda number, _: stopped.append(number))
    ends = time.monotonic() + limit_s
    enable_compat(limit_s)
    folder = tempfile.mkdtemp(prefix="gpunode-")
    try:
        program = os.path.join(folder, "payload.pyz")
        with open(os.open(program, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as stream:
            stream.write(payload)
        scratch = os.path.join(folder, "scratch")
        os.mkdir(scratch)
        ended, code = _run([sys.executable, "-I", "-B", program, *arguments], scratch, ends - time.monotonic(), stopped)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        line = {"record": "watchdog", "ended": ended, "exit_code": code}
        os.write(1, ("\n" + json.dumps(line) + "\n").encode())


def _run(argv: list[str], scratch: str, limit_s: float, stopped: list[int]) -> tuple[str, int | None]:
    ends = time.monotonic() + limit_s
    child = os.fork()
    if child == 0:
        _become(argv, scratch, limit_s)
    try:
        while True:
            status = _reaped(child)
            if status is not None:
                return ("exit", os.WEXITSTATUS(status)) if os.WIFEXITED(status) else ("signal", os.WTERMSIG(status))
            if stopped:
                return "stopped", None
            if time.monotonic() >= ends:
                return "time-limit", None
            if select.select([0], [], [], LOOK_S)[0] and not os.read(0, 4096):
                return "alone", None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)


def _become(argv: list[str], scratch: str, limit_s: float) -> None:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(scratch)
        os.execve(argv[0], argv, dict(os.environ, HOME=scratch, TMPDIR=scratch, GPUNODE_LIMIT_S=str(round(limit_s))))
    except BaseException as err:
        os.write(2, f"{argv[0]}: {err}\n".encode())
    finally:
        os._exit(127)


def _reaped(child: int) -> int | None:
    """Collect the status of all ended children, as PID 1 must; return that of ``child`` if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None
