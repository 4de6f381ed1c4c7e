"""A node after login: further programs on it, over the existing connection."""

import os
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import fabric
import paramiko

from gpunode.fleet.connection import Abort, Gateways, SshSession, connect, start
from gpunode.fleet.session import LocalSession, Program, begin, program, started_as
from gpunode.fleet.targets import Target
from gpunode.text import last_line

_CHUNK = 64 * 1024
_KEPT_STDERR = 16 * 1024
_WRITE_LIMIT_S = 300.0
"""For one piece; an engine that writes a layer to a slow disk does not read in the meantime."""


class Stream:
    """A program on a node with its stdin and stdout as one real socket, ``sock``; the program ends when that closes."""

    def __init__(self, session: SshSession | LocalSession, first: bytes, complaints: bytes) -> None:
        self.sock, self._remote_end = socket.socketpair()
        self._session = session
        self._err = bytearray(complaints)
        self._over = threading.Event()
        for pump in (self._out, self._in):
            threading.Thread(target=pump, args=(first,), daemon=True).start()

    def _out(self, first: bytes) -> None:
        try:
            self._remote_end.sendall(first)
            while not self._session.ended:
                out, err = self._session.read(5.0)
                self._err += err
                del self._err[:-_KEPT_STDERR]
                self._remote_end.sendall(out)
        except (OSError, EOFError, paramiko.SSHException):
            # A reader that stops needs no more output: a program that continues to write would wait for ever.
            self._session.close()
        self._over.set()
        with suppress(OSError):
            self._remote_end.shutdown(socket.SHUT_RDWR)

    def _in(self, _: bytes) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):
            while data := self._remote_end.recv(_CHUNK):
                self._session.write(data, _WRITE_LIMIT_S)
        self._session.close_stdin()

    def complaint(self, timeout_s: float = 2.0) -> str:
        """Return the last line of its stderr once it has ended; empty if it wrote none."""
        self._over.wait(timeout_s)
        return last_line(self._err.decode(errors="replace"))

    def exit_status(self, timeout_s: float = 2.0) -> int | None:
        """Return the exit status after the end; None if it did not end, or the connection was lost before."""
        self._over.wait(timeout_s)
        return self._session.exit_status

    def close(self) -> None:
        """End the program; ``sock`` then reads the end of file, and must be closed by its owner."""
        with suppress(OSError):
            self._remote_end.shutdown(socket.SHUT_RDWR)
        self._session.close()
        self._over.wait(2.0)
        self._remote_end.close()


class Node:
    """A node during its work: programs started on it end with that work at the latest."""

    def __init__(
        self,
        target: Target,
        connection: fabric.Connection | None,
        abort: Abort,
        become_password: str | None,
        unchecked: str | None = None,
    ) -> None:
        self.target = target
        self._connection = connection
        self._abort = abort
        self.given_password = target.become_password or become_password
        self.unchecked = unchecked
        """The host key, if it was accepted without being known; None if it was checked."""

    @property
    def password(self) -> str | None:
        """Return the password for sudo; None also for a node with an unchecked identity."""
        return self.given_password if self.unchecked is None else None

    @property
    def is_root(self) -> bool:
        """Return True if the login is root itself."""
        return self.target.user == "root" if self.target.ssh is not None else os.geteuid() == 0

    @property
    def becomes_root(self) -> bool:
        """Return True if the probe was run with sudo."""
        become = self.given_password is not None if self.target.become is None else self.target.become
        return become and not self.is_root

    @property
    def user(self) -> str:
        """Return the login user; ``this user`` on this machine."""
        return self.target.user or "this user"

    def stream(  # noqa: PLR0913
        self,
        names: Sequence[str],
        arguments: Sequence[str],
        *,
        sudo: bool,
        limit_s: float,
        missing: str,
        label: str,
    ) -> Stream:
        """Start the first program of ``names`` that the node has; the node ends it after ``limit_s``.

        Raises NodeFailure with one line: MissingProgram (``missing``) if there is none of them, a refusal of sudo,
        a lost connection.
        """
        deadline = time.monotonic() + limit_s
        started = started_as(
            names,
            arguments,
            sudo=sudo,
            ask=self.password is not None,
            limit_s=limit_s,
            missing=missing,
            label=label,
            withheld=self.given_password is not None and self.password is None,
        )
        session = self.session(started, deadline)
        try:
            first, complaints = begin(session, started, self.password, deadline)
        except BaseException:
            session.close()
            raise
        stream = Stream(session, bytes(first), bytes(complaints).replace((started.prompt or "\0").encode(), b""))
        self._abort.add(stream.close)
        return stream

    def python(self, *, limit_s: float, arguments: Sequence[str] = ("-I", "-"), label: str = "the probe") -> Program:
        """Return the command that starts the node's Python, as root if the node is used so; see ``program``."""
        return program(
            self.target.python,
            sudo=self.becomes_root,
            ask=self.password is not None,
            limit_s=limit_s,
            withheld=self.given_password is not None and self.password is None,
            arguments=arguments,
            label=label,
        )

    def session(self, program: Program, deadline: float) -> SshSession | LocalSession:
        """Start a program; it ends with the node's work. Raises NodeFailure."""
        session: SshSession | LocalSession
        if self._connection is None:
            session = LocalSession(shlex.split(program.command))
        else:
            session = start(self._connection, program.command, deadline)
        self._abort.add(session.close)
        return session


def login(
    target: Target, *, gateways: Gateways, deadline: float, abort: Abort, become_password: str | None = None
) -> Node:
    """Return a node after login; this machine needs none. Raises NodeFailure."""
    if target.ssh is None:
        return Node(target, None, abort, become_password)
    connection, unchecked = connect(
        target.ssh,
        gateways=gateways,
        deadline=deadline,
        abort=abort,
        password=target.password,
        passphrase=target.key_passphrase,
    )
    abort.add(connection.close)
    return Node(target, connection, abort, become_password, unchecked)
