"""The driver's policy on systems with dnf: gpunode.provisioning decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.gpunode.node.plugins.plugin_utils.policy import registered


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        found: dict[str, Callable[..., Any]] = registered(
            "driver_dnf", "package_manager", "dnf_problems", "dnf_plan", "dnf_refusals", "dnf_error", "dnf_removal"
        )
        return found
