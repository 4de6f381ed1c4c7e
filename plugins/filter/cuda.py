"""What the role cuda installs on a host: toolkits side by side, with the libraries that fit the first of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ansible.errors import AnsibleFilterError
from packaging.version import InvalidVersion, Version

try:
    from datetime import date

    from gpunode.catalog import load
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts
    from gpunode.stack import PlanHost, Request, Stack, picture_from_facts, plan
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

ROOT = "/usr/local/cuda"


def cuda_packages(
    facts: Mapping[str, Any],
    stack: Mapping[str, Any],
    toolkits: Iterable[Any],
    installed: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Packages, pins and holds for ``toolkits`` beside the driver of ``stack``, which stays as it is.

    ``installed`` is name to version of the node's packages: cuDNN and NCCL that fit are kept at their version.
    ``settings``: ``cudnn`` and ``nccl`` (bool), ``default`` (the toolkit behind /usr/local/cuda; the newest where it is
    empty). Returned is ``install`` (NAME=PATTERN), ``pins`` ([{packages, version}]), ``hold`` (patterns), ``default``
    ({series, path, newest}; None where the toolkit is no NVIDIA package), ``problems`` (lines). Every toolkit goes
    through the rules of the resolver with this driver; what they refuse is a problem.
    """
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")
    wanted = settings or {}
    try:
        node = NodeFacts.model_validate(plain(facts))
        base = Stack.model_validate(plain(stack))
    except ValueError as err:
        raise AnsibleFilterError(f"no toolkit can be resolved from this: {err}") from None
    answers: dict[str, Stack] = {}
    problems = []
    for wish in dict.fromkeys(str(each) for each in toolkits):
        answer = _resolved(node, base, wish)
        if isinstance(answer, str):
            problems.append(f"toolkit {wish}: {answer}")
        else:
            answers[wish] = answer
    chosen = str(wanted.get("default") or "") or max(answers, key=_number, default="")
    if chosen and not problems and chosen not in answers:
        problems.append(f"cuda_default {chosen} is none of the wished toolkits ({', '.join(answers)})")
    found: dict[str, Any] = {"install": [], "pins": [], "hold": [], "default": None, "problems": problems}
    if problems:
        return found
    _compat(base, found)
    _toolkits(answers, plain(installed or {}), found)
    if chosen:
        first = answers[chosen]
        if first.source == "nvidia":
            series = _series(chosen)
            newest = chosen == max(answers, key=_number)
            found["default"] = {"series": series, "path": f"{ROOT}-{series}", "newest": newest}
        for component in ("cudnn", "nccl"):
            if wanted.get(component):
                _library(first, component, plain(installed or {}), found)
    return found


def _number(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise AnsibleFilterError(f"{version} is no toolkit version; 12.9 or 12.9.1 is one") from None


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


def _compat(base: Stack, found: dict[str, Any]) -> None:
    for package in base.packages:
        if package.component == "cuda-compat":
            found["install"].append(package.name + (f"={package.version}" if package.version else ""))
            found["hold"].append(package.name)


def _toolkits(answers: Mapping[str, Stack], installed: Mapping[str, str], found: dict[str, Any]) -> None:
    """The toolkits with their configuration packages: those without a series in their name would follow the newest.

    They stay with the newest toolkit that is wished or installed: an installed one needs them not older than itself.
    """
    newest: dict[str, str] = {}
    there = [match for name in installed if (match := re.fullmatch(r"cuda-toolkit-([0-9]+)-([0-9]+)", name))]
    for wish in sorted(answers, key=_number):
        stack, series = answers[wish], _series(wish)
        for package in stack.packages:
            if package.component == "cuda-toolkit":
                found["install"].append(package.name + (f"={package.version}" if package.version else ""))
                found["hold"].append(package.name)
        if stack.source == "nvidia":
            name = series.replace(".", "-")
            found["hold"] += [f"*-{name}", f"cuda-toolkit-{name}-config-common"]
            newest[f"cuda-toolkit-{series.split('.', maxsplit=1)[0]}-config-common"] = series
            newest["cuda-toolkit-config-common"] = series
    for name, wished in newest.items():
        major = name.removeprefix("cuda-toolkit-").partition("-")[0]
        rivals = [f"{match[1]}.{match[2]}" for match in there if major in ("config", match[1])]
        series = max([wished, *rivals], key=_number)
        found["install"].append(f"{name}={series}.*")
        found["hold"].append(name)
        found["pins"].append({"packages": [name], "version": f"{series}.*"})


def _library(stack: Stack, component: str, installed: Mapping[str, str], found: dict[str, Any]) -> None:
    """cuDNN or NCCL; one that is installed and of the same build keeps its version."""
    packages = [package for package in stack.packages if package.component == component]
    if not packages:
        found["problems"].append(f"{component}: {stack.reasons[component].text}")
        return
    for package in packages:
        pattern = package.version or "*"
        build = re.search(r"\+cuda[0-9.]+$", pattern)
        kept = installed.get(package.name)
        if kept is not None and (build is None or fnmatchcase(kept, f"*{build[0]}")):
            pattern = f"{kept.rpartition('-')[0]}-*{build[0] if build else ''}"
        found["install"].append(f"{package.name}={pattern}")
        names = [package.name]
        if component == "cudnn" and package.name.startswith("cudnn"):
            # The metapackage's own: libcudnn9-cuda-12, libcudnn9-dev-cuda-12 …
            major, _, cuda = package.name.removeprefix("cudnn").partition("-")
            names.append(f"libcudnn{major}*-{cuda}")
        found["hold"] += names
        found["pins"].append({"packages": names, "version": pattern})


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"cuda_packages": cuda_packages}
