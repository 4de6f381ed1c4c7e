"""PCI devices, bridges, links and the IOMMU."""

from gpunode.facts.models.base import Fact


class PciLink(Fact):
    """A PCI Express link as reported by one of its two ends. None: not reported, or the function has no link of its
    own."""

    VOLATILE = frozenset({"speed_gt_per_s"})

    speed_gt_per_s: float | None
    speed_max_gt_per_s: float | None
    width: int | None
    width_max: int | None


class PciDevice(Fact):
    """One PCI function. Ids are lower case without ``0x``; ``slot`` is the sysfs form ``0000:1a:00.0``."""

    VOLATILE = frozenset({"power_state"})

    slot: str
    vendor_id: str
    device_id: str
    subsystem_id: str | None
    """``vvvv:dddd``."""
    class_id: str
    """Six hex digits: ``030200``."""
    driver: str | None
    link: PciLink | None = None
    numa_node: int | None = None
    """None if the firmware does not report it."""
    local_cpus: str | None = None
    """``0-31,64-95``."""
    iommu_group: int | None = None
    ports: tuple[str, ...] = ()
    """Slots of the bridges between the device and its root port, the nearest first."""
    power_state: str | None = None
    """``D0``, ``D3hot`` …: in D3 a device does not report its link."""

    @property
    def pci_id(self) -> str:
        """Return vendor and device: ``10de:2330``."""
        return f"{self.vendor_id}:{self.device_id}"

    @property
    def is_nvidia_gpu(self) -> bool:
        """Return True for a display or 3D controller of NVIDIA: class 03xxxx, vendor 10de."""
        return self.vendor_id == "10de" and self.class_id.startswith("03")


class PciPort(Fact):
    """A bridge above a GPU, NIC or NVMe disk: a root port or a port of a switch."""

    slot: str
    vendor_id: str
    device_id: str
    link: PciLink | None
    numa_node: int | None


class PciAcs(Fact):
    """Access Control Services of a bridge, read from its configuration space (root only)."""

    slot: str
    enabled: tuple[str, ...]
    """Of ``SrcValid``, ``TransBlk``, ``ReqRedir``, ``CmpltRedir``, ``UpstreamFwd``, ``EgressCtrl``, ``DirectTrans``."""

    @property
    def redirects(self) -> bool:
        """Return True if traffic between GPUs is redirected to the root complex."""
        return "ReqRedir" in self.enabled or "CmpltRedir" in self.enabled


class Iommu(Fact):
    """The translation of device addresses."""

    units: tuple[str, ...]
    """``dmar0``, ``ivhd1``, ``smmu3.0x...``; empty if no IOMMU is enabled."""
    group_types: dict[int, str]
    """Group number to ``identity`` (passthrough), ``DMA``, ``DMA-FQ`` …, if the kernel reports it."""
