"""Whether the next boot brings the node back with its driver: kernel, module, initramfs, other modules, settings."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.checks.compare import passed, skipped
from gpunode.checks.driver import modules_of, old_images, same_version
from gpunode.checks.machine import is_container
from gpunode.checks.packages import ROLE, driver_installed
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.facts.boot import blocked_by_arguments
from gpunode.facts.modules import ModuleFile
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

BUILT = "driver.module-built"
OTHERS = {
    "mlnx-ofed-kernel": ("mlx5_core", "ib_core"),
    "gdrdrv": ("gdrdrv",),
    "nvidia-fs": ("nvidia_fs",),
    "lustre-client-modules": ("lustre",),
    "zfs": ("zfs",),
}
"""Modules of DKMS and what of them is loaded where they are in use; of others the name itself."""


@dataclass(frozen=True)
class BootFault:
    """One reason why a kernel would start without a working driver."""

    reason: str
    remedy: str
    certain: bool = True
    role: bool = False
    """True if the role nvidia_driver repairs it."""
    reported_by: str | None = None
    """The check that reports it."""


@registry.check(
    "node.next-boot",
    needs=("kernels", "module_files", "packages", "modules", "dkms", "initramfs", "module_blocks"),
    partial=True,
    means="The kernel that the boot loader starts next has a working driver: it is installed, has one nvidia module, "
    "of the version of the library, in its initramfs too; other modules of DKMS that are in use (OFED, gdrdrv, "
    "nvidia-fs, Lustre, ZFS) are built for it; no setting keeps nvidia from loading. An unknown boot loader may start "
    "any installed kernel.",
    remedy=f"Repair it before the node is rebooted: {ROLE}.",
    state="observe",
    actions=("run_role:nvidia_driver:nvidia_driver_install", "fix_configuration"),
)
def next_boot(node: NodeFacts) -> Iterator[CheckResult]:
    if is_container(node):
        raise Skip("in a container the kernel is the host's")
    if not driver_installed(node):
        raise Skip("no NVIDIA driver is installed")
    kernels = startable(node)
    if not kernels:
        raise Skip("no kernel image is installed: the node is started from outside")
    chosen = node.next_boot
    by_kernel = {kernel: list(boot_faults(node, kernel)) for kernel in kernels}
    faults = {kernel: [fault for fault in of if fault.reported_by is None] for kernel, of in by_kernel.items()}
    bad = [kernel for kernel, of in faults.items() if of]
    if bad:
        yield _bad(node, bad, faults)
        return
    unlisted = [image for image in node.initramfs or () if image.kernel in kernels and image.reason]
    if unlisted and not any(by_kernel.values()):
        message = f"{unlisted[0].path} is older than the module on disk: {unlisted[0].reason}"
        raise Skip(message) if (unlisted[0].reason or "").startswith("not listed") else Undetermined(message)
    others = sorted({fault.reported_by for of in by_kernel.values() for fault in of if fault.reported_by})
    choice = (
        f"kernel {chosen.kernel} ({chosen.loader}: {chosen.entry}; {chosen.setting})" if chosen else _unknown(kernels)
    )
    if others:
        yield skipped(f"{listed(others)} reports what is wrong with {choice}")
        return
    (version,) = {module.version for module in modules_of(node, kernels[0])[:1]} or {None}
    yield passed(f"the next boot starts {choice} with driver {version}", measured=chosen.kernel if chosen else None)


def _unknown(kernels: list[str]) -> str:
    return f"any of {listed(kernels)}" if len(kernels) > 1 else f"kernel {kernels[0]}"


def _bad(node: NodeFacts, bad: list[str], faults: dict[str, list[BootFault]]) -> CheckResult:
    """Return the finding with all reasons; it warns where none is certain, or another kernel may start."""
    reasons = list(dict.fromkeys(fault.reason for kernel in bad for fault in faults[kernel]))
    remedies = list(dict.fromkeys(fault.remedy for kernel in bad for fault in faults[kernel]))
    certain = len(bad) == len(faults) and any(fault.certain for kernel in bad for fault in faults[kernel])
    chosen = node.next_boot
    starts = f"the next boot starts kernel {chosen.kernel} ({chosen.setting})" if chosen else "the next boot"
    role = any(fault.role for kernel in bad for fault in faults[kernel])
    return CheckResult(
        Status.FAIL if certain else Status.WARN,
        f"{starts}: {'; '.join(reasons)}",
        expected=0,
        measured=len(reasons),
        unit="reasons",
        remedy=f"Before a reboot: {'; '.join(remedies)}.",
        actions=None if role else ("fix_configuration",),
    )


def startable(node: NodeFacts) -> list[str]:
    """Return the release that the boot loader starts; where that is unknown, those of all kernels with an image."""
    if node.next_boot is not None:
        return [node.next_boot.kernel]
    return [kernel.release for kernel in node.kernels or () if kernel.image]


def boot_faults(node: NodeFacts, release: str) -> Iterator[BootFault]:
    """Yield what would be wrong with the driver after a boot of that kernel. Unknown facts are no fault."""
    kernel = next((kernel for kernel in node.kernels or () if kernel.release == release), None)
    if node.kernels is not None and (kernel is None or not kernel.image):
        yield BootFault(
            f"kernel {release} is not installed, the boot loader names it",
            "choose an installed kernel (grub-set-default, grubby --set-default, bootctl set-default)",
        )
        return
    modules = modules_of(node, release)
    if modules:
        yield from _of_modules(node, release, modules)
    elif node.module_files is not None:
        yield BootFault(f"no nvidia module is on disk for kernel {release}", "build it", role=True, reported_by=BUILT)
    yield from _of_other_modules(node, release)
    yield from _of_settings(node)


def _of_modules(node: NodeFacts, release: str, modules: list[ModuleFile]) -> Iterator[BootFault]:
    library, used = node.driver_library_version, modules[0]
    if len(modules) > 1:
        yield _several(modules)
    if library is not None and used.version is not None and not same_version(used.version, library):
        row = next(
            (row for row in node.dkms or () if row.name.startswith("nvidia") and same_version(row.version, library)),
            None,
        )
        build = f"dkms install --force -m {row.name} -v {row.version} -k {release}" if row else f"run {ROLE}"
        message = f"its nvidia module ({used.path}) is {used.version}, the library is {library}"
        yield BootFault(message, build, role=True)
    for old in old_images(node):
        if old.image.kernel == release:
            message = f"{old.image.path} has another nvidia module than {old.module.path}, and the boot loads that"
            yield BootFault(message, old.command, certain=old.certain, role=True)


def _several(modules: list[ModuleFile]) -> BootFault:
    used, others = modules[0], modules[1:]
    chosen = f"; modprobe loads {used.path}" if used.preferred else ""
    paths = listed([f"{module.path} ({module.version or 'unknown version'})" for module in modules])
    path = others[0].path
    same = all(module.version == used.version for module in others)
    return BootFault(
        f"{len(modules)} nvidia modules for kernel {used.kernel}: {paths}{chosen}",
        f"remove {path} (dpkg -S {path} or rpm -qf {path} names its package; nvidia-uninstall removes that of a .run "
        f"installer), then depmod -a {used.kernel}",
        certain=not same or not used.preferred,
    )


def _of_other_modules(node: NodeFacts, release: str) -> Iterator[BootFault]:
    """Yield the modules of DKMS that the running kernel has in use and this one lacks."""
    running = node.running_kernel
    if running is None or running == release:
        return
    rows = [row for row in node.dkms or () if not row.name.startswith("nvidia") or row.name in OTHERS]
    built = {row.name for row in rows if row.kernel == release and row.state.startswith("installed")}
    current = {row.name for row in rows if row.kernel == running and row.state.startswith("installed")}
    loaded = set(node.modules or ())
    lacking = sorted(
        name for name in current - built if loaded & {*OTHERS.get(name, ()), name.replace("-", "_"), name.split("-")[0]}
    )
    if lacking:
        yield BootFault(
            f"{listed(lacking)} is in use and not built for kernel {release}",
            f"dkms autoinstall -k {release}, with the kernel's headers installed",
        )


def _of_settings(node: NodeFacts) -> Iterator[BootFault]:
    """Yield what keeps the driver's modules from loading."""
    for block in node.module_blocks or ():
        yield BootFault(
            f"{block.place} ({block.text}) keeps {block.module} from loading",
            f"remove the line {block.place}",
            certain=block.always or not _loaded_by_name(node),
        )
    arguments = node.next_boot.arguments if node.next_boot is not None else node.command_line
    for text, always in blocked_by_arguments(arguments or "").items():
        yield BootFault(
            f"the kernel's argument {text} keeps nvidia from loading",
            f"remove {text} from the kernel's arguments (/etc/default/grub and update-grub, or grubby "
            f"--update-kernel=ALL --remove-args={text})",
            certain=always or not _loaded_by_name(node),
        )


def _loaded_by_name(node: NodeFacts) -> bool:
    """Return True if the persistence daemon starts with the node, or may: it loads the module by its name, past a
    blacklist."""
    return node.units is None or any(
        unit.name == "nvidia-persistenced.service" and unit.enabled == "enabled" for unit in node.units
    )


def why_not_to_boot(node: NodeFacts) -> str | None:
    """Return why the next boot would start without a working driver; None if it would not, or this is unknown."""
    kernels = startable(node)
    by_kernel = {
        kernel: [fault for fault in boot_faults(node, kernel) if fault.certain and fault.reported_by is None]
        for kernel in kernels
    }
    if not by_kernel or not all(by_kernel.values()):
        return None
    faults = list(dict.fromkeys(fault for of in by_kernel.values() for fault in of))
    return "; ".join(f"{fault.reason}: {fault.remedy}" for fault in faults)
