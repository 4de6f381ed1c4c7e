"""The filter of the role cuda; what it decides is in gpunode.provisioning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.errors import GpunodeError
    from gpunode.provisioning.cuda import toolkit_packages
    from gpunode.provisioning.documents import node_of, stack_of
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None


def cuda_packages(
    facts: Mapping[str, Any],
    stack: Mapping[str, Any],
    toolkits: Iterable[Any],
    installed: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``toolkit_packages`` as a document; ``settings``: ``cudnn``, ``nccl``, ``default``."""
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")
    versions = [str(each) for each in toolkits]
    try:
        return asdict(
            toolkit_packages(node_of(facts), stack_of(stack), versions, plain(installed), **plain(settings or {}))
        )
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"cuda_packages": cuda_packages}
