"""The stack of a node from the roles' variables, and its lock: the same answer as ``gpunode plan``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import upstream_version
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.context import Context
from gpunode.stack import PlanHost, Request, Stack, picture_from_facts, plan, undetermined
from gpunode.stack.model import Conflict, Installed, NodePicture
from gpunode.stack.plan import PlanGroup
from gpunode.text import printable
from gpunode.variables import plain

# The options of gpunode plan in conflict messages, as variables of the roles.
VARIABLES = {
    "--source": "nvidia_driver_source:",
    "--driver": "nvidia_driver_version:",
    "--kernel-module": "nvidia_driver_flavour:",
    "--cuda": "cuda_version:",
    "--toolkit": "cuda_toolkit:",
}


@dataclass(frozen=True)
class NodeStack:
    """The resolver's answer for one node."""

    group: PlanGroup
    problems: tuple[str, ...]
    """Why it must not be applied, one line each."""

    @property
    def stack(self) -> Stack | None:
        """Return the stack; None if there are problems, or the node could not be examined."""
        return self.group.stack


def of_context(facts: NodeFacts, context: Context) -> NodeStack:
    """Return the stack of a node in a run of the roles."""
    roles = {role: context.settings_of(role) for role in ("nvidia_driver", "cuda")}
    variables = {f"{role}_{name}": value for role, settings in roles.items() for name, value in settings.items()}
    return resolved(facts, requested_by(variables), context.lock, context.today)


REQUESTED: Mapping[str, str] = {
    "source": "nvidia_driver_source",
    "version": "nvidia_driver_version",
    "flavour": "nvidia_driver_flavour",
    "cuda": "cuda_version",
    "toolkit": "cuda_toolkit",
}
"""The variables of a node that request a stack."""


def requested_by(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request in a node's variables, for ``resolved``; of several toolkits the first one decides."""
    requested = {name: variables[variable] for name, variable in REQUESTED.items() if variable in variables}
    if isinstance(requested.get("toolkit"), list | tuple):
        requested["toolkit"] = next(iter(requested["toolkit"]), None)
    return requested


def resolved(
    facts: NodeFacts, requested: Mapping[str, Any], lock: Mapping[str, Any] | None = None, today: date | None = None
) -> NodeStack:
    """Return the stack for the variables of the roles.

    ``requested``: ``source`` and ``flavour`` (``auto``: no request), ``version`` (``keep``: the installed one; on a
    node without a driver the one that the resolver prefers), ``cuda``, ``toolkit`` (empty: no request).
    """
    problems: list[str] = []
    request = request_of(picture_from_facts(facts, load()), requested, problems, locked=bool(lock))
    # Preflight names a .run file itself.
    known = tuple(install for install in facts.foreign_installs or () if install.kind != "driver-runfile")
    group = _answer(facts.model_copy(update={"foreign_installs": known}), request, lock, today or date.today())
    if group.undetermined:
        problems.append(f"undetermined: {group.undetermined}")
    if group.conflict and not problems:
        problems.append(f"no-stack: {_described(group.conflict)}")
    return NodeStack(group, tuple(map(printable, problems)))


def request_of(picture: NodePicture, requested: Mapping[str, Any], problems: list[str], *, locked: bool) -> Request:
    """Return the request of a node's variables, in the form of ``resolved``; reasons against it go to ``problems``.

    ``locked``: the node has a lock, which decides the driver unless the variables request one.
    """
    choices = {key: str(value) for key, value in plain(requested).items() if value not in (None, "", "auto")}
    installed = picture.installed if picture.installed and picture.installed.closure else None
    version = choices.get("version", "keep")
    if version != "keep":
        driver: str | None = version
    else:
        driver = _kept(installed, choices.get("source"), choices.get("flavour"), problems) if not locked else None
    try:
        return Request.model_validate(
            {
                "source": choices.get("source"),
                "driver": driver,
                "kernel_module": choices.get("flavour"),
                "cuda": choices.get("cuda"),
                "toolkit": choices.get("toolkit"),
            }
        )
    except ValueError as err:
        raise UsageError(f"no stack could be resolved: {err}") from None


def with_request(host: PlanHost, variables: Mapping[str, Any], options: Request) -> PlanHost:
    """Return a host with the request of its variables and of the options of a verb, which take precedence.

    A template in a variable is not evaluated: the host is undetermined then. Raises UsageError.
    """
    if host.picture is None:
        return host
    requested = requested_by(variables)
    template = next((REQUESTED[name] for name, value in requested.items() if "{{" in str(value)), None)
    by_option = {
        "source": options.source,
        "version": options.driver,
        "flavour": options.kernel_module,
        "cuda": options.cuda,
        "toolkit": options.toolkit,
    }
    requested |= {name: value for name, value in by_option.items() if value is not None}
    if template is not None and "{{" in str(requested):
        reason = f"{template} is a template, which only gpunode provision evaluates: set the option of gpunode plan"
        return PlanHost(host.name, None, reason)
    try:
        request = request_of(host.picture, requested, [], locked=bool(host.lock))
    except UsageError as err:
        raise UsageError(f"{host.name}: {err}") from None
    only_options = ("framework", "kernel_policy", "past_eol")
    return replace(host, request=request.model_copy(update={name: getattr(options, name) for name in only_options}))


def _kept(installed: Installed | None, source: str | None, flavour: str | None, problems: list[str]) -> str | None:
    """Return the driver request that keeps the installed driver; None if there is none, or it cannot stay."""
    if installed is None:
        return None
    origins = {row.origin for row in installed.closure}
    kept = source or next(iter(origins), None)
    if origins != {kept}:
        versions = {upstream_version(row.version) for row in installed.closure if row.origin == kept}
        if not source or len(versions) != 1:
            return None
        # With foreign packages, which are removed, its source stays the same.
        return versions.pop() if source == "nvidia" else versions.pop().split(".", maxsplit=1)[0]
    if installed.version is None:
        problems.append(
            "mixed-versions: the driver's packages are of several versions "
            f"({', '.join(sorted({row.version for row in installed.closure}))}): set the requested one with "
            "nvidia_driver_version"
        )
        return None
    if flavour in (None, installed.flavour) or installed.flavour is None:
        return "keep"
    return installed.version if installed.origins == ("nvidia",) else installed.version.split(".")[0]


def _answer(node: NodeFacts, request: Request, lock: Mapping[str, Any] | None, today: date) -> PlanGroup:
    catalog = load()
    picture = picture_from_facts(node, catalog)
    reason = undetermined(node, picture)
    host = PlanHost(node.host, None if reason else picture, reason, plain(lock) if lock else None)
    return plan([host], request, catalog, today).groups[0]


def _described(conflict: Conflict) -> str:
    """Return a conflict and the nearest stacks in one line, with the roles' variables."""
    terms = " + ".join(f"{term.name} {term.value}" for term in conflict.terms)
    text = f"{terms} are in conflict: {'; '.join(clash.text for clash in conflict.clashes)}"
    offers = [f"{' and '.join(offer.change)} ({offer.summary})" for offer in conflict.offers]
    near = f"; nearest valid stacks:  {'; '.join(offers)}" if offers else ""
    for option, variable in VARIABLES.items():
        near = near.replace(option, variable)
    return " ".join((text + near).split())
