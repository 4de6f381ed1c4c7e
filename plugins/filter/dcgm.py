"""The filter of the role dcgm; what it decides is in gpunode.provisioning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.errors import GpunodeError
    from gpunode.provisioning.dcgm import dcgm_packages
    from gpunode.provisioning.documents import stack_of
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None


def dcgm_plan(
    stack: Mapping[str, Any] | None, installed: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``dcgm_packages`` as a document; ``settings``: ``version``, ``proprietary``, ``source``."""
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")
    have = {str(name): str(version) for name, version in installed.items()}
    try:
        found = dcgm_packages(stack_of(stack) if stack else None, have, **plain(settings))
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None
    return {**asdict(found), "install": list(found.install), "purge": list(found.purge), "names": list(found.names)}


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"dcgm_plan": dcgm_plan}
