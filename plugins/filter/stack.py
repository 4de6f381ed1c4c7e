"""The Ansible face of the resolver: which stack a node gets, and the lock that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts
    from gpunode.stack import PlanHost, Request, Stack, lock_document, picture_from_facts, plan, undetermined
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None


def _need_gpunode() -> None:
    if MISSING is not None:
        raise AnsibleFilterError(
            f"the Python package gpunode is needed beside Ansible on the controller ({MISSING}): "
            "install it into the environment that ansible-playbook runs from, with pip install gpunode"
        )


def stack(
    facts: Mapping[str, Any],
    wishes: Mapping[str, Any] | None = None,
    lock: Mapping[str, Any] | None = None,
    today: str | None = None,
) -> dict[str, Any]:
    """What ``gpunode plan`` answers for one node: ``{stack, conflict, undetermined, drift}``.

    ``facts`` is a NodeFacts document, ``wishes`` a Request (``source``, ``driver``, ``cuda``, ``toolkit``,
    ``kernel_module``), ``lock`` the variable ``gpunode_stack``. With a lock and no wish for a driver, the locked
    release is wished. Exactly one of ``stack``, ``conflict`` and ``undetermined`` is not None.
    """
    _need_gpunode()
    try:
        node = NodeFacts.model_validate(plain(facts))
        request = Request.model_validate(plain(wishes or {}))
        locked = Stack.model_validate(plain(lock)) if lock else None
        day = date.fromisoformat(str(today)) if today else date.today()
    except ValueError as err:
        raise AnsibleFilterError(f"no stack can be resolved from this: {err}") from None
    if locked is not None and request.driver is None:
        request = request.model_copy(
            update={
                "driver": locked.driver.version or str(locked.driver.branch),
                "source": request.source or locked.source,
                "kernel_module": request.kernel_module or locked.module.flavour,
            }
        )
    try:
        catalog = load()
        picture = picture_from_facts(node, catalog)
        reason = undetermined(node, picture)
        host = PlanHost(node.host, None if reason else picture, reason, plain(lock) if lock else None)
        group = plan([host], request, catalog, day).groups[0]
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None
    return group.model_dump(mode="json", by_alias=True, exclude={"hosts"})


def lock(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A stack as the variables of a lock file, as ``gpunode plan --write`` writes them: ``{gpunode_stack: …}``."""
    _need_gpunode()
    try:
        return lock_document(Stack.model_validate(plain(resolved)))
    except ValueError as err:
        raise AnsibleFilterError(f"not a stack: {err}") from None


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"stack": stack, "lock": lock}
