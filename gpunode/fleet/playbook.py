"""A playbook of the collection, run by ``ansible-playbook``: signals reach it, and nothing of it is left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from gpunode.errors import Exit, UsageError
from gpunode.fleet import process

INTERRUPT_WAIT_S = 20.0
"""Seconds for Ansible to end after Ctrl-C before its process group is killed."""
CALLBACKS = "gpunode.node.preload,gpunode.node.roles"
NODES_FILE = "GPUNODE_NODES_FILE"
"""Environment variable of the callback ``roles``: where it writes what was done to each node."""


def playbook_of(root: Path, name: str) -> Path:
    """Return the path of a playbook. Raises UsageError if it is missing."""
    playbook = root / "playbooks" / name
    if not playbook.is_file():
        raise UsageError(f"{playbook} is missing: reinstall gpunode")
    return playbook


def option_words(options: Mapping[str, Iterable[object]]) -> list[str]:
    """Return options of Ansible's programs as arguments: each once for every value that it has."""
    return [word for option, values in options.items() for value in values for word in (option, str(value))]


def exit_code_of(rc: int) -> int:
    """Return gpunode's exit code for one of ansible-playbook.

    Ansible returns 4 if any node was unreachable, independent of the others, 2 if a task failed, 1 and 5 if it could
    not start, 99 if it was interrupted.
    """
    if rc < 0:
        return 128 - rc
    known = {0: Exit.GOOD, 1: Exit.USAGE, 2: Exit.FAILED, 4: Exit.UNDETERMINED, 5: Exit.USAGE, 99: 130}
    return int(known.get(rc, Exit.UNDETERMINED))


def run(
    argv: Sequence[str],
    env: dict[str, str],
    password: str | None,
    wait_s: float = INTERRUPT_WAIT_S,
    log: BinaryIO | None = None,
) -> int:
    """Run a program to its end in a process group of its own and return its exit code, or minus a signal's number.

    SIGINT, SIGTERM and SIGHUP are passed on to the group; a second one, or ``wait_s`` after the first, kills it. Its
    output goes to ``log`` if there is one.
    If gpunode itself is killed, the group gets SIGTERM. ``password`` goes to its stdin, which is empty otherwise.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        if child is not None and len(received) == 1:
            process.kill_group(child, number)
        elif child is not None:
            process.kill_tree(child)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in handled}
    watcher, line = _watched(wait_s)
    try:
        source = subprocess.DEVNULL if password is None else subprocess.PIPE
        child = subprocess.Popen(
            list(argv),
            env=env,
            stdin=source,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # By the child itself, and before it is the program: it is known to the watcher whenever this process ends.
            preexec_fn=lambda: os.write(line, f"{os.getpid()}\n".encode()),  # noqa: PLW1509
        )
        if child.stdin is not None and password is not None:
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(password.encode() + b"\n")
        return _wait(child, received, wait_s)
    finally:
        if child is not None and child.poll() is None:
            process.kill_tree(child)
            child.wait()
        if child is not None:
            # Connections of a node that did not answer in time.
            process.kill_group(child)
        with suppress(BrokenPipeError):
            os.write(line, b"\n\n")
        os.close(line)
        os.waitpid(watcher, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watched(wait_s: float) -> tuple[int, int]:
    """Fork a process that ends another and its descendants if this process is killed.

    Return its pid, and the file descriptor that takes the other's pid as a line, and anything when that has ended.
    """
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher:
        os.close(reading)
        return watcher, writing
    try:
        os.setsid()
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as source:
            root = int(source.readline() or 0)
            if root and not source.read(1):
                _end(root, wait_s)
    finally:
        os._exit(0)


def _end(root: int, wait_s: float) -> None:
    """Ask a process group to end, and kill it and its leader's descendants after ``wait_s``."""
    doomed = process.descendants(root)
    with suppress(ProcessLookupError):
        os.killpg(root, signal.SIGTERM)
        end = time.monotonic() + wait_s
        while time.monotonic() < end and os.path.exists(f"/proc/{root}/exe"):  # noqa: PTH110 - a zombie has none
            time.sleep(0.1)
        os.killpg(root, signal.SIGKILL)
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait(child: "subprocess.Popen[bytes]", received: list[int], wait_s: float) -> int:
    limit = None
    while True:
        try:
            rc = child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if received and limit is None:
                limit = time.monotonic() + wait_s
            if limit is not None and time.monotonic() > limit:
                process.kill_tree(child)
        else:
            return -received[0] if received else rc
