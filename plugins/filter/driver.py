"""What the role nvidia_driver has to do on a node: which packages, in which version, with what kept and what gone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.catalog.origins import brings_kernel_module, closure_line, origin_of, upstream_version
    from gpunode.checks.words import listed
    from gpunode.facts import NodeFacts
    from gpunode.printable import printable
    from gpunode.stack import TOGETHER, Stack, driver_names, installed_closure, picture_from_facts, releases_from
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

# Stands for the release in texts that are made before it is settled on.
RELEASE = "@RELEASE@"
PIN_PRIORITY = 1001
DAEMON = "nvidia-persistenced"
HELPERS = (DAEMON, "nvidia-modprobe")
"""Packages that come with the driver and are of no use without it, with versions of their own in Debian."""
PINNING = re.compile(r"nvidia-driver-pinning-")
# They go with the driver and are no part of its closure: Ubuntu's modules carry the kernel's version.
FOR_KERNELS = re.compile(r"linux-(modules|objects|signatures)-nvidia-")
BESIDE = re.compile(rf"{PINNING.pattern}|{FOR_KERNELS.pattern}")
META_HEADERS = re.compile(r"linux-headers-(?:[a-z]|686)[a-z0-9.-]*")
DRIVERS_OWN = re.compile(r"^(?!.*(?:container|docker|nsight)).*(?:nvidia|libcuda\d|libcudadebugger|libnv|cuda-drivers)")


@dataclass(frozen=True)
class Case:
    """A node, its stack and the role's settings; ``answer`` is what apt said of the transaction, where it was asked."""

    node: NodeFacts
    apt: Mapping[str, Any]
    stack: Stack
    settings: Mapping[str, Any]
    answer: Mapping[str, Any]

    @cached_property
    def installed(self) -> dict[str, Any]:
        """Every installed package of a driver closure, whoever published it, by name."""
        return installed_closure(self.node, load())

    @cached_property
    def own(self) -> dict[str, str]:
        """Installed packages of the closure from the stack's source: name to release."""
        return releases_from(self.stack.source, self.installed)

    @property
    def strangers(self) -> list[str]:
        """Installed packages of a closure from another source."""
        return sorted(self.installed.keys() - self.own.keys())

    @property
    def precompiled(self) -> bool:
        return self.stack.module.build == "precompiled"

    def _taken(self, name: str, others: Iterable[str]) -> str:
        """Of a package and those that may stand for it the one that is there, else the one that apt would install."""
        coming = {str(row["name"]) for row in self.answer.get("install", ())}
        names = (name, *others)
        return next((one for here in (self.apt["installed"], coming) for one in names if one in here), name)

    @cached_property
    def _wanted(self) -> list[tuple[tuple[str, ...], str]]:
        """((name, those that may stand for it), pattern of versions with RELEASE in it) of the stack's packages."""
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
        """Kernel, modules and driver move on together within the branch, as the distribution's archive does."""
        return self.precompiled and self.settings.get("kernel_policy", "hold") == "follow"

    @cached_property
    def bound(self) -> dict[str, str]:
        """Packages to have at the driver's release: name to the pattern of versions, with RELEASE in it."""
        data = self.settings["by_source"]
        found = {self._taken(name, others): pattern for (name, *others), pattern in self._wanted}
        more = [*data.get(self.settings["profile"], ()), *data.get(self.stack.module.flavour, ())]
        return found | dict.fromkeys([*more, *self.settings["extra_packages"]], f"{RELEASE}-*")

    @cached_property
    def free(self) -> list[str]:
        """Packages to have in whichever version goes with them."""
        rows = [row.name for row in self.stack.packages if row.component in TOGETHER and not row.with_driver]
        kernel = [name for name in self.stack.module.kernel_packages if name not in rows]
        keys = ["mokutil", "openssl"] if self.node.secure_boot and not self.precompiled else []
        wanted = [*rows, *kernel, *keys, *(() if self.precompiled else self.headers)]
        return sorted({name for name in wanted if self.settings["persistence"] or name != DAEMON})

    @property
    def alternatives(self) -> dict[str, list[str]]:
        """Bound packages to those that apt may take in their place where no list has them."""
        return {name: others for (name, *others), _ in self._wanted if others and name in self.bound}

    @property
    def optional(self) -> list[str]:
        """Packages to have where the source has them at the driver's release."""
        names = self.settings["by_source"].get("optional", ())
        return [name for name in names if self.settings["persistence"] or name != DAEMON]

    @cached_property
    def kernels(self) -> list[Any]:
        return [kernel for kernel in self.node.kernels or () if kernel.package]

    @cached_property
    def headers(self) -> list[str]:
        """Headers of every installed kernel, and those that the kernels to come bring."""
        metas = [
            name.replace("linux-image-", "linux-headers-")
            for name in self.apt["installed"]
            if re.fullmatch(r"linux-image-(?!unsigned-)(?:[a-z]|686)[a-z0-9.-]*", name) and not name.endswith("-dbg")
        ]
        asked = list(self.settings["header_packages"])
        if not metas and not self.kernels and not asked:
            metas = [f"linux-headers-{self.apt['architecture']}"]
        return sorted({f"linux-headers-{kernel.release}" for kernel in self.kernels} | {*metas, *asked})

    @property
    def target(self) -> str | None:
        """The release; None where only the archive can say and was not asked yet."""
        if self.answer.get("target"):
            return str(self.answer["target"])
        if self.stack.driver.decided_by != "repository":
            return self.stack.driver.version
        return None

    @property
    def switches(self) -> bool:
        """Source, branch or flavour are to be others than what is there."""
        flavour = picture_flavour(self.node)
        branches = {release.split(".")[0] for release in self.own.values()}
        other_branch = bool(branches - {str(self.stack.driver.branch)})
        other_flavour = flavour is not None and flavour != self.stack.module.flavour
        return bool(self.strangers) or other_branch or (other_flavour and bool(self.own))

    @property
    def missing(self) -> list[str]:
        """Packages that are not there, half there, or at another release; empty on a node that is as it should be."""
        have = self.apt["installed"]
        obtainable = self.apt["headers"] if self.apt["lists"] else self.headers
        wanted = [*self.bound, *(name for name in self.free if not _is_header(name) or name in obtainable)]
        lacking = [name for name in wanted if name not in have]
        moved = [name for name, release in self.own.items() if release != self.target]
        half = [name for name in self.apt["unfinished"] if DRIVERS_OWN.search(name)]
        return sorted({*lacking, *moved, *half})

    @property
    def going(self) -> list[str]:
        """Installed packages that must go, known without asking apt: other sources, the other flavour, other pins."""
        kept = {f"nvidia-driver-pinning-{what}" for what in (self.stack.driver.branch, self.target)}
        pinning = [name for name in self.apt["installed"] if PINNING.match(name) and name not in kept]
        wanted = {*self.bound, *self.free, *self.optional}
        modules = [name for name in self.own if brings_kernel_module(name)]
        modules += [name for name in self.apt["installed"] if FOR_KERNELS.match(name)]
        others = [name for name in modules if name not in wanted]
        return sorted({*self.strangers, *pinning, *(others if self.switches else ())})

    @property
    def coming(self) -> list[str]:
        """Packages of the closure that apt would install."""
        rows = self.answer.get("install", ())
        return [row["name"] for row in rows if closure_line(row["name"], row["source"], self.stack.source)]

    @property
    def closure(self) -> list[str]:
        """Names to hold: what is there, what is to come, and kernel and modules where they belong together."""
        if self.follows:
            return []
        gone = {*self.going, *self.answer.get("remove", ())}
        kernel = self.stack.module.kernel_packages if self.precompiled else ()
        return sorted({*self.own, *self.bound, *self.coming, *kernel} - gone)

    @property
    def freed(self) -> list[str]:
        """Names that the role holds from before and that stay without the driver's hold, such as a kernel."""
        leaving = {*self.going, *self.answer.get("remove", ())}
        return sorted(_own_holds(self.apt) - {*self.closure, *leaving})


def _need_gpunode() -> None:
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")


def _own_holds(apt: Mapping[str, Any]) -> set[str]:
    """Installed packages that are held because the role did it."""
    return set(apt.get("own_holds", ())) & set(apt.get("held", ())) & set(apt["installed"])


def _is_header(name: str) -> bool:
    return name.startswith("linux-headers-")


def picture_flavour(node: NodeFacts) -> str | None:
    """Flavour of the installed module; None where there is none or it could not be told."""
    installed = picture_from_facts(node, load()).installed
    return installed.flavour if installed else None


def _case(
    facts: Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any] | None,
) -> Case:
    _need_gpunode()
    try:
        node, matched = NodeFacts.model_validate(plain(facts)), Stack.model_validate(plain(stack))
    except ValueError as err:
        raise AnsibleFilterError(f"no driver can be planned from this: {err}") from None
    if not isinstance(settings["persistence"], bool):
        raise AnsibleFilterError("persistence must be true or false, not text: use | bool")
    return Case(node, plain(apt), matched, plain(settings), plain(answer or {}))


def driver_plan(
    facts: Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What there is to do for the driver on a node.

    ``facts`` is a NodeFacts document, ``apt`` what ``apt_state.py`` printed, ``stack`` the stack of ``gpunode_plan``,
    ``answer`` what ``apt_preview.py`` said. ``settings``: ``profile``, ``extra_packages``, ``header_packages``,
    ``persistence``, ``kernel_policy`` (``hold``, ``follow``: with modules that the distribution signed), and
    ``by_source``, what the stack does not say of the source.
    """
    case = _case(facts, apt, stack, settings, answer)
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
        "pins": _pins(
            case, f"{case.stack.driver.branch}.*" if case.follows else case.target or case.stack.driver.constraint
        ),
        **_modules(case),
    }


def _pins(case: Case, release: str) -> list[dict[str, Any]]:
    """Stanzas of an apt preferences file that bind the closure to a release, the more exact one for Debian's source."""
    data = case.settings["by_source"]
    names = [f"src:{name}" for name in data.get("pin_sources", ())] or list(data["pin_packages"])
    return [{"packages": names, "pin": f"version {release}-*", "priority": PIN_PRIORITY}]


def _modules(case: Case) -> dict[str, Any]:
    """Kernels, their modules, and the module in memory."""
    target = case.target
    built = {file.kernel for file in case.node.module_files or () if file.version == target}
    built_by = sorted({row.name for row in case.node.dkms or () if row.version == target and "nvidia" in row.name})
    important = [kernel.release for kernel in case.kernels if kernel.newest or kernel.running]
    bare = [kernel.release for kernel in case.kernels if kernel.release in important and not kernel.headers]
    with_headers = [kernel.release for kernel in case.kernels if kernel.headers]
    # Ubuntu's modules come with the newest kernel: an older one that still runs goes with the next reboot.
    wanting = with_headers if not case.precompiled else [kernel.release for kernel in case.kernels if kernel.newest]
    by_flavour = case.settings["by_source"].get("dkms", {}).get(case.stack.module.flavour)
    running = next((kernel.release for kernel in case.node.kernels or () if kernel.running), None)
    loaded = case.node.loaded_driver.version if case.node.loaded_driver else ""
    gpus = bool(case.node.gpus_on_bus)
    nouveau = "nouveau" in (case.node.modules or ())
    return {
        "precompiled": case.precompiled,
        "dkms": built_by[0] if built_by else by_flavour or "nvidia",
        "kernels_without_module": [release for release in wanting if release not in built],
        "kernels_without_headers": [] if case.precompiled else sorted(set(bare)),
        "images": [f"/boot/initrd.img-{kernel.release}" for kernel in case.kernels if kernel.image],
        "loaded": loaded,
        "gpus": gpus,
        "running": gpus and bool(loaded),
        "loadable": gpus and not loaded and not nouveau and running in built,
        "exchangeable": gpus and bool(loaded) and loaded != target and running in built and not _used(case.node),
        "reboot_reasons": [
            *_reboot_reasons(case, gpus and nouveau, loaded),
            *(
                [f"kernel {running} runs and has no module, {', '.join(sorted(built))} has"]
                if gpus and not loaded and built and running not in built
                else []
            ),
        ],
    }


def _reboot_reasons(case: Case, nouveau: bool, loaded: str) -> Iterator[str]:
    if nouveau:
        yield "nouveau is loaded and keeps NVIDIA's module off the GPU"
    if loaded and case.target and loaded != case.target:
        idle = "" if _used(case.node) else " (no process uses a GPU, so nvidia_driver_reload: true would exchange it)"
        yield f"module {loaded} is loaded, {case.target} is installed{idle}"


def _used(node: NodeFacts) -> bool:
    """Something computes on a GPU; so it is taken where nobody could see it."""
    return node.gpu_processes is None or any(process.computes for process in node.gpu_processes)


def driver_question(
    facts: Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What ``apt_preview.py`` is asked for a node; the role adds ``files``, ``keys`` and ``preferences``."""
    case = _case(facts, apt, stack, settings, None)
    keep = {} if case.switches else dict.fromkeys(sorted(case.own.keys() - set(case.going)), f"{RELEASE}-*")
    return {
        "bound": {**keep, **case.bound},
        "required": sorted(case.bound),
        "free": [name for name in case.free if not _is_header(name)],
        "alternatives": case.alternatives,
        "lift": [] if case.precompiled else list(case.settings["by_source"].get("lift", ())),
        "restore": list(case.settings["by_source"].get("restore", ())),
        "optional": [*case.optional, *(name for name in case.free if _is_header(name))],
        "constraint": case.target or case.stack.driver.constraint,
        "drop": sorted(case.installed),
        "remove": case.going,
        "repair": bool(case.apt["unfinished"]),
        "pins": _pins(case, RELEASE),
    }


def driver_removal(facts: Mapping[str, Any], apt: Mapping[str, Any], headers: Iterable[str] = ()) -> dict[str, Any]:
    """What goes with the driver: ``packages``; ``headers`` that go unless they were there before; ``loaded``.

    ``freed`` stays, and was held for the driver's sake.
    """
    _need_gpunode()
    node = NodeFacts.model_validate(plain(facts))
    closure = {
        package.name
        for package in node.packages or ()
        if not package.state.endswith("config-files") and _is_drivers(package)
    }
    have = [*apt["installed"], *apt["unfinished"]]
    mine = {f"linux-headers-{kernel.release}" for kernel in node.kernels or () if kernel.package} | set(headers)
    packages = {*closure, *(name for name in have if BESIDE.match(name) or name in HELPERS)}
    return {
        "packages": sorted(packages),
        "freed": sorted(_own_holds(apt) - packages),
        "headers": sorted(name for name in have if name in mine or META_HEADERS.fullmatch(name)),
        "loaded": node.loaded_driver.version if node.loaded_driver else "",
    }


def _is_drivers(package: Any) -> bool:
    origin = package.published or origin_of(package.name, package.version, package.maintainer)
    return closure_line(package.name, package.source, origin) is not None


def driver_refusals(
    facts: Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any],
) -> list[str]:
    """Why the driver must not be changed, one line each: its name, the reason, and what to do.

    ``answer`` is what ``apt_preview.py`` said; empty where nothing was asked. ``settings`` has ``switch`` besides:
    what stands in the way may go.
    """
    case = _case(facts, apt, stack, settings, answer)
    switch = bool(case.settings["switch"])
    lines = []
    if answer.get("error"):
        lines.append(_of_apt(str(answer["error"])))
    if "lacking" in answer:
        lines.append(_lacking(case))
    if case.strangers and not case.own and not switch:
        origins = sorted({str(row.origin or "an unknown publisher") for row in case.installed.values()})
        lines.append(
            f"other-source: a driver from {' and '.join(origins)} is installed and {case.stack.source} is wished: set "
            "nvidia_driver_switch: true to have it replaced in one transaction, or leave nvidia_driver_source: auto"
        )
    foreign = sorted(
        package.name
        for package in case.node.packages or ()
        if package.held
        and package.name not in apt.get("own_holds", ())
        and package.name in case.own
        and upstream_version(package.version) != (case.target or "?")
    )
    if foreign and case.missing and not switch:
        lines.append(
            f"held-packages: {listed(foreign, 5)} {'is' if len(foreign) == 1 else 'are'} held at another version than "
            f"{case.target or case.stack.driver.constraint}, and not by gpunode: apt-mark unhold, or set "
            "nvidia_driver_switch: true"
        )
    known = {*case.installed, *case.going, *(name for name in answer.get("remove", ()) if DRIVERS_OWN.search(name))}
    others = sorted(set(answer.get("remove", ())) - known)
    if others:
        lines.append(
            f"would-remove: apt would take away {listed(others, 5)} for it, which is not the driver's: "
            "take it away first"
        )
    return list(map(printable, lines))


def _lacking(case: Case) -> str:
    """A part of the closure is not to be had at the release of the rest."""
    answer, word = case.answer, case.answer["constraint"]
    gone = [name for name, there in answer["lacking"].items() if not there]
    lagging = {name: there for name, there in answer["lacking"].items() if there}
    whose = f"the repositories of source {case.stack.source}"
    unsigned = [name for name in gone if FOR_KERNELS.match(name)]
    if unsigned:
        flavour = case.stack.module.kernel_flavour
        return (
            f"package-gone: {whose} have no {unsigned[0]}, the signed modules for the installed kernel {flavour}: "
            "enable its components, choose another branch, or set nvidia_driver_source: nvidia, where DKMS builds them"
        )
    if gone:
        names = listed(sorted(gone), 5)
        return f"package-gone: {names} is in none of {whose}: see to the mirror, or enable its components"
    common = answer.get("common") or []
    branch, leads_to = str(case.stack.driver.branch), sorted({release.split(".")[0] for release in common})
    if case.stack.source == "ubuntu" and len(leads_to) == 1 and leads_to != [branch]:
        return (
            f"closure-lags: branch {branch} is transitional in {whose}: its packages are there in {common[0]} and "
            f"install branch {leads_to[0]}: nvidia_driver_version: {leads_to[0]}"
        )
    near = f"; all is there in {', '.join(common[:3])}: nvidia_driver_version: {common[0]}" if common else ""
    if not lagging:
        return f"closure-lags: {whose} have no one release {word} of the whole closure{near}"
    parts = [f"{name} is there in {', '.join(there[:3])}" for name, there in sorted(lagging.items())[:3]]
    return f"closure-lags: {word} is not to be had of the whole closure from {whose}: {'; '.join(parts)}{near}"


# What apt says of a repository, and what is to be done. The first that fits is told.
OF_APT = (
    (
        r"SHA1 is not considered secure|[Pp]olicy rejected|signing key.*not bound",
        "repository-key-sha1",
        "Debian 13's verifier (sqv) takes no signature that rests on SHA1: give a newer key with nvidia_repository_key",
    ),
    (
        r"EXPKEYSIG|KEYEXPIRED|[Ee]xpired",
        "repository-key-expired",
        "the key that signs the repository has expired: give the current one with nvidia_repository_key",
    ),
    (
        r"NOSPLIT|does the network require authentication|<(!DOCTYPE|html)",
        "repository-answers-html",
        "something between the node and the repository answers in its place, a proxy or a login page: see to "
        "nvidia_repository_proxy and nvidia_repository_url",
    ),
    (
        r"unexpected size|Mirror sync in progress|Hash Sum mismatch",
        "repository-mid-sync",
        "the repository is being written, its index and its signature do not fit: run this again later, or name "
        "another mirror with nvidia_repository_url",
    ),
    (
        r"NO_PUBKEY|is not signed|BADSIG|no valid OpenPGP|Missing key|couldn't be verified|[Cc]learsigned",
        "repository-unsigned",
        "signatures are verified, always: sign the repository, or give its key with nvidia_repository_key",
    ),
    (
        r"Could not (resolve|connect)|[Cc]onnection (refused|failed)|Unable to connect|Failed to fetch|timed? out",
        "repository-unreachable",
        "see to the network, the proxy (nvidia_repository_proxy) or the mirror (nvidia_repository_url)",
    ),
    (
        r"Unable to parse package file|Malformed entry|Malformed stanza|Invalid record in the preferences file",
        "apt-refuses",
        "apt cannot read a file on the node: mend it, or delete it where it is gpunode's: its role writes it anew",
    ),
    (r"did not end within", "repository-slow", "run this again, or name a nearer mirror with nvidia_repository_url"),
    (r"[Nn]o space left|enough free space", "disk-full", "make room, then run this again"),
)


def _of_apt(said: str) -> str:
    for pattern, name, remedy in OF_APT:
        if re.search(pattern, said):
            return f"{name}: {remedy}; apt said: {said}"
    return f"apt-refuses: {said}"


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "driver_plan": driver_plan,
            "driver_question": driver_question,
            "driver_removal": driver_removal,
            "driver_refusals": driver_refusals,
        }
