"""The driver's plan on a node with apt: packages and versions, what is kept and what is removed, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpunode.catalog import load
from gpunode.catalog.origins import brings_kernel_module, closure_line, origin_of, upstream_version
from gpunode.facts import NodeFacts
from gpunode.facts.packages import Package
from gpunode.provisioning.driver.files import LIFTED, SOURCES
from gpunode.provisioning.driver.messages import FOR_KERNELS, explained, lagging
from gpunode.provisioning.driver.model import DAEMON, MEMORY, PREVIEW_LIMIT_S, DriverPlan, DriverRequest
from gpunode.provisioning.state import AptState, NodeState
from gpunode.provisioning.transaction import RELEASE, Transaction
from gpunode.stack import TOGETHER, picture_from_facts
from gpunode.text import listed, printable

HELPERS = (DAEMON, "nvidia-modprobe")
"""Packages that are installed with the driver and are of no use without it, with versions of their own in Debian."""
PINNING = re.compile(r"nvidia-driver-pinning-")
BESIDE = re.compile(rf"{PINNING.pattern}|{FOR_KERNELS.pattern}")
META_HEADERS = re.compile(r"linux-headers-(?:[a-z]|686)[a-z0-9.-]*")
DRIVERS_OWN = re.compile(r"^(?!.*(?:container|docker|nsight)).*(?:nvidia|libcuda\d|libcudadebugger|libnv|cuda-drivers)")


def planned(request: DriverRequest, apt: AptState) -> DriverPlan:
    """Return the plan if apt manages the packages."""
    stack, settings, preview = request.stack, request.settings, request.preview
    source = SOURCES[stack.source]
    chosen = {_available(request, names): (names, pattern) for names, pattern in request.names}
    more = [*source.profiles.get(settings.profile, ()), *source.flavours.get(stack.module.flavour, ())]
    bound = {name: pattern for name, (_, pattern) in chosen.items()}
    bound |= dict.fromkeys([*more, *settings.extra_packages], f"{RELEASE}-*")
    headers = _headers(request, apt)
    others = {*_free(request), *(() if request.precompiled else headers)}
    free = sorted(name for name in others if not _is_header(name))
    optional = [name for name in source.optional if settings.persistence or name != DAEMON]
    switches = _switches(request)
    going = _going(request, apt, {*bound, *others, *optional}, switches=switches)
    unfinished = [name for name in apt.unfinished if DRIVERS_OWN.search(name)]
    obtainable = apt.headers if apt.lists else headers
    missing = request.unmet([*bound, *free, *(others & {*obtainable})]) | {*unfinished}
    changes = bool(missing or going)
    follows = request.precompiled and settings.kernel_policy == "follow"
    leaving = {*going, *preview.remove}
    coming = [name for name, built_from in preview.sources.items() if closure_line(name, built_from, stack.source)]
    kernel = stack.module.kernel_packages if request.precompiled else ()
    hold = set() if follows else {*request.of_stack, *bound, *coming, *kernel} - leaving
    change = Transaction(
        manager="apt",
        hold=tuple(sorted(hold)),
        # What the role holds and what stays without the driver's hold, such as a kernel.
        unhold=tuple(sorted(_own_holds(apt) - hold - leaving)),
        memory=MEMORY,
        lock_wait_s=settings.lock_wait_s,
    )
    return DriverPlan(
        request.state,
        stack,
        settings,
        request.answer,
        question=Transaction(
            manager="apt",
            bound=tuple(f"{name}={pattern}" for name, pattern in sorted(bound.items())),
            constraint=request.constraint,
            # Packages that dpkg has not finished would require packages that are removed with the others.
            closure=tuple(sorted({*request.installed, *unfinished})),
            fresh=switches,
            install=tuple(free),
            optional=(*(f"{name}={RELEASE}-*" for name in optional), *sorted(filter(_is_header, others))),
            alternatives={name: names[1:] for name, (names, _) in chosen.items() if name == names[0] and names[1:]},
            lift=() if request.precompiled else source.lift,
            restore=source.restore,
            remove=tuple(going),
            # The plan itself refuses removals, by the packages' origins.
            expendable=("*",),
            lock_wait_s=settings.lock_wait_s,
            limit_s=PREVIEW_LIMIT_S,
        ),
        change=change.model_copy(update={"install": preview.exact, "remove": preview.remove}) if changes else change,
        settled=not changes,
        changes=changes,
        missing=tuple(sorted(missing)),
        refusals=tuple(map(printable, _refusals(request, apt, going, changes=bool(missing)))),
        # Ubuntu's modules come with the newest kernel: an older one that still runs is replaced by the next reboot.
        wanting=tuple(
            kernel for kernel in request.kernels if (kernel.newest if request.precompiled else kernel.headers)
        ),
        names_in_dkms=source.dkms,
        has_daemon=any(name == DAEMON or name.startswith("nvidia-compute-utils") for name in apt.installed),
        pinned=f"{stack.driver.branch}.*" if follows else request.constraint,
    )


def _available(request: DriverRequest, names: tuple[str, ...]) -> str:
    """Return the installed one of a package and its alternatives, else the one that apt would install."""
    available = (request.state.installed, request.preview.install)
    return next((name for packages in available for name in names if name in packages), names[0])


def _free(request: DriverRequest) -> list[str]:
    """Return packages requested in any version."""
    rows = [row.name for row in request.stack.packages if row.component in TOGETHER and not row.with_driver]
    keys = ["mokutil", "openssl"] if request.node.secure_boot and not request.precompiled else []
    requested = {*rows, *request.stack.module.kernel_packages, *keys}
    return sorted(name for name in requested if request.settings.persistence or name != DAEMON)


def _headers(request: DriverRequest, apt: AptState) -> list[str]:
    """Return headers of every installed kernel, and those that future kernels depend on."""
    metas = [
        name.replace("linux-image-", "linux-headers-")
        for name in apt.installed
        if re.fullmatch(r"linux-image-(?!unsigned-)(?:[a-z]|686)[a-z0-9.-]*", name) and not name.endswith("-dbg")
    ]
    extra = request.settings.header_packages
    if not metas and not request.kernels and not extra:
        metas = [f"linux-headers-{apt.architecture}"]
    return sorted({*(f"linux-headers-{kernel.release}" for kernel in request.kernels), *metas, *extra})


def _switches(request: DriverRequest) -> bool:
    """Return whether source, branch or flavour differ from what is installed."""
    flavour = picture_flavour(request.node)
    branches = {release.split(".")[0] for release in request.of_stack.values()}
    other_branch = bool(branches - {str(request.stack.driver.branch)})
    other_flavour = flavour is not None and flavour != request.stack.module.flavour
    return bool(request.foreign) or other_branch or (other_flavour and bool(request.of_stack))


def _going(request: DriverRequest, apt: AptState, requested: set[str], *, switches: bool) -> list[str]:
    """Return installed packages to remove, known without querying apt: other sources, the other flavour, other pins."""
    kept = {f"nvidia-driver-pinning-{version}" for version in (request.stack.driver.branch, request.target)}
    pinning = [name for name in apt.installed if PINNING.match(name) and name not in kept]
    modules = [name for name in request.of_stack if brings_kernel_module(name)]
    modules += [name for name in apt.installed if FOR_KERNELS.match(name)]
    others = [name for name in modules if name not in requested]
    return sorted({*request.foreign, *pinning, *(others if switches else ())})


def _refusals(request: DriverRequest, apt: AptState, going: list[str], *, changes: bool) -> Iterator[str]:
    preview, switch, source = request.preview, request.settings.switch, request.stack.source
    if preview.error:
        yield explained("apt", preview.error)
    if preview.lacking is not None:
        yield lagging(preview, request.stack)
    if request.foreign and not request.of_stack and not switch:
        origins = sorted({str(row.origin or "an unknown publisher") for row in request.installed.values()})
        yield (
            f"other-source: a driver from {' and '.join(origins)} is installed, {source} is requested: "
            "set nvidia_driver_switch: true to replace it in one transaction, or leave nvidia_driver_source: auto"
        )
    foreign = sorted(
        package.name
        for package in request.node.packages or ()
        if package.held
        and package.name not in apt.own_holds
        and package.name in request.of_stack
        and upstream_version(package.version) != (request.target or "?")
    )
    if foreign and changes and not switch:
        yield (
            f"held-packages: {listed(foreign, 5)} {'is' if len(foreign) == 1 else 'are'} held at another version "
            f"than {request.constraint}, and not by gpunode: apt-mark unhold, or set nvidia_driver_switch: true"
        )
    known = {*request.installed, *going, *(name for name in preview.remove if DRIVERS_OWN.search(name))}
    others = sorted(set(preview.remove) - known)
    if others:
        yield (
            f"would-remove: apt would remove {listed(others, 5)}, which does not belong to the driver: remove it first"
        )


def _is_header(name: str) -> bool:
    return name.startswith("linux-headers-")


def _own_holds(apt: AptState) -> set[str]:
    """Return installed packages that the role has put on hold."""
    return set(apt.own_holds) & set(apt.held) & set(apt.installed)


def picture_flavour(node: NodeFacts) -> str | None:
    """Return the flavour of the installed module; None if there is none or it is unknown."""
    installed = picture_from_facts(node, load()).installed
    return installed.flavour if installed else None


def removal(state: NodeState, apt: AptState, headers: Iterable[str], *, keep_headers: bool) -> Transaction:
    """Return the transaction that removes the driver, also packages of which only configuration is left.

    Kernel headers go if the role installed them, unless ``keep_headers``. A kernel that was held because of the driver
    is released.
    """
    node, have = state.facts, [*apt.installed, *apt.unfinished]
    header_names = {f"linux-headers-{kernel.release}" for kernel in node.kernels or () if kernel.package} | set(headers)
    packages = {package.name for package in node.packages or () if _is_drivers(package)}
    packages |= {name for name in have if BESIDE.match(name) or name in HELPERS}
    new = sorted(name for name in have if name in header_names or META_HEADERS.fullmatch(name))
    return Transaction(
        manager="apt",
        state="absent",
        remove=tuple(sorted(packages)),
        remove_new=() if keep_headers else tuple(new),
        never=("linux-headers-*", "linux-kbuild-*") if keep_headers else (),
        restore=LIFTED,
        unhold=tuple(sorted(_own_holds(apt) - packages)),
        memory=MEMORY,
    )


def _is_drivers(package: Package) -> bool:
    origin = package.published or origin_of(package.name, package.version, package.maintainer)
    return closure_line(package.name, package.source, origin) is not None
