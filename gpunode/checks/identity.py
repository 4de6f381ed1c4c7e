"""A short description of a node, for reports."""

import re

from gpunode.checks.gpus import model_of
from gpunode.checks.machine import is_guest
from gpunode.checks.packages import driver_packages, upstream
from gpunode.checks.topology import NodeLayout, PairMatrix, layout_of, matrices_of
from gpunode.facts.node import NodeFacts
from gpunode.frozen import Frozen

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
