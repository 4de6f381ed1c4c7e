"""Reading and judging of a node's answer in a process of its own, within limits: excessive costs affect only that node.

One process is forked before any thread runs, with all modules loaded, and forks the children that do the work, one
answer after another. A child limits itself for each: processor time, time and memory. One that exceeds a limit ends
with that answer, and another takes its place. What it runs is a function of ours; what it returns is bytes.
"""

import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from gpunode.errors import GpunodeError, UsageError


@dataclass(frozen=True)
class AnswerLimits:
    """Limits for one answer."""

    cpu_s: int = 20
    wall_s: int = 120
    memory_mib: int = 256
    """In addition to what the process has before it begins."""
    answer_mib: int = 32


class Exceeded(Exception):  # noqa: N818 - it becomes a finding
    """An answer exceeded the limits, or crashed the work; the message is the reason in one line."""


_HEAD = struct.Struct(">cq")
"""Kind of a frame, and the number of bytes that follow; for ``_ENDED``, minus the signal's number."""
_WORK, _DONE, _REFUSED, _MEMORY, _BROKE, _ENDED = b"W", b"D", b"R", b"M", b"B", b"E"
_CHUNK = 1 << 20


class Workers:
    """Pool in which ``workers(*arguments)`` calls ``work(*arguments)`` in a child. Threads may call it in parallel.

    Raises UsageError if ``work`` does, and Exceeded for every other failure there.
    """

    def __init__(
        self, work: Callable[..., bytes], limits: AnswerLimits | None = None, *, most: int | None = None
    ) -> None:
        self.limits = limits or AnswerLimits()
        self.most = most or min(4, os.cpu_count() or 1)
        """Maximum number of children."""
        self._slots = threading.Semaphore(self.most)
        self._idle: list[socket.socket] = []
        self._control, remote_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            _stand_by(remote_end, work, self.limits)
        remote_end.close()

    def __call__(self, *arguments: Any) -> bytes:
        """Return the result of ``work``, called in a child; see the class."""
        with self._slots:
            child = self._idle.pop() if self._idle else self._another()
            try:
                kind, number, body = self._ask(child, pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL))
            except (OSError, Exceeded) as err:
                child.close()
                if isinstance(err, TimeoutError):
                    raise Exceeded(f"evaluating its answer took more than {self.limits.wall_s} s") from None
                raise err if isinstance(err, Exceeded) else _failed(err) from None
            if kind in (_DONE, _REFUSED):
                self._idle.append(child)
            else:
                child.close()
        return self._understood(kind, number, body)

    def _another(self) -> socket.socket:
        """Return a new child. Raises Exceeded: also for each later answer if the process that forks was killed."""
        try:
            local_end, remote_end = socket.socketpair()
            with remote_end:
                local_end.settimeout(self.limits.wall_s + 10)
                socket.send_fds(self._control, [_WORK], [remote_end.fileno()])
        except OSError as err:
            raise _failed(err) from None
        return local_end

    def _ask(self, child: socket.socket, request: bytes) -> tuple[bytes, int, bytes]:
        with suppress(BrokenPipeError, ConnectionResetError):
            child.sendall(_HEAD.pack(_WORK, len(request)))
            child.sendall(request)
        kind, number = _HEAD.unpack(_read(child, _HEAD.size))
        if number > self.limits.answer_mib << 20:
            raise Exceeded(f"its report is larger than {self.limits.answer_mib} MiB")
        return kind, number, b"" if kind == _ENDED else _read(child, number)

    def _understood(self, kind: bytes, number: int, body: bytes) -> bytes:
        if kind == _DONE:
            return body
        if kind == _REFUSED:
            raise UsageError(body.decode())
        if kind == _MEMORY or (kind == _ENDED and number == -signal.SIGABRT):
            raise Exceeded(f"evaluating its answer took more than {self.limits.memory_mib} MiB of memory")
        if kind == _BROKE:
            raise Exceeded(f"evaluating its answer failed: {body.decode(errors='replace')}")
        if number == -signal.SIGALRM:
            raise Exceeded(f"evaluating its answer took more than {self.limits.wall_s} s")
        if number == -signal.SIGXCPU:
            raise Exceeded(f"evaluating its answer took more than {self.limits.cpu_s} s of processor time")
        raise Exceeded(f"evaluating its answer was terminated by signal {-number}")

    def close(self) -> None:
        """End the process and its children."""
        self._control.close()
        for child in self._idle:
            child.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _failed(err: OSError) -> Exceeded:
    return Exceeded(f"evaluating its answer failed: no process for it: {err.strerror or err}")


def _read(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size > 0:
        data = sock.recv(min(size, _CHUNK))
        if not data:
            raise Exceeded("evaluating its answer failed")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def _stand_by(control: socket.socket, work: Callable[..., bytes], limits: AnswerLimits) -> NoReturn:
    """Fork a child for each socket that arrives, and report on it how the child ended; end with the other side."""
    children: dict[int, int] = {}
    try:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _leave_streams()
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # Else every child would copy all loaded pages when the collector marks objects. To collect first would touch
        # those pages too, and costs more than the remaining garbage.
        gc.disable()
        gc.freeze()
        while True:
            ready, _, _ = select.select([control.fileno(), woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                _bury(children)
            if control.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not message:
                    break
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    # Its other end closes when no other process holds a copy.
                    for other in (*children.values(), woken, wake, control.fileno()):
                        os.close(other)
                    _serve(socket.socket(fileno=descriptors[0]), work, limits)
                children[pid] = descriptors[0]
    finally:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os._exit(0)


def _leave_streams() -> None:
    """Redirect the standard streams: a process that reads them must not wait for this one."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _bury(children: dict[int, int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            descriptor = children.pop(pid)
            with suppress(OSError):
                os.write(descriptor, _HEAD.pack(_ENDED, min(0, os.waitstatus_to_exitcode(status))))
            os.close(descriptor)


def _serve(sock: socket.socket, work: Callable[..., bytes], limits: AnswerLimits) -> NoReturn:
    """Answer requests until the other side closes, or one exceeds a limit."""
    with suppress(BaseException):
        gc.enable()
        # An answer's objects live until its end, and its memory is limited: to look for garbage among them rarely pays.
        gc.set_threshold(20_000, 20, 20)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # Else pydantic's core, out of memory, waits for ever for its own lock when it writes the location of the panic.
        os.environ["RUST_BACKTRACE"] = "0"
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory(limits)
        kind = _DONE
        while kind in (_DONE, _REFUSED):
            _, size = _HEAD.unpack(_read(sock, _HEAD.size))
            _limit_time(limits)
            kind, body = _answered(sock, size, work)
            sock.sendall(_HEAD.pack(kind, len(body)))
            sock.sendall(body)
            signal.alarm(0)
    os._exit(0)


def _answered(sock: socket.socket, size: int, work: Callable[..., bytes]) -> tuple[bytes, bytes]:
    try:
        return _DONE, work(*pickle.loads(_read(sock, size)))  # noqa: S301 - from the process that forked us
    except MemoryError:
        return _MEMORY, b""
    except GpunodeError as err:
        return _REFUSED, str(err).encode()
    except BaseException as err:
        # Out of memory, pydantic's core panics, which is not an Exception: "PyObject pointer is null".
        kind = _MEMORY if "pointer is null" in str(err) else _BROKE
        return kind, f"unexpected {type(err).__name__}".encode()


def _limit_time(limits: AnswerLimits) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + limits.cpu_s, hard))
    signal.alarm(limits.wall_s)


def _limit_memory(limits: AnswerLimits) -> None:
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + (limits.memory_mib << 20)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
