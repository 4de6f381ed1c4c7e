"""The kernel modules of the driver, with any package manager: built, signed, loaded, and due changes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpunode.checks.boot_images import old_images as images_with_other_module
from gpunode.facts import NodeFacts
from gpunode.facts.node import Kernel
from gpunode.provisioning import driver_files as files
from gpunode.provisioning.context import Context
from gpunode.provisioning.driver_input import DriverInput
from gpunode.provisioning.manifest import UnitState
from gpunode.provisioning.state import ModuleKey, NodeState

DAEMON = "nvidia-persistenced.service"
IMAGES = ("/boot/initrd.img-*", "/boot/initramfs-*.img")
"""Initramfs images, as Debian and Ubuntu name them with every tool, and as RHEL does."""


def foreign_modules(state: NodeState) -> list[str]:
    """Return the modules other than NVIDIA's that DKMS builds with the kernel headers of the node."""
    if state.facts.dkms is None:
        return ["modules that could not be determined"] if "dkms" in state.installed else []
    return sorted({module.name for module in state.facts.dkms if not module.name.startswith("nvidia")})


def headers_note(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the note that kernel headers stay; none without a module that needs them."""
    names = ", ".join(modules)
    return (f"the kernel headers stay: DKMS also builds {names}",) if names else ()


def module_state(case: DriverInput, wanting: Sequence[Kernel], by_flavour: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of kernels, their modules, and the loaded module.

    ``wanting`` are the kernels that need a module, ``by_flavour`` the names that DKMS will use for the modules of each
    flavour.
    """
    target = case.target
    built = {file.kernel for file in case.node.module_files or () if file.version == target}
    built_by = sorted({row.name for row in case.node.dkms or () if row.version == target and "nvidia" in row.name})
    important = [kernel for kernel in case.kernels if kernel.newest or kernel.running]
    running = case.node.running_kernel
    loaded = case.node.loaded_driver.version if case.node.loaded_driver else ""
    gpus = bool(case.node.gpus_on_bus)
    nouveau = "nouveau" in (case.node.modules or ())
    return {
        "precompiled": case.precompiled,
        "dkms": built_by[0] if built_by else by_flavour.get(case.stack.module.flavour, "nvidia"),
        "kernels_without_module": [kernel.release for kernel in wanting if kernel.release not in built],
        "kernels_without_headers": []
        if case.precompiled
        else sorted({kernel.release for kernel in important if not kernel.headers}),
        "images": [kernel.release for kernel in case.kernels if kernel.image],
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


def _reboot_reasons(case: DriverInput, nouveau: bool, loaded: str) -> Iterator[str]:
    if nouveau:
        yield "nouveau is loaded and keeps NVIDIA's module off the GPU"
    if loaded and case.target and loaded != case.target:
        idle = "" if _used(case.node) else " (no process uses a GPU, so nvidia_driver_reload: true would exchange it)"
        yield f"module {loaded} is loaded, {case.target} is installed{idle}"


def _used(node: NodeFacts) -> bool:
    """Return whether a process computes on a GPU; True if that could not be determined."""
    return node.gpu_processes is None or any(process.computes for process in node.gpu_processes)


def module_builds(draft: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the due builds: kernel and the command."""
    if draft["precompiled"] or not draft["target"]:
        return []
    head = ["dkms", "install", "--force", "-m", draft["dkms"], "-v", draft["target"], "-k"]
    return [{"kernel": kernel, "argv": [*head, kernel]} for kernel in draft["kernels_without_module"]]


def module_problems(draft: Mapping[str, Any]) -> list[str]:
    """Return why the newest or the running kernel has no module after the builds."""
    lacking = [*draft["kernels_without_module"], *draft["kernels_without_headers"]]
    if not lacking:
        return []
    bare = draft["kernels_without_headers"]
    why = f" (no headers for {', '.join(bare)})" if bare else ""
    return [f"no module {draft['target']} for {', '.join(lacking)}{why}"]


def module_reasons(draft: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the modules are due; ``after``: ``builds``, ``stage_key``, ``load`` and ``exchange``."""
    yield from (f"kernel {build['kernel']} has no module {draft['target']}" for build in after["builds"])
    if after["stage_key"]:
        yield "the key that signs the modules is not staged"
    if after["load"]:
        yield f"module {draft['target']} is not loaded"
    for image in after["images"]:
        why = "has another nvidia module than the disk" if image.get("module") else f"is older than {files.NOUVEAU}"
        yield f"{image['path']} {why}"
    if after["exchange"]:
        yield f"module {draft['loaded']} is loaded, {draft['target']} is installed"


def daemon_units(draft: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[UnitState]:
    """Yield the persistence daemon if it is installed; it runs if a module is loaded."""
    if draft["daemon"]:
        on = bool(settings["persistence"])
        yield UnitState(name=DAEMON, enabled=on, state=None if not draft["running"] else "started" if on else "stopped")


def image_command(state: NodeState, kernel: str) -> dict[str, Any] | None:
    """Return image and command (``path``, ``argv``) that rebuild a kernel's initramfs; None without a known tool.

    Ubuntu has dracut from 25.10 on, Debian on request: there it is called as in /etc/kernel/postinst.d/dracut.
    """
    path = f"/boot/initrd.img-{kernel}" if state.apt is not None else f"/boot/initramfs-{kernel}.img"
    if "initramfs-tools" in state.installed:
        return {"path": path, "argv": ["update-initramfs", "-u", "-k", kernel]}
    if "dracut" in state.installed:
        return {"path": path, "argv": ["dracut", "--quiet", "--force", path, kernel]}
    return None


def _images(state: NodeState, kernels: Iterable[str]) -> Iterator[tuple[dict[str, Any], float | None]]:
    """Yield the command and the time of each image that exists."""
    for kernel in kernels:
        command = image_command(state, kernel)
        image = state.files.get(command["path"]) if command is not None else None
        if command is not None and image is not None and image.kind == "file":
            yield command, image.mtime


def old_images(state: NodeState, draft: Mapping[str, Any], context: Context) -> list[dict[str, Any]]:
    """Return the images that are older than the file that disables nouveau in them, or that hold another GPU module
    than the disk, each with its command."""
    other_module = {old.image.path for old in images_with_other_module(state.facts)}
    blacklist = state.files.get(files.NOUVEAU)
    since = blacklist.mtime if blacklist is not None and blacklist.kind == "file" else None
    return [
        {**command, "module": True} if command["path"] in other_module else command
        for command, time in _images(state, draft["images"])
        if command["path"] in other_module
        or time is None
        or (time <= since if since is not None else not context.check)
    ]


def refreshed_images(state: NodeState) -> list[dict[str, Any]]:
    """Return the images to rebuild once the file that disables nouveau is removed, each with its command."""
    blacklist = state.files.get(files.NOUVEAU)
    if blacklist is None or blacklist.kind == "absent":
        return []
    kernels = [kernel.release for kernel in state.facts.kernels or () if kernel.package and kernel.image]
    return [command for command, _ in _images(state, kernels)]


class SigningKey:
    """The key that signs modules built by DKMS: with secure boot, they load only after the firmware has enrolled it."""

    def __init__(
        self, facts: NodeFacts, key: ModuleKey | None, draft: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self.key = key
        self.signs = bool(facts.secure_boot) and not draft["precompiled"]
        self.given = bool(settings["mok_hash"])

    @property
    def staged(self) -> bool:
        return self.key is not None and (self.key.enrolled is True or self.key.waits)

    @property
    def waits(self) -> bool:
        """Return whether enrolment at the console is pending: until then no module is loaded or exchanged."""
        return self.signs and not (self.key is not None and self.key.enrolled)

    @property
    def to_stage(self) -> bool:
        return self.signs and self.given and not self.staged

    @property
    def fresh(self) -> bool:
        """Return whether it was staged since the last boot: only the next boot shows the console dialog, so a reboot is
        due once.
        """
        return self.key is not None and self.key.fresh

    @property
    def reason(self) -> str:
        if self.given or self.staged:
            return "the key that signs the modules must be confirmed at the console (MOK manager)"
        return "the key that signs the modules is not known to be enrolled: nvidia_driver_mok_hash stages it"

    @property
    def path(self) -> str | None:
        """Return the path of the key."""
        return self.key.path if self.key else None

    @property
    def notes(self) -> tuple[str, ...]:
        return (self.reason,) if self.waits else ()

    @property
    def reboot_reasons(self) -> tuple[str, ...]:
        return (self.reason,) if self.waits and self.fresh else ()
