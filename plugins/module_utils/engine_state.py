"""What the container engine of this node answers, where it runs."""

from __future__ import annotations

from typing import Any


def taken() -> dict[str, Any]:
    """Return the engine's answer."""
    return {}
