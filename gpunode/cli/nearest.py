"""What a person may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown check gpu.cuont: did you mean gpu.count?``; all known names where none is near."""
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return f"unknown {what} {name}: {hint}"
