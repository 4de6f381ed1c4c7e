"""The role nvidia_driver on a node with apt: packages and versions, what is kept and what is removed."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import brings_kernel_module, closure_line, origin_of
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.facts.node import Kernel
from gpunode.provisioning.apt_sources import missing_components
from gpunode.provisioning.documents import node_of, stack_of
from gpunode.provisioning.driver_input import DriverInput
from gpunode.provisioning.driver_modules import module_state
from gpunode.provisioning.driver_sources import LIFTED, SOURCES, DriverSource
from gpunode.stack import TOGETHER, Stack, driver_names, picture_from_facts
from gpunode.stack.naming import any_revision
from gpunode.variables import plain

# Placeholder of the release in texts that are built before it is known.
RELEASE = "@RELEASE@"
PIN_PRIORITY = 1001
DAEMON = "nvidia-persistenced"
HELPERS = (DAEMON, "nvidia-modprobe")
"""Packages that are installed with the driver and are of no use without it, with versions of their own in Debian."""
PINNING = re.compile(r"nvidia-driver-pinning-")
# They are removed with the driver and are not part of its closure: Ubuntu's modules have the kernel's version.
FOR_KERNELS = re.compile(r"linux-(modules|objects|signatures)-nvidia-")
BESIDE = re.compile(rf"{PINNING.pattern}|{FOR_KERNELS.pattern}")
META_HEADERS = re.compile(r"linux-headers-(?:[a-z]|686)[a-z0-9.-]*")
DRIVERS_OWN = re.compile(r"^(?!.*(?:container|docker|nsight)).*(?:nvidia|libcuda\d|libcudadebugger|libnv|cuda-drivers)")


@dataclass(frozen=True)
class AptDriverInput(DriverInput):
    """The input if apt manages the packages; ``apt`` is apt's state."""

    apt: Mapping[str, Any]

    @property
    def source(self) -> DriverSource:
        """Return the packages and pins of the driver's source, which the stack does not contain."""
        return SOURCES[self.stack.source]

    def _taken(self, name: str, others: Iterable[str]) -> str:
        """Return the installed one of a package and its alternatives, else the one that apt would install."""
        coming = {str(row["name"]) for row in self.answer.get("install", ())}
        names = (name, *others)
        return next((one for here in (self.apt["installed"], coming) for one in names if one in here), name)

    @cached_property
    def _requested(self) -> list[tuple[tuple[str, ...], str]]:
        """Return ((name, its alternatives), pattern of versions with RELEASE in it) of the stack's packages."""
        rows = [row for row in self.stack.packages if row.component in TOGETHER and row.with_driver]
        full = driver_names(self.stack, load(), "full") if self.settings["profile"] == "full" else ()
        word = self.stack.driver.constraint
        return [(names, f"{RELEASE}-*") for names in full] + [
            ((row.name, *row.alternatives), (row.version or f"{word}-*").replace(word, RELEASE))
            for row in rows
            if not (full and row.component == "driver")
        ]

    @property
    def follows(self) -> bool:
        """Return whether kernel, modules and driver are upgraded together within the branch."""
        return self.precompiled and self.settings.get("kernel_policy", "hold") == "follow"

    @cached_property
    def bound(self) -> dict[str, str]:
        """Return packages requested at the driver's release: name to the pattern of versions, with RELEASE in it."""
        found = {self._taken(name, others): pattern for (name, *others), pattern in self._requested}
        more = [
            *self.source.profiles.get(self.settings["profile"], ()),
            *self.source.flavours.get(self.stack.module.flavour, ()),
        ]
        return found | dict.fromkeys([*more, *self.settings["extra_packages"]], f"{RELEASE}-*")

    @cached_property
    def free(self) -> list[str]:
        """Return packages requested in any version."""
        rows = [row.name for row in self.stack.packages if row.component in TOGETHER and not row.with_driver]
        kernel = [name for name in self.stack.module.kernel_packages if name not in rows]
        keys = ["mokutil", "openssl"] if self.node.secure_boot and not self.precompiled else []
        requested = [*rows, *kernel, *keys, *(() if self.precompiled else self.headers)]
        return sorted({name for name in requested if self.settings["persistence"] or name != DAEMON})

    @property
    def alternatives(self) -> dict[str, list[str]]:
        """Return bound packages to those that apt may install in their place if no list has them."""
        return {name: others for (name, *others), _ in self._requested if others and name in self.bound}

    @property
    def optional(self) -> list[str]:
        """Return packages requested if the source has them at the driver's release."""
        return [name for name in self.source.optional if self.settings["persistence"] or name != DAEMON]

    @cached_property
    def headers(self) -> list[str]:
        """Return headers of every installed kernel, and those that future kernels depend on."""
        metas = [
            name.replace("linux-image-", "linux-headers-")
            for name in self.apt["installed"]
            if re.fullmatch(r"linux-image-(?!unsigned-)(?:[a-z]|686)[a-z0-9.-]*", name) and not name.endswith("-dbg")
        ]
        extra = list(self.settings["header_packages"])
        if not metas and not self.kernels and not extra:
            metas = [f"linux-headers-{self.apt['architecture']}"]
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
        have = self.apt["installed"]
        obtainable = self.apt["headers"] if self.apt["lists"] else self.headers
        requested = [*self.bound, *(name for name in self.free if not _is_header(name) or name in obtainable)]
        lacking = [name for name in requested if name not in have]
        moved = [name for name, release in self.own.items() if release != self.target]
        return sorted({*lacking, *moved, *self.unfinished})

    @property
    def unfinished(self) -> list[str]:
        """Return packages of the driver that dpkg has begun to install and not finished."""
        return [name for name in self.apt["unfinished"] if DRIVERS_OWN.search(name)]

    @property
    def going(self) -> list[str]:
        """Return installed packages to remove, known without querying apt: other sources, the other flavour, other
        pins.
        """
        kept = {f"nvidia-driver-pinning-{what}" for what in (self.stack.driver.branch, self.target)}
        pinning = [name for name in self.apt["installed"] if PINNING.match(name) and name not in kept]
        requested = {*self.bound, *self.free, *self.optional}
        modules = [name for name in self.own if brings_kernel_module(name)]
        modules += [name for name in self.apt["installed"] if FOR_KERNELS.match(name)]
        others = [name for name in modules if name not in requested]
        return sorted({*self.foreign, *pinning, *(others if self.switches else ())})

    @property
    def coming(self) -> list[str]:
        """Return packages of the closure that apt would install."""
        rows = self.answer.get("install", ())
        return [row["name"] for row in rows if closure_line(row["name"], row["source"], self.stack.source)]

    @property
    def closure(self) -> list[str]:
        """Return names to hold: installed and new packages, and kernel and modules if they belong together."""
        if self.follows:
            return []
        gone = {*self.going, *self.answer.get("remove", ())}
        kernel = self.stack.module.kernel_packages if self.precompiled else ()
        return sorted({*self.own, *self.bound, *self.coming, *kernel} - gone)

    @property
    def freed(self) -> list[str]:
        """Return names that the role holds and that stay without the driver's hold, such as a kernel."""
        leaving = {*self.going, *self.answer.get("remove", ())}
        return sorted(_own_holds(self.apt) - {*self.closure, *leaving})


def _own_holds(apt: Mapping[str, Any]) -> set[str]:
    """Return installed packages that the role has put on hold."""
    return set(apt.get("own_holds", ())) & set(apt.get("held", ())) & set(apt["installed"])


def _is_header(name: str) -> bool:
    return name.startswith("linux-headers-")


def picture_flavour(node: NodeFacts) -> str | None:
    """Return the flavour of the installed module; None if there is none or it is unknown."""
    installed = picture_from_facts(node, load()).installed
    return installed.flavour if installed else None


def driver_input(
    facts: NodeFacts | Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any] | None,
) -> AptDriverInput:
    if not isinstance(settings["persistence"], bool):
        raise UsageError("persistence must be true or false, not text: use | bool")
    return AptDriverInput(node_of(facts), stack_of(stack), plain(settings), plain(answer or {}), plain(apt))


def driver_plan(
    facts: NodeFacts | Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the changes for the driver on a node.

    ``facts`` is a NodeFacts document, ``apt`` what ``apt_state.py`` printed, ``stack`` the stack of ``gpunode_plan``,
    ``answer`` what ``apt_preview.py`` printed. ``settings``: ``profile``, ``extra_packages``, ``header_packages``,
    ``persistence``, ``kernel_policy`` (``hold``, ``follow``: with modules that the distribution signed), and
    ``sources_file``, the role's own file of apt sources.
    """
    case = driver_input(facts, apt, stack, settings, answer)
    closure = case.closure
    held = {package.name for package in case.node.packages or () if package.held} | set(apt.get("held", ()))
    have = {*case.own, *(name for name in case.stack.module.kernel_packages if name in case.apt["installed"])}
    return {
        "target": case.target,
        "missing": case.missing,
        "going": case.going,
        "closure": closure,
        "held": sorted(held),
        "freed": case.freed,
        "daemon": any(name == DAEMON or name.startswith("nvidia-compute-utils") for name in case.apt["installed"]),
        "loose": sorted(name for name in closure if name in have and name not in held),
        "versions": dict(sorted(case.own.items())),
        "wrong_versions": [f"{name} {release}" for name, release in sorted(case.own.items()) if release != case.target],
        "stanzas": _stanzas(case),
        "pins": _pins(
            case, f"{case.stack.driver.branch}.*" if case.follows else case.target or case.stack.driver.constraint
        ),
        **module_state(case, _wanting(case), case.source.dkms),
    }


def _stanzas(case: AptDriverInput) -> list[dict[str, Any]]:
    """Return sources for the components with the driver, as far as the node's own sources lack them."""
    if not case.source.components or case.node.os is None:
        return []
    return missing_components(
        case.apt["sources"], str(case.node.os.codename), case.source.components, str(case.settings["sources_file"])
    )


def _pins(case: AptDriverInput, release: str) -> list[dict[str, Any]]:
    """Return stanzas of an apt preferences file that pin the closure to a release, the more exact one for Debian's
    source.
    """
    names = [f"src:{name}" for name in case.source.pin_sources] or list(case.source.pin_packages)
    return [{"packages": names, "pin": f"version {any_revision(release)}", "priority": PIN_PRIORITY}]


def _wanting(case: AptDriverInput) -> list[Kernel]:
    """Return the kernels that need a module.

    Ubuntu's modules come with the newest kernel: an older one that still runs is replaced by the next reboot.
    """
    return [kernel for kernel in case.kernels if (kernel.newest if case.precompiled else kernel.headers)]


def driver_question(
    facts: NodeFacts | Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the question for ``apt_preview.py``; the role adds ``files``, ``keys`` and ``preferences``."""
    case = driver_input(facts, apt, stack, settings, None)
    keep = {} if case.switches else dict.fromkeys(sorted(case.own.keys() - set(case.going)), f"{RELEASE}-*")
    return {
        "bound": {**keep, **case.bound},
        "required": sorted(case.bound),
        "free": [name for name in case.free if not _is_header(name)],
        "alternatives": case.alternatives,
        "lift": [] if case.precompiled else list(case.source.lift),
        "restore": list(case.source.restore),
        "optional": [*case.optional, *(name for name in case.free if _is_header(name))],
        "constraint": case.target or case.stack.driver.constraint,
        # Packages that dpkg has not finished would require packages that are removed with the others.
        "drop": sorted({*case.installed, *case.unfinished}),
        "remove": case.going,
        "repair": bool(case.apt["unfinished"]),
        "pins": _pins(case, RELEASE),
    }


def driver_removal(
    facts: NodeFacts | Mapping[str, Any], apt: Mapping[str, Any], headers: Iterable[str] = ()
) -> dict[str, Any]:
    """Return what is removed with the driver.

    ``packages``, including those of which only configuration is left; ``headers`` that are removed unless they were
    there before; ``loaded``; ``restore``: what returns to the distribution's version.

    ``freed`` stays, and was held because of the driver.
    """
    node = node_of(facts)
    closure = {package.name for package in node.packages or () if _is_drivers(package)}
    have = [*apt["installed"], *apt["unfinished"]]
    mine = {f"linux-headers-{kernel.release}" for kernel in node.kernels or () if kernel.package} | set(headers)
    packages = {*closure, *(name for name in have if BESIDE.match(name) or name in HELPERS)}
    return {
        "packages": sorted(packages),
        "freed": sorted(_own_holds(apt) - packages),
        "headers": sorted(name for name in have if name in mine or META_HEADERS.fullmatch(name)),
        "restore": list(LIFTED),
        "loaded": node.loaded_driver.version if node.loaded_driver else "",
    }


def _is_drivers(package: Any) -> bool:
    origin = package.published or origin_of(package.name, package.version, package.maintainer)
    return closure_line(package.name, package.source, origin) is not None
