"""Hardware and settings of the host: processors, memory, disks."""

from typing import Literal

from gpunode.facts.models.base import Fact


class Machine(Fact):
    """The machine's names in the firmware (DMI). Serial numbers are not collected."""

    vendor: str | None
    product: str | None
    board: str | None
    bios_version: str | None
    bios_date: str | None


class CpuNode(Fact):
    """The processors of one NUMA node, as lscpu lists them."""

    node: int
    cpus: str
    """``0-31,64-95``; empty for a node that has memory only."""


class Cpu(Fact):
    """The processors, from ``lscpu``."""

    architecture: str
    model_name: str | None
    cpus: int
    """Logical processors that are online."""
    sockets: int | None
    cores_per_socket: int | None
    threads_per_core: int | None
    nodes: tuple[CpuNode, ...] = ()


class CpuSets(Fact):
    """Numbers of the kernel's processors; ``possible`` counts hot-plug slots in addition to those that are
    ``present``."""

    online: tuple[int, ...]
    present: tuple[int, ...]
    possible: tuple[int, ...]
    smt: str | None
    """``on``, ``off``, ``forceoff``, ``notsupported``; None if the kernel has no such control."""
    first_core: tuple[int, ...] | None = None
    """Processors of the core of processor 0: ``(0, 64)``, ``(0, 1)``; None: an older probe, or unknown."""

    def core_of(self, cpu: int) -> int:
        """Return the core of a processor, by its first processor; every core is numbered as that of processor 0."""
        first = self.first_core or (0,)
        step = first[1] - first[0] if len(first) > 1 else 1
        return cpu // (step * len(first)) * step * len(first) + cpu % step


class CpuFrequency(Fact):
    """Frequency control of the processors. Empty dictionaries: the kernel does not control it (most virtual
    machines)."""

    driver: str | None
    """``intel_pstate``, ``acpi-cpufreq``, ``amd-pstate-epp`` …"""
    governors: dict[str, int]
    """``{"performance": 128}``: processors by governor."""
    preferences: dict[str, int]
    """``{"balance_performance": 128}``: processors by energy preference."""


class NumaNode(Fact):
    """One NUMA node, from sysfs."""

    VOLATILE = frozenset({"memory_free_mib"})

    node: int
    cpus: str
    """``0-31,64-95``; empty for a node that has memory only."""
    memory_total_mib: int | None
    memory_free_mib: int | None
    distances: tuple[int, ...]
    """To each node, in ascending order of their numbers."""


class Memory(Fact):
    """Memory and swap, from ``/proc/meminfo``."""

    VOLATILE = frozenset({"available_mib", "swap_free_mib", "hugepages_free", "committed_mib"})

    total_mib: int
    available_mib: int | None
    swap_total_mib: int | None
    swap_free_mib: int | None
    hugepages_total: int | None
    hugepages_free: int | None
    hugepage_size_kib: int | None
    committed_mib: int | None = None


class MemoryController(Fact):
    """Error counts of one memory controller since boot (EDAC)."""

    COUNTERS = frozenset({"corrected", "uncorrected"})

    name: str
    """``mc0``."""
    model: str | None
    corrected: int | None
    uncorrected: int | None


class Disk(Fact):
    """One physical block device."""

    name: str
    """``nvme0n1``, ``sda``."""
    model: str | None
    size_bytes: int
    rotational: bool | None
    read_only: bool | None


class Nvme(Fact):
    """One NVMe controller. Its health is None unless ``health`` is ``read``."""

    VOLATILE = frozenset({"available_spare_percent", "temperature_c"})
    COUNTERS = frozenset({"media_errors", "percentage_used"})

    name: str
    """``nvme0``."""
    model: str | None
    firmware: str | None
    state: str | None
    """``live``."""
    slot: str | None
    numa_node: int | None
    health: Literal["read", "no-program", "no-permission", "unknown"] = "unknown"
    """``read``: ``nvme smart-log`` printed the health; otherwise the reason why it is unknown."""
    critical_warning: int | None = None
    """A bit field; 0 is good."""
    media_errors: int | None = None
    percentage_used: int | None = None
    available_spare_percent: int | None = None
    temperature_c: int | None = None


class StoredMount(Fact):
    """One mount of the role storage: as recorded, and as found."""

    VOLATILE = frozenset({"free_mib"})

    path: str
    source: str
    type: str
    remote: bool
    options: tuple[str, ...]
    """The recorded options that the kernel shows unchanged."""
    mounted_type: str | None
    """None: nothing is mounted."""
    mounted_options: tuple[str, ...]
    same_device: bool | None
    """None if the source is not a UUID."""
    size_mib: int | None
    free_mib: int | None
    problem: str | None
    """Why the mount does not respond."""


class LocalMount(Fact):
    """The root, or a mounted file system of ``/etc/fstab`` on a block device."""

    path: str
    source: str
    type: str
    read_only: bool
    """Of the file system itself: the kernel sets it after an error, also if the mount still has ``rw``."""
    fstab_read_only: bool | None
    """As ``/etc/fstab`` requests it; None: it has no entry."""


class FileSystem(Fact):
    """One local file system, from ``df``."""

    VOLATILE = frozenset({"free_mib", "inodes_free_percent"})

    mount: str
    type: str
    size_mib: int
    free_mib: int
    inodes_free_percent: int | None
    """None if the file system does not count inodes (btrfs, vfat)."""
