"""Conversion of an accepted candidate into a Stack: every field with the rule that decided it."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from gpunode.catalog import KernelFlavour
from gpunode.stack.candidates import is_native
from gpunode.stack.model import Cuda, Driver, Module, PackageChoice, Reason, Restart, Stack, Warn
from gpunode.stack.naming import DRIVER_VARIANTS, choices, package_set, version_word
from gpunode.stack.question import number
from gpunode.stack.rules import CandidateCase, Choice, rules

COMPONENTS = (
    *("fabric-manager", "nscq", "nvsdm", "nvlsm", "imex", "dcgm", "container-toolkit"),
    *("cuda-compat", "cuda-toolkit", "cudnn", "nccl"),
)
"""The order of packages after the driver's."""
EMPTY: dict[str, Any] = {"remove": ()}
"""Values of fields if their rule is skipped; None for all others."""


def assemble(case: CandidateCase, off: Collection[str] = ()) -> Stack:
    """Return the stack of a case."""
    values: dict[str, Any] = {}
    reasons: dict[str, Reason] = {}
    extra: list[PackageChoice] = []
    for rule_id, choice in _choices(case, off):
        values[choice.field] = choice.value
        reasons[choice.field] = choice.reason(rule_id)
        extra += choice.packages
    candidate, node = case.candidate, case.question.node
    flavour_row = _kernel_flavour(case)
    driver, driver_packages = _driver(case, flavour_row)
    values |= {
        "source": candidate.source,
        "driver": driver,
        "module": _module(case, flavour_row),
        "cuda": _cuda(case),
        "packages": (*driver_packages, *sorted(extra, key=lambda package: COMPONENTS.index(package.component))),
        "restart": Restart(kind=_restart(case)[0]),
        "kept": candidate.installed,
    }
    reasons |= {
        "source": _why_source(case),
        "driver": _why_driver(case),
        "module": _why_module(case, flavour_row),
        "cuda": _why_cuda(case),
        "packages": _why_packages(case, driver_packages),
        "restart": Reason(rule="catalog", text=_restart(case)[1]),
        "kept": Reason(
            rule="installed" if candidate.installed else "preference",
            text="the node has this driver already" if candidate.installed else "this driver is not on the node",
        ),
    }
    warned = [Warn(rule=rule_id, text=verdict.text) for rule_id, verdict in rules.verdicts(case, off)]
    seen = [Warn(rule="catalog", text=note) for note in node.notes]
    return Stack(
        os=candidate.system.id,
        arch=candidate.arch,
        kernel=node.kernel,
        platform=case.question.platform.id if case.question.platform else None,
        gpus=tuple(_named(term.label, term.count) for term in case.question.gpus),
        warnings=tuple(dict.fromkeys([*warned, *_assumed(case), *_secure_boot(case), *seen])),
        reasons=reasons,
        **values,
    )


def _named(label: str, count: int | None) -> str:
    return label if count is None else f"{count}x {label}"


def _choices(case: CandidateCase, off: Collection[str]) -> Iterator[tuple[str, Choice]]:
    for rule in rules:
        if rule.decide is None:
            continue
        if rule.id in off:
            for field in rule.fields:
                yield rule.id, Choice(field, EMPTY.get(field), f"rule {rule.id} is skipped")
        else:
            for choice in rule.decide(case):
                yield rule.id, choice


def _driver(case: CandidateCase, kernel: KernelFlavour | None) -> tuple[Driver, tuple[PackageChoice, ...]]:
    candidate = case.candidate
    row = package_set(case, "driver", DRIVER_VARIANTS if kernel is None else ("precompiled", *DRIVER_VARIANTS))
    driver = Driver(
        branch=candidate.branch.number,
        version=None if _unknown_release(case) else candidate.version,
        constraint=version_word(case),
        decided_by=candidate.decided_by,
        type=candidate.branch.type,
        variant=row.variant if row else None,
    )
    return driver, () if row is None else choices(case, row, kernel=kernel.id if kernel else "")


def _unknown_release(case: CandidateCase) -> bool:
    """Return True if the repository decides the release and the catalog does not have its content."""
    candidate, offer = case.candidate, case.candidate.offer
    return candidate.decided_by == "repository" and (offer is None or candidate.branch.number not in offer.versions)


def _kernel_flavours(case: CandidateCase) -> list[KernelFlavour]:
    """Return the rows of precompiled modules for the kernel, the most likely first; empty if DKMS builds the
    modules."""
    candidate, kernel = case.candidate, case.question.node.kernel
    if package_set(case, "driver", ("precompiled",)) is None:
        return []
    rows = [
        row
        for row in case.question.catalog.kernel_flavours.values()
        if row.os == candidate.system.os
        and (not row.systems or candidate.system.id in row.systems)
        and candidate.arch in row.arches
        and candidate.flavour in row.modules
    ]
    if kernel is None:
        return rows[:1]
    return _by_meta_package(case) or [row for row in rows if _is_kernel_of(row, candidate.system.id, kernel)]


def _is_kernel_of(row: KernelFlavour, system: str, kernel: str) -> bool:
    """Return whether a kernel's release may be one of a flavour, by its suffix and its series."""
    series = row.kernels.get(system)
    return kernel.endswith(f"-{row.suffix}") and (series is None or kernel.startswith(f"{series}."))


def _by_meta_package(case: CandidateCase) -> list[KernelFlavour]:
    """Return the flavour of the installed meta package with the newest kernel, which upgrades image and modules
    together.

    ``uname -r`` does not identify it: -generic is also the kernel of generic-hwe-24.04, and of virtual, which has no
    modules of its own. Names of a flavour that the catalog does not have are derived; apt is queried for them before
    anything changes.
    """
    node, catalog = case.question.node, case.question.catalog
    suffix = re.fullmatch(r"[0-9.]+-[0-9]+-(.+)", node.kernel or "")
    if suffix is None or case.candidate.system.os != "ubuntu":
        return []
    series = re.compile(rf"{re.escape(suffix[1])}(-(hwe|lts|[0-9]+[.][0-9]+).*)?")
    flavours = [image.removeprefix("linux-image-").replace("virtual", "generic", 1) for image in node.kernel_images]
    generic = catalog.kernel_flavours["generic"]
    fitting = [flavour for flavour in flavours if series.fullmatch(flavour)]
    return [catalog.kernel_flavours.get(flavour) or _derived(generic, flavour) for flavour in fitting[:1]]


def _derived(generic: KernelFlavour, flavour: str) -> KernelFlavour:
    """Return a flavour that the catalog does not have, with names derived from the generic flavour's."""
    names = {kind: f"{template.removesuffix('generic')}{flavour}" for kind, template in generic.modules.items()}
    return generic.model_copy(
        update={
            "id": flavour,
            "image": f"linux-image-{flavour}",
            "headers": f"linux-headers-{flavour}",
            "modules": names,
            "confidence": "derived",
        }
    )


def _kernel_flavour(case: CandidateCase) -> KernelFlavour | None:
    return next(iter(_kernel_flavours(case)), None)


def _assumed(case: CandidateCase) -> Iterator[Warn]:
    """Yield a warning for each assumption about something that was not requested."""
    if case.question.node.os is None:
        text = f"no operating system requested: {case.candidate.system.name} is assumed"
        yield Warn(rule="preference", text=text)
    flavours = _kernel_flavours(case)
    if len(flavours) > 1:
        others = " or ".join(row.image for row in flavours[1:])
        text = f"{case.question.node.kernel} may be the kernel of {others}: {flavours[0].image} is assumed"
        yield Warn(rule="preference", text=text)


def _module(case: CandidateCase, kernel: KernelFlavour | None) -> Module:
    flavour = case.candidate.flavour
    if kernel is None:
        return Module(flavour=flavour, build="dkms")
    modules = kernel.modules[flavour].format(branch=case.candidate.branch.number)
    return Module(
        flavour=flavour,
        build="precompiled",
        kernel_flavour=kernel.id,
        kernel_packages=(kernel.image, kernel.headers, modules),
    )


def _cuda(case: CandidateCase) -> Cuda:
    candidate, catalog = case.candidate, case.question.catalog
    last = min(
        (row.last_cuda for row in (catalog.architectures[gpu.architecture] for gpu in case.models) if row.last_cuda),
        default=None,
    )
    known = {row.series: row for row in catalog.toolkits.values() if last is None or row.major <= last}
    reached = [number(series) for series, row in known.items() if candidate.number >= number(case.question.floor(row))]
    branch_cuda = candidate.branch.native_cuda
    native = [number(series) for series in known if branch_cuda is not None and number(series) <= number(branch_cuda)]
    firsts = [catalog.architectures[gpu.architecture].first_cuda.get(gpu.compute_capability) for gpu in case.models]
    return Cuda(
        wished=case.question.request.cuda,
        native=str(max(native)) if native else None,
        newest=str(max(reached)) if reached else None,
        oldest=str(max(number(first) for first in firsts if first)) if any(firsts) else None,
        support=_support(case),
    )


def _support(case: CandidateCase) -> Any:
    if case.question.cuda is None:
        return None
    if case.candidate.compat is not None:
        return "forward-compat"
    return "native" if is_native(case.question, case.candidate) else "minor-version"


def _restart(case: CandidateCase) -> tuple[str, str]:
    """Return the kind of restart, and its reason."""
    candidate, node = case.candidate, case.question.node
    loaded = node.loaded_version
    if loaded == candidate.version and candidate.installed:
        return "none", f"{loaded} is installed and loaded"
    if loaded is not None:
        new = candidate.version if candidate.installed else f"the module of {version_word(case)}"
        return "reload-module", f"{loaded} is loaded and {new} is to be: exchange it on an idle node, or reboot"
    if node.nouveau:
        return "reboot", "nouveau is bound to the GPUs"
    if node.observed:
        return "load-module", "no NVIDIA module is loaded"
    return "load-module", "of a node without a driver; reboot if nouveau is bound to the GPUs"


def _secure_boot(case: CandidateCase) -> list[Warn]:
    if not case.question.node.secure_boot or _kernel_flavour(case) is not None:
        return []
    text = "secure boot is on and DKMS signs with its own key, which must be enrolled once at the console"
    return [Warn(rule="catalog", text=text)]


def _why_source(case: CandidateCase) -> Reason:
    rule = case.question.source_rule
    words = {
        "wish": "requested",
        "installed": "source of the installed driver packages",
        "preference": "nothing requested and nothing installed: it has all components in matching versions",
    }
    return Reason(rule=rule, text=words[rule])


def _why_driver(case: CandidateCase) -> Reason:
    candidate, driver = case.candidate, case.question.request.driver
    branch = candidate.branch
    kind = {"LTSB": "long-term support", "PB": "production", "NFB": "new feature", None: "of unknown type"}[branch.type]
    release = {
        "wish": "the release is requested",
        "catalog": f"{candidate.version} is its newest known release",
        "repository": "the archive decides the release",
        "installed": f"{candidate.version} is installed",
    }[candidate.decided_by]
    if candidate.decided_by == "wish" and case.question.driver_version is None:
        release = f"{candidate.version} is installed and stays; {branch.number}-latest moves to the newest"
    if candidate.installed:
        return Reason(rule="installed", text=f"{candidate.version} is installed and satisfies every request and rule")
    if driver is None:
        return Reason(rule="preference", text=f"the best branch that every rule allows ({kind}); {release}")
    of_a_range = f"{driver} is requested, and {branch.number} is {kind}"
    named = f"requested: {driver}" if case.question.driver_branch else of_a_range
    return Reason(rule="wish", text=f"{named}; {release}")


def _why_module(case: CandidateCase, kernel: KernelFlavour | None) -> Reason:
    candidate = case.candidate
    build = (
        f"{case.source_name} has modules signed for each kernel"
        if kernel
        else "built by DKMS for every installed kernel that has headers"
    )
    needed = next((gpu for gpu in case.models if gpu.modules == candidate.flavour), None)
    if needed is not None:
        rule = "R06-open-required" if candidate.flavour == "open" else "R07-proprietary-required"
        return Reason(rule=rule, text=f"{needed.name} requires the {candidate.flavour} modules; {build}")
    if case.question.request.kernel_module is not None:
        return Reason(rule="wish", text=f"{candidate.flavour} is requested; {build}")
    if candidate.installed:
        return Reason(rule="installed", text=f"{candidate.flavour} is installed; {build}")
    if len(candidate.branch.modules) == 1:
        text = f"branch {candidate.branch.number} has only {candidate.flavour} modules; {build}"
        return Reason(rule="R08-no-proprietary", text=text)
    text = f"{candidate.flavour} is the default of branch {candidate.branch.number}; {build}"
    return Reason(rule="preference", text=text)


def _why_cuda(case: CandidateCase) -> Reason:
    candidate, row = case.candidate, case.question.cuda
    if row is None:
        return Reason(
            rule="R01-minor-floor", text=f"no CUDA is requested; this is what {candidate.version} and the GPUs allow"
        )
    words = {
        "native": f"branch {candidate.branch.number} carries CUDA {candidate.branch.native_cuda}",
        "minor-version": f"{candidate.version} is above the floor of CUDA {row.major}, {case.question.floor(row)}",
        "forward-compat": f"through {candidate.compat.package if candidate.compat else ''}",
    }
    support = _support(case)
    rule = {"native": "R02-native", "minor-version": "R01-minor-floor", "forward-compat": "R14-compat-matrix"}[support]
    return Reason(rule=rule, text=words[support])


def _why_packages(case: CandidateCase, driver_packages: tuple[PackageChoice, ...]) -> Reason:
    if driver_packages:
        return Reason(
            rule="R15-distro-repo", text=f"names of {case.source_name} for branch {case.candidate.branch.number}"
        )
    text = f"the catalog has no driver package names for {case.source_name}"
    return Reason(rule="R15-distro-repo", text=text)
