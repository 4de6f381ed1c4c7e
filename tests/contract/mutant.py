"""What a mutant is: an edit of raw text that one check must find; and what it is when data is missing."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bundles import Edit
from machines import Document

from gpunode.checks import Expectation, Status

Base = Callable[[], Document]
Missing = dict[str, list[tuple[Base, list[Edit]]]]


@dataclass(frozen=True)
class Mutant:
    """An edit that one check must find."""

    check: str
    name: str
    base: Base
    edits: list[Edit]
    becomes: Status = Status.FAIL
    skips: tuple[str, ...] = ()
    """Checks that have nothing to look at any more."""
    unknown: tuple[str, ...] = ()
    """Checks that lack their data now."""
    expect: Expectation = field(default_factory=Expectation)
    everywhere: bool = False
    """It is of every GPU of the node: each has a finding."""


def garbled(command: str, text: str = "garbage\n") -> list[Edit]:
    """The command printed something that is not an answer."""
    return [Edit(("commands", command, "stdout"), None, text)]


def cut(command: str) -> list[Edit]:
    """The command printed more than the probe keeps."""
    return [Edit(("commands", command, "truncated"), None, True)]
