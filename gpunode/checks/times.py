"""Times as logs print them."""

from datetime import UTC, datetime


def moment(text: str | None) -> datetime | None:
    """Return the time of a log's line (``2026-11-20T09:00:00+0000``); None for another form. UTC where no zone is."""
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def seconds_between(one: str | None, other: str | None) -> float | None:
    """Return the time from one line of a log to another, None where a line's time is of another form."""
    first, second = moment(one), moment(other)
    return (second - first).total_seconds() if first and second else None
