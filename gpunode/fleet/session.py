"""One program on a node: a session that can be read, written, aborted, and the probe's conversation over it."""

import os
import secrets
import selectors
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, cast

from gpunode.fleet.process import kill_group
from gpunode.text import last_line

MAX_STDOUT = 32 * 1024 * 1024
MAX_STDERR = 1024 * 1024
MAX_NOISE = 1024 * 1024
"""Maximum bytes of login banners and similar output before the probe starts."""
_KEPT_STDERR = 16 * 1024
_CHUNK = 256 * 1024

USUAL_S, RESERVE_S = 120, 5
"""The time of a node by default; with more, the probe may take longer, but for the time that its answer takes."""
PYTHONS = ("/usr/bin/python3", "python3", "/usr/libexec/platform-python")
"""Default locations of Python; the system's own takes precedence over a shim in the user's PATH."""


class NodeFailure(Exception):  # noqa: N818 - it is the content of a report, not a programming error
    """Why a node has no result: one line, what is wrong and what to do."""


class Session(Protocol):
    """A running command on a node."""

    def read(self, timeout_s: float) -> tuple[bytes, bytes]:
        """Return available output: (stdout, stderr), both empty if the time is over or the command has ended."""

    def write(self, data: bytes, timeout_s: float) -> None:
        """Send all of ``data`` to stdin; raise TimeoutError, or OSError if the other end is closed."""

    def close_stdin(self) -> None:
        """Close stdin: nothing more will be written."""

    @property
    def ended(self) -> bool:
        """Return True if the command has ended and all its output was read."""

    @property
    def exit_status(self) -> int | None:
        """Return the exit status after the end; None if the connection was lost before."""


class MissingProgram(NodeFailure):
    """The node has no such program."""


@dataclass(frozen=True)
class Program:
    """A program to run on a node, and how it becomes root."""

    command: str
    """One line for the login shell, of any kind."""
    token: str
    """Marks the lines that the command itself prints."""
    sudo: bool
    prompt: str | None = None
    """The prompt of sudo, random for each start; None if no password may be sent."""
    withheld: bool = False
    """There is a password, and this node may not have it."""
    missing: str = "no such program on the node"
    """The message for a missing program."""
    label: str = "the probe"
    """The program's name in messages."""


def program(  # noqa: PLR0913
    python: str | None,
    *,
    sudo: bool,
    ask: bool,
    limit_s: float,
    withheld: bool = False,
    arguments: Sequence[str] = ("-I", "-"),
    label: str = "the probe",
) -> Program:
    """Return the command that starts Python, by default reading its program from stdin; see ``started_as``."""
    if python is None:
        missing = "no Python 3 on the node: install it (apt-get install python3) or set ansible_python_interpreter"
    else:
        missing = f"{python} does not exist on the node: correct ansible_python_interpreter"
    names = (python,) if python else PYTHONS
    return started_as(
        names, arguments, sudo=sudo, ask=ask, limit_s=limit_s, missing=missing, withheld=withheld, label=label
    )


def probe_arguments(limit_s: float) -> tuple[str, ...]:
    """Return Python's arguments for the probe on stdin; where it has more time than usual, with that time."""
    return ("-I", "-", str(int(limit_s) - RESERVE_S)) if limit_s > USUAL_S else ("-I", "-")


def started_as(  # noqa: PLR0913
    names: Sequence[str],
    arguments: Sequence[str],
    *,
    sudo: bool,
    ask: bool,
    limit_s: float,
    missing: str,
    label: str = "the probe",
    withheld: bool = False,
) -> Program:
    """Return the command that starts the first program of ``names`` that the node has.

    It prints ``TOKEN ready`` before it starts it: earlier output is noise of the login shell, and input is sent only
    then, so that sudo never reads it. The node ends it by itself after ``limit_s``, also when the connection breaks.
    ``ask``: sudo may ask for a password, with a random prompt of its own. Without sudo there is no prompt.
    """
    token = f"gpunode-{secrets.token_hex(8)}"
    prompt = f"gpunode-{secrets.token_hex(16)}:" if sudo and ask else None
    limit = max(1, int(limit_s))
    inner = (
        f'for p in {" ".join(map(_double_quoted, names))}; do if command -v "$p" >/dev/null 2>&1; then '
        f'echo {token} ready; t=; command -v timeout >/dev/null 2>&1 && t="timeout -k 5 {limit}"; '
        f'exec $t "$p" {" ".join(map(_double_quoted, arguments))}; fi; done; echo {token} missing; exit 127'
    )
    command_line = ["/bin/sh", "-c", inner]
    if sudo:
        # sudo's messages are parsed, so they have to be in English; env, because csh does not support VARIABLE=value
        # before a command.
        command_line = [
            "env",
            "LC_ALL=C",
            "sudo",
            "-H",
            *(("-S", "-p", prompt) if prompt else ("-n",)),
            "-u",
            "root",
            *command_line,
        ]
    return Program(shlex.join(command_line), token, sudo, prompt, withheld, missing, label)


def converse(  # noqa: PLR0913
    session: Session,
    program: Program,
    script: bytes,
    password: str | None,
    deadline: float,
    *,
    ready: Callable[[], None] = lambda: None,
) -> bytes:
    """Run the probe over a session and return its stdout; raise NodeFailure with one line otherwise.

    The password is written when sudo's prompt appears and at no other time. ``deadline`` is a time.monotonic() value.
    ``ready`` is called when the node is about to run the probe.
    """
    out, err = begin(session, program, password, deadline)
    ready()
    left = deadline - time.monotonic()
    with suppress(OSError):
        session.write(script, left)
    session.close_stdin()
    errors_seen = len(err)
    while not session.ended:
        stdout, stderr = session.read(_left(deadline))
        out += stdout
        err += stderr
        errors_seen += len(stderr)
        if len(out) > MAX_STDOUT or errors_seen > MAX_STDERR:
            raise NodeFailure(
                f"the node sent more than {(MAX_STDOUT if len(out) > MAX_STDOUT else MAX_STDERR) >> 20} MiB"
            )
        if len(err) > 2 * _KEPT_STDERR:
            del err[:-_KEPT_STDERR]
    return _result(session.exit_status, bytes(out), err.decode(errors="replace"), program)


def begin(session: Session, program: Program, password: str | None, deadline: float) -> tuple[bytearray, bytearray]:
    """Wait until a program is about to start; return what was read of its stdout and stderr until then.

    The password is written when the last line on stderr is the prompt of the sudo that this command starts, once,
    and at no other time: not for a login shell's or a tool's own prompt, and never where the command starts no sudo.
    Raises NodeFailure with one line.
    """
    out, err = bytearray(), bytearray()
    prompts = 0
    prompt, mark = (program.prompt or "").encode(), f"{program.token} ready".encode()
    while not session.ended:
        stdout, stderr = session.read(_left(deadline))
        out += stdout
        err += stderr
        if f"{program.token} missing".encode() in out:
            raise MissingProgram(program.missing)
        # sudo-rs adds its own text around it. A program that asks leaves the line open.
        if prompt and prompt in err.rpartition(b"\n")[2] and err.count(prompt) > prompts:
            prompts = err.count(prompt)
            _answer_prompt(session, password, prompts, deadline - time.monotonic())
        line = out.find(mark)
        end = out.find(b"\n", line) if line >= 0 else -1
        if end >= 0:
            return out[end + 1 :], err
        if len(out) > MAX_NOISE:
            raise NodeFailure(f"the login shell prints too much before {program.label} can start: check its profile")
        if len(err) > MAX_STDERR:
            raise NodeFailure(f"the node sent more than {MAX_STDERR >> 20} MiB")
    text = err.decode(errors="replace")
    raise NodeFailure(_why_not_started(session.exit_status, text, last_line(_without(program, text)), program))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise NodeFailure("no answer within the time limit; the node hangs or is overloaded (--timeout S)")
    return min(left, 5.0)


def _answer_prompt(session: Session, password: str | None, prompts: int, left: float) -> None:
    if password is None:
        raise NodeFailure("sudo requires a password: use -K, or set ansible_become_password")
    if prompts > 1:
        raise NodeFailure("sudo does not accept the password")
    with suppress(OSError):
        session.write(password.encode() + b"\n", left)


def _without(program: Program, text: str) -> str:
    return text.replace(program.prompt, "") if program.prompt else text


def _result(status: int | None, out: bytes, err: str, program: Program) -> bytes:
    last = last_line(_without(program, err))
    if status is None or status < 0:
        raise NodeFailure(f"the connection was lost while {program.label} ran")
    if status in (124, 137):
        raise NodeFailure(
            f"{program.label} did not end within the time limit and was stopped on the node (--timeout S)"
        )
    if status != 0:
        raise NodeFailure(f"{program.label} ended with exit code {status}{f': {last}' if last else ''}")
    return out


def _why_not_started(status: int | None, err: str, last: str, program: Program) -> str:
    text = err.lower()
    if program.sudo:
        if "password is required" in text or "authentication is required" in text or "terminal is required" in text:
            if program.withheld:
                return (
                    "sudo requires a password, but none is sent to a node with an unverified host key: "
                    "add its host key to known_hosts"
                )
            return "sudo requires a password: use -K, or set ansible_become_password"
        if "incorrect password" in text or "authentication failed" in text or "no password was provided" in text:
            return "sudo does not accept the password"
        if "not in the sudoers" in text or "not allowed to" in text or "may not run" in text or "can't do that" in text:
            return f"sudo does not let this user become root: {last}"
        if "must have a tty" in text:
            return "sudo requires a terminal: remove requiretty from sudoers"
        if status == 127 or "sudo: not found" in text or "sudo: command not found" in text:
            return "sudo is not installed on the node: log in as root, or set ansible_become: false"
    if status is None or status < 0:
        return f"the connection was lost before {program.label} could start"
    return f"{program.label} could not start, exit code {status}{f': {last}' if last else ''}"


def _double_quoted(text: str) -> str:
    for special in '\\"$`':
        text = text.replace(special, f"\\{special}")
    return f'"{text}"'


class LocalSession:
    """A command of this machine in a process group of its own."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._stdin: IO[bytes] = cast("IO[bytes]", self._process.stdin)
        outputs = (self._process.stdout, self._process.stderr)
        self._streams = {stream.fileno(): index for index, stream in enumerate(outputs) if stream is not None}
        self._selector = selectors.DefaultSelector()
        for number in self._streams:
            self._selector.register(number, selectors.EVENT_READ)
        os.set_blocking(self._stdin.fileno(), False)

    def read(self, timeout_s: float) -> tuple[bytes, bytes]:
        """See Session."""
        both = [b"", b""]
        if not self._streams:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
            return b"", b""
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, _CHUNK)
            if data:
                both[self._streams[key.fd]] += data
            else:
                self._selector.unregister(key.fd)
                del self._streams[key.fd]
        return both[0], both[1]

    def write(self, data: bytes, timeout_s: float) -> None:
        """See Session."""
        deadline = time.monotonic() + timeout_s
        rest = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin.fileno(), selectors.EVENT_WRITE)
            while rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("nobody reads")
                rest = rest[os.write(self._stdin.fileno(), rest[:4096]) :]

    def close_stdin(self) -> None:
        """See Session."""
        with suppress(OSError):
            self._stdin.close()

    @property
    def ended(self) -> bool:
        """See Session."""
        return not self._streams and self._process.poll() is not None

    @property
    def exit_status(self) -> int | None:
        """See Session."""
        return self._process.returncode

    def close(self) -> None:
        """Kill the rest of the group and close the pipes."""
        kill_group(self._process)
        self._process.wait()
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
