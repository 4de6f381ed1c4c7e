"""From a bundle to the facts of a node."""

from collections.abc import Callable, Mapping
from typing import Any

from gpunode.facts import dkms, gpu, kernels, modules, packages, pci, system, units
from gpunode.facts.errors import ParseError
from gpunode.facts.node import NodeFacts
from gpunode.facts.seen import Seen, Unseen
from gpunode.probe.bundle import Bundle

READERS: Mapping[str, Callable[[Seen], Any]] = {
    "os": system.operating_system,
    "architecture": system.architecture,
    "virtualization": system.virtualization,
    "systemd": system.systemd,
    "command_line": system.command_line,
    "kernels": kernels.kernels,
    "pci": pci.devices,
    "modules": modules.loaded,
    "loaded_driver": modules.loaded_driver,
    "nouveau_blacklisted": modules.nouveau_blacklisted,
    "module_files": modules.files,
    "dkms": dkms.modules,
    "packages": packages.packages,
    "driver_library_version": gpu.library_version,
    "smi": gpu.smi,
    "units": units.units,
    "gpu_processes": gpu.processes,
    "secure_boot": system.secure_boot,
    "disk_free_mib": system.disk_free_mib,
}
"""One reader per field of NodeFacts; each raises Unseen or ParseError with the reason where it has no answer."""


def facts_from_bundle(bundle: Bundle) -> NodeFacts:
    """Read every fact. Never raises: what was not seen, or was not understood, is a gap with its reason."""
    seen = Seen(bundle)
    values: dict[str, Any] = {}
    gaps: dict[str, str] = {}
    for field, read in READERS.items():
        try:
            values[field] = read(seen)
        except (Unseen, ParseError) as err:
            gaps[field] = _one_line(str(err))
    return NodeFacts(
        host=bundle.host, collected_at=bundle.collected_at, simulated=bundle.simulated, gaps=gaps, **values
    )


def _one_line(text: str) -> str:
    """A reason may quote what a node printed: no line ends and no terminal's control codes come through."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))[:500]
