"""Checks on the driver's kernel module, its library, and initramfs images with another module than the disk."""

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from gpunode.catalog.origins import upstream_version
from gpunode.checks.actions import State
from gpunode.checks.compare import failed, passed, skipped, undetermined, warned
from gpunode.checks.packages import ROLE, driver_installed
from gpunode.checks.registry import CheckResult, Skip, registry
from gpunode.facts.boot import Initramfs, blocked_by_arguments
from gpunode.facts.kernel_log import KernelEvent
from gpunode.facts.modules import LoadedDriver, ModuleFile
from gpunode.facts.node import NodeFacts
from gpunode.facts.packages import Kernel
from gpunode.text import listed


@dataclass(frozen=True)
class OldImage:
    """An image that is older than the module on disk and has another one."""

    image: Initramfs
    module: ModuleFile
    """The module on disk that modprobe loads."""
    certain: bool
    """False if the image may have the same module: built again, or stripped by dracut."""
    dracut: bool
    """dracut writes the node's images."""

    @property
    def command(self) -> str:
        """Return the command that writes the image again, by the name that its tool gives it."""
        kernel = self.image.kernel
        if not self.image.path.startswith("/boot/initrd.img-"):
            return f"dracut -f --kver {kernel}"
        # Ubuntu has dracut from 25.10 on, and Debian's dracut has no update-initramfs in every release.
        return f"dracut --force {self.image.path} {kernel}" if self.dracut else f"update-initramfs -u -k {kernel}"


def modules_of(node: NodeFacts, release: str) -> list[ModuleFile]:
    """Return the GPU's modules of a kernel, the one that modprobe loads first."""
    modules = [module for module in node.module_files or () if module.kernel == release]
    return sorted(modules, key=lambda module: not module.preferred)


def old_images(node: NodeFacts) -> tuple[OldImage, ...]:
    """Return the images with another GPU module than the disk; one that could not be listed is not among them."""
    loaded = node.loaded_driver.version if node.loaded_driver else None
    dracut = any(package.installed and package.name == "dracut" for package in node.packages or ())
    images = []
    for image in node.initramfs or ():
        modules = modules_of(node, image.kernel)
        sizes = {_name(module.path): module.size for module in modules}
        others = [old for old in image.modules or () if old.size is None or sizes.get(_name(old.path)) != old.size]
        if not modules or not others:
            continue
        # dracut may strip a module: there its size alone does not prove that it is another.
        plain = image.path.startswith("/boot/initrd.img-") and not dracut
        copied = plain and any(sizes.get(_name(old.path)) for old in others)
        upgraded = None not in (loaded, modules[0].version) and loaded != modules[0].version
        images.append(OldImage(image, modules[0], certain=copied or upgraded, dracut=dracut))
    return tuple(images)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


MISMATCH = "driver-library-mismatch"
LOG = "journalctl -k -b | grep -e NVRM -e Xid shows the driver's messages."
SLOW = (
    "Switch persistence on, so that each call need not start the GPUs: role nvidia_driver, tag nvidia_driver_service."
)
PERMISSION = "Run the probe as root (ansible_become: true), and check the mode of /dev/nvidia* and the device cgroups."
UNREACHABLE = {
    "driver-not-loaded": (
        "nvidia-smi cannot reach the loaded driver",
        f"{LOG} ls -l /dev/nvidiactl must show a character device; reload the module or restart the node.",
    ),
    "library-missing": (
        "the driver's library libnvidia-ml cannot be loaded",
        f"Reinstall the driver's user space ({ROLE}), then run ldconfig.",
    ),
    "nvml-unknown": (
        "NVML cannot be initialised",
        f"{LOG} Check /dev/nvidia*; in a container, restart it. Otherwise drain the node and restart it.",
    ),
}
"""Kinds of nvidia-smi's errors if it cannot reach the driver: cause and remedy."""


@registry.check(
    "driver.module-built",
    needs=("kernels", "module_files", "packages", "pci"),
    means="The nvidia module exists for the running kernel, for the newest one (used by the next boot), and "
    "for every other installed kernel that has headers.",
    remedy=f"Build it: {ROLE}, or dkms autoinstall -k KERNEL; /var/lib/dkms/nvidia*/*/build/make.log shows the error.",
    state="observe",
    actions=("run_role:nvidia_driver:nvidia_driver_install",),
)
def module_built(node: NodeFacts) -> Iterator[CheckResult]:
    if not driver_installed(node):
        if node.gpus_on_bus:
            yield failed("no NVIDIA driver is installed", remedy=f"Install it: {ROLE}.")
        else:
            yield skipped("no NVIDIA driver is installed, and no NVIDIA GPU is on the PCI bus")
        return
    on_disk = {module.kernel: module for module in node.module_files or ()}
    matter = [
        kernel for kernel in node.kernels or () if kernel.running or kernel.newest or (kernel.image and kernel.headers)
    ]
    for kernel in sorted(matter, key=lambda kernel: (not kernel.running, not kernel.newest)):
        yield _built_for(kernel, on_disk.get(kernel.release), node)


def _built_for(kernel: Kernel, module: ModuleFile | None, node: NodeFacts) -> CheckResult:
    component = f"kernel {kernel.release}"
    role = _role_of(kernel)
    if module is not None:
        built_for = (module.vermagic or kernel.release).split(" ", 1)[0]
        # The kernels of RHEL share modules: those in weak-updates were built for another release.
        if built_for != kernel.release and "/weak-updates/" not in module.path:
            message = f"{module.path} was built for {built_for}"
            return failed(message, component=component, expected=kernel.release, measured=built_for)
        flavour = f" ({module.flavour})" if module.flavour else ""
        message = f"nvidia {module.version or 'of unknown version'}{flavour} is on disk for {role}"
        return passed(message, component=component, measured=module.version)
    if kernel.running and kernel.package is None:
        return skipped(f"{role} belongs to no installed package: no module is built for it", component=component)
    states = [
        f"{entry.name} {entry.version}: {entry.state}" for entry in node.dkms or () if entry.kernel == kernel.release
    ]
    dkms = f" (dkms: {listed(states)})" if states else ""
    if kernel.headers:
        return failed(
            f"no nvidia module on disk for {role}, though its headers are installed{dkms}", component=component
        )
    return failed(
        f"no nvidia module on disk for {role}, and its headers are not installed{dkms}",
        component=component,
        remedy=f"Install the headers of {kernel.release} and build the module: {ROLE}.",
    )


def _role_of(kernel: Kernel) -> str:
    if kernel.running:
        return "the running kernel"
    return "the newest kernel" if kernel.newest else "an installed kernel"


@registry.check(
    "driver.module-loaded",
    needs=("modules", "loaded_driver"),
    needs_gpu=True,
    means="The nvidia module is in memory.",
    remedy="Reboot, or load it with modprobe nvidia; dmesg shows why it does not load.",
    state="drain",
    actions=("reload_driver", "run_role:nvidia_driver:nvidia_driver_install", "restart_os"),
)
def module_loaded(node: NodeFacts) -> Iterator[CheckResult]:
    loaded = node.loaded_driver
    if loaded is None:
        yield _not_loaded(node)
    else:
        flavour = f" ({loaded.flavour})" if loaded.flavour else ""
        yield passed(f"nvidia {loaded.version}{flavour} is loaded", measured=loaded.version)


def _not_loaded(node: NodeFacts) -> CheckResult:
    on_disk = next((module for module in node.module_files or () if module.kernel == node.running_kernel), None)
    others = sorted(
        {device.driver for device in node.gpus_on_bus or () if device.driver not in (None, "nvidia")} - {None}
    )
    if "nouveau" in (node.modules or ()):
        return failed(
            "no NVIDIA module is loaded: nouveau is bound to the GPU",
            remedy=f"Blacklist nouveau ({ROLE}) and reboot.",
        )
    rejected = next((event for event in _log(node) if event.kind == "module-rejected"), None)
    blocked = [f"{block.place} ({block.text})" for block in node.module_blocks or ()]
    blocked += [f"{text} on the kernel's command line" for text in blocked_by_arguments(node.command_line or "")]
    if blocked:
        return failed(
            f"no NVIDIA module is loaded: it is blacklisted: {listed(blocked)}",
            remedy="Remove these settings, rebuild the initramfs (update-initramfs -u -k all, dracut -f "
            "--regenerate-all), and reboot.",
            actions=("fix_configuration", "restart_os"),
        )
    if rejected is not None and on_disk is not None:
        return failed(
            f"no NVIDIA module is loaded: the kernel logs '{rejected.message}': the firmware has not enrolled the key "
            "that signed the module, or it is not signed",
            remedy=f"modinfo -F signer {on_disk.path} names the key, mokutil --list-enrolled those of the firmware; "
            "nvidia_driver_mok_hash stages it for the console of the next boot.",
        )
    if others:
        return failed(
            f"no NVIDIA module is loaded: the GPU is bound to {listed([str(name) for name in others])}",
            remedy="Unbind the GPU from that driver, or validate the machine that it was passed to.",
        )
    if on_disk is None and node.module_files is not None:
        return failed(
            "no NVIDIA module is loaded, and none is on disk for the running kernel",
            remedy=f"Install and build it ({ROLE}); if the newest kernel has one, reboot into it.",
        )
    if node.secure_boot and on_disk is not None and not on_disk.signed:
        return failed(
            "no NVIDIA module is loaded: secure boot is on, and the module on disk is not signed",
            remedy="Sign the module with a key enrolled in the firmware (mokutil), or disable secure boot.",
        )
    if node.secure_boot and on_disk is not None:
        return failed(
            "no NVIDIA module is loaded, though one is on disk: secure boot is on, and its key may not be enrolled",
            remedy="mokutil --list-new shows whether the key waits for a person at the console of the next boot; "
            "nvidia_driver_mok_hash stages it.",
        )
    return failed("no NVIDIA module is loaded, though one is on disk for the running kernel")


def loaded_driver(node: NodeFacts) -> LoadedDriver:
    """Return the driver in memory; raise Skip without one."""
    if node.loaded_driver is None:
        raise Skip("no NVIDIA module is loaded (driver.module-loaded reports the cause)")
    return node.loaded_driver


def _log(node: NodeFacts) -> tuple[KernelEvent, ...]:
    return node.kernel_log.events if node.kernel_log is not None else ()


@registry.check(
    "driver.library-matches-module",
    needs=("loaded_driver", "driver_library_version"),
    means="The module in memory and the library on disk (libnvidia-ml) have one version. After an upgrade without a "
    'reboot they have not, and every NVIDIA tool answers "Driver/library version mismatch".',
    remedy="Reboot, or with idle GPUs unload the old module (modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia) "
    "and load the new one.",
    state="drain",
    actions=("reload_driver", "restart_os"),
)
def library_matches_module(node: NodeFacts) -> Iterator[CheckResult]:
    if node.loaded_driver is None:
        raise Skip("no NVIDIA module is loaded")
    module, library = node.loaded_driver.version, node.driver_library_version
    tool_says_so = node.smi is not None and node.smi.error_kind == MISMATCH
    steps = [old.command for old in old_images(node) if old.image.kernel == node.running_kernel]
    remedy = f"Before a reboot, which would load the old module again: {steps[0]}; then reboot." if steps else None
    if library is not None and not same_version(module, library):
        message = f"driver/library version mismatch: the module in memory is {module}, the library {library}"
        if steps:
            message += "; the initramfs has an older module than the disk (node.next-boot)"
        yield failed(message, expected=module, measured=library, remedy=remedy)
    elif tool_says_so and node.smi is not None:
        used = node.smi.error_nvml_version
        other = "another version" if used is None or _same_release(used, module) else used
        message = f"driver/library version mismatch: the module in memory is {module}, nvidia-smi loads {other}"
        if library is not None:
            message += f", though the linker's cache has {library} (driver.libraries lists the copies)"
        yield failed(message, expected=module, measured=used, remedy=remedy)
    elif library is None:
        yield skipped("no NVIDIA driver library is installed")
    else:
        yield passed(f"module and library are {module}", expected=module, measured=library)


def _same_release(short: str, version: str) -> bool:
    """Return True if a version that nvidia-smi may truncate (``580.95``) is that of a driver (``580.95.05``)."""
    return f"{version}.".startswith(f"{short}.")


def same_version(version: str, other: str) -> bool:
    """Return True for equal versions, without epochs and distribution revisions; as text if either is not a version."""
    version, other = upstream_version(version), upstream_version(other)
    try:
        return Version(version) == Version(other)
    except InvalidVersion:
        return version == other


@registry.check(
    "driver.nouveau",
    needs=("modules", "nouveau_blacklisted", "packages"),
    partial=True,
    means="nouveau, the kernel's own driver for NVIDIA GPUs, is not loaded, and cannot bind to a GPU on the next boot.",
    remedy=f"Blacklist nouveau: {ROLE}.",
    state="drain",
    actions=("run_role:nvidia_driver:nvidia_driver_install", "restart_os"),
)
def nouveau(node: NodeFacts) -> Iterator[CheckResult]:
    if "nouveau" in (node.modules or ()):
        where = "instead of" if node.loaded_driver is None else "in addition to"
        yield failed(f"nouveau is loaded {where} NVIDIA's module", remedy=f"Blacklist nouveau ({ROLE}) and reboot.")
    elif not driver_installed(node):
        yield skipped("no NVIDIA driver is installed, and nouveau is not loaded")
    elif node.kernels is not None and not any(kernel.image for kernel in node.kernels):
        yield skipped("no kernel is installed here, so no nouveau: the node is started from outside")
    elif not node.nouveau_blacklisted:
        yield warned("nouveau is not loaded, but not blacklisted: it may bind to the GPU on the next boot")
    else:
        yield passed("nouveau is blacklisted and not loaded")


@registry.check(
    "driver.tools-answer",
    needs=("loaded_driver", "tool_runs"),
    needs_gpu=True,
    means="NVIDIA's tools reach the loaded driver: none hangs, crashes, or reports that there is no driver or library. "
    "After one that hangs, no other is started. Checks that need their output are skipped and refer to this one.",
    remedy=f"{LOG} Drain the node and restart it.",
    state="drain",
    actions=("restart_os",),
)
def tools_answer(node: NodeFacts) -> Iterator[CheckResult]:
    runs = node.tool_runs or ()
    broken = [run for run in runs if run.ended in ("timeout", "signal")]
    left_out = [run.failure or run.command for run in runs if run.ended in ("not-run", "slow")]
    if node.loaded_driver is None:
        yield skipped("no NVIDIA module is loaded: its tools were not run")
    elif broken:
        crashed = all(run.ended == "signal" for run in broken)
        yield failed(
            listed([run.failure or run.command for run in broken]),
            expected=0,
            measured=len(broken),
            unit="tools",
            remedy=f"{LOG} Reinstall the driver's user space ({ROLE}) if it is empty." if crashed else None,
        )
    elif left_out:
        # Without nvidia-smi's answer the health of the GPUs is unknown: no job should run on them.
        blind = any(run.answers == "smi" and run.ended in ("not-run", "slow") for run in runs)
        yield undetermined(listed(left_out), remedy=SLOW, state=State.DRAIN if blind else None)
    else:
        yield _reached(node)


def _reached(node: NodeFacts) -> CheckResult:
    """Return the result for the answer of nvidia-smi -q -x, on which all others depend."""
    smi, gap = node.smi, node.gap("smi")
    if gap is not None:
        return undetermined(gap, remedy="Run nvidia-smi -q -x on the node and compare what it prints.")
    if smi is None:
        message = "the NVIDIA module is loaded and nvidia-smi is not installed"
        return undetermined(message, remedy=f"Install it: {ROLE}.")
    if smi.error_kind in UNREACHABLE:
        cause, mend = UNREACHABLE[smi.error_kind]
        return failed(f"{cause}: {smi.error_message}", remedy=mend)
    if smi.error_kind == MISMATCH:
        return skipped("nvidia-smi cannot answer (driver.library-matches-module reports the cause)")
    if smi.error_kind in ("gpu-lost", "no-devices"):
        check = "gpu.answers" if smi.error_kind == "gpu-lost" else "gpu.count"
        return skipped(f"nvidia-smi reaches the driver and no GPU ({check} reports the cause)")
    if smi.document is None:
        remedy = PERMISSION if smi.error_kind == "permission" else None
        return undetermined(f"nvidia-smi has no answer: {smi.error_message}", remedy=remedy)
    return passed("NVIDIA's tools answer", expected=0, measured=0, unit="tools")
