"""The policy of an NVLink fabric: gpunode.provisioning decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.policy import registered


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        found: dict[str, Callable[..., Any]] = registered("fabric", "imex_addresses")
        return found
