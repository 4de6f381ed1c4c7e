"""Initramfs images that hold another GPU module than the disk: the boot loads theirs."""

from dataclasses import dataclass

from gpunode.facts.boot import Initramfs
from gpunode.facts.modules import ModuleFile
from gpunode.facts.node import NodeFacts


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
