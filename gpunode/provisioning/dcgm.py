"""DCGM on a node: its parts for the driver's CUDA, in one version, and what they take the place of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpunode.catalog import load
from gpunode.catalog.origins import upstream_version
from gpunode.errors import UsageError
from gpunode.stack import Stack

STEM = "datacenter-gpu-manager-4"
CORE, CLOSED = f"{STEM}-core", f"{STEM}-proprietary"
PARTS = re.compile(rf"{STEM}-(?:(?:proprietary|multinode)-)?cuda([0-9]+)")
"""Parts that are built for one CUDA major."""
DCGM_3 = re.compile(r"datacenter-gpu-manager(-[a-z]+)?")
"""Names that DCGM 3 had. The exporter still has such a name: what counts is the version."""


@dataclass(frozen=True, slots=True)
class DcgmPackages:
    """The packages of DCGM 4 that a node gets; no ``names`` where there are none."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    """Shell pattern of the one version that all of them carry."""
    purge: tuple[str, ...] = ()
    why_not: str | None = None

    @property
    def install(self) -> tuple[str, ...]:
        """``NAME=PATTERN`` of each package."""
        return tuple(f"{name}={self.pattern}" for name in self.names)


def dcgm_packages(
    stack: Stack | None,
    installed: Mapping[str, str],
    version: str = "keep",
    proprietary: bool = True,
    source: str = "auto",
) -> DcgmPackages:
    """Return the packages of DCGM for a node. Raises UsageError for a malformed version.

    ``installed`` is name to version. ``version``: ``keep`` (the installed one, else the newest in the repository),
    ``newest`` (the newest in the catalog), or an exact one. ``proprietary``: with NVIDIA's closed parts, which apt
    would only recommend. ``source``: ``auto`` (the driver's) or ``nvidia`` (NVIDIA's repository beside a driver of the
    distribution).
    """
    names, pattern, why_not = _planned(stack, source)
    if not names:
        return DcgmPackages(why_not=why_not)
    if version == "keep":
        # On a node without DCGM the repository decides: the catalog cannot know which point release it has.
        pattern = re.sub(r"-[^-]*$", "-*", installed[CORE]) if CORE in installed else re.sub(r"[^:]+$", "4.*", pattern)
    elif version != "newest":
        if re.fullmatch(r"[0-9]+([.][0-9]+)+", version) is None:
            raise UsageError(f"dcgm_version: {version} is not a version (examples: keep, newest, 4.6.0)")
        pattern = re.sub(r"[^:]+$", f"{version}-*", pattern)
    every = f"{STEM}-cuda-all" in installed
    closed = [CLOSED, *(name.replace(STEM, CLOSED) for name in names)] if proprietary else []
    wanted = [CORE, *names, *closed]
    going = [name for name in installed if DCGM_3.fullmatch(name) and _major(installed[name]) < 4]
    going += [name for name in installed if PARTS.fullmatch(name) and not every and not _fits(name, names)]
    going += [name for name in installed if name.startswith(CLOSED) and not proprietary]
    # Parts that somebody else installed, such as -dev and -multinode, move along: all carry one version.
    wanted += sorted(name for name in installed if name.startswith(f"{STEM}-") and name not in {*wanted, *going})
    return DcgmPackages(tuple(wanted), pattern, tuple(sorted(set(going))))


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
    """Return whether a part is for a CUDA major that is requested."""
    found = PARTS.fullmatch(name)
    return found is not None and f"{STEM}-cuda{found[1]}" in names
