"""The kind of machine: bare metal or guest, and its platforms in the catalog."""

from gpunode.catalog import Platform, load
from gpunode.checks.gpus import model_of
from gpunode.facts.node import NodeFacts

# systemd-detect-virt's names of containers: the machine is the host itself, as far as is known.
CONTAINERS = frozenset(
    {
        "container-other",
        "docker",
        "lxc",
        "lxc-libvirt",
        "openvz",
        "podman",
        "private-users",
        "proot",
        "rkt",
        "systemd-nspawn",
    }
)


def is_guest(node: NodeFacts) -> bool:
    """Return True in a virtual machine: the hypervisor controls buses and paths to other GPUs."""
    return node.virtualization is not None and node.virtualization != "none" and node.virtualization not in CONTAINERS


def is_container(node: NodeFacts) -> bool:
    """Return True in a container: kernel, clock and firmware are the host's."""
    return node.virtualization in CONTAINERS


def gpu_ids(node: NodeFacts) -> dict[str, int] | None:
    """Return catalog ids of the GPUs on the bus with their number; None if the catalog does not have one of them."""
    numbers: dict[str, int] = {}
    for device in node.gpus_on_bus or ():
        match = model_of(device)
        if match is None or match.gpu is None:
            return None
        numbers[match.gpu.id] = numbers.get(match.gpu.id, 0) + 1
    return numbers


def platforms(node: NodeFacts) -> tuple[Platform, ...]:
    """Return the catalog's platforms with this node's GPUs and architecture; empty if none is known."""
    ids = gpu_ids(node)
    if not ids:
        return ()
    rows = [row for row in load().platforms_with(ids) if node.architecture in (None, *row.hosts)]
    own_kind = [row for row in rows if row.virtual == is_guest(node)]
    return tuple(own_kind or rows)


def nvswitches(node: NodeFacts) -> tuple[str, ...]:
    """Return the slots of the NVSwitches on the bus."""
    switches = {part.id for part in load().pci_parts.values() if part.role == "nvswitch"}
    return tuple(device.slot for device in node.pci or () if device.pci_id in switches)
