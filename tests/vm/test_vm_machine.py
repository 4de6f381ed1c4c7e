"""The machines themselves: a kernel of their own, disks, reboots by GRUB, and what is written stays."""

import pytest
from machine import StartVm

DROP_IN = 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX gpunode.test=1"'
pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]
CONCERNS = ("tests/vm/",)


def test_a_machine_boots_its_own_kernel_and_keeps_its_disk(start_vm: StartVm) -> None:
    vm = start_vm(disks=(64 << 20,))
    assert "-cloud-amd64" in vm.sh("uname -r")
    assert vm.sh("systemd-detect-virt").strip() in ("qemu", "kvm")
    assert vm.sh("lsblk --bytes --noheadings --output SIZE /dev/vdc").strip() == str(64 << 20)
    vm.sh(f"echo kept > /root/kept; echo '{DROP_IN}' > /etc/default/grub.d/90-test.cfg; update-grub")
    vm.reboot()
    assert "gpunode.test=1" in vm.sh("cat /proc/cmdline")
    vm.power_off()
    vm.start()
    assert vm.sh("cat /root/kept") == "kept\n"
