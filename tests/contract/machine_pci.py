"""What a simulated node's bus and its adapters show beside what the simulator writes."""

from collections.abc import Iterator

from machine_shapes import PCI, Document, Machine, answer

from gpunode.lab.simulator import kernel

NVME_SLOT = "0000:f1:00.0"


def pci_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    bare = machine.virtualization == "none"
    yield "/sys/class/iommu/", "dmar0\n" if bare else ""
    for name, nic in machine.interfaces.items():
        yield f"/sys/class/infiniband/{nic['name']}/ports/1/gid_attrs/ndevs/0", f"{name}\n"
    if machine.nvme:
        yield (
            f"{PCI}{NVME_SLOT}/uevent",
            f"DRIVER=nvme\nPCI_CLASS=10802\nPCI_ID=144D:A80A\nPCI_SLOT_NAME={NVME_SLOT}\n",
        )


# As the manual page of dcb-pfc prints it (iproute2 6.1), with another priority.
PFC = "pfc-cap 8 macsec-bypass off delay 4096 \nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off \n"


# As iproute2 6.1 prints it.
RULES = "0:\tfrom all lookup local\n32766:\tfrom all lookup main\n32767:\tfrom all lookup default\n"


def pci_commands(machine: Machine) -> dict[str, Document]:
    files = sorted(path for path, *_ in kernel.adapter_files(machine.hardware))
    commands = {
        "rdma-nodes": answer(
            "".join(f"{path}\tcharacter\n" for path in files), argv=("(probe)", "look at /dev/infiniband")
        ),
    }
    if machine.hardware["nics"]:
        commands["peer-memory"] = answer("no\n", argv=("(probe)", "look for the peer memory interface"))
    if machine.roce:
        commands["ip-rules"] = answer(RULES)
    for name in machine.interfaces if machine.roce else ():
        commands[f"dcb-pfc-{name}"] = answer(PFC)
        commands[f"dcb-app-{name}"] = answer("dscp-prio 26:3 48:6 \n")
        commands[f"dcb-dcbx-{name}"] = answer("host ieee \n")
    return commands
