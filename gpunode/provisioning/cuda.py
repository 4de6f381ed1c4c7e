"""CUDA toolkits on a host: side by side, with the libraries that fit the first of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase

from packaging.version import InvalidVersion, Version

from gpunode.catalog import load
from gpunode.errors import GpunodeError, UsageError
from gpunode.facts import NodeFacts
from gpunode.stack import PlanHost, Request, Stack, picture_from_facts, plan

ROOT = "/usr/local/cuda"


@dataclass(frozen=True, slots=True)
class VersionPin:
    """Packages that stay at versions of one pattern."""

    packages: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class DefaultToolkit:
    """The toolkit behind /usr/local/cuda."""

    series: str
    path: str
    newest: bool
    """Of several, the packages themselves choose the newest."""


@dataclass(slots=True)
class ToolkitPackages:
    """What the requested toolkits come to."""

    install: list[str] = field(default_factory=list)
    """``NAME`` or ``NAME=PATTERN``."""
    pins: list[VersionPin] = field(default_factory=list)
    hold: list[str] = field(default_factory=list)
    """Shell patterns of names."""
    default: DefaultToolkit | None = None
    """None where the toolkit is not a package of NVIDIA's."""
    problems: list[str] = field(default_factory=list)


def toolkit_packages(  # noqa: PLR0913
    node: NodeFacts,
    stack: Stack,
    toolkits: Iterable[str],
    installed: Mapping[str, str] | None = None,
    *,
    default: str = "",
    cudnn: bool = False,
    nccl: bool = False,
) -> ToolkitPackages:
    """Return packages, pins and holds for ``toolkits`` beside the driver of ``stack``, which stays as it is.

    ``installed`` is name to version of the node's packages: cuDNN and NCCL that fit are kept at their version.
    ``default`` is the toolkit behind /usr/local/cuda; the newest where it is empty. Every toolkit goes through the
    rules of the resolver with this driver; what they refuse is a problem. Raises UsageError for a malformed version.
    """
    found = ToolkitPackages()
    answers: dict[str, Stack] = {}
    for version in dict.fromkeys(toolkits):
        answer = _resolved(node, stack, version)
        if isinstance(answer, str):
            found.problems.append(f"toolkit {version}: {answer}")
        else:
            answers[version] = answer
    chosen = default or max(answers, key=_number, default="")
    if chosen and not found.problems and chosen not in answers:
        found.problems.append(f"cuda_default {chosen} is not among the requested toolkits ({', '.join(answers)})")
    if found.problems:
        return found
    have = installed or {}
    _compat(stack, found)
    _toolkits(answers, have, found)
    if chosen:
        first = answers[chosen]
        if first.source == "nvidia":
            series = _series(chosen)
            found.default = DefaultToolkit(series, f"{ROOT}-{series}", chosen == max(answers, key=_number))
        for component, requested in (("cudnn", cudnn), ("nccl", nccl)):
            if requested:
                _library(first, component, have, found)
    return found


def _number(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise UsageError(f"{version} is not a toolkit version (examples: 12.9, 12.9.1)") from None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _resolved(node: NodeFacts, base: Stack, toolkit: str) -> Stack | str:
    """The stack with this toolkit and the driver that is planned, or why there is none."""
    _number(toolkit)
    try:
        request = Request(
            source=base.source,
            driver=base.driver.version or str(base.driver.branch),
            kernel_module=base.module.flavour,
            cuda=base.cuda.wished,
            toolkit=toolkit,
        )
        catalog = load()
        host = PlanHost(node.host, picture_from_facts(node, catalog), None, None)
        group = plan([host], request, catalog, date.today()).groups[0]
    except GpunodeError as err:
        return str(err)
    if group.stack is None:
        return group.conflict.message if group.conflict else str(group.undetermined)
    return group.stack


def _compat(base: Stack, found: ToolkitPackages) -> None:
    for package in base.packages:
        if package.component == "cuda-compat":
            found.install.append(package.name + (f"={package.version}" if package.version else ""))
            found.hold.append(package.name)


def _toolkits(answers: Mapping[str, Stack], installed: Mapping[str, str], found: ToolkitPackages) -> None:
    """The toolkits with their configuration packages: those without a series in their name would follow the newest.

    They stay with the newest toolkit that is requested or installed: an installed one needs them not older than itself.
    """
    newest: dict[str, str] = {}
    there = [match for name in installed if (match := re.fullmatch(r"cuda-toolkit-([0-9]+)-([0-9]+)", name))]
    for version in sorted(answers, key=_number):
        stack, series = answers[version], _series(version)
        for package in stack.packages:
            if package.component == "cuda-toolkit":
                found.install.append(package.name + (f"={package.version}" if package.version else ""))
                found.hold.append(package.name)
        if stack.source == "nvidia":
            name = series.replace(".", "-")
            found.hold += [f"*-{name}", f"cuda-toolkit-{name}-config-common"]
            newest[f"cuda-toolkit-{series.split('.', maxsplit=1)[0]}-config-common"] = series
            newest["cuda-toolkit-config-common"] = series
    for name, requested in newest.items():
        major = name.removeprefix("cuda-toolkit-").partition("-")[0]
        rivals = [f"{match[1]}.{match[2]}" for match in there if major in ("config", match[1])]
        series = max([requested, *rivals], key=_number)
        found.install.append(f"{name}={series}.*")
        found.hold.append(name)
        found.pins.append(VersionPin((name,), f"{series}.*"))


def _library(stack: Stack, component: str, installed: Mapping[str, str], found: ToolkitPackages) -> None:
    """cuDNN or NCCL; one that is installed and of the same build keeps its version."""
    packages = [package for package in stack.packages if package.component == component]
    if not packages:
        found.problems.append(f"{component}: {stack.reasons[component].text}")
        return
    for package in packages:
        pattern = package.version or "*"
        build = re.search(r"\+cuda[0-9.]+$", pattern)
        kept = installed.get(package.name)
        if kept is not None and (build is None or fnmatchcase(kept, f"*{build[0]}")):
            pattern = f"{kept.rpartition('-')[0]}-*{build[0] if build else ''}"
        found.install.append(f"{package.name}={pattern}")
        names = [package.name]
        if component == "cudnn" and package.name.startswith("cudnn"):
            # The metapackage's own: libcudnn9-cuda-12, libcudnn9-dev-cuda-12 …
            major, _, cuda = package.name.removeprefix("cudnn").partition("-")
            names.append(f"libcudnn{major}*-{cuda}")
        found.hold += names
        found.pins.append(VersionPin(tuple(names), pattern))
