"""The program of gpunode-acs.service on an emulated PCI Express port: cleared above a network adapter, and put back."""

import base64

import pytest
from machine import Machine, StartVm

from gpunode.provisioning.kernel_tuning import ROLE

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]
CONCERNS = ("roles/kernel_tuning/files/acs",)

PORTS = (
    *("-machine", "q35"),
    # One port above a network adapter, one above nothing that moves data between devices.
    *("-device", "pcie-root-port,id=above,chassis=1,slot=1", "-device", "pcie-root-port,id=other,chassis=2,slot=2"),
    *(
        "-netdev",
        "user,id=net1,net=10.0.9.0/24",
        "-device",
        "virtio-net-pci,netdev=net1,bus=above,mac=52:54:00:12:34:57,romfile=",
    ),
    *("-device", "virtio-rng-pci,bus=other"),
)
REDIRECT = "001d"


@pytest.fixture(scope="module")
def vm(start_vm: StartVm) -> Machine:
    machine = start_vm(options=PORTS)
    machine.sh(f"echo {base64.b64encode(ROLE.program('acs').encode()).decode()} | base64 -d > /root/acs")
    return machine


def ports(vm: Machine) -> dict[str, str]:
    """Return the ACS control register of each port, by the class of what is below it."""
    by_port = {}
    for line in vm.sh(
        "cd /sys/bus/pci/devices; "
        "for port in $(lspci -D -d ::0604 | cut -d' ' -f1); do for below in $port/????:??:??.?; do "
        'echo "$(cat $below/class) $port $(setpci -s $port ECAP_ACS+6.w)"; done; done'
    ).splitlines():
        kind, port, value = line.split()
        by_port["adapter" if kind.startswith("0x0200") else "other"] = value
        by_port[port] = kind
    return by_port


def test_redirection_is_cleared_only_above_adapters_and_restored(vm: Machine) -> None:
    before = ports(vm)
    assert {"adapter", "other"} <= before.keys()
    slots = [slot for slot in before if ":" in slot]
    for slot in slots:
        vm.sh(f"setpci -s {slot} ECAP_ACS+6.w={REDIRECT}")
    assert ports(vm)["adapter"] == REDIRECT
    shown = vm.sh("sh /root/acs off")
    assert f"ACS control was {REDIRECT}, is 0000" in shown
    assert (ports(vm)["adapter"], ports(vm)["other"]) == ("0000", REDIRECT)
    vm.sh("sh /root/acs off")
    vm.sh("sh /root/acs restore")
    assert (ports(vm)["adapter"], ports(vm)["other"]) == (REDIRECT, REDIRECT)


def test_it_is_refused_where_a_device_is_handed_to_a_guest(vm: Machine) -> None:
    # The folder as the kernel makes it when a device is bound: the emulated machine has no IOMMU to bind with.
    script = "sed 's,/sys/bus/pci/drivers/vfio-pci,/root/vfio-pci,' /root/acs > /root/acs-vfio"
    vm.sh(f"mkdir -p /root/vfio-pci/0000:01:00.0; {script}")
    done = vm.run(["sh", "/root/acs-vfio", "off"])
    assert done.returncode == 1
    assert "0000:01:00.0 is bound to vfio-pci" in done.stderr
