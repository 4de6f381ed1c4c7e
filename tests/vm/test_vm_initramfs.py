"""The driver's module in the initramfs: an upgrade leaves the old one, validate reports it, its remedy repairs it.

The driver is Debian's, of two releases; DKMS builds both while the image is made, on this machine's own processor. That
takes a quarter of an hour once, and the test as long again: it runs with ``--only vm --all``, or if it was changed.
"""

import json
import re
from typing import Any

import pytest
from machine import Machine, StartVm
from programs import beside_python, run_program
from vm_fixtures import image_with

pytestmark = [pytest.mark.vm, pytest.mark.timeout(5400)]

DRIVER = r"""
kernel=$(basename "$1"/lib/modules/*-cloud-amd64)
inside() { chroot "$1" env DEBIAN_FRONTEND=noninteractive "${@:2}" </dev/null; }
get() { inside "$1" apt-get install -y -q --no-install-recommends "linux-headers-$kernel" nvidia-kernel-dkms \
    libnvidia-ml1 libcuda1; }
cp "$1/etc/resolv.conf" "$1/root/resolv.conf"
cp /etc/resolv.conf "$1/etc/resolv.conf"
printf 'Package: *nvidia* libcuda1\nPin: release n=bookworm-security\nPin-Priority: -1\n' \
    > "$1/etc/apt/preferences.d/first"
get "$1"
rm "$1/etc/apt/preferences.d/first"
echo nvidia-current >> "$1/etc/initramfs-tools/modules"
inside "$1" update-initramfs -u -k "$kernel"
# Some switch it off while they install, to save time.
echo update_initramfs=no > "$1/etc/initramfs-tools/update-initramfs.conf"
get "$1"
echo update_initramfs=yes > "$1/etc/initramfs-tools/update-initramfs.conf"
inside "$1" apt-get clean
mv "$1/root/resolv.conf" "$1/etc/resolv.conf"
"""


# Most of the image is firmware of GPUs that the machine lacks, and an emulated processor unpacks all of it for a list.
WITHOUT_FIRMWARE = """
find /root/image -path '*/firmware/nvidia/*' -type f -delete
(cd /root/image; find . | cpio --quiet -R 0:0 -o -H newc | gzip -1) > {image}.new
touch -r {image} {image}.new
mv {image}.new {image}
"""


def test_an_old_module_in_the_initramfs_is_found_and_its_remedy_repairs_it(start_vm: StartVm) -> None:
    vm = start_vm(image=image_with(components="main contrib non-free non-free-firmware", setup=DRIVER))
    vm.sh("update-grub 2>/dev/null")
    kernel = vm.sh("uname -r").strip()
    library = vm.sh("basename $(readlink -e /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1)").strip().partition(".so.")[2]
    image = f"/boot/initrd.img-{kernel}"
    old = in_image(vm, image)
    assert library == vm.sh("modinfo -F version nvidia-current").strip() != old
    vm.sh(WITHOUT_FIRMWARE.format(image=image), 600)

    before = judged(vm)
    assert (before["status"], before["expected"], before["measured"]) == ("fail", 0, 1), before
    assert image in before["message"]
    remedy = re.search(r"update-initramfs -u -k \S+amd64", before["remedy"])
    assert remedy is not None, before["remedy"]

    vm.sh(remedy[0], 1200)
    assert in_image(vm, image) == library
    repaired = judged(vm)
    assert repaired["status"] == "pass", repaired
    vm.reboot()
    # The initramfs tried to load it; without a GPU the driver leaves again.
    assert "nvidia-nvlink: Nvlink Core is being initialized" in vm.sh("journalctl -k -b")
    booted = judged(vm)
    assert booted["status"] == "pass", booted
    print(f"{old} in the image, {library} on disk: {before['message']}\nto do: {before['remedy']}")
    print(f"after the remedy: {repaired['message']}\nafter the reboot: {booted['message']}")


def in_image(vm: Machine, image: str) -> str:
    """Return the version of the driver's module in an initramfs; its files stay in /root/image."""
    return vm.sh(
        f"rm -rf /root/image; unmkinitramfs {image} /root/image; "
        "modinfo -F version $(find /root/image -name nvidia-current.ko | head -n 1)",
        600,
    ).strip()


def judged(vm: Machine) -> dict[str, Any]:
    """Return the finding about the next boot; an emulated processor has ten times the time that a node has."""
    chosen = ["--select", "node.next-boot", "--level", "quick", "--timeout", "1200", "--no-history"]
    argv = [beside_python("gpunode"), "validate", "-i", vm.inventory_path, *chosen, "--format", "json"]
    done = run_program(argv, limit_s=1300)
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    (report,) = json.loads(done.stdout)["nodes"]
    (finding,) = [finding for finding in report["findings"] if finding["check"] == "node.next-boot"]
    return dict(finding)
