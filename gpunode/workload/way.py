"""What the launcher is handed: the way to one node. It opens no connection itself."""

import socket
from typing import Protocol


class LaunchFailure(Exception):  # noqa: N818 - it is what the record says, not a programming error
    """Why the payload did not run, or not to its end: ``kind`` for programs, one line for people.

    ``said`` is what the engine said of it, whole; the line may have a part of it.
    """

    def __init__(self, kind: str, message: str, said: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.said = message if said is None else said


class ProgramStream(Protocol):
    """A program on the node, its stdin and stdout as one socket."""

    @property
    def sock(self) -> socket.socket:
        """Both directions; what is written reaches the program, its closing ends the program."""

    def complaint(self) -> str:
        """The last line of the program's stderr after its end; empty where it wrote none."""

    def close(self) -> None:
        """End the program."""


class Transport(Protocol):
    """The way to one node: byte streams over the connection that is open already.

    Both raise LaunchFailure where the node does not let them begin.
    """

    @property
    def as_root(self) -> tuple[bool, ...]:
        """How the engine may be asked for, in this order: as who logged in (False), with sudo (True)."""

    @property
    def user(self) -> str:
        """Who logged in."""

    def engine(self, *, root: bool) -> ProgramStream:
        """A new connection to the engine's API."""

    def python(self, program: str, arguments: tuple[str, ...]) -> ProgramStream:
        """The node's Python running ``program`` (as ``python3 -I -c``), as who logged in."""
