"""The PCI bus: NVIDIA's functions, network adapters and NVMe controllers, the bridges above them, and the IOMMU."""

import re

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact

_FOLDER = "/sys/bus/pci/devices/"
_SLOT = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.I)
_IDS = re.compile(r"([0-9a-f]{4}):([0-9a-f]{4})", re.I)
_CLASS = re.compile(r"[0-9a-f]{1,6}", re.I)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s.*")
_HEX = re.compile(r"[0-9a-f]{4}")
_SOURCE = "pci_functions"
_ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
_MOST = 1024
"""Sixteen GPUs with their audio functions and switches are about fifty; virtual functions are at most some hundreds."""
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


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


def read_pci(bundle: BundleReader) -> tuple[PciDevice, ...]:
    """Return all functions of vendor 10de. The probe lists every function and keeps the files of the relevant ones
    only."""
    devices = tuple(device for device in _functions(bundle) if device.vendor_id == "10de")
    if len(devices) > _MOST:
        raise ParseError(f"expected at most {_MOST} functions of NVIDIA on the PCI bus, found {len(devices)}")
    return devices


def read_pci_io(bundle: BundleReader) -> tuple[PciDevice, ...]:
    """Return network adapters and NVMe controllers of all vendors; NVIDIA's own ConnectX have Mellanox's vendor id."""
    _require_places(bundle)
    return tuple(device for device in _functions(bundle) if device.class_id.startswith(("02", "0108")))


def _require_places(bundle: BundleReader) -> None:
    """Raise UnknownFactError for a bundle of an earlier probe, which has only NVIDIA's functions, without their
    paths."""
    if bundle.folder(_FOLDER) and not bundle.ran("pci-paths"):
        raise bundle.not_collected()


def _functions(bundle: BundleReader) -> list[PciDevice]:
    devices: list[PciDevice] = bundle.once("pci", lambda: _read_functions(bundle))
    return devices


def _read_functions(bundle: BundleReader) -> list[PciDevice]:
    slots = bundle.folder(_FOLDER)
    if slots is None:
        raise UnknownFactError(f"{_FOLDER} does not exist: the PCI bus cannot be read")
    bundle.require_finished(_SOURCE)
    places = _places(bundle)
    devices = []
    for slot in slots:
        path = f"{_FOLDER}{slot}/uevent"
        text = bundle.text(path) if bundle.has_file(path) else None
        if text is not None:
            above, group = places.get(slot, ((), None))
            devices.append(_with_details(bundle, parse_uevent(text, slot), slot, above, group))
    return devices


def _with_details(
    bundle: BundleReader, device: PciDevice, slot: str, above: tuple[str, ...], group: int | None
) -> PciDevice:
    folder = f"{_FOLDER}{slot}/"
    return device.model_copy(
        update={
            "link": _link(bundle, folder),
            "numa_node": _numa_node(bundle, folder),
            "local_cpus": bundle.value(folder + "local_cpulist"),
            "iommu_group": group,
            "ports": above,
            "power_state": bundle.value(folder + "power_state"),
        }
    )


def _places(bundle: BundleReader) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Return the bridges above each slot, the nearest first, and its IOMMU group."""
    if not bundle.ran("pci-paths"):
        return {}
    return {
        slot: (tuple(reversed(above.lower().split())), whole(group))
        for slot, above, group in bundle.rows("pci-paths", 3)
    }


def _link(bundle: BundleReader, folder: str) -> PciLink | None:
    """Return a function's link; None if it has none of its own: sysfs then has no such files, or zeros in them."""
    link = PciLink(
        speed_gt_per_s=_speed(bundle.value(folder + "current_link_speed")),
        speed_max_gt_per_s=_speed(bundle.value(folder + "max_link_speed")),
        width=_width(bundle.number(folder + "current_link_width")),
        width_max=_width(bundle.number(folder + "max_link_width")),
    )
    return None if link == _NO_LINK else link


_NO_LINK = PciLink(speed_gt_per_s=None, speed_max_gt_per_s=None, width=None, width_max=None)


def _speed(text: str | None) -> float | None:
    match = _SPEED.fullmatch(text or "")
    return float(match[1]) if match else None


def _width(number: int | None) -> int | None:
    """Return the width; 0 and 255 stand for no link."""
    return number if number in _WIDTHS else None


def _numa_node(bundle: BundleReader, folder: str) -> int | None:
    node = bundle.number(folder + "numa_node")
    return node if node is not None and node >= 0 else None


def slot_of(bundle: BundleReader, uevent: str) -> str | None:
    """Return the PCI slot that a device's ``uevent`` names; None for a device on another bus."""
    name = dict(line.partition("=")[::2] for line in (bundle.value(uevent) or "").splitlines()).get("PCI_SLOT_NAME", "")
    return name.lower() if _SLOT.fullmatch(name) else None


def read_pci_ports(bundle: BundleReader) -> tuple[PciPort, ...]:
    """Return the bridges above the functions that the probe reads; empty in a guest with a GPU on a bus without
    bridges."""
    _require_places(bundle)
    bridges = {slot for device in _functions(bundle) for slot in device.ports}
    ports = []
    for slot in sorted(bridges):
        folder = f"{_FOLDER}{slot}/"
        device = parse_uevent(bundle.text(folder + "uevent") or "", slot)
        ports.append(
            PciPort(
                slot=slot,
                vendor_id=device.vendor_id,
                device_id=device.device_id,
                link=_link(bundle, folder),
                numa_node=_numa_node(bundle, folder),
            )
        )
    return tuple(ports)


def read_pci_acs(bundle: BundleReader) -> tuple[PciAcs, ...]:
    """Return the bridges with Access Control Services, and the services that are enabled."""
    bundle.require_finished(_SOURCE)
    _require_places(bundle)
    if not bundle.ran("pci-acs"):
        if bundle.folder(_FOLDER) is None:
            raise UnknownFactError(f"{_FOLDER} does not exist: the PCI bus cannot be read")
        if any(above for above, _ in _places(bundle).values()):
            raise bundle.not_collected()
        return ()
    try:
        rows = bundle.rows("pci-acs", 3)
    except UnknownFactError as err:
        raise UnknownFactError(f"{err}; run the probe as root") from None
    acs = []
    for slot, _, control in rows:
        if not _SLOT.fullmatch(slot) or not _HEX.fullmatch(control):
            raise ParseError(f"expected a slot and a register in hexadecimal, found '{first_line(control)}'")
        bits = int(control, 16)
        enabled = tuple(name for bit, name in enumerate(_ACS_BITS) if bits & 1 << bit)
        acs.append(PciAcs(slot=slot.lower(), enabled=enabled))
    return tuple(acs)


def read_iommu(bundle: BundleReader) -> Iommu:
    """Return the units of ``/sys/class/iommu``, and the types of the groups of GPUs, NICs and NVMe controllers."""
    _require_places(bundle)
    units = bundle.folder("/sys/class/iommu/")
    types = {}
    for device in _functions(bundle):
        kind = bundle.value(f"{_FOLDER}{device.slot}/iommu_group/type")
        if device.iommu_group is not None and kind is not None:
            types[device.iommu_group] = kind
    return Iommu(units=units or (), group_types=types)


def parse_uevent(text: str, slot: str) -> PciDevice:
    """Parse a PCI function's ``uevent`` file; raise ParseError if ids or class are missing."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    ids = _IDS.fullmatch(values.get("PCI_ID", ""))
    class_id = _CLASS.fullmatch(values.get("PCI_CLASS", ""))
    if not ids or not class_id or not _SLOT.fullmatch(slot):
        raise ParseError(f"expected PCI_ID and PCI_CLASS in the uevent of {slot[:40]}, found '{first_line(text)}'")
    subsystem = _IDS.fullmatch(values.get("PCI_SUBSYS_ID", ""))
    return PciDevice(
        slot=slot.lower(),
        vendor_id=ids[1].lower(),
        device_id=ids[2].lower(),
        subsystem_id=subsystem[0].lower() if subsystem else None,
        class_id=class_id[0].lower().zfill(6),
        driver=values.get("DRIVER") or None,
    )


class PciFacts(FactArea):
    """The PCI bus."""

    pci: tuple[PciDevice, ...] | None = fact(read_pci)
    """Functions of NVIDIA only, including NVSwitches and audio functions."""
    pci_io: tuple[PciDevice, ...] | None = fact(read_pci_io)
    """Network adapters and NVMe controllers, without virtual functions."""
    pci_ports: tuple[PciPort, ...] | None = fact(read_pci_ports)
    """Bridges above NVIDIA's functions and those of ``pci_io``."""
    pci_acs: tuple[PciAcs, ...] | None = fact(read_pci_acs, needs_root=True)
    """Bridges that have ACS."""
    iommu: Iommu | None = fact(read_iommu)

    @property
    def gpus_on_bus(self) -> tuple[PciDevice, ...] | None:
        """Return the NVIDIA GPUs among the PCI functions; None if the bus could not be read."""
        if self.pci is None:
            return None
        return tuple(device for device in self.pci if device.is_nvidia_gpu)
