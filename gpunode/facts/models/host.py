"""The host's hardware and how it is set: processors, memory, disks."""

from typing import Literal

from gpunode.facts.models.base import Fact


class Machine(Fact):
    """What the firmware calls the machine (DMI). Serial numbers are not collected."""

    vendor: str | None
    product: str | None
    board: str | None
    bios_version: str | None
    bios_date: str | None


class CpuNode(Fact):
    """The processors of one NUMA node, as lscpu lists them."""

    node: int
    cpus: str
    """``0-31,64-95``; empty for a node of memory alone."""


class Cpu(Fact):
    """From ``lscpu``."""

    architecture: str
    model_name: str | None
    cpus: int
    """Logical processors that are online."""
    sockets: int | None
    cores_per_socket: int | None
    threads_per_core: int | None
    nodes: tuple[CpuNode, ...] = ()


class CpuSets(Fact):
    """Numbers of the kernel's processors; ``possible`` counts places for hot-plug beside those that are ``present``."""

    online: tuple[int, ...]
    present: tuple[int, ...]
    possible: tuple[int, ...]
    smt: str | None
    """``on``, ``off``, ``forceoff``, ``notsupported``; None where the kernel has no such control."""


class CpuFrequency(Fact):
    """How processors choose their clock. Empty dictionaries: the kernel does not (most virtual machines)."""

    driver: str | None
    """``intel_pstate``, ``acpi-cpufreq``, ``amd-pstate-epp`` …"""
    governors: dict[str, int]
    """``{"performance": 128}``: processors by governor."""
    preferences: dict[str, int]
    """``{"balance_performance": 128}``: processors by energy preference."""


class NumaNode(Fact):
    """One NUMA node, from sysfs."""

    node: int
    cpus: str
    """``0-31,64-95``; empty for a node of memory alone."""
    memory_total_mib: int | None
    memory_free_mib: int | None
    distances: tuple[int, ...]
    """To each node, in ascending order of their numbers."""


class Memory(Fact):
    """From ``/proc/meminfo``."""

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

    name: str
    """``nvme0``."""
    model: str | None
    firmware: str | None
    state: str | None
    """``live``."""
    slot: str | None
    numa_node: int | None
    health: Literal["read", "no-program", "no-permission", "unknown"] = "unknown"
    """Whether ``nvme smart-log`` printed its health, else what the node reported instead."""
    critical_warning: int | None = None
    """A bit field; 0 is good."""
    media_errors: int | None = None
    percentage_used: int | None = None
    available_spare_percent: int | None = None
    temperature_c: int | None = None


class StoredMount(Fact):
    """One mount of the role storage: what was recorded, and what is there."""

    path: str
    source: str
    type: str
    remote: bool
    options: tuple[str, ...]
    """Those of the recorded ones that the kernel shows as they are."""
    mounted_type: str | None
    """None: nothing is mounted."""
    mounted_options: tuple[str, ...]
    same_device: bool | None
    """None where the source is no UUID."""
    size_mib: int | None
    free_mib: int | None
    problem: str | None
    """Why it does not answer."""


class FileSystem(Fact):
    """One local file system, from ``df``."""

    mount: str
    type: str
    size_mib: int
    free_mib: int
    inodes_free_percent: int | None
    """None where it does not count them (btrfs, vfat)."""
