"""NodeFacts: the typed picture of one node.

A field that is None was not seen; ``NodeFacts.gaps`` then holds the reason under the field's name.
An empty tuple was seen and is empty.
"""

from pydantic import Field

from gpunode.facts.models.base import Fact
from gpunode.facts.models.bmc import BmcAccess, BmcEvent, BmcSensor
from gpunode.facts.models.exposure import Address, Listener, PacketFilter
from gpunode.facts.models.gpu import (
    DeviceNode,
    DriverGpu,
    GpuProcess,
    GpuRule,
    GpuSetting,
    GpuSettings,
    LoadedDriver,
    ToolRun,
)
from gpunode.facts.models.host import (
    Cpu,
    CpuFrequency,
    CpuNode,
    CpuSets,
    Disk,
    FileSystem,
    Machine,
    Memory,
    MemoryController,
    NumaNode,
    Nvme,
    StoredMount,
)
from gpunode.facts.models.network import Gid, IbDevice, IbPort, LinkEvent, LinkLog, Nic, RdmaNode
from gpunode.facts.models.pci import Iommu, PciAcs, PciDevice, PciLink, PciPort
from gpunode.facts.models.smi import Nvlink, PeerAccess, Smi, SmiGpu, SmiLog, Topology
from gpunode.facts.models.software import (
    CdiSpec,
    ContainerSettings,
    DkmsModule,
    DockerDaemon,
    LibraryFile,
    ModuleFile,
    Package,
)
from gpunode.facts.models.ssh import KeyFile, SshDaemon
from gpunode.facts.models.system import (
    AutomaticUpdates,
    BootLog,
    BootSetting,
    EnvironmentSetting,
    ForeignInstall,
    Kernel,
    KernelEvent,
    KernelLog,
    Limit,
    Limits,
    OperatingSystem,
    PendingUpdate,
    Process,
    Repository,
    TimeSync,
    Unit,
)
from gpunode.facts.models.workload import MalformedRecord, Record

__all__ = [
    "MAY_BE_NONE",
    "Address",
    "AutomaticUpdates",
    "BmcAccess",
    "BmcEvent",
    "BmcSensor",
    "BootLog",
    "BootSetting",
    "CdiSpec",
    "ContainerSettings",
    "Cpu",
    "CpuFrequency",
    "CpuNode",
    "CpuSets",
    "DeviceNode",
    "Disk",
    "DkmsModule",
    "DockerDaemon",
    "DriverGpu",
    "EnvironmentSetting",
    "Fact",
    "FileSystem",
    "ForeignInstall",
    "Gid",
    "GpuProcess",
    "GpuRule",
    "GpuSetting",
    "GpuSettings",
    "IbDevice",
    "IbPort",
    "Iommu",
    "Kernel",
    "KernelEvent",
    "KernelLog",
    "KeyFile",
    "LibraryFile",
    "Limit",
    "Limits",
    "LinkEvent",
    "LinkLog",
    "Listener",
    "LoadedDriver",
    "Machine",
    "MalformedRecord",
    "Memory",
    "MemoryController",
    "ModuleFile",
    "Nic",
    "NodeFacts",
    "NumaNode",
    "Nvlink",
    "Nvme",
    "OperatingSystem",
    "Package",
    "PacketFilter",
    "PciAcs",
    "PciDevice",
    "PciLink",
    "PciPort",
    "PeerAccess",
    "PendingUpdate",
    "Process",
    "RdmaNode",
    "Record",
    "Repository",
    "Smi",
    "SmiGpu",
    "SmiLog",
    "SshDaemon",
    "TimeSync",
    "ToolRun",
    "Topology",
    "Unit",
]

MAY_BE_NONE = frozenset(
    {
        "loaded_driver",
        "driver_library_version",
        "smi",
        "topology",
        "peer_access",
        "nvlink",
        "nvlink_errors",
        "nvidia_tool_versions",
        "gpu_virtualization",
        "docker",
        "automatic_updates",
        "gpu_settings",
        "tools",
        "packet_filter",
        "peer_memory",
        "pending_updates",
        "ssh_daemon",
        "storage",
    }
)
"""Facts whose None says something as long as they have no gap; any other None was not seen."""


class NodeFacts(Fact):
    """Everything that is known of one node. Fields are documented by their types."""

    host: str
    collected_at: str
    simulated: bool = False
    gaps: dict[str, str] = Field(default_factory=dict)

    os: OperatingSystem | None = None
    architecture: str | None = None
    """Of the kernel: ``x86_64``, ``aarch64``."""
    virtualization: str | None = None
    """``none`` on bare metal, else what systemd-detect-virt prints."""
    systemd: bool | None = None
    """The node was booted with systemd."""
    command_line: str | None = None
    """The kernel's."""
    kernels: tuple[Kernel, ...] | None = None
    pci: tuple[PciDevice, ...] | None = None
    """NVIDIA's functions only, NVSwitches and audio functions among them."""
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
    """Of the driver, CUDA, NCCL, cuDNN, DCGM, and of container engines and runtimes."""
    driver_library_version: str | None = None
    """Of the libnvidia-ml.so.1 that the linker finds; None without a gap: there is none."""
    smi: Smi[SmiLog] | None = None
    """None without a gap: there is no nvidia-smi, or no module for it to talk to."""
    units: tuple[Unit, ...] | None = None
    """Failed units, and those that the node has of the GPU stack, containers, time, RDMA and schedulers. A gap where it
    was not booted with systemd."""
    gpu_processes: tuple[GpuProcess, ...] | None = None
    gpu_settings: GpuSettings | None = None
    """None without a gap: the role gpu_settings sets nothing here."""
    tools: dict[str, str | None] | None = None
    """Programs of the role gpu_tools and where they are; None without a gap: the role installed none."""
    storage: tuple[StoredMount, ...] | None = None
    """Mounts of the role storage; None without a gap: the role set up none."""
    secure_boot: bool | None = None
    """None with a gap where it could not be seen; False where the firmware has none."""
    disk_free_mib: dict[str, int] | None = None
    """Free space under ``/``, ``/boot``, ``/var``, ``/usr`` as far as they exist, whichever file system they are on."""

    # The driver and its GPUs
    driver_gpus: tuple[DriverGpu, ...] | None = None
    """As the module lists them without any tool; empty where no module is loaded."""
    device_nodes: tuple[DeviceNode, ...] | None = None
    """``/dev/nvidia*``; empty: there are none."""
    driver_parameters: dict[str, str] | None = None
    """From ``/proc/driver/nvidia/params``; empty where no module is loaded."""
    module_parameters: dict[str, dict[str, str]] | None = None
    """Module to parameters, of ``nvidia*`` and ``nvidia_*`` in ``/sys/module``."""
    topology: Smi[Topology] | None = None
    """``nvidia-smi topo -m``; this and the next three are None without a gap where ``smi`` is."""
    peer_access: Smi[PeerAccess] | None = None
    """``nvidia-smi topo -p2p r``."""
    nvlink: Smi[Nvlink] | None = None
    """``nvidia-smi nvlink --status``."""
    nvlink_errors: Smi[Nvlink] | None = None
    """``nvidia-smi nvlink -e``."""
    gpu_virtualization: tuple[str, ...] | None = None
    """nvidia-smi's words, one a GPU in its order: ``None``, ``Pass-Through``, ``VGPU``, ``Host VGPU`` …; None without a
    gap where ``smi`` has no document."""
    tool_runs: tuple[ToolRun, ...] | None = None
    """How NVIDIA's tools ended; empty where none was run."""
    nvidia_tool_versions: dict[str, str] | None = None
    """``{"nv-fabricmanager": "580.95.05", "nv-hostengine": "4.4.1", "dcgmi": "4.4.1"}`` in their own words; a program
    that is not installed has no key. None without a gap where no module is loaded: then they were not run."""
    tool_versions: dict[str, str] | None = None
    """``{"docker": "28.5.1", "containerd": …, "podman": …, "runc": …, "crun": …, "nvidia-ctk": …}``: the programs on
    disk; one that is not installed has no key."""

    # What was installed, and by whom
    libraries: tuple[LibraryFile, ...] | None = None
    """libcuda, libnvidia-ml, libnccl, libcudnn: all copies in the linker's cache and in well-known folders."""
    repositories: tuple[Repository, ...] | None = None
    """Package sources that name NVIDIA, CUDA, containers or Docker."""
    foreign_installs: tuple[ForeignInstall, ...] | None = None
    automatic_updates: AutomaticUpdates | None = None
    """None without a gap: no tool for it is installed."""
    pending_updates: tuple[PendingUpdate, ...] | None = None
    """As the role updates has the node record them; None without a gap: it is not in use."""
    reboot_required: tuple[str, ...] | None = None
    """Packages that wait for a reboot (Debian, Ubuntu); empty: none, or the distribution does not say."""

    # Containers
    docker: DockerDaemon | None = None
    """None without a gap: Docker is not installed, or its daemon does not run."""
    containers: ContainerSettings | None = None
    cdi_specs: tuple[CdiSpec, ...] | None = None

    # The PCI bus
    pci_io: tuple[PciDevice, ...] | None = None
    """Network adapters and NVMe controllers, without virtual functions."""
    pci_ports: tuple[PciPort, ...] | None = None
    """Bridges above NVIDIA's functions and those of ``pci_io``."""
    pci_acs: tuple[PciAcs, ...] | None = None
    """Bridges that have ACS. A gap without root."""
    iommu: Iommu | None = None

    # The host
    machine: Machine | None = None
    cpu: Cpu | None = None
    cpu_sets: CpuSets | None = None
    cpu_frequency: CpuFrequency | None = None
    cpus_allowed: int | None = None
    """Logical processors that the probe could run on: fewer than ``cpu.cpus`` where a cpuset confines the session."""
    numa: tuple[NumaNode, ...] | None = None
    memory: Memory | None = None
    memory_controllers: tuple[MemoryController, ...] | None = None
    """Empty where the kernel counts no errors (virtual machines, no EDAC driver)."""
    transparent_hugepages: str | None = None
    """``always``, ``madvise``, ``never``."""
    disks: tuple[Disk, ...] | None = None
    nvmes: tuple[Nvme, ...] | None = None
    file_systems: tuple[FileSystem, ...] | None = None

    # Network
    nics: tuple[Nic, ...] | None = None
    addressed: tuple[str, ...] | None = None
    """Interfaces with an IPv4 network of their own, bonds and bridges among them; the ports of these have none."""
    infiniband: tuple[IbDevice, ...] | None = None
    rdma_nodes: tuple[RdmaNode, ...] | None = None
    peer_memory: bool | None = None
    """Memory of other devices can register with the kernel's RDMA, as nvidia-peermem does it: MLNX_OFED, DOCA-OFED, and
    kernels patched for it. None without a gap: ib_core is not loaded."""
    link_log: LinkLog | None = None
    """By the drivers and daemons that report links (mlx5_core, systemd-networkd)."""

    # What can be reached
    packet_filter: PacketFilter | None = None
    """None without a gap: nft is not installed. A gap without root."""
    listeners: tuple[Listener, ...] | None = None
    addresses: tuple[Address, ...] | None = None
    root_groups: dict[str, tuple[str, ...]] | None = None
    """Members of ``docker``, ``sudo``, ``wheel`` and ``admin``, as far as the node has these groups."""

    ssh_daemon: SshDaemon | None = None
    """None without a gap: the node has no OpenSSH server. This and the next two are gaps without root."""
    private_keys: tuple[KeyFile, ...] | None = None
    """The daemon's host keys, and keys in the homes below /home and in root's."""
    empty_passwords: tuple[str, ...] | None = None
    """Accounts with a shell that need no password."""

    # The management controller
    bmc_access: BmcAccess | None = None
    """Where it is not ``read``, the next three are empty."""
    bmc_fans: tuple[BmcSensor, ...] | None = None
    bmc_power_supplies: tuple[BmcSensor, ...] | None = None
    bmc_events: tuple[BmcEvent, ...] | None = None

    # The system as it is set and as it runs
    lockdown: str | None = None
    """``none``, ``integrity``, ``confidentiality``; ``none`` where the kernel has no such thing."""
    sysctl: dict[str, str] | None = None
    """Kernel settings by name, as far as the kernel has them: ``{"vm.swappiness": "60"}``."""
    boot_settings: tuple[BootSetting, ...] | None = None
    """What files of sysctl.d and tmpfiles.d set of these at the next boot."""
    boot_arguments: tuple[str, ...] | None = None
    """Words that the role kernel_tuning put onto the boot loader's command line; empty: none."""
    limits: Limits | None = None
    environment: tuple[EnvironmentSetting, ...] | None = None
    """Variables of a fixed list (CUDA_LAUNCH_BLOCKING, NCCL_DEBUG …) that are set for the whole system."""
    time_sync: TimeSync | None = None
    uptime_s: float | None = None
    """Seconds since the boot."""
    load_1min: float | None = None
    """The load average of the last minute."""
    kernel_log: KernelLog | None = None
    earlier_boots: tuple[BootLog, ...] | None = None
    """The latest first, as far as the probe looked back and the journal is kept."""
    stuck_processes: tuple[Process, ...] | None = None
    unanswered: tuple[str, ...] | None = None
    """Commands that did not come back in time, as they were called; not those that were left out because of them."""

    # Inside a container
    records: tuple[MalformedRecord | Record, ...] | None = None
    """What workloads recorded on the node, results that are no records first; a gap where none was run."""

    @property
    def gpus_on_bus(self) -> tuple[PciDevice, ...] | None:
        """NVIDIA GPUs among the PCI functions, None where the bus was not seen."""
        if self.pci is None:
            return None
        return tuple(device for device in self.pci if device.is_nvidia_gpu)

    @property
    def running_kernel(self) -> str | None:
        """Release of the kernel that the node runs; None where it is unknown."""
        return next((kernel.release for kernel in self.kernels or () if kernel.running), None)

    @property
    def smi_gpus(self) -> tuple[SmiGpu, ...]:
        """The GPUs that nvidia-smi reports; none where it does not answer."""
        return self.smi.document.gpus if self.smi and self.smi.document else ()

    @property
    def gpu_links(self) -> dict[str, dict[str, str]]:
        """What connects every two elements by ``nvidia-smi topo -m``; empty where it does not answer."""
        return self.topology.document.links if self.topology and self.topology.document else {}

    def gap(self, field: str) -> str | None:
        """Why ``field`` was not seen; None where it was."""
        return self.gaps.get(field)
