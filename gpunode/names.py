"""Short notation for node names: ``gpu-[01-16]`` for sixteen names, by ClusterShell's NodeSet."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from gpunode.errors import UsageError

MOST = 10_000
"""Maximum number of names from one argument."""
_RANGES = re.compile(r"\[(\d[\d,/-]*)\]")
# Characters that NodeSet would interpret; an IPv6 address may have brackets. Longer numbers are an error there, and it
# would rewrite digits of other scripts.
_SPECIAL = re.compile(r"[\[\]!&^,\s%]|^@|[^\x00-\x7f]|\d{19}")
_MOST_AXES, _MOST_FOLDED = 2, 100
"""Beyond both, NodeSet takes minutes: only the last number of a name is folded."""


def expand(argument: str) -> list[str]:
    """Return all names of an argument, in their order: ``gpu-[01-16,20]``, ``rack[1-2]-gpu[1-8]``, ``gpu1,gpu2``.

    ``!`` excludes names (``gpu-[1-8]!gpu-3``), as in clush. Text without ranges and commas is one name. Raises
    UsageError for an invalid range, and for more than ``MOST`` names.
    """
    if not _RANGES.search(argument) and ("," not in argument or "[" in argument):
        if re.search(r"\[[^:\]]*(\]|$)", argument):
            raise UsageError(f"{argument}: not a valid range of node names; write gpu-[01-16] or gpu-[1,3,7-9]")
        return [argument]
    for low, high in re.findall(r"(\d+)-(\d+)", "".join(_RANGES.findall(argument))):
        if int(high) - int(low) >= MOST:
            raise UsageError(f"{argument}: more than {MOST} nodes")
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 (slow to load)

    try:
        names = NodeSet(argument.strip(","), resolver=RESOLVER_NOGROUP)
    except NodeSetException as err:
        raise UsageError(
            f"{argument}: not a valid range of node names: {str(err).splitlines()[0]}; write gpu-[01-16]"
        ) from None
    if len(names) > MOST:
        raise UsageError(f"{argument}: more than {MOST} nodes")
    return list(names)


def fold(names: Iterable[str]) -> str:
    """Return ``gpu-[01-03]`` for gpu-01, gpu-02, gpu-03, then the names that cannot be folded, comma-separated.

    The names may be a node's: any text is accepted.
    """
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet  # noqa: PLC0415 (slow to load)

    ordered = sorted(set(names))
    plain = [name for name in ordered if not _SPECIAL.search(name)]
    others = [name for name in ordered if _SPECIAL.search(name)]
    many = {name for name in plain if len(re.findall(r"\d+", name)) > _MOST_AXES}
    groups: dict[str, list[str]] = {}
    for name in plain:
        alone = name in many and len(many) > _MOST_FOLDED
        groups.setdefault(re.sub(r"\d+(?=\D*$)", "#", name) if alone else "", []).append(name)
    folded = [str(NodeSet.fromlist(group, resolver=RESOLVER_NOGROUP)) for group in groups.values()]
    return ",".join(folded + others)


def expand_all(arguments: Sequence[str]) -> list[str]:
    """Return the names of several arguments; raise UsageError for a duplicate."""
    names = [name for argument in arguments for name in expand(argument)]
    doubles = [name for name, times in Counter(names).items() if times > 1]
    if doubles:
        raise UsageError(f"{fold(doubles)}: listed more than once")
    return names
