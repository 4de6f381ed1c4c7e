"""Filters that compute the settings of a workload from a node's facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpunode.node.plugins.plugin_utils.policy import unusable

try:
    from gpunode.facts import NodeFacts
    from gpunode.tuning import WORKLOADS, env_file, tune
    from gpunode.variables import plain
except ImportError as err:
    MISSING = unusable(err)
else:
    MISSING = unusable()


def container_env(facts: Mapping[str, Any], workload: str = "pytorch", multi_node: bool = False) -> str:
    """Return the text of ``/etc/gpunode/container.env`` for a NodeFacts document, for ``docker run --env-file``.

    Raise AnsibleFilterError for an invalid document or an unknown workload.
    """
    if MISSING is not None:
        raise AnsibleFilterError(MISSING)
    if workload not in WORKLOADS:
        raise AnsibleFilterError(f"unknown workload: {workload}; known: {', '.join(WORKLOADS)}")
    if not isinstance(multi_node, bool):
        raise AnsibleFilterError("multi_node must be true or false, not text: use | bool")
    try:
        node = NodeFacts.model_validate(plain(facts))
    except ValueError as err:
        raise AnsibleFilterError(f"not a NodeFacts document: {err}") from None
    return env_file(tune(node, workload, multi_node=multi_node))


class FilterModule:
    """Filters of the collection ``gpunode.node``."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"container_env": container_env}
