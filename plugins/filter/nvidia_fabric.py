"""Filters for NVLink fabrics, computed by gpunode.provisioning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.policy import registered


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        found: dict[str, Callable[..., Any]] = registered("fabric", "imex_addresses")
        return found
