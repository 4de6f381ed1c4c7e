"""Small helpers for sentences in findings."""

from collections.abc import Sequence


def listed(items: Sequence[str], most: int = 6) -> str:
    """``a, b, c``; what is beyond ``most`` is counted: ``a, b and 7 more``."""
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 package``, ``2 packages``, ``2 processes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
