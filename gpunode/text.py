"""Text in messages: escaped, listed, counted, suggested; and the timestamps in logs.

This module imports nothing of gpunode, so every room may use it.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control codes of both sets, and characters that change the direction of text."""
_CONTROL_OF_JSON = re.compile(_CONTROL.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))
"""The same but for tab and line feed, of which an indented document is full."""


def printable(text: str) -> str:
    """Return text of a node, file or user on one line with control characters escaped, safe for a terminal."""
    return _CONTROL.sub(lambda match: " " if match[0] in "\t\n" else f"\\x{ord(match[0]):02x}", text)


def is_whole(text: str) -> bool:
    """Return whether a text is a whole number of at most 18 digits; isdigit() is true of others that int() refuses."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def one_line(text: str, most: int = 500) -> str:
    """Return text of a node or a program as a line of limited length, without a character that is not printable."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))[:most]


def last_line(text: str, most: int = 300) -> str:
    """Return the last line of a program's message that is not blank, as ``one_line``; empty if there is none."""
    return one_line(next((line for line in reversed(text.splitlines()) if line.strip()), ""), most)


def printable_json(text: str) -> str:
    """Return an equivalent JSON document in which control characters are JSON escapes."""
    return _CONTROL_OF_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def all_printable(value: Any) -> Any:
    """Return the value with every text in it printable, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(item) for item in value]
    return value


def listed(items: Iterable[str], most: int = 6) -> str:
    """Return ``a, b, c``; items beyond ``most`` are counted: ``a, b and 7 more``."""
    names = list(items)
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def number_ranges(numbers: Iterable[int]) -> str:
    """Return ``0-3,7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 package``, ``2 packages``, ``2 processes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def nearest(name: str, known: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Return at most ``most`` of the known names that resemble ``name``, the most similar first."""
    return get_close_matches(name, list(known), n=most, cutoff=likeness)


def did_you_mean(names: Sequence[str]) -> str:
    """Return ``did you mean a or b?``; empty text without names."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def suggestion(name: str, known: Iterable[str], most: int = 1, likeness: float = 0.6) -> str:
    """Return ``did you mean gpu.count?``, or all known names if none is similar."""
    names = list(known)
    return did_you_mean(nearest(name, names, most, likeness)) or f"known: {', '.join(names)}"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``unknown check gpu.cuont: did you mean gpu.count?``; all known names if none is similar."""
    return f"unknown {kind} {name or '(empty)'}: {suggestion(name, known, most=3)}"


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the shell patterns matches a name, with case."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def moment(text: str | None) -> datetime | None:
    """Return the time of a log line (``2026-11-20T09:00:00+0000``), UTC without a zone; None for another format."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def is_recent(text: str | None, at: str | None, within: timedelta) -> bool:
    """Return whether a log line's time is at most so long before another time; True if one of them is not known."""
    then, end = moment(text), moment(at)
    return then is None or end is None or end - then <= within


def now() -> str:
    """Return the time in UTC, as in reports."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Return the seconds from one log line's time to another's; None if either has another format."""
    first, second = moment(start), moment(end)
    return (second - first).total_seconds() if first and second else None
