"""NVIDIA's functions on the PCI bus."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import PciDevice
from gpunode.facts.seen import Seen, Unseen, first_line

_FOLDER = "/sys/bus/pci/devices/"
_SLOT = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.I)
_IDS = re.compile(r"([0-9a-f]{4}):([0-9a-f]{4})", re.I)
_CLASS = re.compile(r"[0-9a-f]{1,6}", re.I)


def devices(seen: Seen) -> tuple[PciDevice, ...]:
    """All functions of vendor 10de. The probe names every function and keeps the ``uevent`` of NVIDIA's alone."""
    slots = seen.folder(_FOLDER)
    if slots is None:
        raise Unseen(f"{_FOLDER} is not there: the PCI bus cannot be seen")
    found = []
    for slot in slots:
        path = f"{_FOLDER}{slot}/uevent"
        text = seen.text(path) if seen.asked(path) else None
        if text is not None:
            found.append(parse_uevent(text, slot))
    return tuple(device for device in found if device.vendor_id == "10de")


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
