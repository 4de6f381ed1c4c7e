"""Text of nodes, files and users as it may be shown: nothing in it steers a terminal, and it stays in its line."""

import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control codes of both sets, and what turns the direction of text."""


def printable(text: str) -> str:
    """The text in one line, with control characters written out."""
    return _CONTROL.sub(lambda match: " " if match[0] in "\t\n" else f"\\x{ord(match[0]):02x}", text)


def printable_json(text: str) -> str:
    """A JSON document that says the same, with those control characters as escapes that JSON lets stand."""
    return _CONTROL.sub(lambda match: match[0] if match[0] in "\t\n" else f"\\u{ord(match[0]):04x}", text)


def all_printable(value: Any) -> Any:
    """The value with every text in it printable, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(item) for item in value]
    return value
