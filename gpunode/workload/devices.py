"""The GPUs of a node on which no other process computes, and as devices of a container in each mechanism's notation."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpunode.facts import NodeFacts
from gpunode.facts.models.smi import SmiGpu
from gpunode.workload.container import KIND
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


_FOLDERS = "/etc/cdi or /var/run/cdi"
_WRITTEN = "/var/run/cdi/nvidia.yaml"


@dataclass(frozen=True)
class ContainerDevice:
    """A whole GPU, or one MIG device."""

    gpu: int
    uuid: str | None = None
    mig: int | None = None
    """Index on its GPU; None: the whole GPU."""

    @property
    def id(self) -> str:
        """Return ``0``, ``0:1``: the notation of the NVIDIA runtime, in the driver's order."""
        return str(self.gpu) if self.mig is None else f"{self.gpu}:{self.mig}"

    @property
    def component(self) -> str:
        """Return ``gpu0``, ``MIG device 1 of gpu0``."""
        return f"gpu{self.gpu}" if self.mig is None else f"MIG device {self.mig} of gpu{self.gpu}"

    @property
    def cdi_names(self) -> tuple[str, ...]:
        """Return the names that nvidia-ctk may give it, by its strategies ``uuid``, ``index`` and ``type-index``."""
        by_index = (self.id, f"{'gpu' if self.mig is None else 'mig'}{self.id}")
        # Indices are those at the time when the specification was written; a UUID stays with its GPU.
        return (self.uuid, *by_index) if self.uuid else by_index


def without_empty_mig(use: Use, node: NodeFacts) -> Use:
    """Return a run's GPUs without those on which nothing can run: MIG is enabled and has no instance."""
    if not use.indices:
        return use
    empty = [gpu.index for gpu in node.smi_gpus if gpu.mig_mode and not gpu.mig_devices]
    able = tuple(index for index in use.indices if index not in empty)
    if able:
        return replace(use, indices=able)
    reason = f"MIG is on and has no instance: {', '.join(f'gpu{index}' for index in use.indices)}"
    if use.busy:
        reason = f"GPUs are in use: {', '.join(use.busy)}; {reason}; --force uses them all the same"
    return replace(use, indices=(), skipped=reason)


def of_gpus(use: Use, node: NodeFacts) -> Iterator[ContainerDevice]:
    """Yield a run's GPUs, one in MIG mode as its MIG devices, which are the only ones that CUDA uses.

    Raises LaunchFailure if nvidia-smi does not report the index of a MIG device.
    """
    for gpu in node.smi_gpus:
        if gpu.index not in use.indices:
            continue
        if gpu.mig_mode:
            for device in gpu.mig_devices:
                if device.index is None:
                    raise LaunchFailure("unknown", f"nvidia-smi reports no index of a MIG device of gpu{gpu.index}")
                yield ContainerDevice(gpu.index, mig=device.index)
        else:
            yield ContainerDevice(gpu.index, gpu.uuid)


def cdi_names(use: Use, node: NodeFacts) -> tuple[str, ...]:
    """Return the names of a run's devices in the node's CDI specification.

    Raises LaunchFailure if it has no name for one of them: an engine refuses a device that does not exist.
    """
    if node.cdi_specs is None:
        reason = node.gap("cdi_specs") or "not in the collected data"
        raise LaunchFailure("unknown", f"CDI specifications could not be read ({reason}). {_instead(use)}")
    specs = [spec for spec in node.cdi_specs if spec.kind == KIND]
    known = {name for spec in specs for name in spec.devices}
    named = {device: _name(device, known) for device in of_gpus(use, node)}
    nameless = [device for device, name in named.items() if name is None]
    if not nameless:
        return tuple(name for name in named.values() if name is not None)
    those = ", ".join(device.component for device in nameless)
    if not specs:
        problem = f"no CDI specification of {KIND} in {_FOLDERS} lists {those}"
    else:
        paths = " and ".join(spec.path for spec in specs)
        problem = f"{paths} {'has' if len(specs) == 1 else 'have'} no device for {those}"
    # nvidia-smi does not report to which GPU a MIG device's UUID belongs.
    by_uuid = any(device.mig is not None for device in nameless) and any(name.startswith("MIG-") for name in known)
    strategy = " --device-name-strategy=index" if by_uuid else ""
    path = specs[-1].path if specs else _WRITTEN
    remedy = f"nvidia-ctk cdi generate{strategy} --output={path} regenerates it"
    raise LaunchFailure("no-gpu-support", f"{problem}: {remedy}. {_instead(use)}")


def _name(device: ContainerDevice, known: Iterable[str]) -> str | None:
    return next((name for name in device.cdi_names if name in known), None)


def _instead(use: Use) -> str:
    busy = ", ".join(dict.fromkeys(line.partition(":")[0] for line in use.busy))
    return f"When {busy} is idle, all GPUs are requested and no name is needed"


def open_to_all(node: NodeFacts) -> bool:
    """Return whether any user of the node may use its GPUs: true if all their device files are open to others.

    NVreg_DeviceFileMode and similar options restrict them to a group, of which no process in a container is a member.
    """
    needed = re.compile(r"/dev/nvidia(\d+|ctl|-uvm)")
    return all(int(each.mode, 8) & 0o006 == 0o006 for each in node.device_nodes or () if needed.fullmatch(each.path))
