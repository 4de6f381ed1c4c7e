"""Removal of secrets that a node received from what it sends back."""

from collections.abc import Iterable, Sequence
from typing import Any

from gpunode.probe import Bundle

PLACEHOLDER = "[password]"
LEAST = 4
"""Characters: a shorter secret could be part of any text, and its removal would leave nothing to judge."""


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
