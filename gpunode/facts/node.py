"""NodeFacts: the typed facts of one node.

A field that is None is unknown; ``NodeFacts.gaps`` then has the reason under the field's name. An empty tuple was read
and is empty.
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
    GpuUsage,
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
    LocalMount,
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
    CdiNode,
    CdiSpec,
    ContainerDevices,
    ContainerSettings,
    DkmsModule,
    DockerDaemon,
    Initramfs,
    LibraryFile,
    ModuleFile,
    ModuleImage,
    Needrestart,
    Package,
)
from gpunode.facts.models.ssh import KeyFile, SshDaemon
from gpunode.facts.models.system import (
    AutomaticUpdates,
    BootLog,
    BootSetting,
    EnvironmentSetting,
    FailedRevert,
    ForeignInstall,
    Kernel,
    KernelEvent,
    KernelLog,
    Limit,
    Limits,
    ModuleBlock,
    NextBoot,
    OperatingSystem,
    OwnName,
    PendingUpdate,
    Process,
    Repository,
    Slurm,
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
    "CdiNode",
    "CdiSpec",
    "ContainerDevices",
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
    "FailedRevert",
    "FileSystem",
    "ForeignInstall",
    "Gid",
    "GpuProcess",
    "GpuRule",
    "GpuSetting",
    "GpuSettings",
    "GpuUsage",
    "IbDevice",
    "IbPort",
    "Initramfs",
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
    "LocalMount",
    "Machine",
    "MalformedRecord",
    "Memory",
    "MemoryController",
    "ModuleBlock",
    "ModuleFile",
    "ModuleImage",
    "Needrestart",
    "NextBoot",
    "Nic",
    "NodeFacts",
    "NumaNode",
    "Nvlink",
    "Nvme",
    "OperatingSystem",
    "OwnName",
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
    "Slurm",
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
        "dcgm_engine",
        "needrestart",
        "slurm",
        "gpu_usage_again",
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
"""Fields for which None without a gap has a meaning of its own; any other None is unknown."""


class NodeFacts(Fact):
    """All facts of one node. Fields are documented by their types."""

    VOLATILE = frozenset(
        {
            *("host", "collected_at", "simulated", "gaps", "uptime_s", "load_1min", "disk_free_mib", "tool_runs"),
            *("kernel_log", "link_log", "earlier_boots", "bmc_events"),  # logs: the checks evaluate them
            *("gpu_processes", "gpu_usage_again", "stuck_processes", "unanswered", "listeners", "addresses"),
            *("records", "cpus_allowed"),  # of the workload and of the session
            *("container_devices", "cloud_init_running"),
        }
    )

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
    """True if the node was booted with systemd."""
    command_line: str | None = None
    """The kernel's command line."""
    kernels: tuple[Kernel, ...] | None = None
    pci: tuple[PciDevice, ...] | None = None
    """Functions of NVIDIA only, including NVSwitches and audio functions."""
    modules: tuple[str, ...] | None = None
    """Names of the loaded kernel modules."""
    loaded_driver: LoadedDriver | None = None
    """None without a gap: no NVIDIA module is loaded."""
    nouveau_blacklisted: bool | None = None
    """``blacklist nouveau`` (or ``install nouveau /bin/false``, ``alias nouveau off``) in a modprobe.d folder, or
    ``modprobe.blacklist=nouveau`` on the kernel's command line."""
    module_files: tuple[ModuleFile, ...] | None = None
    module_blocks: tuple[ModuleBlock, ...] | None = None
    """Lines of modprobe.d that keep nvidia or nvidia-uvm from loading."""
    initramfs: tuple[Initramfs, ...] | None = None
    """Of the kernels that have a GPU module on disk."""
    next_boot: NextBoot | None = None
    """The kernel that the boot loader starts next, by its own settings; a gap where these are unknown."""
    dkms: tuple[DkmsModule, ...] | None = None
    packages: tuple[Package, ...] | None = None
    """Of the driver, CUDA, NCCL, cuDNN, DCGM, and of container engines and runtimes."""
    driver_library_version: str | None = None
    """Version of the libnvidia-ml.so.1 that the linker finds; None without a gap: there is none."""
    smi: Smi[SmiLog] | None = None
    """None without a gap: nvidia-smi is not installed, or no module is loaded."""
    units: tuple[Unit, ...] | None = None
    """Failed units, and installed units of the GPU stack, containers, time, RDMA and schedulers. A gap if the node was
    not booted with systemd."""
    gpu_processes: tuple[GpuProcess, ...] | None = None
    gpu_settings: GpuSettings | None = None
    """None without a gap: the role gpu_settings sets nothing on this node."""
    tools: dict[str, str | None] | None = None
    """Programs of the role gpu_tools and their paths; None without a gap: the role installed none."""
    storage: tuple[StoredMount, ...] | None = None
    """Mounts of the role storage; None without a gap: the role set up none."""
    secure_boot: bool | None = None
    """None with a gap: could not be determined; False if the firmware has no Secure Boot."""
    disk_free_mib: dict[str, int] | None = None
    """Free space under ``/``, ``/boot``, ``/var``, ``/usr`` if they exist, whichever file system they are on."""

    # The driver and its GPUs
    driver_gpus: tuple[DriverGpu, ...] | None = None
    """As the module lists them without NVIDIA's tools; empty if no module is loaded."""
    device_nodes: tuple[DeviceNode, ...] | None = None
    """``/dev/nvidia*``; empty if there are none."""
    driver_parameters: dict[str, str] | None = None
    """From ``/proc/driver/nvidia/params``; empty if no module is loaded."""
    module_parameters: dict[str, dict[str, str]] | None = None
    """Parameters by module, of ``nvidia*`` and ``nvidia_*`` in ``/sys/module``."""
    topology: Smi[Topology] | None = None
    """``nvidia-smi topo -m``; this and the next three are None without a gap if ``smi`` is."""
    peer_access: Smi[PeerAccess] | None = None
    """``nvidia-smi topo -p2p r``."""
    nvlink: Smi[Nvlink] | None = None
    """``nvidia-smi nvlink --status``."""
    nvlink_errors: Smi[Nvlink] | None = None
    """``nvidia-smi nvlink -e``."""
    gpu_virtualization: tuple[str, ...] | None = None
    """As nvidia-smi prints it, one value per GPU in its order: ``None``, ``Pass-Through``, ``VGPU``, ``Host VGPU`` …;
    None without a gap if ``smi`` has no document."""
    gpu_usage_again: tuple[GpuUsage, ...] | None = None
    """A second sample, 10 s after that of nvidia-smi; None without a gap: no two GPUs were in full use without reading
    memory."""
    tool_runs: tuple[ToolRun, ...] | None = None
    """Exit statuses of NVIDIA's tools; empty if none was run."""
    nvidia_tool_versions: dict[str, str] | None = None
    """``{"nv-fabricmanager": "580.95.05", "nv-hostengine": "4.4.1", "dcgmi": "4.4.1"}`` as they print it; a program
    that is not installed has no key. None without a gap if no module is loaded: then they were not run."""
    dcgm_engine: str | None = None
    """Version of the running DCGM host engine, by ``dcgmi -v``; None without a gap: none runs."""
    tool_versions: dict[str, str] | None = None
    """``{"docker": "28.5.1", "containerd": …, "podman": …, "runc": …, "crun": …, "nvidia-ctk": …}``: the programs on
    disk; a program that is not installed has no key."""

    # Installed software and its installers
    libraries: tuple[LibraryFile, ...] | None = None
    """libcuda, libnvidia-ml, libnccl, libcudnn: all copies in the linker's cache and in well-known folders."""
    repositories: tuple[Repository, ...] | None = None
    """Package sources that name NVIDIA, CUDA, containers or Docker."""
    foreign_installs: tuple[ForeignInstall, ...] | None = None
    automatic_updates: AutomaticUpdates | None = None
    """None without a gap: no tool for automatic updates is installed."""
    needrestart: Needrestart | None = None
    """None without a gap: needrestart is not installed."""
    pending_updates: tuple[PendingUpdate, ...] | None = None
    """As the role updates has the node record them; None without a gap: the role is not in use."""
    failed_reverts: tuple[FailedRevert, ...] | None = None
    """Unconfirmed changes of roles (SSH, accounts, firewall) that the node could not revert yet."""
    reboot_required: tuple[str, ...] | None = None
    """Packages that require a reboot (Debian, Ubuntu); empty: none, or the distribution does not record them."""

    # Containers
    docker: DockerDaemon | None = None
    """None without a gap: Docker is not installed, or its daemon is not running."""
    containers: ContainerSettings | None = None
    cdi_specs: tuple[CdiSpec, ...] | None = None
    container_devices: tuple[ContainerDevices, ...] | None = None
    """Running containers with GPUs, if systemd manages their cgroups. A gap without root."""

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
    """Empty if the kernel counts no errors (virtual machines, no EDAC driver)."""
    transparent_hugepages: str | None = None
    """``always``, ``madvise``, ``never``."""
    disks: tuple[Disk, ...] | None = None
    nvmes: tuple[Nvme, ...] | None = None
    file_systems: tuple[FileSystem, ...] | None = None
    local_mounts: tuple[LocalMount, ...] | None = None

    # Network
    nics: tuple[Nic, ...] | None = None
    addressed: tuple[str, ...] | None = None
    """Interfaces with an IPv4 network of their own, including bonds and bridges; the ports of these have none."""
    infiniband: tuple[IbDevice, ...] | None = None
    rdma_nodes: tuple[RdmaNode, ...] | None = None
    peer_memory: bool | None = None
    """True if memory of other devices can register with the kernel's RDMA, as nvidia-peermem does: MLNX_OFED,
    DOCA-OFED, and kernels patched for it. None without a gap: ib_core is not loaded."""
    peer_memory_clients: tuple[str, ...] | None = None
    """Modules that registered with it, by ``/sys/kernel/mm/memory_peers``: ``nv_mem``, ``nv_mem_nc``."""
    own_name: OwnName | None = None
    link_log: LinkLog | None = None
    """From the drivers and daemons that report links (mlx5_core, systemd-networkd)."""

    # Network exposure
    packet_filter: PacketFilter | None = None
    """None without a gap: nft is not installed. A gap without root."""
    listeners: tuple[Listener, ...] | None = None
    addresses: tuple[Address, ...] | None = None
    root_groups: dict[str, tuple[str, ...]] | None = None
    """Members of ``docker``, ``sudo``, ``wheel`` and ``admin``, if the node has these groups."""

    ssh_daemon: SshDaemon | None = None
    """None without a gap: the node has no OpenSSH server. This and the next two are gaps without root."""
    private_keys: tuple[KeyFile, ...] | None = None
    """The daemon's host keys, and keys in the home folders below /home and in root's."""
    empty_passwords: tuple[str, ...] | None = None
    """Accounts with a shell that need no password."""

    # The management controller
    bmc_access: BmcAccess | None = None
    """If it is not ``read``, the next three are empty."""
    bmc_fans: tuple[BmcSensor, ...] | None = None
    bmc_power_supplies: tuple[BmcSensor, ...] | None = None
    bmc_events: tuple[BmcEvent, ...] | None = None

    # System settings and state
    lockdown: str | None = None
    """``none``, ``integrity``, ``confidentiality``; ``none`` if the kernel does not support lockdown."""
    sysctl: dict[str, str] | None = None
    """Kernel settings by name, if the kernel has them: ``{"vm.swappiness": "60"}``."""
    boot_settings: tuple[BootSetting, ...] | None = None
    """Values that files of sysctl.d and tmpfiles.d set for these at the next boot."""
    boot_arguments: tuple[str, ...] | None = None
    """Arguments that the role kernel_tuning added to the boot loader's command line; empty: none."""
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
    """The latest first, limited by the probe and by the journal."""
    stuck_processes: tuple[Process, ...] | None = None
    cloud_init_running: bool | None = None
    """True while cloud-init sets the node up; False: it is done, or not installed."""
    slurm: Slurm | None = None
    """None without a gap: the node has no slurm.conf."""
    unanswered: tuple[str, ...] | None = None
    """Commands that did not end in time, as they were called, without those that were not run because of them."""

    # Inside a container
    records: tuple[MalformedRecord | Record, ...] | None = None
    """Records of workloads on the node, malformed results first; a gap if no workload was run."""

    @property
    def gpus_on_bus(self) -> tuple[PciDevice, ...] | None:
        """Return the NVIDIA GPUs among the PCI functions; None if the bus could not be read."""
        if self.pci is None:
            return None
        return tuple(device for device in self.pci if device.is_nvidia_gpu)

    @property
    def running_kernel(self) -> str | None:
        """Return the release of the running kernel; None if it is unknown."""
        return next((kernel.release for kernel in self.kernels or () if kernel.running), None)

    @property
    def smi_gpus(self) -> tuple[SmiGpu, ...]:
        """Return the GPUs that nvidia-smi reports; empty if it fails."""
        return self.smi.document.gpus if self.smi and self.smi.document else ()

    @property
    def gpu_links(self) -> dict[str, dict[str, str]]:
        """Return the link between every two elements of ``nvidia-smi topo -m``; empty if it fails."""
        return self.topology.document.links if self.topology and self.topology.document else {}

    def gap(self, field: str) -> str | None:
        """Return the reason why ``field`` is unknown; None if it is known."""
        return self.gaps.get(field)
