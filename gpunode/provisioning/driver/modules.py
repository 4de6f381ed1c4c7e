"""Around the driver's kernel modules: the key that signs them, the initramfs, modules of others that DKMS builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpunode.checks.driver import old_images as images_with_other_module
from gpunode.frozen import Frozen
from gpunode.provisioning.driver import files
from gpunode.provisioning.driver.model import DriverPlan
from gpunode.provisioning.state import ModuleKey, NodeState

IMAGES = ("/boot/initrd.img-*", "/boot/initramfs-*.img")
"""Initramfs images, as Debian and Ubuntu name them with every tool, and as RHEL does."""


class BootImage(Frozen):
    """An initramfs image to rebuild."""

    path: str
    argv: tuple[str, ...]
    reason: str = ""


def foreign_modules(state: NodeState) -> list[str]:
    """Return the modules other than NVIDIA's that DKMS builds with the kernel headers of the node."""
    if state.facts.dkms is None:
        return ["modules that could not be determined"] if "dkms" in state.installed else []
    return sorted({module.name for module in state.facts.dkms if not module.name.startswith("nvidia")})


def image_of(state: NodeState, kernel: str) -> BootImage | None:
    """Return the image of a kernel and the command that rebuilds it; None without a known tool.

    Ubuntu has dracut from 25.10 on, Debian on request: there it is called as in /etc/kernel/postinst.d/dracut.
    """
    path = state.by_manager(apt=f"/boot/initrd.img-{kernel}", dnf=f"/boot/initramfs-{kernel}.img")
    if "initramfs-tools" in state.installed:
        return BootImage(path=path, argv=("update-initramfs", "-u", "-k", kernel))
    if "dracut" in state.installed:
        return BootImage(path=path, argv=("dracut", "--quiet", "--force", path, kernel))
    return None


def _images(state: NodeState, kernels: Iterable[str]) -> Iterator[tuple[BootImage, float | None]]:
    """Yield each image that exists, with its time."""
    for kernel in kernels:
        image = image_of(state, kernel)
        if image is not None and state.kind(image.path) == "file":
            yield image, state.files[image.path].mtime


def old_images(plan: DriverPlan, *, check: bool) -> Iterator[BootImage]:
    """Yield the images that are older than a file that disables nouveau in them, or that hold another GPU module
    than the disk.
    """
    state = plan.state
    other_module = {old.image.path for old in images_with_other_module(state.facts)}
    since, newest = max(_written(state), default=(None, files.NOUVEAU))
    for image, time in _images(state, [kernel.release for kernel in plan.kernels if kernel.image]):
        if image.path in other_module:
            yield image.model_copy(update={"reason": "has another nvidia module than the disk"})
        elif time is None or (time <= since if since is not None else not check):
            yield image.model_copy(update={"reason": f"is older than {newest}"})


def _written(state: NodeState) -> Iterator[tuple[float, str]]:
    """Yield time and path of each file that keeps nouveau out of an image."""
    for path in (files.NOUVEAU, files.DRACUT):
        actual = state.files.get(path)
        if actual is not None and actual.kind == "file" and actual.mtime is not None:
            yield actual.mtime, path


def refreshed_images(state: NodeState) -> Iterator[BootImage]:
    """Yield the images to rebuild once the files that disable nouveau are removed."""
    if any(map(state.exists, (files.NOUVEAU, files.DRACUT))):
        kernels = [kernel.release for kernel in state.facts.kernels or () if kernel.package and kernel.image]
        yield from (image for image, _ in _images(state, kernels))


NO_KEY = (
    "secure boot is on, nvidia_driver_mok_hash is given, and there is no key that signs modules, neither "
    "mok_certificate of /etc/dkms/framework.conf nor /var/lib/shim-signed/mok/MOK.der nor /var/lib/dkms/mok.pub"
)


@dataclass(frozen=True)
class SigningKey:
    """The key that signs modules built by DKMS: with secure boot, they load only after the firmware has enrolled it."""

    key: ModuleKey | None
    signs: bool
    """Secure boot is on, and DKMS builds the modules."""
    has_password: bool
    """The settings have a password to stage it with."""

    @property
    def staged(self) -> bool:
        return self.key is not None and (self.key.enrolled is True or self.key.waits)

    @property
    def waits(self) -> bool:
        """Return whether enrolment at the console is pending: until then no module is loaded or exchanged."""
        return self.signs and not (self.key is not None and self.key.enrolled)

    @property
    def to_stage(self) -> bool:
        return self.signs and self.has_password and not self.staged

    @property
    def notes(self) -> tuple[str, ...]:
        """Return why no module is loaded."""
        if not self.waits:
            return ()
        if self.has_password or self.staged:
            return ("the key that signs the modules must be confirmed at the console (MOK manager)",)
        return ("the key that signs the modules is not known to be enrolled: nvidia_driver_mok_hash stages it",)

    @property
    def reboot_reasons(self) -> tuple[str, ...]:
        """Return the same if it was staged since the last boot: only the next boot shows the dialog, once."""
        return self.notes if self.key is not None and self.key.fresh else ()
