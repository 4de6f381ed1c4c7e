"""The simulated node as NVIDIA's tools see it: loaded module, library on disk, GPUs and their state."""

from __future__ import annotations

import os
import re
from typing import Any

from . import state


def numbers(version: str) -> tuple[int, ...]:
    """Parse ``580.95.05`` to (580, 95, 5)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def in_range(versions: str, version: tuple[int, ...]) -> bool:
    """Return whether ``580-``, ``-565`` or ``535-545`` contains the version; an empty range contains all."""
    if not versions:
        return True
    first, _, last = versions.partition("-")
    if first and version < numbers(first):
        return False
    bound = numbers(last)
    return not bound or version[: len(bound)] <= bound


LIBRARY_FOLDERS = ("usr/lib/{arch}-linux-gnu", "usr/lib64", "usr/lib", "lib/{arch}-linux-gnu", "usr/local/lib")
DEVICE_OWNER = "etc/gpunode/lab-node"
MODPROBE_S = 60
OLDEST_FIRST = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin")
NAMES = {"ada": "Ada Lovelace"}


class NodeSnapshot:
    """One look at the node. ``release`` is the version of the loaded module, None if none is loaded."""

    def __init__(self) -> None:
        try:
            self.hardware: dict[str, Any] = state.hardware()
        except OSError:
            self.hardware = {"gpus": []}
        self.running = state.running()
        self.kept = state.kept()
        self.faults = state.faults()
        module = self.running.get("module") or {}
        self.release: str | None = module.get("version")
        self.flavour: str | None = module.get("flavour")
        self.library = library_release()
        gpus = [SimulatedGpu(self, entry) for entry in self.hardware.get("gpus", [])]
        self.gpus = [gpu for gpu in gpus if self._is_visible(gpu)]
        for index, gpu in enumerate(self.gpus):
            gpu.index = index

    @property
    def in_container(self) -> bool:
        """Return whether the tool runs in a container of the node."""
        return not (state.ROOT / DEVICE_OWNER).exists()

    def _is_visible(self, gpu: SimulatedGpu) -> bool:
        """Return whether the GPU is visible: on the node if the driver is bound to it, in a container if it has its
        device file.
        """
        taken = self.running.get("gpus")
        if taken and str(gpu.number) not in taken:
            return False
        if not self.in_container:
            return True
        return (state.ROOT / f"dev/nvidia{gpu.minor}").exists()

    @property
    def driver(self) -> str:
        """Return the module's version, which decides the layout; the library's if no module is loaded."""
        return self.release or self.library or "580.95.05"

    @property
    def cuda(self) -> str:
        """Return ``13.0``, the CUDA version of this driver; for a branch between two of the description, the older
        one's.
        """
        listed: dict[str, str] = self.hardware.get("cuda_of_branch") or {}
        known = [int(branch) for branch in listed if int(branch) <= numbers(self.driver)[0]]
        return listed[str(max(known))] if known else "N/A"

    @property
    def services(self) -> frozenset[str]:
        """Return the services that the platform needs in addition to the driver: ``fabric-manager``, ``nvlsm``,
        ``imex``.
        """
        named = self.hardware.get("services")
        if named is not None:
            return frozenset(named)
        return frozenset({"fabric-manager"} if self.hardware.get("nvswitches") else ())

    def has_fault(self, fault: str) -> bool:
        """Return whether this fault of the whole node is set."""
        return any(entry.get("fault") == fault for entry in self.faults)

    def processes(self) -> list[dict[str, Any]]:
        """Return the processes on the visible GPUs; in a container those of other containers are hidden."""
        if self.in_container:
            return []
        listed: list[dict[str, Any]] = self.running.get("processes") or []
        return [entry for entry in listed if (state.ROOT / f"proc/{entry.get('pid')}").exists()]


def loaded() -> NodeSnapshot:
    """Return the node after a first call of the driver's library: root's first call loads the module."""
    node = NodeSnapshot()
    modprobe = state.path("/usr/sbin/modprobe")
    if node.library is None or node.release is not None or os.geteuid() != 0 or not modprobe.exists():
        return node
    import subprocess  # noqa: PLC0415 (only the first call loads the module)

    subprocess.run(
        [str(modprobe), "nvidia"],
        check=False,
        timeout=MODPROBE_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return NodeSnapshot()


def library_release() -> str | None:
    """Return the release in the name of the file that libnvidia-ml.so.1 links to; None if there is none."""
    arch = os.uname().machine
    for folder in LIBRARY_FOLDERS:
        link = state.ROOT / folder.format(arch=arch) / "libnvidia-ml.so.1"
        if link.exists():
            match = re.search(r"\.so\.(\d+(?:\.\d+)+)$", link.resolve().name)
            if match:
                return match[1]
    return None


def package_release() -> str | None:
    """Return the upstream version of the running tool's package: no epoch, no revision."""
    version = os.environ.get("GPUNODE_LAB_PACKAGE_VERSION", "")
    match = re.search(r"(?:^|:)(\d+(?:\.\d+)+)", version)
    return match[1] if match else None


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
        import hashlib  # noqa: PLC0415 (loads libcrypto, and few layouts have this line)

        return "0x" + hashlib.sha256(self.uuid.encode()).hexdigest()[:16]
