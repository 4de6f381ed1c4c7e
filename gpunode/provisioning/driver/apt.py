"""The driver's plan on a node with apt: packages and versions, what is kept and what is removed, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import brings_kernel_module, closure_line, origin_of, upstream_version
from gpunode.facts import NodeFacts
from gpunode.facts.kernels import Kernel
from gpunode.facts.packages import Package
from gpunode.provisioning.apt_sources import missing_components
from gpunode.provisioning.driver import files
from gpunode.provisioning.driver.files import PinStanza
from gpunode.provisioning.driver.messages import explained
from gpunode.provisioning.driver.model import DAEMON, MEMORY, DriverPlan, Preview
from gpunode.provisioning.driver.sources import LIFTED, SOURCES, DriverSource
from gpunode.provisioning.manifest import AptChange
from gpunode.provisioning.state import AptState, NodeState
from gpunode.stack import TOGETHER, driver_names, picture_from_facts
from gpunode.stack.naming import any_revision
from gpunode.text import listed

# Placeholder of the release in texts that are built before it is known.
RELEASE = "@RELEASE@"
PIN_PRIORITY = 1001
HELPERS = (DAEMON, "nvidia-modprobe")
"""Packages that are installed with the driver and are of no use without it, with versions of their own in Debian."""
PINNING = re.compile(r"nvidia-driver-pinning-")
# They are removed with the driver and are not part of its closure: Ubuntu's modules have the kernel's version.
FOR_KERNELS = re.compile(r"linux-(modules|objects|signatures)-nvidia-")
BESIDE = re.compile(rf"{PINNING.pattern}|{FOR_KERNELS.pattern}")
META_HEADERS = re.compile(r"linux-headers-(?:[a-z]|686)[a-z0-9.-]*")
DRIVERS_OWN = re.compile(r"^(?!.*(?:container|docker|nsight)).*(?:nvidia|libcuda\d|libcudadebugger|libnv|cuda-drivers)")


class AptPlan(DriverPlan):
    """The plan if apt manages the packages."""

    @cached_property
    def apt(self) -> AptState:
        """Return apt's state."""
        assert self.state.apt is not None  # noqa: S101 - this class is for nodes with apt
        return self.state.apt

    @property
    def source(self) -> DriverSource:
        """Return the packages and pins of the driver's source, which the stack does not contain."""
        return SOURCES[self.stack.source]

    def _taken(self, name: str, others: Iterable[str]) -> str:
        """Return the installed one of a package and its alternatives, else the one that apt would install."""
        coming = {row.name for row in self.preview.install}
        names = (name, *others)
        return next((one for here in (self.apt.installed, coming) for one in names if one in here), name)

    @cached_property
    def _requested(self) -> list[tuple[tuple[str, ...], str]]:
        """Return ((name, its alternatives), pattern of versions with RELEASE in it) of the stack's packages."""
        rows = [row for row in self.stack.packages if row.component in TOGETHER and row.with_driver]
        full = driver_names(self.stack, load(), "full") if self.settings.profile == "full" else ()
        word = self.stack.driver.constraint
        return [(names, f"{RELEASE}-*") for names in full] + [
            ((row.name, *row.alternatives), (row.version or f"{word}-*").replace(word, RELEASE))
            for row in rows
            if not (full and row.component == "driver")
        ]

    @property
    def follows(self) -> bool:
        """Return whether kernel, modules and driver are upgraded together within the branch."""
        return self.precompiled and self.settings.kernel_policy == "follow"

    @cached_property
    def bound(self) -> dict[str, str]:
        """Return packages requested at the driver's release: name to the pattern of versions, with RELEASE in it."""
        found = {self._taken(name, others): pattern for (name, *others), pattern in self._requested}
        more = [
            *self.source.profiles.get(self.settings.profile, ()),
            *self.source.flavours.get(self.stack.module.flavour, ()),
        ]
        return found | dict.fromkeys([*more, *self.settings.extra_packages], f"{RELEASE}-*")

    @cached_property
    def free(self) -> list[str]:
        """Return packages requested in any version."""
        rows = [row.name for row in self.stack.packages if row.component in TOGETHER and not row.with_driver]
        kernel = [name for name in self.stack.module.kernel_packages if name not in rows]
        keys = ["mokutil", "openssl"] if self.node.secure_boot and not self.precompiled else []
        requested = [*rows, *kernel, *keys, *(() if self.precompiled else self.headers)]
        return sorted({name for name in requested if self.settings.persistence or name != DAEMON})

    @property
    def alternatives(self) -> dict[str, list[str]]:
        """Return bound packages to those that apt may install in their place if no list has them."""
        return {name: others for (name, *others), _ in self._requested if others and name in self.bound}

    @property
    def optional(self) -> list[str]:
        """Return packages requested if the source has them at the driver's release."""
        return [name for name in self.source.optional if self.settings.persistence or name != DAEMON]

    @cached_property
    def headers(self) -> list[str]:
        """Return headers of every installed kernel, and those that future kernels depend on."""
        metas = [
            name.replace("linux-image-", "linux-headers-")
            for name in self.apt.installed
            if re.fullmatch(r"linux-image-(?!unsigned-)(?:[a-z]|686)[a-z0-9.-]*", name) and not name.endswith("-dbg")
        ]
        extra = list(self.settings.header_packages)
        if not metas and not self.kernels and not extra:
            metas = [f"linux-headers-{self.apt.architecture}"]
        return sorted({f"linux-headers-{kernel.release}" for kernel in self.kernels} | {*metas, *extra})

    @property
    def switches(self) -> bool:
        """Return whether source, branch or flavour differ from what is installed."""
        flavour = picture_flavour(self.node)
        branches = {release.split(".")[0] for release in self.own.values()}
        other_branch = bool(branches - {str(self.stack.driver.branch)})
        other_flavour = flavour is not None and flavour != self.stack.module.flavour
        return bool(self.foreign) or other_branch or (other_flavour and bool(self.own))

    @property
    def missing(self) -> list[str]:
        """Return packages that are missing, half-installed, or at another release; empty if none is."""
        have = self.apt.installed
        obtainable = self.apt.headers if self.apt.lists else self.headers
        requested = [*self.bound, *(name for name in self.free if not _is_header(name) or name in obtainable)]
        lacking = [name for name in requested if name not in have]
        moved = [name for name, release in self.own.items() if release != self.target]
        return sorted({*lacking, *moved, *self.unfinished})

    @property
    def unfinished(self) -> list[str]:
        """Return packages of the driver that dpkg has begun to install and not finished."""
        return [name for name in self.apt.unfinished if DRIVERS_OWN.search(name)]

    @property
    def going(self) -> list[str]:
        """Return installed packages to remove, known without querying apt: other sources, the other flavour, other
        pins.
        """
        kept = {f"nvidia-driver-pinning-{what}" for what in (self.stack.driver.branch, self.target)}
        pinning = [name for name in self.apt.installed if PINNING.match(name) and name not in kept]
        requested = {*self.bound, *self.free, *self.optional}
        modules = [name for name in self.own if brings_kernel_module(name)]
        modules += [name for name in self.apt.installed if FOR_KERNELS.match(name)]
        others = [name for name in modules if name not in requested]
        return sorted({*self.foreign, *pinning, *(others if self.switches else ())})

    @property
    def coming(self) -> list[str]:
        """Return packages of the closure that apt would install."""
        rows = self.preview.install
        return [row.name for row in rows if closure_line(row.name, row.source, self.stack.source)]

    @property
    def closure(self) -> list[str]:
        """Return names to hold: installed and new packages, and kernel and modules if they belong together."""
        if self.follows:
            return []
        gone = {*self.going, *self.preview.remove}
        kernel = self.stack.module.kernel_packages if self.precompiled else ()
        return sorted({*self.own, *self.bound, *self.coming, *kernel} - gone)

    @property
    def freed(self) -> list[str]:
        """Return names that the role holds and that stay without the driver's hold, such as a kernel."""
        leaving = {*self.going, *self.preview.remove}
        return sorted(_own_holds(self.apt) - {*self.closure, *leaving})

    @property
    def changes(self) -> bool:
        """Return whether packages change."""
        return bool(self.missing or self.going)

    @property
    def wanting(self) -> list[Kernel]:
        """Return the kernels that need a module.

        Ubuntu's modules come with the newest kernel: an older one that still runs is replaced by the next reboot.
        """
        return [kernel for kernel in self.kernels if (kernel.newest if self.precompiled else kernel.headers)]

    @property
    def names_in_dkms(self) -> Mapping[str, str]:
        """Return the name that DKMS will use for the modules of each flavour."""
        return self.source.dkms

    @property
    def has_daemon(self) -> bool:
        """Return whether the persistence daemon is installed."""
        return any(name == DAEMON or name.startswith("nvidia-compute-utils") for name in self.apt.installed)

    @property
    def stanzas(self) -> list[dict[str, Any]]:
        """Return sources for the components with the driver, as far as the node's own sources lack them."""
        if not self.source.components or self.node.os is None:
            return []
        rows = [row.model_dump() for row in self.apt.sources]
        return missing_components(rows, str(self.node.os.codename), self.source.components, files.SOURCES_FILE)

    @property
    def pins(self) -> list[PinStanza]:
        """Return the preferences that keep the closure at its release."""
        branch = f"{self.stack.driver.branch}.*"
        return self._pinned(branch if self.follows else self.target or self.stack.driver.constraint)

    def _pinned(self, release: str) -> list[PinStanza]:
        """Return stanzas that pin the closure to a release, the more exact one for Debian's source."""
        names = [f"src:{name}" for name in self.source.pin_sources] or list(self.source.pin_packages)
        return [{"packages": names, "pin": f"version {any_revision(release)}", "priority": PIN_PRIORITY}]

    @property
    def question(self) -> dict[str, Any]:
        """Return the question for ``apt_preview.py``, without ``files`` and ``preferences``."""
        keep = {} if self.switches else dict.fromkeys(sorted(self.own.keys() - set(self.going)), f"{RELEASE}-*")
        return {
            "bound": {**keep, **self.bound},
            "required": sorted(self.bound),
            "free": [name for name in self.free if not _is_header(name)],
            "alternatives": self.alternatives,
            "lift": [] if self.precompiled else list(self.source.lift),
            "restore": list(self.source.restore),
            "optional": [*self.optional, *(name for name in self.free if _is_header(name))],
            "constraint": self.target or self.stack.driver.constraint,
            # Packages that dpkg has not finished would require packages that are removed with the others.
            "drop": sorted({*self.installed, *self.unfinished}),
            "remove": self.going,
            "repair": bool(self.apt.unfinished),
            "pins": self._pinned(RELEASE),
        }

    @property
    def closure_problems(self) -> tuple[str, ...]:
        """Return why the closure is not at one version after the transaction."""
        whole = [f"not all of {', '.join(self.missing)} is available"] if self.missing else []
        there = "; ".join([*self.wrong_versions, *whole])
        return (f"{self.target} is requested for the whole closure, found {there}",) if there else ()

    @property
    def pending_reasons(self) -> Iterator[str]:
        """Yield which packages change."""
        for name in self.missing:
            there = self.apt.installed.get(name)
            request = f"is at {there}, {self.target or 'another release'} is requested"
            yield f"{name} {request if there else 'is not installed'}"
        yield from (f"{name} must be removed" for name in self.going)

    def change(self, texts: Mapping[str, str], preferences: str, *, idle: bool) -> AptChange:
        """Return the transaction; ``texts`` are apt's files, ``idle``: no process may compute on a GPU."""
        change = AptChange(
            hold=tuple(self.closure),
            unhold=tuple(self.freed),
            memory=MEMORY,
            files={**texts, files.PREFERENCES: preferences},
            lock_wait_s=self.settings.lock_wait_s,
        )
        if not self.changes:
            return change
        install = tuple(one for one in self.preview.arguments if not one.endswith("-"))
        return change.model_copy(update={"install": install, "remove": self.preview.remove, "idle_gpus": idle})

    # --- refusals

    @property
    def _refusals(self) -> Iterator[str]:
        preview, switch = self.preview, self.settings.switch
        if preview.error:
            yield explained("apt", preview.error)
        if preview.lacking is not None:
            yield self._lacking(preview)
        if self.foreign and not self.own and not switch:
            origins = sorted({str(row.origin or "an unknown publisher") for row in self.installed.values()})
            yield (
                f"other-source: a driver from {' and '.join(origins)} is installed, {self.stack.source} is requested: "
                "set nvidia_driver_switch: true to replace it in one transaction, or leave nvidia_driver_source: auto"
            )
        foreign = sorted(
            package.name
            for package in self.node.packages or ()
            if package.held
            and package.name not in self.apt.own_holds
            and package.name in self.own
            and upstream_version(package.version) != (self.target or "?")
        )
        if foreign and self.missing and not switch:
            yield (
                f"held-packages: {listed(foreign, 5)} {'is' if len(foreign) == 1 else 'are'} held at another version "
                f"than {self.target or self.stack.driver.constraint}, and not by gpunode: apt-mark unhold, or set "
                "nvidia_driver_switch: true"
            )
        known = {*self.installed, *self.going, *(name for name in preview.remove if DRIVERS_OWN.search(name))}
        others = sorted(set(preview.remove) - known)
        if others:
            yield (
                f"would-remove: apt would remove {listed(others, 5)}, which does not belong to the driver: remove it "
                "first"
            )

    def _lacking(self, answer: Preview) -> str:
        """Return the refusal if a part of the closure is not available at the release of the rest."""
        word, found = answer.constraint, answer.lacking or {}
        gone = [name for name, there in found.items() if not there]
        lagging = {name: there for name, there in found.items() if there}
        whose = f"the repositories of source {self.stack.source}"
        unsigned = [name for name in gone if FOR_KERNELS.match(name)]
        if unsigned:
            flavour = self.stack.module.kernel_flavour
            return (
                f"package-gone: {whose} have no {unsigned[0]}, the signed modules for the installed kernel "
                f"{flavour}: enable its components, choose another branch, or set nvidia_driver_source: nvidia, where "
                "DKMS builds them"
            )
        if gone:
            names = listed(sorted(gone), 5)
            return f"package-gone: {names} is in none of {whose}: check the mirror, or enable its components"
        common = answer.common
        branch, leads_to = str(self.stack.driver.branch), sorted({release.split(".")[0] for release in common})
        if self.stack.source == "ubuntu" and len(leads_to) == 1 and leads_to != [branch]:
            return (
                f"closure-lags: branch {branch} is transitional in {whose}: its packages are available in {common[0]} "
                f"and install branch {leads_to[0]}: nvidia_driver_version: {leads_to[0]}"
            )
        if not lagging:
            return f"closure-lags: {whose} have no one release {word} of the whole closure{answer.near}"
        parts = [f"{name} is available in {', '.join(there[:3])}" for name, there in sorted(lagging.items())[:3]]
        return (
            f"closure-lags: {word} is not available for the whole closure from {whose}: {'; '.join(parts)}{answer.near}"
        )


def _own_holds(apt: AptState) -> set[str]:
    """Return installed packages that the role has put on hold."""
    return set(apt.own_holds) & set(apt.held) & set(apt.installed)


def _is_header(name: str) -> bool:
    return name.startswith("linux-headers-")


def picture_flavour(node: NodeFacts) -> str | None:
    """Return the flavour of the installed module; None if there is none or it is unknown."""
    installed = picture_from_facts(node, load()).installed
    return installed.flavour if installed else None


def removal(state: NodeState, apt: AptState, headers: Iterable[str], *, keep_headers: bool) -> AptChange:
    """Return the transaction that removes the driver, also packages of which only configuration is left.

    Kernel headers go if the role installed them, unless ``keep_headers``. A kernel that was held because of the driver
    is released.
    """
    node, have = state.facts, [*apt.installed, *apt.unfinished]
    mine = {f"linux-headers-{kernel.release}" for kernel in node.kernels or () if kernel.package} | set(headers)
    packages = {package.name for package in node.packages or () if _is_drivers(package)}
    packages |= {name for name in have if BESIDE.match(name) or name in HELPERS}
    new = sorted(name for name in have if name in mine or META_HEADERS.fullmatch(name))
    return AptChange(
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
