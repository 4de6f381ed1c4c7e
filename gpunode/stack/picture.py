"""The facts of a machine for the resolver and the roles: its NodePicture, and the installed packages of its driver."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from gpunode.catalog import Catalog
from gpunode.catalog.hardware import Arch, Flavour
from gpunode.catalog.origins import brings_kernel_module, closure_line, is_companion, origin_of, upstream_version
from gpunode.facts import NodeFacts
from gpunode.facts.packages import Kernel, Package
from gpunode.stack.model import GpuGroup, Installed, InstalledPackage, NodePicture, Stack
from gpunode.stack.naming import alternatives, is_for
from gpunode.stack.plan import PlanHost

KERNEL_IMAGE = re.compile(r"linux-image-(?!unsigned-)[a-z][a-z0-9.+-]*")
ARCHES: dict[str, Arch] = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
TOGETHER = ("driver", "fabric-manager", "nscq", "nvsdm", "imex")
"""Components that are upgraded with the driver in one transaction; components with versions of their own are not."""


def picture_from_facts(facts: NodeFacts, catalog: Catalog) -> NodePicture:
    """Return the picture of a node. Unknown facts, and facts that the catalog does not have, are in ``notes``."""
    groups, unknown = _gpus(facts, catalog)
    system = facts.os and catalog.os_of(facts.os.id, facts.os.version_id)
    loaded = facts.loaded_driver
    return NodePicture(
        os=system.id if system else None,
        arch=ARCHES.get(facts.architecture or ""),
        kernel=_kernel(facts.kernels),
        kernel_images=_kernel_images(facts.packages),
        gpus=groups,
        unknown_gpus=unknown,
        nvswitch=_nvswitch(facts, catalog),
        secure_boot=facts.secure_boot,
        nouveau=None if facts.modules is None else "nouveau" in facts.modules,
        loaded_version=loaded.version if loaded else None,
        installed=_installed(facts),
        observed=True,
        notes=tuple(_notes(facts)),
    )


def undetermined(facts: NodeFacts, picture: NodePicture) -> str | None:
    """Return why no stack can be selected for this node, in one line; None if one can."""
    for field in ("os", "packages", "pci"):
        reason = facts.gap(field)
        if reason is not None:
            return f"{field} could not be determined: {reason}"
    if picture.unknown_gpus:
        return _unknown_gpus(picture.unknown_gpus)
    if picture.os is None:
        name = facts.os and (facts.os.pretty_name or f"{facts.os.id} {facts.os.version_id}")
        return f"unknown operating system {name}"
    if picture.arch is None:
        return f"unknown architecture {facts.architecture}"
    return None


def _unknown_gpus(ids: tuple[str, ...]) -> str:
    """Return the reason, with the overlay that would add the GPUs."""
    rows = ", ".join(
        f"gpu-{pci[-4:]}: {{name: NAME, pci: ['{pci}'], architecture: ARCHITECTURE, compute_capability: X.Y, "
        "min_driver: RELEASE, date: YYYY-MM-DD}"
        for pci in ids
    )
    return f"unknown GPU {', '.join(ids)}; add it in a file for --overlay: gpus: {{{rows}}}"


def _notes(facts: NodeFacts) -> Iterator[str]:
    if facts.pci is not None and not facts.gpus_on_bus:
        yield "no NVIDIA GPU is on the PCI bus"


def _gpus(facts: NodeFacts, catalog: Catalog) -> tuple[tuple[GpuGroup, ...], tuple[str, ...]]:
    """Return GPUs grouped by kind, and the PCI ids of those that the catalog does not have."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    unknown: set[str] = set()
    for device in facts.gpus_on_bus or ():
        match = catalog.gpu_by_pci(device.pci_id, device.subsystem_id)
        if match is None:
            unknown.add(device.pci_id)
        else:
            names = tuple(gpu.id for gpu in match.gpus)
            counts[match.gpu.name if match.gpu else " or ".join(gpu.name for gpu in match.gpus), names] += 1
    groups = tuple(GpuGroup(label=label, models=models, count=n) for (label, models), n in sorted(counts.items()))
    return groups, tuple(sorted(unknown))


def _nvswitch(facts: NodeFacts, catalog: Catalog) -> bool | None:
    if facts.pci is None:
        return None
    switches = {pci for pci, part in catalog.pci_parts.items() if part.role == "nvswitch"}
    return any(device.pci_id in switches for device in facts.pci)


def _kernel(kernels: Iterable[Kernel] | None) -> str | None:
    """Return the running kernel if a package owns it, else the newest installed one (a container runs its host's)."""
    packaged = [kernel for kernel in kernels or () if kernel.package]
    chosen = [kernel for kernel in packaged if kernel.running] or [kernel for kernel in packaged if kernel.newest]
    return chosen[0].release if chosen else None


def _kernel_images(packages: Iterable[Package] | None) -> tuple[str, ...]:
    """Return meta packages of kernel images; their versions begin with the releases of their kernels."""
    images = [package for package in packages or () if package.installed and KERNEL_IMAGE.fullmatch(package.name)]
    ordered = sorted(images, key=lambda package: [int(part) for part in re.findall(r"[0-9]+", package.version)])
    return tuple(package.name for package in reversed(ordered))


def _installed(facts: NodeFacts) -> Installed | None:
    if facts.packages is None:
        return None
    packages = [package for package in facts.packages if package.installed]
    held = tuple(_package(package) for package in packages)
    if all(is_companion(row.name) for row in held if row.closure is not None):
        held = tuple(row.model_copy(update={"closure": None}) for row in held)
    versions = {
        upstream_version(package.version)
        for package, row in zip(packages, held, strict=True)
        if row.closure is not None and brings_kernel_module(package.name)
    } or {upstream_version(row.version) for row in held if row.closure is not None}
    return Installed(
        version=versions.pop() if len(versions) == 1 else None,
        flavour=_flavour(facts, packages),
        packages=tuple(sorted(held, key=lambda row: row.name)),
        runfile=next(
            (install.path for install in facts.foreign_installs or () if install.kind == "driver-runfile"), None
        ),
    )


def _package(package: Package) -> InstalledPackage:
    origin = package.published or origin_of(package.name, package.version, package.maintainer)
    line = closure_line(package.name, package.source, origin)
    return InstalledPackage(name=package.name, version=package.version, origin=origin, closure=line)


def _flavour(facts: NodeFacts, packages: Iterable[Package]) -> Flavour | None:
    """Return the flavour of the module on disk, else of its package, else of the loaded module."""
    seen = {module.flavour for module in facts.module_files or ()}
    if not seen - {None}:
        names = [package.name for package in packages if brings_kernel_module(package.name)]
        seen = {"open" if "open" in name.split("-") else "proprietary" for name in names}
    if not seen - {None} and facts.loaded_driver is not None:
        seen = {facts.loaded_driver.flavour}
    known: tuple[Flavour, ...] = ("open", "proprietary")
    return next((flavour for flavour in known if seen == {flavour}), None)


def host_of(name: str, facts: NodeFacts, catalog: Catalog, lock: Any = None) -> PlanHost:
    """Return one node of a plan by its facts."""
    picture = picture_from_facts(facts, catalog)
    reason = undetermined(facts, picture)
    return PlanHost(name, None if reason else picture, reason, lock)


def driver_names(stack: Stack, catalog: Catalog, variant: str) -> tuple[tuple[str, ...], ...]:
    """Return the driver's packages in a ``variant`` of the catalog (``full``); empty if the source has none.

    Each is its name, followed by the alternatives if the repository does not have it.
    """
    branch, system = stack.driver.branch, catalog.os(stack.os)
    for row in catalog.packages.values():
        fits = (
            row.component == "driver"
            and row.origin == stack.source
            and row.variant == variant
            and row.flavour in (None, stack.module.flavour)
            and is_for(row, system, branch)
        )
        if fits:
            names = (name.format(branch=branch, version=stack.driver.constraint) for name in row.names)
            return tuple(alternatives(name) for name in names)
    return ()


def installed_closure(node: NodeFacts, catalog: Catalog) -> dict[str, InstalledPackage]:
    """Return every installed package of a driver closure, of any publisher, by name."""
    installed = picture_from_facts(node, catalog).installed
    return {package.name: package for package in installed.closure} if installed else {}


def releases_from(source: str, installed: dict[str, InstalledPackage]) -> dict[str, str]:
    """Return name and release of the packages that came from ``source``."""
    return {name: upstream_version(row.version) for name, row in installed.items() if row.origin == source}
