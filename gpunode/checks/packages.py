"""Checks on the driver's packages: one version, one origin, held."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from gpunode.checks.compare import failed, passed, skipped, warned
from gpunode.checks.installed import DriverPackages, driver_packages, line_of, upstream
from gpunode.checks.registry import CheckResult, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.packages import Package
from gpunode.text import counted, listed

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
