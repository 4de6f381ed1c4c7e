"""The PCI bus: NVIDIA's functions, network adapters and NVMe controllers, the bridges above them, and the IOMMU."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import Iommu, PciAcs, PciDevice, PciLink, PciPort
from gpunode.facts.seen import Seen, Unseen, first_line, whole

_FOLDER = "/sys/bus/pci/devices/"
_SLOT = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.I)
_IDS = re.compile(r"([0-9a-f]{4}):([0-9a-f]{4})", re.I)
_CLASS = re.compile(r"[0-9a-f]{1,6}", re.I)


_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s.*")
_HEX = re.compile(r"[0-9a-f]{4}")
_SOURCE = "pci_functions"
_ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
_MOST = 1024
"""Sixteen GPUs with their audio functions and switches are some fifty; virtual ones are no more than some hundreds."""
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


def devices(seen: Seen) -> tuple[PciDevice, ...]:
    """All functions of vendor 10de. The probe names every function and keeps files of those that matter alone."""
    found = tuple(device for device in _functions(seen) if device.vendor_id == "10de")
    if len(found) > _MOST:
        raise ParseError(f"expected at most {_MOST} functions of NVIDIA on the PCI bus, found {len(found)}")
    return found


def io_devices(seen: Seen) -> tuple[PciDevice, ...]:
    """Network adapters and NVMe controllers of all vendors; NVIDIA's own ConnectX have Mellanox's number."""
    _require_places(seen)
    return tuple(device for device in _functions(seen) if device.class_id.startswith(("02", "0108")))


def _require_places(seen: Seen) -> None:
    """A bundle of an earlier probe has NVIDIA's functions alone, and nothing about where they are."""
    if seen.folder(_FOLDER) and not seen.ran("pci-paths"):
        raise Unseen("the paths of PCI functions were not read")


def _functions(seen: Seen) -> list[PciDevice]:
    found: list[PciDevice] = seen.once("pci", lambda: _read_functions(seen))
    return found


def _read_functions(seen: Seen) -> list[PciDevice]:
    slots = seen.folder(_FOLDER)
    if slots is None:
        raise Unseen(f"{_FOLDER} does not exist: the PCI bus cannot be read")
    seen.require_finished(_SOURCE)
    places = _places(seen)
    found = []
    for slot in slots:
        path = f"{_FOLDER}{slot}/uevent"
        text = seen.text(path) if seen.asked(path) else None
        if text is not None:
            above, group = places.get(slot, ((), None))
            found.append(_with_details(seen, parse_uevent(text, slot), slot, above, group))
    return found


def _with_details(seen: Seen, device: PciDevice, slot: str, above: tuple[str, ...], group: int | None) -> PciDevice:
    place = f"{_FOLDER}{slot}/"
    return device.model_copy(
        update={
            "link": _link(seen, place),
            "numa_node": _numa_node(seen, place),
            "local_cpus": seen.value(place + "local_cpulist"),
            "iommu_group": group,
            "ports": above,
            "power_state": seen.value(place + "power_state"),
        }
    )


def _places(seen: Seen) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """Slot to the bridges above it, the nearest first, and its IOMMU group."""
    if not seen.ran("pci-paths"):
        return {}
    return {
        slot: (tuple(reversed(above.lower().split())), whole(group)) for slot, above, group in seen.rows("pci-paths", 3)
    }


def _link(seen: Seen, place: str) -> PciLink | None:
    """None for a function without a link of its own: sysfs then has no such files, or zeros in them."""
    link = PciLink(
        speed_gt_per_s=_speed(seen.value(place + "current_link_speed")),
        speed_max_gt_per_s=_speed(seen.value(place + "max_link_speed")),
        width=_width(seen.number(place + "current_link_width")),
        width_max=_width(seen.number(place + "max_link_width")),
    )
    return None if link == _NO_LINK else link


_NO_LINK = PciLink(speed_gt_per_s=None, speed_max_gt_per_s=None, width=None, width_max=None)


def _speed(text: str | None) -> float | None:
    match = _SPEED.fullmatch(text or "")
    return float(match[1]) if match else None


def _width(number: int | None) -> int | None:
    """0 and 255 stand for no link."""
    return number if number in _WIDTHS else None


def _numa_node(seen: Seen, place: str) -> int | None:
    node = seen.number(place + "numa_node")
    return node if node is not None and node >= 0 else None


def slot_of(seen: Seen, uevent: str) -> str | None:
    """The PCI slot that a device's ``uevent`` names; None for a device that is on another bus."""
    name = dict(line.partition("=")[::2] for line in (seen.value(uevent) or "").splitlines()).get("PCI_SLOT_NAME", "")
    return name.lower() if _SLOT.fullmatch(name) else None


def ports(seen: Seen) -> tuple[PciPort, ...]:
    """Bridges above the functions that the probe looks at; none in a guest whose GPU sits on a bus without one."""
    _require_places(seen)
    bridges = {slot for device in _functions(seen) for slot in device.ports}
    found = []
    for slot in sorted(bridges):
        place = f"{_FOLDER}{slot}/"
        device = parse_uevent(seen.text(place + "uevent") or "", slot)
        found.append(
            PciPort(
                slot=slot,
                vendor_id=device.vendor_id,
                device_id=device.device_id,
                link=_link(seen, place),
                numa_node=_numa_node(seen, place),
            )
        )
    return tuple(found)


def acs(seen: Seen) -> tuple[PciAcs, ...]:
    """Bridges with Access Control Services, and which of them are switched on."""
    seen.require_finished(_SOURCE)
    _require_places(seen)
    if not seen.ran("pci-acs"):
        if seen.folder(_FOLDER) is None:
            raise Unseen(f"{_FOLDER} does not exist: the PCI bus cannot be read")
        if any(above for above, _ in _places(seen).values()):
            raise Unseen("the configuration space of bridges was not read")
        return ()
    try:
        rows = seen.rows("pci-acs", 3)
    except Unseen as err:
        raise Unseen(f"{err}; run the probe as root") from None
    found = []
    for slot, _, control in rows:
        if not _SLOT.fullmatch(slot) or not _HEX.fullmatch(control):
            raise ParseError(f"expected a slot and a register in hexadecimal, found '{first_line(control)}'")
        bits = int(control, 16)
        enabled = tuple(name for bit, name in enumerate(_ACS_BITS) if bits & 1 << bit)
        found.append(PciAcs(slot=slot.lower(), enabled=enabled))
    return tuple(found)


def iommu(seen: Seen) -> Iommu:
    """Units of ``/sys/class/iommu``, and the types of the groups that GPUs, NICs and NVMe controllers are in."""
    _require_places(seen)
    units = seen.folder("/sys/class/iommu/")
    types = {}
    for device in _functions(seen):
        kind = seen.value(f"{_FOLDER}{device.slot}/iommu_group/type")
        if device.iommu_group is not None and kind is not None:
            types[device.iommu_group] = kind
    return Iommu(units=units or (), group_types=types)


def parse_uevent(text: str, slot: str) -> PciDevice:
    """Read a PCI function's ``uevent`` file; raise ParseError where ids or class are missing."""
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
