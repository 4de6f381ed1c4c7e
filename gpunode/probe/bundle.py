"""The bundle: everything seen on one node, raw, as one JSON document."""

from importlib.resources import files as resource_files
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpunode.errors import UsageError

SCHEMA: Literal["gpunode.bundle/1"] = "gpunode.bundle/1"


class CommandResult(BaseModel):
    """One command as it ran on the node. A missing tool is rc 127, a timeout rc 124 with ``timed_out``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: list[str]
    rc: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    truncated: bool = False

    @property
    def missing(self) -> bool:
        """True where the node has no such tool."""
        return self.rc == 127


class Bundle(BaseModel):
    """Raw outputs of one node.

    ``files`` maps a path to its text, or to None where it is absent or could not be read. A key that ends
    in ``/`` is a folder: its text is the names in it, one a line. A path that was never asked for is no key.

    ``commands`` holds by key what ran; where ``argv`` begins with ``(probe)`` the probe looked by itself. What it could
    not read is in ``probe-read``: one ``PATH: REASON`` a line of stderr, so that absent and unreadable are told apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["gpunode.bundle/1"] = Field(SCHEMA, alias="schema")
    host: str
    collected_at: str
    simulated: bool = False
    commands: dict[str, CommandResult]
    files: dict[str, str | None]
    results: list[dict[str, Any]] = []

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """Read a bundle; raise UsageError with one line that names ``where`` if it is none."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as err:
            first = err.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the document"
            raise UsageError(f"{where}: not a {SCHEMA} bundle: {place}: {first['msg']}") from None

    def to_json(self) -> str:
        """The document as it is saved; ``from_json`` reads it back unchanged."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def script_text() -> str:
    """The probe's source: runs under Python 3.6 or later as ``python3 -I -`` and prints one bundle."""
    return resource_files("gpunode.probe").joinpath("script.py").read_text(encoding="utf-8")
