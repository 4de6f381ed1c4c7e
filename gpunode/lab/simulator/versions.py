"""Versions of drivers and packages, compared number by number."""

from __future__ import annotations

import re


def numbers(version: str) -> tuple[int, ...]:
    """Parse ``580.95.05`` to (580, 95, 5)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def in_range(versions: str, version: tuple[int, ...]) -> bool:
    """Return whether ``580-``, ``-565`` or ``535-545`` contains the version; an empty range contains all."""
    if not versions:
        return True
    first, _, last = versions.partition("-")
    if first and version < numbers(first):
        return False
    bound = numbers(last)
    return not bound or version[: len(bound)] <= bound
