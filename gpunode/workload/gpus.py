"""The GPUs of a node that the payload may use: those on which no other process computes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpunode.facts import NodeFacts
from gpunode.facts.models.smi import SmiGpu
from gpunode.workload.transport import LaunchFailure


@dataclass(frozen=True)
class Use:
    """GPUs of one run. ``skipped``: the reason why nothing is started."""

    indices: tuple[int, ...] = ()
    """Passed in, in the driver's order."""
    uuids: tuple[str, ...] = ()
    """For a run on the host, without MIG devices: of all GPUs on which no other process computes."""
    busy: tuple[str, ...] = ()
    """Excluded: ``gpu3: python3 (pid 4242, alice)``."""
    all: bool = True
    """No GPU of the node is excluded."""
    skipped: str | None = None


def choose(node: NodeFacts, *, force: bool, without: bool) -> Use:
    """Return the GPUs to pass in. ``without``: an image was named, so a node without a GPU is tried too.

    Raises LaunchFailure if it cannot be determined which are idle.
    """
    if node.gpus_on_bus is None:
        raise LaunchFailure("unknown", f"GPUs are unknown, so nothing was started: {node.gap('pci')}")
    if not node.gpus_on_bus:
        if without:
            return Use()
        return Use(skipped="no NVIDIA GPU on the PCI bus; --image IMAGE or --no-container tests only the processor")
    gpus = node.smi_gpus
    if not gpus:
        reason = node.gap("smi") or (node.smi and node.smi.error_message) or "nvidia-smi lists none"
        raise LaunchFailure("unknown", f"the driver shows no GPU, so nothing was started: {reason}")
    if force:
        return _handed(gpus, ())
    if node.gpu_processes is None:
        raise LaunchFailure(
            "unknown",
            f"the GPUs in use are unknown ({node.gap('gpu_processes')}), so nothing was started: --force uses them all",
        )
    busy = tuple(
        f"{process.gpu or 'a GPU'}: {process.name or 'a process'} (pid {process.pid}, {process.user or 'user unknown'})"
        for process in node.gpu_processes
        if process.computes
    )
    if any(process.gpu is None for process in node.gpu_processes if process.computes):
        # A process on an unknown GPU may be on any of them.
        return Use(busy=busy, all=False, skipped=f"GPUs are in use: {', '.join(busy)}; --force uses them all the same")
    taken = {process.gpu for process in node.gpu_processes if process.computes}
    use = _handed([gpu for gpu in gpus if f"gpu{gpu.index}" not in taken], busy)
    if not use.indices:
        return Use(busy=busy, all=False, skipped=f"all GPUs are in use: {', '.join(busy)}; --force uses them")
    return use


def _handed(gpus: Sequence[SmiGpu], busy: tuple[str, ...]) -> Use:
    return Use(
        tuple(gpu.index for gpu in gpus),
        tuple(gpu.uuid for gpu in gpus if gpu.uuid),
        busy,
        all=not busy,
    )
