"""NodeFacts: the typed picture of one node.

A field that is None was not seen; ``NodeFacts.gaps`` then holds the reason under the field's name.
An empty tuple was seen and is empty.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Fact(BaseModel):
    """Base of all facts: immutable, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OperatingSystem(Fact):
    """From os-release."""

    id: str
    version_id: str | None
    codename: str | None
    pretty_name: str | None
    id_like: tuple[str, ...] = ()


class Kernel(Fact):
    """One kernel of the node: installed, running, or both."""

    release: str
    package: str | None
    """The installed package that carries its image, else its headers; None where it belongs to none (a container's
    host, a hand-built one)."""
    running: bool
    newest: bool
    """The newest among those with an image; where none has one (a container), among those with headers."""
    headers: bool
    """``/lib/modules/RELEASE/build`` leads to a tree that a module can be built against."""
    image: bool = True
    """The kernel itself is installed, not its headers alone."""


class PciDevice(Fact):
    """One PCI function. Ids are lower case without ``0x``; ``slot`` is the sysfs form ``0000:1a:00.0``."""

    slot: str
    vendor_id: str
    device_id: str
    subsystem_id: str | None
    """``vvvv:dddd``."""
    class_id: str
    """Six hex digits: ``030200``."""
    driver: str | None

    @property
    def is_nvidia_gpu(self) -> bool:
        """A display or 3D controller of NVIDIA: class 03xxxx, vendor 10de."""
        return self.vendor_id == "10de" and self.class_id.startswith("03")


class Package(Fact):
    """One package of the node's package database, as far as it belongs to the GPU stack."""

    name: str
    version: str
    architecture: str
    source: str
    """Name of the source package."""
    maintainer: str
    installed: bool
    """False for what is half-installed or removed with its configuration left."""
    state: str
    """The package manager's own words: ``install ok installed``."""
    held: bool


class DkmsModule(Fact):
    """One line of ``dkms status``. ``kernel`` is None for a module that was added and never built."""

    name: str
    version: str
    kernel: str | None
    architecture: str | None
    state: str
    """``added``, ``built``, ``installed``; the warning that dkms appends is cut off."""
    note: str | None = None


class ModuleFile(Fact):
    """What ``modinfo`` says of the nvidia module on disk for one kernel."""

    kernel: str
    path: str
    version: str | None
    vermagic: str | None
    flavour: str | None
    """``open`` or ``proprietary``, from the licence."""
    signed: bool


class LoadedDriver(Fact):
    """The NVIDIA kernel module in memory, from ``/proc/driver/nvidia/version`` or ``/sys/module/nvidia``."""

    version: str
    flavour: str | None


class Unit(Fact):
    """One systemd unit."""

    name: str
    load: str
    active: str
    sub: str
    enabled: str | None = None


# As /proc/PID/comm has them, 15 characters long.
_DAEMONS = frozenset({"nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "nvidia-imex", "nvlsm", "dcgm-exporter"})


class GpuProcess(Fact):
    """One process that holds a GPU."""

    pid: int
    name: str | None
    type: str | None
    """nvidia-smi's word: ``C``, ``G``, ``C+G``, ``M+C``; None where nvidia-smi does not list the process."""
    user: str | None = None
    gpu: str | None = None
    """``gpu3``; None where it is not known which."""
    devices: tuple[str, ...] = ()
    """The device files that it holds, as far as they could be seen."""

    @property
    def computes(self) -> bool:
        """True for a process that makes a GPU busy: a compute process, or one with CUDA's memory device open."""
        if self.type is not None:
            return "C" in self.type
        return self.name not in _DAEMONS and any(device.startswith("/dev/nvidia-uvm") for device in self.devices)


class Smi(Fact):
    """``nvidia-smi -q -x`` as parsed: exactly one of ``document`` and ``error`` is set."""

    document: dict[str, Any] | None = None
    """The shape of ``gpunode parse nvidia-smi-xml``."""
    error_kind: str | None = None
    error_message: str | None = None
    error_nvml_version: str | None = None


class NodeFacts(Fact):
    """Everything that is known of one node. Fields are documented by their types."""

    host: str
    collected_at: str
    simulated: bool = False
    gaps: dict[str, str] = {}

    os: OperatingSystem | None = None
    architecture: str | None = None
    virtualization: str | None = None
    """``none`` on bare metal, else what systemd-detect-virt prints."""
    systemd: bool | None = None
    """The node was booted with systemd."""
    command_line: str | None = None
    """The kernel's."""
    kernels: tuple[Kernel, ...] | None = None
    pci: tuple[PciDevice, ...] | None = None
    """NVIDIA's functions only."""
    modules: tuple[str, ...] | None = None
    """Names of the loaded kernel modules."""
    loaded_driver: LoadedDriver | None = None
    """None without a gap: no NVIDIA module is loaded."""
    nouveau_blacklisted: bool | None = None
    """``blacklist nouveau`` (or ``install nouveau /bin/false``, ``alias nouveau off``) in a modprobe.d folder, or
    ``modprobe.blacklist=nouveau`` on the kernel's command line."""
    module_files: tuple[ModuleFile, ...] | None = None
    dkms: tuple[DkmsModule, ...] | None = None
    packages: tuple[Package, ...] | None = None
    driver_library_version: str | None = None
    """Of the libnvidia-ml.so.1 that the linker finds; None without a gap: there is none."""
    smi: Smi | None = None
    """None without a gap: there is no nvidia-smi, or no module for it to talk to."""
    units: tuple[Unit, ...] | None = None
    """Failed units, and those of the GPU stack that the node has. A gap where it was not booted with systemd."""
    gpu_processes: tuple[GpuProcess, ...] | None = None
    secure_boot: bool | None = None
    """None with a gap where it could not be seen; False where the firmware has none."""
    disk_free_mib: dict[str, int] | None = None
    """Free space under ``/``, ``/boot``, ``/var``, ``/usr`` as far as they exist, whichever file system they are on."""

    @property
    def gpus_on_bus(self) -> tuple[PciDevice, ...] | None:
        """NVIDIA GPUs among the PCI functions, None where the bus was not seen."""
        if self.pci is None:
            return None
        return tuple(device for device in self.pci if device.is_nvidia_gpu)

    def gap(self, field: str) -> str | None:
        """Why ``field`` was not seen; None where it was."""
        return self.gaps.get(field)
