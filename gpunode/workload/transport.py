"""Transport to one node, as the launcher gets it. It opens no connection itself."""

import socket
from typing import Protocol


class LaunchFailure(Exception):  # noqa: N818 - it is the content of a record, not a programming error
    """Why the payload did not run, or did not finish: ``kind`` for programs, one line for people.

    ``engine_message`` is the engine's complete message; the line may contain a part of it.
    """

    def __init__(self, kind: str, message: str, engine_message: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.engine_message = message if engine_message is None else engine_message


class ProgramStream(Protocol):
    """A program on the node, its stdin and stdout as one socket."""

    @property
    def sock(self) -> socket.socket:
        """Return the socket of both directions; written data reaches the program, closing it ends the program."""

    def complaint(self) -> str:
        """Return the last line of the program's stderr after its end; empty if it wrote none."""

    def close(self) -> None:
        """End the program."""


class Transport(Protocol):
    """Transport to one node: byte streams over the existing connection.

    Both methods raise LaunchFailure if the node does not start them.
    """

    @property
    def as_root(self) -> tuple[bool, ...]:
        """Return how to reach the engine, in this order: as the login user (False), with sudo (True)."""

    @property
    def user(self) -> str:
        """Return the login user."""

    def engine(self, *, root: bool) -> ProgramStream:
        """Return a new connection to the engine's API."""

    def python(self, program: str, arguments: tuple[str, ...]) -> ProgramStream:
        """Run ``program`` with the node's Python (as ``python3 -I -c``), as the login user."""
