"""Node names in short: ``gpu-[01-16]`` for sixteen names, by ClusterShell's NodeSet."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from gpunode.errors import UsageError

MOST = 10_000
"""Names that one word may stand for."""
_RANGES = re.compile(r"\[(\d[\d,/-]*)\]")
# What NodeSet would read as its own signs; an IPv6 address may have brackets.
_SPECIAL = re.compile(r"[\[\]!&^,\s%]|^@")


def expand(word: str) -> list[str]:
    """All names that a word stands for, in their order: ``gpu-[01-16,20]``, ``rack[1-2]-gpu[1-8]``, ``gpu1,gpu2``.

    ``!`` takes names out (``gpu-[1-8]!gpu-3``), as in clush. What has neither ranges nor commas is one name, whatever
    it is. Raises UsageError for a range that is none, and for more than ``MOST`` names.
    """
    if not _RANGES.search(word) and ("," not in word or "[" in word):
        if re.search(r"\[[^:\]]*(\]|$)", word):
            raise UsageError(f"{word}: not a valid range of node names; write gpu-[01-16] or gpu-[1,3,7-9]")
        return [word]
    for low, high in re.findall(r"(\d+)-(\d+)", "".join(_RANGES.findall(word))):
        if int(high) - int(low) >= MOST:
            raise UsageError(f"{word}: more than {MOST} nodes")
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 (slow to load)

    try:
        names = NodeSet(word.strip(","), resolver=RESOLVER_NOGROUP)
    except NodeSetException as err:
        raise UsageError(
            f"{word}: not a valid range of node names: {str(err).splitlines()[0]}; write gpu-[01-16]"
        ) from None
    if len(names) > MOST:
        raise UsageError(f"{word}: more than {MOST} nodes")
    return list(names)


def fold(names: Iterable[str]) -> str:
    """``gpu-[01-03]`` for gpu-01, gpu-02, gpu-03; names that cannot be folded stand behind, comma-separated."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet  # noqa: PLC0415 (slow to load)

    given = sorted(set(names))
    plain = [name for name in given if not _SPECIAL.search(name)]
    others = [name for name in given if _SPECIAL.search(name)]
    folded = str(NodeSet.fromlist(plain, resolver=RESOLVER_NOGROUP))
    return ",".join(([folded] if plain else []) + others)


def expand_all(words: Sequence[str]) -> list[str]:
    """The names of several words; raises UsageError where a name comes twice."""
    names = [name for word in words for name in expand(word)]
    doubles = [name for name, times in Counter(names).items() if times > 1]
    if doubles:
        raise UsageError(f"{fold(doubles)}: listed more than once")
    return names
