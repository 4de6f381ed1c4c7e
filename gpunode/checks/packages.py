"""Checks on packages: the driver's have one version and one origin and are held, DCGM's fit each other."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gpunode.catalog import load, origins
from gpunode.checks.compare import failed, passed, skipped, warned
from gpunode.checks.registry import CheckResult, Skip, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.packages import Package
from gpunode.text import counted, listed

GONE = ("config-files", "not-installed")

# Nodes of a fleet have the same packages.
_origin_of = lru_cache(maxsize=10_000)(origins.origin_of)
_closure_line = lru_cache(maxsize=10_000)(origins.closure_line)


@dataclass(frozen=True)
class DriverPackages:
    """The driver closure's packages on one node, by origin.

    ``main`` is the origin of most of them (of equals, the one with the kernel module). Checks on version and hold use
    only ``main``, so that a foreign package is reported once, by the check on foreign packages.
    """

    main: str | None
    """None if no package of a closure is installed."""
    by_origin: dict[str, tuple[Package, ...]]

    @property
    def of_main(self) -> tuple[Package, ...]:
        """Return the packages of the main origin."""
        return () if self.main is None else self.by_origin[self.main]


def present(package: Package) -> bool:
    """Return True for installed packages, also half-installed ones; False for removed ones with configuration left."""
    return package.installed or not package.state.endswith(GONE)


def origin_of(package: Package) -> str | None:
    """Return the package's origin by the catalog; None if no row matches."""
    return package.published or _origin_of(package.name, package.version, package.maintainer)


def line_of(package: Package) -> str | None:
    """Return the closure line of the package; None if it may have a version of its own."""
    return _closure_line(package.name, package.source, origin_of(package))


def upstream(package: Package) -> str:
    """Return the driver's version in the package's version."""
    return origins.upstream_version(package.version)


def driver_packages(node: NodeFacts) -> DriverPackages:
    """Return the packages of the driver closure; empty if the package database could not be read."""
    groups: dict[str, list[Package]] = defaultdict(list)
    for package in node.packages or ():
        if present(package) and line_of(package) is not None:
            groups[origin_of(package) or f"unknown ({package.maintainer})"].append(package)
    if all(origins.is_companion(package.name) for packages in groups.values() for package in packages):
        return DriverPackages(None, {})

    def weight(origin: str) -> tuple[int, bool, str]:
        brings_module = any(origins.brings_kernel_module(package.name) for package in groups[origin])
        return len(groups[origin]), brings_module, origin

    return DriverPackages(max(groups, key=weight), {origin: tuple(packages) for origin, packages in groups.items()})


def driver_installed(node: NodeFacts) -> bool:
    """Return True if a kernel module is expected: its package, its DKMS source or its file exists, or it is loaded."""
    return (
        any(present(package) and origins.brings_kernel_module(package.name) for package in node.packages or ())
        or any(module.name.startswith("nvidia") for module in node.dkms or ())
        or bool(node.module_files)
        or node.loaded_driver is not None
    )


CATALOG = "catalog (origins.yml)"
ROLE = "role nvidia_driver, tag nvidia_driver_install"
NONE_INSTALLED = skipped("no package of an NVIDIA driver is installed")


@registry.check(
    "driver.closure",
    needs=("packages",),
    means="All packages of the driver are completely installed and carry one version. Packages that their "
    "publisher versions independently are ignored; see driver.origin for packages of another origin.",
    remedy=f"Install one version: {ROLE}.",
    state="observe",
    actions=("run_role:nvidia_driver:nvidia_driver_install",),
)
def closure(node: NodeFacts) -> Iterator[CheckResult]:
    stack = driver_packages(node)
    if stack.main is None:
        yield NONE_INSTALLED
        return
    lines: dict[str, list[Package]] = defaultdict(list)
    for package in stack.of_main:
        lines[line_of(package) or stack.main].append(package)
    for line, packages in lines.items():
        yield _one_version(line, packages)


def _one_version(line: str, packages: list[Package]) -> CheckResult:
    incomplete = sorted(f"{package.name} ({package.state})" for package in packages if not package.installed)
    if incomplete:
        return failed(
            f"not completely installed: {listed(incomplete)}",
            source=CATALOG,
            remedy=f"Check the output of dpkg --configure -a, then: {ROLE}.",
        )
    versions = Counter(upstream(package) for package in packages)
    usual, _ = versions.most_common(1)[0]
    odd = sorted({f"{package.name} {upstream(package)}" for package in packages if upstream(package) != usual})
    if odd:
        return failed(
            f"{len(odd)} of {counted(len(packages), 'package')} of {line} not at {usual}: {listed(odd)}",
            expected=usual,
            measured=listed(sorted(versions)),
            source=CATALOG,
        )
    return passed(f"{counted(len(packages), 'package')} of {line} at {usual}", measured=usual)


@registry.check(
    "driver.held",
    needs=("packages",),
    means="Every package of the driver is held, so that no upgrade of the system moves the driver under a running job.",
    remedy=f"Hold them: {ROLE}.",
    state="observe",
    actions=("run_role:nvidia_driver:nvidia_driver_install",),
)
def held(node: NodeFacts) -> Iterator[CheckResult]:
    packages = driver_packages(node).of_main
    if not packages:
        yield NONE_INSTALLED
        return
    loose = sorted({package.name for package in packages if not package.held})
    if loose:
        yield failed(
            f"{len(loose)} of {counted(len(packages), 'package')} not held: {listed(loose)}",
            expected=0,
            measured=len(loose),
            unit="packages not held",
        )
    else:
        yield passed(f"{counted(len(packages), 'package')} held")


@registry.check(
    "driver.origin",
    needs=("packages",),
    means="All packages of the driver come from one publisher: the distribution, NVIDIA's repository, a PPA. Mixed "
    "origins break on the next upgrade of either.",
    remedy=f"Choose one origin, remove the packages of the other, then: {ROLE}.",
    state="observe",
    actions=("fix_configuration", "run_role:nvidia_driver:nvidia_driver_install"),
)
def origin(node: NodeFacts) -> Iterator[CheckResult]:
    stack = driver_packages(node)
    if stack.main is None:
        yield NONE_INSTALLED
    elif len(stack.by_origin) > 1:
        yield failed(
            f"packages of {len(stack.by_origin)} origins: {_by_origin(stack)}",
            expected=stack.main,
            measured=", ".join(_ranked(stack)),
            source=CATALOG,
        )
    elif stack.main.startswith("unknown"):
        yield warned(
            f"{counted(len(stack.of_main), 'package')} of an origin that is not in the catalog: {stack.main}",
            measured=stack.main,
            source=CATALOG,
            remedy="If you trust the publisher, add it to origins.yml.",
        )
    else:
        yield passed(f"{counted(len(stack.of_main), 'package')} from {stack.main}", measured=stack.main, source=CATALOG)


def _ranked(stack: DriverPackages) -> list[str]:
    return sorted(stack.by_origin, key=lambda name: (name != stack.main, name))


def _by_origin(stack: DriverPackages) -> str:
    return "; ".join(
        f"{name}: {listed(sorted({package.name for package in stack.by_origin[name]}), most=3)}"
        for name in _ranked(stack)
    )


_DCGM_PLUGINS = re.compile(r"datacenter-gpu-manager-4-(?:proprietary-)?cuda(\d{1,3})")
DCGM_GUIDE = "docs.nvidia.com/datacenter/dcgm, installation: the packages of the driver's CUDA"


@registry.check(
    "dcgm.versions",
    needs=("packages", "nvidia_tool_versions", "dcgm_engine", "loaded_driver"),
    partial=True,
    needs_gpu=True,
    means="dcgmi and the running host engine have one version, and DCGM's plugins are those of the driver's CUDA.",
    remedy="systemctl restart nvidia-dcgm starts the installed version; apt-get install "
    "datacenter-gpu-manager-4-cuda13 (cuda12 for drivers before 580) installs the plugins; role dcgm does both.",
    state="observe",
    actions=("restart_service:nvidia-dcgm.service", "run_role:dcgm"),
)
def dcgm_versions(node: NodeFacts) -> Iterator[CheckResult]:
    tools = node.nvidia_tool_versions or {}
    installed = {
        match[1]
        for package in node.packages or ()
        if present(package) and (match := _DCGM_PLUGINS.fullmatch(package.name))
    }
    cuda = _cuda(node)
    if "dcgmi" not in tools and not installed:
        raise Skip("DCGM is not installed")
    seen = {"dcgmi": tools.get("dcgmi"), "the program nv-hostengine": tools.get("nv-hostengine")}
    programs = {name: version for name, version in {**seen, "the running engine": node.dcgm_engine}.items() if version}
    versions_here = sorted(set(programs.values()))
    measured = listed(versions_here) or None
    if len(versions_here) > 1:
        words = listed([f"{name} {version}" for name, version in programs.items()])
        source = "NVIDIA/DCGM issue 314"
        yield failed(f"{len(versions_here)} versions: {words}", measured=measured, source=source)
    elif installed and cuda is not None and cuda not in installed:
        have = listed(sorted(f"cuda{major}" for major in installed))
        message = f"the plugins are those of {have}, the driver has CUDA {cuda}: diagnostics do not start"
        yield failed(message, expected=f"cuda{cuda}", measured=have, source=DCGM_GUIDE)
    else:
        plugins = f", plugins of {listed(sorted(f'cuda{major}' for major in installed))}" if installed else ""
        yield passed(f"DCGM {measured or 'without programs'}{plugins}", measured=measured)


def _cuda(node: NodeFacts) -> str | None:
    """Return the major version of the CUDA in the driver; None if it is unknown."""
    driver = node.loaded_driver
    reported = node.smi.document.cuda_version if node.smi and node.smi.document else None
    branch = load().branches.get(driver.version.split(".", maxsplit=1)[0]) if driver and driver.version else None
    version = reported or (branch.native_cuda if branch else None)
    return version.split(".", maxsplit=1)[0] if version else None
