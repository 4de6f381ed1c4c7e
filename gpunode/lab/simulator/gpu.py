"""One simulated GPU: its hardware, its settings, and the effects of faults."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .node import NodeSnapshot

OLDEST_FIRST = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin")
NAMES = {"ada": "Ada Lovelace"}


class SimulatedGpu:
    """A GPU of the node, read again at each start of a tool."""

    def __init__(self, node: NodeSnapshot, entry: dict[str, Any]) -> None:
        self.node = node
        self.entry = entry
        self.number: int = int(entry["index"])
        """Its index in the hardware description; state and faults use it."""
        self.index: int = self.number
        """Its index among the GPUs that the tool sees, as tools print it."""
        self.minor: int = int(entry.get("minor_number", self.number))
        self.now: dict[str, Any] = (node.running.get("gpus") or {}).get(str(self.number), {})
        self.kept: dict[str, Any] = (node.kept.get("gpus") or {}).get(str(self.number), {})

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the hardware description."""
        value = self.entry.get(key)
        return default if value is None else value

    def fault(self, name: str) -> dict[str, Any] | None:
        """Return the fault's entry if this GPU has it; a fault without a component applies to every GPU."""
        for entry in self.node.faults:
            component = entry.get("component") or "node"
            if entry.get("fault") == name and component.partition("/")[0] in (f"gpu{self.number}", "node"):
                return entry
        return None

    @property
    def lost(self) -> bool:
        """Return whether it has fallen off the bus."""
        return self.fault("gpu-lost") is not None

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def uuid(self) -> str:
        return str(self.entry["uuid"])

    @property
    def architecture(self) -> str:
        """Return the catalog's name: ``hopper``."""
        return str(self.entry.get("architecture", "")).lower()

    def is_since(self, architecture: str) -> bool:
        """Return True for this architecture and those after it."""
        known = self.architecture if self.architecture in OLDEST_FIRST else "ampere"
        return OLDEST_FIRST.index(known) >= OLDEST_FIRST.index(architecture)

    @property
    def bus_id(self) -> str:
        """Return ``00000000:1B:00.0``, as NVIDIA's tools write it."""
        domain, _, rest = str(self.entry["pci_bus_id"]).partition(":")
        return f"{domain.rjust(8, '0')}:{rest}".upper()

    @property
    def sysfs_id(self) -> str:
        """Return ``0000:1B:00.0``, as messages of nvidia-smi write it."""
        return self.bus_id[4:]

    @property
    def traits(self) -> frozenset[str]:
        """Return the traits that decide between layouts: see ``layout``."""
        named = {
            self.architecture: True,
            "bits": not self.is_since("turing"),
            "tlimit": bool(self.get("tlimits_c")) and self.node_is_since(525),
            "remapper": bool(self.get("remap_banks")) and not self.mig,
        }
        return frozenset(name for name, holds in named.items() if holds)

    def node_is_since(self, branch: int) -> bool:
        """Return whether the driver is of this branch or a later one."""
        return int(self.node.driver.partition(".")[0]) >= branch

    @property
    def has_ecc(self) -> bool:
        return bool(self.get("ecc", True))

    @property
    def ecc(self) -> bool:
        """Return whether ECC is active."""
        return self.has_ecc and bool(self.now.get("ecc", self.kept.get("ecc", True)))

    @property
    def ecc_pending(self) -> bool:
        return self.has_ecc and bool(self.kept.get("ecc", True))

    @property
    def can_mig(self) -> bool:
        return bool(self.get("mig_capable", False))

    @property
    def mig(self) -> bool:
        """Return whether MIG mode is active."""
        return self.can_mig and bool(self.now.get("mig", False))

    @property
    def mig_pending(self) -> bool:
        return self.can_mig and bool(self.now.get("mig_pending", self.mig))

    @property
    def persistence(self) -> bool:
        return bool(self.now.get("persistence", False))

    @property
    def compute_mode(self) -> str:
        return str(self.now.get("compute_mode", "Default"))

    @property
    def power_limit_w(self) -> float:
        return float(self.now.get("power_limit_w", self.get("power_limit_w", 0)))

    @property
    def processes(self) -> list[dict[str, Any]]:
        """Return its processes: pid, name, memory_mib."""
        return [entry for entry in self.node.processes() if entry.get("gpu") == self.number]

    @property
    def busy(self) -> bool:
        return bool(self.processes)

    @property
    def in_fabric(self) -> bool:
        """Return whether it reports a fabric: Hopper and later behind NVSwitches."""
        return self.is_since("hopper") and "fabric-manager" in self.node.services

    @property
    def links(self) -> int:
        return int(self.entry.get("nvlinks") or 0)

    def link_is_down(self, link: int) -> bool:
        """Return whether a fault disabled this link, or all links of the GPU."""
        for entry in self.node.faults:
            if entry.get("fault") != "nvlink-down":
                continue
            gpu, _, which = str(entry.get("component") or "").partition("/")
            if gpu == f"gpu{self.number}" and which in ("", f"link{link}"):
                return True
        return False

    @property
    def pdi(self) -> str:
        """Return a number per chip, derived from the UUID, so that it stays the same."""
        return "0x" + hashlib.sha256(self.uuid.encode()).hexdigest()[:16]
