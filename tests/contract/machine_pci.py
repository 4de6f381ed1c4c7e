"""What a simulated node's PCI bus shows in sysfs."""

from collections.abc import Iterator

from machine_shapes import PCI, Document, Machine, answer

BRIDGE = "PCI_CLASS=60400\nPCI_ID=1000:C030\n"


def pci_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    model = machine.model
    bridges = sorted({port for gpu in machine.gpus for port in gpu.ports})
    slots = [*(gpu.slot for gpu in machine.gpus), *bridges, *machine.nvswitches, *(slot for _, slot in machine.hcas)]
    slots += ["0000:c3:00.0"] if machine.nvme else []
    yield PCI, "".join(f"{slot}\n" for slot in sorted(slots))
    for gpu in machine.gpus:
        place = f"{PCI}{gpu.slot}/"
        yield (
            place + "uevent",
            (
                f"DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:{model.device_id}\nPCI_SUBSYS_ID=10DE:{model.subsystem_id}\n"
                f"PCI_SLOT_NAME={gpu.slot}\n"
            ),
        )
        yield from link(place, model.speed, machine.pcie_link)
        yield place + "numa_node", f"{gpu.numa if machine.sockets > 1 else -1}\n"
        yield place + "local_cpulist", f"{gpu.numa * machine.cores}-{(gpu.numa + 1) * machine.cores - 1}\n"
        yield place + "power_state", "D0\n"
        if machine.virtualization == "none":
            yield place + "iommu_group/type", "identity\n"
    for slot in bridges:
        yield f"{PCI}{slot}/uevent", BRIDGE
        yield from link(f"{PCI}{slot}/", model.speed, machine.pcie_link)
    for slot in machine.nvswitches:
        yield (
            f"{PCI}{slot}/uevent",
            f"DRIVER=nvidia-nvswitch\nPCI_CLASS=68000\nPCI_ID=10DE:22A3\nPCI_SLOT_NAME={slot}\n",
        )
    for number, (name, slot) in enumerate(machine.hcas):
        yield f"{PCI}{slot}/uevent", f"DRIVER=mlx5_core\nPCI_CLASS=20700\nPCI_ID=15B3:1021\nPCI_SLOT_NAME={slot}\n"
        yield from infiniband(machine, name, slot, number)
    yield "/sys/class/infiniband/", "".join(f"{name}\n" for name, _ in machine.hcas) or None
    numbers = range(len(machine.hcas))
    yield "/sys/class/infiniband_verbs/", "".join(f"uverbs{number}\n" for number in numbers) or None
    yield "/sys/class/infiniband_mad/", "".join(f"umad{number}\n" for number in numbers) or None
    yield "/sys/class/iommu/", "dmar0\n" if machine.virtualization == "none" else ""


def link(place: str, speed: str, told: bool) -> Iterator[tuple[str, str]]:
    if told:
        yield place + "current_link_speed", f"{speed}\n"
        yield place + "max_link_speed", f"{speed}\n"
        yield place + "current_link_width", "16\n"
        yield place + "max_link_width", "16\n"


def infiniband(machine: Machine, name: str, slot: str, number: int) -> Iterator[tuple[str, str]]:
    place = f"/sys/class/infiniband/{name}/"
    yield place + "fw_ver", "28.39.1002\n"
    yield place + "board_id", "MT_0000000838\n"
    yield place + "hca_type", "MT4129\n"
    yield place + "device/uevent", f"PCI_SLOT_NAME={slot}\n"
    yield place + "ports/1/state", "4: ACTIVE\n"
    yield place + "ports/1/phys_state", "5: LinkUp\n"
    yield place + "ports/1/rate", "400 Gb/sec (4X NDR)\n"
    yield place + "ports/1/link_layer", "Ethernet\n" if machine.roce else "InfiniBand\n"
    yield place + "ports/1/gid_attrs/ndevs/0", f"{machine.interfaces[number]}\n"
    yield f"/sys/class/infiniband_verbs/uverbs{number}/ibdev", f"{name}\n"
    yield f"/sys/class/infiniband_mad/umad{number}/ibdev", f"{name}\n"
    yield f"/sys/class/infiniband_mad/umad{number}/port", "1\n"
    for counter in ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors"):
        yield f"{place}ports/1/counters/{counter}", "0\n"


# As the manual page of dcb-pfc prints it (iproute2 6.1), with another priority.
PFC = "pfc-cap 8 macsec-bypass off delay 4096 \nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off \n"


def pci_commands(machine: Machine) -> dict[str, Document]:
    paths = "".join(f"{gpu.slot}\t{' '.join(gpu.ports)}\t{number + 10}\n" for number, gpu in enumerate(machine.gpus))
    bridges = sorted({port for gpu in machine.gpus for port in gpu.ports})
    files = [f"/dev/infiniband/{kind}{at}" for kind in ("umad", "uverbs") for at in range(len(machine.hcas))]
    commands = {
        "pci-paths": answer(paths, argv=("(probe)", "resolve links")),
        "rdma-nodes": answer(
            "".join(f"{path}\tcharacter\n" for path in files), argv=("(probe)", "look at /dev/infiniband")
        ),
    }
    if machine.hcas:
        commands["peer-memory"] = answer("no\n", argv=("(probe)", "look for the peer memory interface"))
    for name in machine.interfaces if machine.roce else ():
        commands[f"dcb-pfc-{name}"] = answer(PFC, argv=("dcb", "pfc", "show", "dev", name))
    if bridges:
        lines = "".join(f"{slot}\t005f\t0000\n" for slot in bridges)
        commands["pci-acs"] = answer(lines, argv=("(probe)", "read configuration space"))
    return commands
