# ruff: noqa: PTH102, PTH118, PTH123, S606
"""Runs the payload where it is measured: as PID 1 of a container, or as a process of the node. Python 3.8, alone.

The launcher sends this text with the payload over stdin and leaves that open: its end tells that the launcher has gone,
however it went. Then, and at the time limit, everything started here is killed; a container ends with its PID 1.
The last line on stdout says how it ended: ``{"record": "watchdog", "ended": "exit", "exit_code": 0}``; ``ended`` is
``exit``, ``signal`` (the code is its number), ``time-limit``, ``alone`` (the launcher has gone) or ``stopped``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time

LOOK_S = 0.2


def watch(payload: bytes, arguments: list[str], limit_s: float) -> None:
    """Put the payload (a zip application) into a folder, run it, say how it ended, and leave nothing of it."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # PID 1 is sent no signal that it does not ask for.
        signal.signal(number, lambda number, _: stopped.append(number))
    folder = tempfile.mkdtemp(prefix="gpunode-")
    try:
        program = os.path.join(folder, "payload.pyz")
        with open(os.open(program, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as stream:
            stream.write(payload)
        scratch = os.path.join(folder, "scratch")
        os.mkdir(scratch)
        ended, code = _run([sys.executable, "-I", "-B", program, *arguments], scratch, limit_s, stopped)
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
        os.execve(argv[0], argv, dict(os.environ, HOME=scratch, TMPDIR=scratch, GPUNODE_LIMIT_S=str(int(limit_s))))
    except BaseException as err:
        os.write(2, f"{argv[0]}: {err}\n".encode())
    finally:
        os._exit(127)


def _reaped(child: int) -> int | None:
    """Take the status of all that have ended, as PID 1 must; that of ``child`` where it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None
