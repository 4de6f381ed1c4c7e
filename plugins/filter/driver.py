"""The driver's policy on systems with apt: gpunode.provisioning decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.policy import registered


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            **registered("driver_apt", "driver_plan", "driver_question", "driver_removal"),
            **registered("driver_refusals", "driver_refusals"),
        }
