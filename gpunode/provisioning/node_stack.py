"""Which stack a node gets from the roles' variables, and the lock that keeps it: ``gpunode plan`` answers the same."""

from collections.abc import Mapping
from datetime import date
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import upstream_version
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.printable import printable
from gpunode.provisioning.documents import node_of, stack_of
from gpunode.stack import PlanHost, Request, Stack, lock_document, picture_from_facts, plan, undetermined
from gpunode.variables import plain


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
    try:
        node = NodeFacts.model_validate(plain(facts))
        request = Request.model_validate(plain(wishes or {}))
        locked = Stack.model_validate(plain(lock)) if lock else None
        day = date.fromisoformat(str(today)) if today else date.today()
    except ValueError as err:
        raise UsageError(f"no stack can be resolved from this: {err}") from None
    if locked is not None and request.driver is None:
        request = request.model_copy(
            update={
                "driver": locked.driver.version or str(locked.driver.branch),
                "source": request.source or locked.source,
                "kernel_module": request.kernel_module or locked.module.flavour,
            }
        )
    catalog = load()
    picture = picture_from_facts(node, catalog)
    reason = undetermined(node, picture)
    host = PlanHost(node.host, None if reason else picture, reason, plain(lock) if lock else None)
    group = plan([host], request, catalog, day).groups[0]
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
    asked = {key: str(value) for key, value in plain(wishes).items() if value not in (None, "", "auto")}
    node = node_of(facts)
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
    return lock_document(stack_of(resolved))
