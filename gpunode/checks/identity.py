"""A short description of a node, for reports."""

from gpunode.checks.installed import driver_packages, upstream
from gpunode.facts.node import NodeFacts
from gpunode.frozen import Frozen


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


class Identity(Described):
    """The description of a node in a report, beside its findings."""

    simulated: bool
    stack: RunningStack
    gpus: tuple[GpuIdentity, ...]


def identify(node: NodeFacts) -> Identity:
    """Return the description of a node; unknown values are None."""
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
    return Identity(simulated=node.simulated, stack=stack, gpus=gpus)
