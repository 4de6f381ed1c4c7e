"""Filters that run the checks on a node's facts, those of its NVLink fabric, and the settings of a workload on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpunode.node.plugins.plugin_utils.policy import unusable

try:
    from gpunode.checks import Expectation, judge, registry
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts
    from gpunode.provisioning import running_driver
    from gpunode.text import printable
    from gpunode.tuning import WORKLOADS, env_file, tune
    from gpunode.variables import plain
except ImportError as err:
    MISSING = unusable(err)
else:
    MISSING = unusable()


def _need_gpunode() -> None:
    if MISSING is not None:
        raise AnsibleFilterError(MISSING)


def _node(facts: Mapping[str, Any]) -> NodeFacts:
    try:
        return NodeFacts.model_validate(plain(facts))
    except ValueError as err:
        raise AnsibleFilterError(f"not a NodeFacts document: {err}") from None


def findings(
    facts: Mapping[str, Any], checks: Iterable[str] | None = None, expect: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the findings of a NodeFacts document; of the named checks only, if checks are named.

    Raise AnsibleFilterError for an unknown check or an invalid document.
    """
    _need_gpunode()
    wanted = None if checks is None else [str(check) for check in checks]
    unknown = [check for check in wanted or () if check not in registry]
    if unknown:
        raise AnsibleFilterError(f"unknown check: {', '.join(unknown)}")
    try:
        expectation = Expectation.model_validate(plain(expect or {}))
    except ValueError as err:
        raise AnsibleFilterError(f"not a valid expectation: {err}") from None
    return [finding.model_dump(mode="json") for finding in judge(_node(facts), expectation, only=wanted)]


def failed(findings: Iterable[Mapping[str, Any]], before: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the findings that failed or were not possible, except those that were no better before."""
    known = {(finding["check"], finding["component"]): str(finding["status"]) for finding in before}
    worst = [dict(finding) for finding in findings if finding["status"] in ("fail", "error")]
    return [row for row in worst if known.get((row["check"], row["component"])) not in ("fail", row["status"])]


def finding_line(finding: Mapping[str, Any]) -> str:
    """Return a finding as one line: status, check, component, message, and the remedy if there is one."""
    component = "" if finding["component"] == "node" else f" {finding['component']}"
    remedy = f" Next: {finding['remedy']}" if finding["remedy"] else ""
    return printable(f"{finding['status']} {finding['check']}{component}: {finding['message']}.{remedy}")


def imex_addresses(hosts: Iterable[str], variables: Any) -> list[str]:
    """Return the addresses of the hosts of an NVLink domain; ``variables`` is ``hostvars``."""
    _need_gpunode()
    try:
        return list(running_driver.imex_addresses(hosts, variables))
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None


def container_env(facts: Mapping[str, Any], workload: str = "pytorch", multi_node: bool = False) -> str:
    """Return the text of ``/etc/gpunode/container.env`` for a NodeFacts document, for ``docker run --env-file``.

    Raise AnsibleFilterError for an invalid document or an unknown workload.
    """
    _need_gpunode()
    if workload not in WORKLOADS:
        raise AnsibleFilterError(f"unknown workload: {workload}; known: {', '.join(WORKLOADS)}")
    if not isinstance(multi_node, bool):
        raise AnsibleFilterError("multi_node must be true or false, not text: use | bool")
    return env_file(tune(_node(facts), workload, multi_node=multi_node))


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "findings": findings,
            "failed": failed,
            "finding_line": finding_line,
            "imex_addresses": imex_addresses,
            "container_env": container_env,
        }
