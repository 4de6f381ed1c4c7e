"""The Ansible face of the resolver: which stack a node gets, and the lock that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.catalog.origins import upstream_version
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts
    from gpunode.printable import printable
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


# The options of gpunode plan that a conflict speaks of, as variables of the roles.
VARIABLES = {
    "--source": "nvidia_driver_source:",
    "--driver": "nvidia_driver_version:",
    "--kernel-module": "nvidia_driver_flavour:",
    "--cuda": "cuda_version:",
    "--toolkit": "cuda_toolkit:",
}


def node_plan(
    facts: Mapping[str, Any],
    wishes: Mapping[str, Any],
    lock: Mapping[str, Any] | None = None,
    today: str | None = None,
) -> dict[str, Any]:
    """The answer of ``stack`` for the variables of the roles, and ``problems``: why it must not be carried out.

    ``wishes``: ``source`` and ``flavour`` (``auto``: no wish), ``version`` (``keep``: what is installed; on a node
    without a driver what the resolver prefers), ``cuda``, ``toolkit`` (empty: no wish).
    """
    _need_gpunode()
    asked = {key: str(value) for key, value in plain(wishes).items() if value not in (None, "", "auto")}
    node = NodeFacts.model_validate(plain(facts))
    picture = picture_from_facts(node, load())
    installed = picture.installed if picture.installed and picture.installed.closure else None
    source, flavour, version = asked.get("source"), asked.get("flavour"), asked.get("version", "keep")
    request: dict[str, Any] = {"source": source, "kernel_module": flavour}
    request |= {"cuda": asked.get("cuda"), "toolkit": asked.get("toolkit")}
    problems: list[str] = []
    origins = {row.origin for row in installed.closure} if installed else set()
    wished_of = source or next(iter(origins), None)
    own = (
        {upstream_version(row.version) for row in installed.closure if row.origin == wished_of} if installed else set()
    )
    if version != "keep":
        request["driver"] = version
    elif installed and not lock and origins != {wished_of}:
        if source and len(own) == 1:  # beside others that go: it stays what it is
            request["driver"] = own.pop() if source == "nvidia" else own.pop().split(".", maxsplit=1)[0]
    elif installed and not lock:
        if installed.version is None:
            problems.append(
                "mixed-versions: the driver's packages are of several versions "
                f"({', '.join(sorted({row.version for row in installed.closure}))}): say which one is to be, "
                "with nvidia_driver_version"
            )
        elif flavour in (None, installed.flavour) or installed.flavour is None:
            request["driver"] = "keep"
        else:
            request["driver"] = (
                installed.version if installed.origins == ("nvidia",) else installed.version.split(".")[0]
            )
    # Preflight names a .run file itself.
    node = node.model_copy(
        update={"foreign_installs": tuple(one for one in node.foreign_installs or () if one.kind != "driver-runfile")}
    )
    wanted = {key: value for key, value in request.items() if value is not None}
    answer = stack(node.model_dump(mode="json"), wanted, lock, today)
    if answer["undetermined"]:
        problems.append(f"undetermined: {answer['undetermined']}")
    if answer["conflict"] and not problems:
        problems.append(f"no-stack: {_words(answer['conflict'])}")
    return {**answer, "problems": list(map(printable, problems))}


def _words(conflict: Mapping[str, Any]) -> str:
    """A conflict and the nearest stacks in one line, in the words of the roles' variables."""
    terms = " + ".join(f"{term['name']} {term['value']}" for term in conflict["terms"])
    text = f"{terms} cannot hold together: {'; '.join(clash['text'] for clash in conflict['clashes'])}"
    offers = [f"{' and '.join(offer['change'])} ({offer['summary']})" for offer in conflict["offers"]]
    near = f"; nearest that can: {'; '.join(offers)}" if offers else ""
    for option, variable in VARIABLES.items():
        near = near.replace(option, variable)
    return " ".join((text + near).split())


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
        return {"stack": stack, "node_plan": node_plan, "lock": lock}
