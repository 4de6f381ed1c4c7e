"""Which packages of DCGM a node gets: its parts for the driver's CUDA, in one version, and what gives way to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.catalog.origins import upstream_version
    from gpunode.stack import Stack
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

STEM = "datacenter-gpu-manager-4"
CORE, CLOSED = f"{STEM}-core", f"{STEM}-proprietary"
PARTS = re.compile(rf"{STEM}-(?:(?:proprietary|multinode)-)?cuda([0-9]+)")
"""Parts that are built for one CUDA major."""
DCGM_3 = re.compile(r"datacenter-gpu-manager(-[a-z]+)?")
"""Names that DCGM 3 had. The exporter still has such a name: what counts is the version."""


def dcgm_plan(
    stack: Mapping[str, Any] | None, installed: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``{names, install, purge, pattern, why_not}`` for DCGM 4; no ``names`` where there is none, and why.

    ``stack`` is the resolved stack or None, ``installed`` name to version. ``settings``: ``version`` (``keep``: the
    installed one, else the newest that the repository has; ``newest``: the newest that the catalog knows; an exact
    one), ``proprietary`` (NVIDIA's closed parts, which apt would only recommend), ``source``
    (``auto``: the driver's; ``nvidia``: NVIDIA's repository beside a driver of the distribution).
    """
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")
    names, pattern, why_not = _planned(Stack.model_validate(plain(stack)) if stack else None, str(settings["source"]))
    have = {name: str(version) for name, version in installed.items()}
    if not names:
        return {"names": [], "install": [], "purge": [], "pattern": "", "why_not": why_not}
    asked = str(settings["version"])
    if asked == "keep":
        # On a node without one the repository decides: which point it holds, the catalog cannot know.
        pattern = re.sub(r"-[^-]*$", "-*", have[CORE]) if CORE in have else re.sub(r"[^:]+$", "4.*", pattern)
    elif asked != "newest":
        if re.fullmatch(r"[0-9]+([.][0-9]+)+", asked) is None:
            raise AnsibleFilterError(f"dcgm_version: {asked} is no version: keep, newest or one such as 4.6.0")
        pattern = re.sub(r"[^:]+$", f"{asked}-*", pattern)
    every = f"{STEM}-cuda-all" in have
    closed = [CLOSED, *(name.replace(STEM, CLOSED) for name in names)] if settings["proprietary"] else []
    wanted = [CORE, *names, *closed]
    going = [name for name in have if DCGM_3.fullmatch(name) and _major(have[name]) < 4]
    going += [name for name in have if PARTS.fullmatch(name) and not every and not _fits(name, names)]
    going += [name for name in have if name.startswith(CLOSED) and not settings["proprietary"]]
    # Parts that somebody else installed, such as -dev and -multinode, move along: all carry one version.
    wanted += sorted(name for name in have if name.startswith(f"{STEM}-") and name not in {*wanted, *going})
    return {
        "names": wanted,
        "install": [f"{name}={pattern}" for name in wanted],
        "purge": sorted(set(going)),
        "pattern": pattern,
        "why_not": None,
    }


def _planned(stack: Stack | None, source: str) -> tuple[list[str], str, str | None]:
    """(packages for the driver's CUDA, pattern of versions, why there are none)."""
    if stack is None:
        return [], "", "no stack is planned"
    rows = [package for package in stack.packages if package.component == "dcgm"]
    if rows:
        return [row.name for row in rows], rows[0].version or "*", None
    if source != "nvidia":
        text = stack.reasons["dcgm"].text if "dcgm" in stack.reasons else "the stack has none"
        return [], "", f"{text} (dcgm_source: nvidia takes it from NVIDIA's repository)"
    if stack.cuda.native is None:
        return [], "", f"the CUDA of driver branch {stack.driver.branch} is not known, and DCGM's parts are for one"
    row = max(load().dcgm.values(), key=lambda each: int(each.id))
    return [f"{STEM}-cuda{stack.cuda.native.split('.')[0]}"], f"{row.epoch}:{row.latest}-*", None


def _major(version: str) -> int:
    found = re.match(r"[0-9]+", upstream_version(version))
    return int(found[0]) if found else 0


def _fits(name: str, names: list[str]) -> bool:
    """A part for a CUDA major that is wanted."""
    found = PARTS.fullmatch(name)
    return found is not None and f"{STEM}-cuda{found[1]}" in names


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"dcgm_plan": dcgm_plan}
