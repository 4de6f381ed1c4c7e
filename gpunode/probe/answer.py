"""The answer of a node before it is parsed: parsing is work for a process with limits (room ``judging``)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunode.errors import UsageError
from gpunode.probe.bundle import Bundle

ANSWER = "the node's answer"
"""The name of the probe's output in messages."""
PLACEHOLDER = "[password]"
LEAST = 4
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
        if len(secret) >= LEAST:
            text = text.replace(secret, PLACEHOLDER)
    return text


def redacted_bundle(bundle: Bundle, secrets: Sequence[str]) -> Bundle:
    """Return the bundle without any of the secrets, in every part and in every JSON escaping."""
    if not any(len(secret) >= LEAST for secret in secrets):
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
