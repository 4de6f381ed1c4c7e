"""Waves: which nodes change together, and in which order."""

import re
from collections.abc import Iterable, Mapping, Sequence

from gpunode.change.journal import NodeRecord
from gpunode.change.scheduler import Availability
from gpunode.change.states import ChangeState
from gpunode.errors import UsageError

AT_TARGET, NO_PART = "already at ", "no part of "
"""Begin of the reasons of nodes that have nothing to change."""
AS_THEY_SHOULD_BE = (AT_TARGET, NO_PART, Availability.FOREIGN.value)
"""Begin of the reasons of nodes that are left out as they should be."""
_SHARE = re.compile(r"(\d{1,3})%")


def wave_sizes(text: str) -> list[str]:
    """Return the sizes of waves: numbers, and shares of all nodes. Raises UsageError."""
    sizes = [size.strip() for size in text.split(",")]
    for size in sizes:
        share = _SHARE.fullmatch(size)
        if not (size.isdigit() and int(size) > 0) and not (share and 0 < int(share[1]) <= 100):
            raise UsageError(f"--waves {text}: {size or 'nothing'} is not a number or a share (example: 10%,25%)")
    return sizes


def wave_numbers(nodes: int, canary: int, sizes: Sequence[str]) -> list[int]:
    """Return the wave of each node, in their order."""
    waves: list[int] = []
    for wave in range(nodes):
        left = nodes - len(waves)
        if not left:
            break
        size = str(canary) if wave == 0 else sizes[min(wave, len(sizes)) - 1]
        share = _SHARE.fullmatch(size)
        number = max(1, nodes * int(share[1]) // 100) if share else int(size)
        waves += [wave] * min(number, left)
    return waves


def incomplete(chosen: Iterable[str], left_out: Mapping[str, str], domains: Mapping[str, str]) -> dict[str, str]:
    """Return the chosen nodes with a failure domain of which another node is left out, with the reason."""
    missing = {
        domains[name]: name
        for name, why in left_out.items()
        if domains[name] and not why.startswith((AT_TARGET, NO_PART))
    }
    return {
        name: f"{domains[name]}: {missing[domains[name]]} is left out" for name in chosen if domains[name] in missing
    }


def in_waves(
    chosen: Mapping[str, NodeRecord], domains: Mapping[str, str], canary: int, sizes: Sequence[str]
) -> dict[str, NodeRecord]:
    """Return the nodes with their waves: a failure domain is in one wave, and counts as one node.

    Nodes of earlier runs come first: they are out of service already.
    """
    units: dict[str, list[str]] = {}
    for name in sorted(chosen, key=lambda name: chosen[name].state is ChangeState.PLANNED):
        units.setdefault(domains[name] or f"node {name}", []).append(name)
    waves = zip(units.values(), wave_numbers(len(units), canary, sizes), strict=True)
    return {
        name: chosen[name].model_copy(update={"wave": wave, "domain": domains[name]})
        for names, wave in waves
        for name in names
    }
