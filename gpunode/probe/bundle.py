"""The bundle: the raw data of one node as one JSON document; and a node's answer before it is parsed.

Parsing is work for a process with limits (room ``judging``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json

from gpunode.errors import UsageError
from gpunode.frozen import Frozen, FrozenByName, invalid_field
from gpunode.text import one_line

SCHEMA: Literal["gpunode.bundle/1"] = "gpunode.bundle/1"
MAX_BYTES = 32 * 1024 * 1024
MAX_TEXT = 8 * 1024 * 1024
"""Maximum characters of one output or file: twice what the probe keeps."""
MAX_COMMANDS = 2_000
MAX_FILES = 100_000
MAX_RESULTS = 5_000
MAX_WORDS = 50_000
"""Maximum words of one command: the probe passes files to dpkg, modinfo and cat."""
MAX_VALUES = 20_000
"""Maximum values in one result, at all levels."""
_MAX_KEYS = 32
"""Maximum keys of one of our own objects: more are foreign, and each unknown key would add an error with a text of its
own.
"""


class CommandResult(Frozen):
    """One command as it ran on the node. A missing tool is rc 127, a timeout rc 124 with ``timed_out``."""

    argv: list[str]
    rc: int
    stdout: str
    stderr: str
    seconds: float = Field(allow_inf_nan=False)
    timed_out: bool = False
    truncated: bool = False

    @property
    def missing(self) -> bool:
        """Return True if the node has no such tool."""
        return self.rc == 127


class Bundle(FrozenByName):
    """Raw outputs of one node.

    ``files`` maps a path to its text, or to None where it is absent or could not be read. A key that ends
    in ``/`` is a folder: its text is the names in it, one a line. A path that was not requested is missing.

    ``commands`` are the commands that ran, by key; if ``argv`` begins with ``(probe)``, the probe collected the data
    itself. Unreadable paths are in ``probe-read``: one ``PATH: REASON`` per line of stderr, so that they differ from
    absent ones.
    """

    schema_name: Literal["gpunode.bundle/1"] = Field(SCHEMA, alias="schema")
    host: str
    collected_at: str
    simulated: bool = False
    commands: dict[str, CommandResult]
    files: dict[str, str | None]
    results: list[dict[str, Any]] = Field([])

    # A result with infinity (1e999) or NaN is malformed, and as a saved bundle it must not become one without a value.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    @classmethod
    def from_json(cls, text: str | bytes, where: str, records: Sequence[dict[str, Any]] = ()) -> Self:
        """Read a bundle and add a workload's records to its own.

        Raises UsageError with one line that names ``where`` if it is invalid.
        """
        try:
            _refuse_longer(text, "the document", MAX_BYTES)
            document = from_json(text)
            if records:
                _add(records, document)
            # Validation keeps an error text for each fault: a million of them would be gigabytes.
            _refuse_excess(document)
            return cls.model_validate(document)
        except ValidationError as err:
            field, why = invalid_field(err, "the document")
        except ValueError as err:
            field, why = "the document", f"Invalid JSON: {err}"
        except _Refused as err:
            field, why = err.field, err.why
        raise UsageError(one_line(f"{where}: not a {SCHEMA} bundle: {field}: {why}"))

    def to_json(self) -> str:
        """Return the document as it is saved; ``from_json`` reads it back unchanged.

        On one line if it is too long otherwise: it was not, as the node sent it.
        """
        text = self.model_dump_json(by_alias=True, indent=1) + "\n"
        return text if len(text.encode()) <= MAX_BYTES else self.model_dump_json(by_alias=True) + "\n"


class _Refused(Exception):  # noqa: N818 - it becomes the UsageError
    def __init__(self, field: str, why: str) -> None:
        self.field = field
        self.why = why


def _add(records: Sequence[dict[str, Any]], document: Any) -> None:
    """Add a workload's records; those of a run that was lost do not know whether the node is simulated."""
    document = _table(document, "the document", _MAX_KEYS)
    simulated = document.get("simulated") is True
    results = _list(document.get("results", []), "results", MAX_RESULTS)
    document["results"] = [
        *results,
        *({**record, "simulated": record.get("simulated", simulated)} for record in records),
    ]


def _refuse_excess(document: Any) -> None:
    """Raise _Refused at the first value that is of another kind, or more than a node can have."""
    _table(document, "the document", _MAX_KEYS)
    for key, command in _table(document.get("commands", {}), "commands", MAX_COMMANDS).items():
        field = f"commands.{key}"
        _table(command, field, _MAX_KEYS)
        _list(command.get("argv", []), f"{field}.argv", MAX_WORDS)
        for word in command.get("argv", []):
            _text(word, f"{field}.argv")
        for name in ("stdout", "stderr"):
            _text(command.get(name, ""), f"{field}.{name}")
    for path, text in _table(document.get("files", {}), "files", MAX_FILES).items():
        if text is not None:
            _text(text, f"files.{path}")
    for number, result in enumerate(_list(document.get("results", []), "results", MAX_RESULTS)):
        field = f"results.{number}"
        _table(result, field, 2 * _MAX_KEYS)
        _few_values(result, field)


def _table(value: Any, field: str, most: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Refused(field, "Input should be an object")
    if len(value) > most:
        raise _Refused(field, f"{len(value)} entries, at most {most} are read")
    return value


def _list(value: Any, field: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise _Refused(field, "Input should be a list")
    if len(value) > most:
        raise _Refused(field, f"{len(value)} entries, at most {most} are read")
    return value


def _text(value: Any, field: str) -> None:
    if not isinstance(value, str):
        raise _Refused(field, "Input should be a text")
    _refuse_longer(value, field, MAX_TEXT)


def _refuse_longer(value: str | bytes, field: str, most: int) -> None:
    if len(value) > most:
        raise _Refused(field, f"longer than {most >> 20} MiB")


def _few_values(result: dict[str, Any], field: str) -> None:
    pending: list[Any] = [result]
    seen = 0
    while pending:
        value = pending.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        seen += len(inner)
        if seen > MAX_VALUES:
            raise _Refused(field, f"more than {MAX_VALUES} values")
        pending.extend(inner)


ANSWER = "the node's answer"
"""The name of the probe's output in messages."""
PLACEHOLDER = "[password]"
LEAST_SECRET = 4
"""Characters: a shorter secret could be part of any text, and its removal would leave nothing to judge."""


@dataclass(frozen=True)
class Answer:
    """The output of the probe, or a saved bundle, with what belongs to it."""

    output: bytes = field(repr=False)
    where: str = ANSWER
    """Its name in messages."""
    host: str | None = None
    """The requested name of the node, which replaces its own; None: its own name."""
    records: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """Records of a workload, added to those in the output."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that the node received or may have received, and could send back."""

    def bundle(self) -> Bundle:
        """Parse it. Raises UsageError if it is not a bundle."""
        try:
            bundle = Bundle.from_json(self.output, self.where, self.records)
        except UsageError as err:
            raise UsageError(redacted(str(err), self.secrets)) from None
        bundle = redacted_bundle(bundle, self.secrets)
        return bundle if self.host is None else bundle.model_copy(update={"host": self.host})


@dataclass(frozen=True)
class Collected:
    """The result of one node or one saved bundle: exactly one of ``answer`` and ``reason`` is set.

    ``host`` is the name in the inventory (or as typed), or the file; the answer's own name is the node's own.
    ``reason`` is one line: what is wrong and what to do.
    """

    host: str
    answer: Answer | None
    reason: str | None
    seconds: float | None
    """Duration of the collection; None for a saved bundle."""
    unchecked: str | None = None
    """Its host key in one line, if the user's settings accept an unknown one (StrictHostKeyChecking)."""


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return the text without any of the secrets."""
    for secret in secrets:
        if len(secret) >= LEAST_SECRET:
            text = text.replace(secret, PLACEHOLDER)
    return text


def redacted_bundle(bundle: Bundle, secrets: Sequence[str]) -> Bundle:
    """Return the bundle without any of the secrets, in every part and in every JSON escaping."""
    if not any(len(secret) >= LEAST_SECRET for secret in secrets):
        return bundle
    before = bundle.model_dump(by_alias=True)
    after = _everywhere(before, secrets)
    return bundle if after == before else Bundle.model_validate(after)


def _everywhere(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return redacted(value, secrets)
    if isinstance(value, dict):
        return {_everywhere(key, secrets): _everywhere(part, secrets) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_everywhere(part, secrets) for part in value]
    return value
