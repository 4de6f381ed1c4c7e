"""Virtual machines for tests: one image for all, a disk of its own for each machine, ended with the tests."""

import os
import shutil
from collections.abc import Iterator

import pytest
from image import Image, built
from machine import Hardware, Machine, StartVm

NEEDS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "ssh": "openssh-client",
}


USUAL = Hardware()


@pytest.fixture(scope="session")
def vm_image() -> Image:
    """The image that machines start from; skips where this machine cannot have one."""
    return image_with()


def image_with(*packages: str, components: str = "main", setup: str = "") -> Image:
    """Return the image with more packages; skips where this machine cannot have one. Parameters as of ``built``."""
    if os.geteuid() != 0:
        pytest.skip("building the image of a virtual machine needs root")
    for program, package in NEEDS.items():
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install {package}")
    return built(*packages, components=components, setup=setup)


@pytest.fixture(scope="module")
def start_vm(vm_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartVm]:
    """Start a machine: ``start_vm(disks=(1 << 30,))``, or with another ``image``; all are ended with the module."""
    machines: list[Machine] = []

    def start(
        *,
        image: Image = vm_image,
        disks: tuple[int, ...] = (),
        options: tuple[str, ...] = (),
        hardware: Hardware = USUAL,
    ) -> Machine:
        machine = Machine(image, tmp_path_factory.mktemp("vm"), disks=disks, options=options, hardware=hardware)
        machines.append(machine)
        machine.start()
        return machine

    yield start
    for machine in machines:
        machine.kill()


@pytest.fixture(scope="module")
def vm(start_vm: StartVm) -> Machine:
    """A machine without further disks."""
    return start_vm()
