"""``gres.conf`` of a node from its facts: models, device files, the cores near each GPU, and links between GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.facts.errors import ParseError
from gpunode.facts.host import cpu_numbers
from gpunode.facts.pci import PciDevice
from gpunode.text import number_ranges

_LINK = re.compile(r"NV(\d{1,3})")


@dataclass(frozen=True)
class Gres:
    """The lines of ``gres.conf``, and why something is not in them."""

    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()
    problem: str | None = None
    """Why no lines can be written."""
    waits: bool = False
    """The driver is not loaded: the lines can be written once it is."""


def gpu_lines(node: NodeFacts, types: tuple[str, ...] | None, *, cores: bool) -> Gres:
    """Return one line for each GPU, in the order of PCI addresses, which is Slurm's (``gres.conf(5)``, Links).

    ``types`` are those that slurm.conf gives this node: () if it gives out GPUs without a type, None if it is unknown;
    a type is then the model's name. ``cores``: whether slurm.conf describes the processors as they are.
    """
    gpus = sorted(node.gpus_on_bus or (), key=lambda gpu: gpu.slot)
    if any(gpu.mig_mode for gpu in node.smi_gpus):
        return Gres(
            (), problem="MIG is on: set slurm_node_gres (gres.conf(5), MultipleFiles), or AutoDetect=nvml there"
        )
    minors = {gpu.pci_bus_id: gpu.minor_number for gpu in node.smi_gpus}
    minors |= {gpu.slot: gpu.minor for gpu in node.driver_gpus or ()}
    missing = [gpu.slot for gpu in gpus if minors.get(gpu.slot) is None]
    if missing:
        return Gres((), problem=f"the device file of {', '.join(missing)} is unknown", waits=True)
    notes, near = [], {gpu.slot: near_cores(node, gpu) for gpu in gpus} if cores else {}
    if cores and not all(near.values()):
        notes.append("gres.conf has no cores: which are near the GPUs could not be determined")
        near = {}
    links = links_of(node, gpus)
    lines = []
    for at, gpu in enumerate(gpus):
        kind = type_of(gpu, types)
        if kind is None and types:
            return Gres((), problem=f"slurm.conf names the types {', '.join(types)}, and {gpu.slot} is {_model(gpu)}")
        words = ["Name=gpu", *([f"Type={kind}"] if kind else []), f"File=/dev/nvidia{minors[gpu.slot]}"]
        words += [f"Cores={near[gpu.slot]}"] if near else []
        words += [f"Links={','.join(map(str, links[at]))}"] if links else []
        lines.append(" ".join(words))
    return Gres(tuple(lines), tuple(notes))


def _model(gpu: PciDevice) -> str:
    """Return the model's id in the catalog; the PCI id if the catalog does not know exactly one."""
    match = load().gpu_by_pci(gpu.pci_id, gpu.subsystem_id)
    return match.gpus[0].id if match is not None and len(match.gpus) == 1 else gpu.pci_id.replace(":", "_")


def type_of(gpu: PciDevice, types: tuple[str, ...] | None) -> str | None:
    """Return the GPU's type: that of slurm.conf if it has one that is the model's name or a word of it."""
    model = _model(gpu)
    if types is None:
        return model
    if len(types) == 1:
        return types[0]
    words = {*re.split(r"[^a-z0-9]+", model), model}
    return next((name for name in types if name.lower() in words), None)


def near_cores(node: NodeFacts, gpu: PciDevice) -> str | None:
    """Return Slurm's numbers of the cores near a GPU; None if they are unknown.

    Slurm counts the cores of the first socket first, whatever the kernel's numbers are (``gres.conf(5)``, Cores). The
    order of NUMA nodes by their first processor is that of sockets.
    """
    sets, text = node.cpu_sets, gpu.local_cpus
    if sets is None or not text or not node.numa:
        return None
    try:
        places = sorted(cpu_numbers(domain.cpus, f"NUMA node {domain.node}") for domain in node.numa if domain.cpus)
        near = cpu_numbers(text, gpu.slot)
    except ParseError:
        return None
    order = [core for cpus in places for core in sorted({sets.core_of(cpu) for cpu in cpus})]
    index = {core: at for at, core in enumerate(order)}
    wanted = {sets.core_of(cpu) for cpu in near}
    return number_ranges(index[core] for core in wanted) if wanted <= index.keys() else None


def links_of(node: NodeFacts, gpus: list[PciDevice]) -> list[list[int]]:
    """Return the number of NVLinks from each GPU to each, -1 for itself; empty without NVLink, or if it is unknown."""
    index = {gpu.pci_bus_id: gpu.index for gpu in node.smi_gpus}
    names = [f"GPU{index[gpu.slot]}" if gpu.slot in index else "" for gpu in gpus]
    known = node.gpu_links
    if not all(names) or not all(name in known for name in names):
        return []

    def between(name: str, other: str) -> int:
        match = _LINK.fullmatch(known[name].get(other, ""))
        return -1 if name == other else int(match[1]) if match else 0

    links = [[between(name, other) for other in names] for name in names]
    return links if any(number > 0 for row in links for number in row) else []
