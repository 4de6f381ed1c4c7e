"""Conversion of ``node_state``'s answer to ``NodeState``: a node's answer is hostile until it is parsed and bounded."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from gpunode.catalog.origins import publisher
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.frozen import invalid_field
from gpunode.probe import Bundle
from gpunode.provisioning.ssh_state import SshState
from gpunode.provisioning.state import AptState, DnfState, NodeState

M = TypeVar("M", bound=BaseModel)
MAX_BYTES = 64 << 20


def parsed(text: str, where: str, unread: tuple[str, ...] = ()) -> bytes:
    """Return a ``NodeState`` without the parts in ``unread``, as JSON.

    Raise UsageError with one line that names ``where`` for an invalid answer.
    """
    if len(text) > MAX_BYTES:
        raise UsageError(f"{where} is longer than {MAX_BYTES >> 20} MiB")
    try:
        document: Any = from_json(text)
    except ValueError as err:
        raise UsageError(f"{where} is not valid JSON: {err}") from None
    if not isinstance(document, dict) or not isinstance(document.get("bundle"), str):
        raise UsageError(f"{where} contains no bundle of the probe")
    apt = document.get("apt")
    if isinstance(apt, dict) and apt.get("error"):
        raise UsageError(
            f"apt-refuses: apt could not be queried: {apt['error']}: make sure that apt-config dump, apt-cache policy "
            "and apt-get indextargets work on the node, then run this again"
        )
    facts = facts_from_bundle(Bundle.from_json(document["bundle"], where))
    known = _valid(AptState, apt, "apt.", where)
    parts = {
        "facts": with_publishers(facts, known),
        "apt": known,
        "dnf": _valid(DnfState, document.get("dnf"), "dnf.", where),
        "ssh": _valid(SshState, document.get("ssh"), "ssh.", where),
        **{name: document.get(name) or {} for name in ("files", "contents", "engine")},
        "connection": document.get("connection"),
        "unread": unread,
    }
    state = _valid(NodeState, parts, "", where)
    return state.model_dump_json().encode() if state is not None else b""


def _valid(model: type[M], value: Any, prefix: str, where: str) -> M | None:
    """Return a part of the answer as its model; None if it is missing."""
    if value is None:
        return None
    try:
        return model.model_validate(value)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise UsageError(f"{where}: {prefix}{field}: {why}") from None


def with_publishers(facts: NodeFacts, apt: AptState | None) -> NodeFacts:
    """Return facts in which packages have their publisher from apt's lists.

    A package that is in no known repository, or in repositories of two publishers, is not changed: name, version and
    maintainer then decide.
    """
    if facts.packages is None or apt is None:
        return facts
    packages = []
    for package in facts.packages:
        named = {publisher(release, label) for release, label in apt.publishers.get(package.name, ())} - {None}
        packages.append(package.model_copy(update={"published": named.pop()}) if len(named) == 1 else package)
    return facts.model_copy(update={"packages": tuple(packages)})
