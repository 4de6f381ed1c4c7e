"""A short description of a node for reports, and its parts and links for drawings.

Values that vary on an unchanged node are left out of drawings, so that equal nodes have equal descriptions: a GPU
lowers the speed of its PCIe link while it is idle.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from gpunode.checks.gpus import model_of
from gpunode.checks.machine import is_guest, nvswitches
from gpunode.checks.measurements import why_no_figures
from gpunode.checks.packages import driver_packages, upstream
from gpunode.checks.performance_tools import answer_of
from gpunode.checks.registry import NotJudged
from gpunode.checks.workload import gpu_named, of, read
from gpunode.expectations.tools import PEER_TESTS
from gpunode.facts.models.measured import PeerCopyValues, ToolValues
from gpunode.facts.network import IbDevice, Nic
from gpunode.facts.node import NodeFacts
from gpunode.facts.parsers import nvbandwidth
from gpunode.facts.pci import PciDevice, PciLink
from gpunode.frozen import Frozen

MOST_PARTS = 256
"""Parts of one kind that are described."""
PartKind = Literal["gpu", "nvswitch", "nic", "nvme"]


class PartLink(Frozen):
    """A PCI Express link as one of its ends reports it."""

    width: int | None
    width_max: int | None
    speed_gt_per_s: float | None
    """None also for a GPU: it varies with its load."""
    speed_max_gt_per_s: float | None


class PartNvlink(Frozen):
    """One NVLink of a GPU."""

    link: int
    state: str | None
    """``active`` (also while it sleeps), ``inactive``, ``unsupported``; None: not reported."""


class MachinePart(Frozen):
    """A PCI function that a drawing shows."""

    kind: PartKind
    name: str
    """The component's name in findings: ``gpu3``, ``mlx5_0``, ``ib0``, ``nvme0``."""
    model: str | None = None
    slot: str | None = None
    numa_node: int | None = None
    bridges: tuple[str, ...] = ()
    """Slots between the part and its root port, the nearest first."""
    link: PartLink | None = None
    state: str | None = None
    """Of an adapter's port: ``ACTIVE``, ``up``, ``down`` …"""
    rate_gbit_per_s: float | None = None
    nvlinks: tuple[PartNvlink, ...] = ()
    nvlink_gb_per_s: float | None = None
    """Of one link in one direction, if all have the same."""


class MachineBridge(Frozen):
    """A root port or a port of a PCIe switch."""

    slot: str
    numa_node: int | None
    link: PartLink | None


class NumaDomain(Frozen):
    """A NUMA node of the host."""

    node: int
    cpus: str | None
    memory_mib: int | None


class PairMatrix(Frozen):
    """Values of each ordered pair of GPUs, by row and column; None: no value."""

    title: str
    origin: str
    """The record that measured it."""
    labels: tuple[str, ...]
    unit: str
    rows: tuple[tuple[float | None, ...], ...]


class NodeLayout(Frozen):
    """Parts and links of a node."""

    numa: tuple[NumaDomain, ...] = ()
    parts: tuple[MachinePart, ...] = ()
    bridges: tuple[MachineBridge, ...] = ()
    labels: tuple[str, ...] = ()
    """GPUs and adapters of ``connections``."""
    connections: tuple[tuple[str | None, ...], ...] = ()
    """What connects each two, as ``nvidia-smi topo -m`` names it: ``NV18``, ``PIX``, ``SYS``."""


def layout_of(node: NodeFacts) -> NodeLayout:
    """Return parts and links of a node, as far as they are known."""
    parts = (*_gpus(node), *_switches(node), *_adapters(node), *_disks(node))
    above = {slot for part in parts for slot in part.bridges}
    bridges = tuple(
        MachineBridge(slot=port.slot, numa_node=port.numa_node, link=_link(port.link))
        for port in (node.pci_ports or ())[: 4 * MOST_PARTS]
        if port.slot in above
    )
    numa = tuple(
        NumaDomain(node=domain.node, cpus=domain.cpus, memory_mib=domain.memory_total_mib)
        for domain in (node.numa or ())[:MOST_PARTS]
    )
    document = node.topology.document if node.topology else None
    if document is None:
        return NodeLayout(numa=numa, parts=parts, bridges=bridges)
    elements = (*document.gpus[:MOST_PARTS], *document.nics[:MOST_PARTS])
    names = tuple(
        element.lower() if element in document.gpus else document.nic_names.get(element, element)
        for element in elements
    )
    rows = tuple(tuple(document.links.get(element, {}).get(other) for other in elements) for element in elements)
    return NodeLayout(numa=numa, parts=parts, bridges=bridges, labels=names, connections=rows)


def matrices_of(node: NodeFacts) -> tuple[PairMatrix, ...]:
    """Return the measured matrices over pairs of GPUs; empty if none was measured on a GPU."""
    return (*_peer_copies(node), *_tool_matrices(node))


def _link(link: PciLink | None, *, varies: bool = False) -> PartLink | None:
    if link is None:
        return None
    return PartLink(
        width=link.width,
        width_max=link.width_max,
        speed_gt_per_s=None if varies else link.speed_gt_per_s,
        speed_max_gt_per_s=link.speed_max_gt_per_s,
    )


def _part(kind: PartKind, name: str, device: PciDevice, **more: object) -> MachinePart:
    about = {
        "slot": device.slot,
        "numa_node": device.numa_node,
        "bridges": device.ports,
        "link": _link(device.link, varies=kind == "gpu"),
    }
    return MachinePart.model_validate({"kind": kind, "name": name, **about, **more})


def _gpus(node: NodeFacts) -> Iterator[MachinePart]:
    """Yield the GPUs on the bus, by nvidia-smi's order, and those that only nvidia-smi lists."""
    reported = {gpu.pci_bus_id: gpu for gpu in node.smi_gpus}
    nvlinks = node.nvlink.document.gpus if node.nvlink and node.nvlink.document else ()
    by_index = {gpu.index: gpu for gpu in nvlinks}
    on_bus = {device.slot: device for device in node.gpus_on_bus or ()}
    for gpu in node.smi_gpus[:MOST_PARTS]:
        links = by_index[gpu.index].links if gpu.index in by_index else ()
        speeds = {link.speed_gb_per_s for link in links} - {None}
        more: dict[str, object] = {
            "model": gpu.name,
            "nvlinks": tuple(
                PartNvlink(link=link.link, state="active" if link.state == "sleep" else link.state) for link in links
            ),
            "nvlink_gb_per_s": speeds.pop() if len(speeds) == 1 else None,
        }
        device = on_bus.get(gpu.pci_bus_id or "")
        if device is not None:
            yield _part("gpu", f"gpu{gpu.index}", device, **more)
        else:
            yield MachinePart.model_validate(
                {"kind": "gpu", "name": f"gpu{gpu.index}", "slot": gpu.pci_bus_id, "state": "not on the bus", **more}
            )
    for slot, device in list(on_bus.items())[:MOST_PARTS]:
        if slot not in reported:
            match = model_of(device)
            model = match.gpu.name if match is not None and match.gpu is not None else device.pci_id
            yield _part("gpu", f"gpu at {slot}", device, model=model)


def _switches(node: NodeFacts) -> Iterator[MachinePart]:
    slots = set(nvswitches(node))
    for number, device in enumerate([device for device in node.pci or () if device.slot in slots][:MOST_PARTS]):
        yield _part("nvswitch", f"nvswitch{number}", device)


def _adapters(node: NodeFacts) -> Iterator[MachinePart]:
    """Yield the network adapters on the bus, by the names of their RDMA devices, else of their interfaces."""
    rdma = {device.slot: device for device in node.infiniband or () if device.slot}
    nics: dict[str | None, Nic] = {}
    for nic in node.nics or ():
        nics.setdefault(nic.slot, nic)
    for device in [device for device in node.pci_io or () if device.class_id.startswith("02")][:MOST_PARTS]:
        adapter = rdma.get(device.slot)
        if adapter is not None:
            yield _part("nic", adapter.name, device, **_of_rdma(adapter))
        elif (interface := nics.get(device.slot)) is not None:
            rate = interface.speed_mbit_per_s
            yield _part(
                "nic",
                interface.name,
                device,
                model=interface.driver,
                state=interface.state,
                rate_gbit_per_s=None if rate is None else rate / 1000,
            )
        else:
            yield _part("nic", f"adapter at {device.slot}", device, model=device.driver, state="no interface")


def _of_rdma(adapter: IbDevice) -> dict[str, object]:
    port = next(iter(adapter.ports), None)
    about: dict[str, object] = {"model": adapter.type}
    if port is not None:
        about |= {"state": port.state, "rate_gbit_per_s": port.rate_gbit_per_s}
        about["model"] = " ".join(text for text in (adapter.type, port.link_layer) if text) or None
    return about


def _disks(node: NodeFacts) -> Iterator[MachinePart]:
    devices = [device for device in node.pci_io or () if device.class_id.startswith("01")]
    for number, device in enumerate(devices[:MOST_PARTS]):
        if device.ports:
            yield _part("nvme", f"nvme{number}", device)


def _peer_copies(node: NodeFacts) -> Iterator[PairMatrix]:
    for record in of(node, "copy.peer"):
        try:
            values = read(record, PeerCopyValues)
        except NotJudged:
            continue
        if why_no_figures(node, record, on_gpu=True) is not None or len(values.uuids) > MOST_PARTS:
            continue
        names = tuple(gpu_named(node, uuid) or f"cuda:{number}" for number, uuid in enumerate(values.uuids))
        size = range(len(names))
        one_way = {(pair.source, pair.target): pair.bandwidth_gb_per_s for pair in values.pairs}
        both = {(pair.source, pair.target): pair.both_gb_per_s for pair in values.pairs if pair.both_gb_per_s}
        both |= {(target, source): rate for (source, target), rate in both.items()}
        for title, rates in (("GPU to GPU, one direction", one_way), ("GPU to GPU, both directions", both)):
            if rates:
                rows = tuple(tuple(rates.get((row, column)) for column in size) for row in size)
                yield PairMatrix(title=title, origin="copy.peer", labels=names, unit="GB/s", rows=rows)


def _tool_matrices(node: NodeFacts) -> Iterator[PairMatrix]:
    for record in of(node, "tools.nvbandwidth"):
        try:
            answer = answer_of(read(record, ToolValues), nvbandwidth.parse)
        except NotJudged:
            continue
        if why_no_figures(node, record, on_gpu=True) is not None:
            continue
        for test in answer.tests:
            if test.name in PEER_TESTS and test.matrix and _square(test.matrix):
                labels = tuple(f"cuda:{number}" for number in range(len(test.matrix)))
                rows = tuple(
                    tuple(None if row == column else cell for column, cell in enumerate(cells))
                    for row, cells in enumerate(test.matrix)
                )
                yield PairMatrix(
                    title=str(test.name), origin="tools.nvbandwidth", labels=labels, unit=test.unit or "", rows=rows
                )


def _square(rows: Sequence[Sequence[object]]) -> bool:
    return 0 < len(rows) <= MOST_PARTS and all(len(row) == len(rows) for row in rows)


SINGLE = re.compile(r"^[0-]*$")
"""The cluster's UUID of a fabric that ends in the node."""


UNNAMED = re.compile(r"to be filled|system product name|default string|not specified", re.IGNORECASE)
"""Texts of firmware for a machine that its vendor has not named."""


class Described(Frozen):
    """Base: immutable, without unknown fields. None is unknown or absent."""


class RunningStack(Described):
    """The running software of the node."""

    os: str | None = None
    architecture: str | None = None
    kernel: str | None = None
    """Release of the running kernel."""
    driver: str | None = None
    """Version of the module in memory."""
    driver_flavour: str | None = None
    """``open`` or ``proprietary``."""
    driver_packages: str | None = None
    """Version of the installed packages; None also if they have several versions."""
    driver_origin: str | None = None
    driver_library: str | None = None
    cuda: str | None = None
    """The newest CUDA version that the driver supports, by nvidia-smi."""


class GpuIdentity(Described):
    """One GPU with the driver's identifiers."""

    index: int
    name: str | None
    uuid: str | None


class Hardware(Described):
    """The machine, as nodes of a run are compared with each other."""

    product: str | None = None
    """Vendor and product by the firmware: ``NVIDIA DGXH100``."""
    virtual: bool | None = None
    """True in a virtual machine."""
    gpus: int | None = None
    """NVIDIA GPUs on the PCI bus."""
    gpu_model: str | None = None
    """Catalog id of their model; None if they have several, or an unknown one."""
    nvlink_domain: str | None = None
    """Cluster and clique of the NVLink fabric that it shares with other nodes, as ``UUID/CLIQUE``."""


class Identity(Described):
    """The description of a node in a report, beside its findings."""

    simulated: bool
    stack: RunningStack
    gpus: tuple[GpuIdentity, ...]
    hardware: Hardware = Hardware()
    layout: NodeLayout | None = None
    matrices: tuple[PairMatrix, ...] = ()


def described(node: NodeFacts) -> Identity:
    """Return the description of a node for a report: ``identify`` with its parts, links and measured matrices."""
    return identify(node).model_copy(update={"layout": layout_of(node), "matrices": matrices_of(node)})


def identify(node: NodeFacts) -> Identity:
    """Return the description of a node, without its parts; unknown values are None."""
    packages = driver_packages(node)
    versions = {upstream(package) for package in packages.of_main}
    loaded = node.loaded_driver
    stack = RunningStack(
        os=node.os.pretty_name or node.os.id if node.os else None,
        architecture=node.architecture,
        kernel=node.running_kernel,
        driver=loaded.version if loaded else None,
        driver_flavour=loaded.flavour if loaded else None,
        driver_packages=versions.pop() if len(versions) == 1 else None,
        driver_origin=packages.main,
        driver_library=node.driver_library_version,
        cuda=node.smi.document.cuda_version if node.smi and node.smi.document else None,
    )
    gpus = tuple(GpuIdentity(index=gpu.index, name=gpu.name, uuid=gpu.uuid) for gpu in node.smi_gpus)
    return Identity(simulated=node.simulated, stack=stack, gpus=gpus, hardware=_hardware(node))


def _hardware(node: NodeFacts) -> Hardware:
    machine, devices = node.machine, node.gpus_on_bus
    named = [text for text in (machine.vendor, machine.product) if text] if machine else []
    matches = [model_of(device) for device in devices or ()]
    models = {match.gpu.id if match is not None and match.gpu is not None else None for match in matches}
    fabrics = {
        f"{gpu.fabric.cluster_uuid}/{gpu.fabric.clique_id}"
        for gpu in node.smi_gpus
        if gpu.fabric.cluster_uuid is not None and SINGLE.search(gpu.fabric.cluster_uuid) is None
    }
    return Hardware(
        product=" ".join(named) if machine and machine.product and not UNNAMED.search(machine.product) else None,
        virtual=None if node.virtualization is None else is_guest(node),
        gpus=None if devices is None else len(devices),
        gpu_model=models.pop() if len(models) == 1 else None,
        nvlink_domain=fabrics.pop() if len(fabrics) == 1 else None,
    )
