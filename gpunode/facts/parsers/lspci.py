"""``lspci``, with or without ``-nn``, ``-n``, ``-D``, ``-k``, ``-v`` to ``-vvv``, as root or not."""

import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import Lspci
from gpunode.facts.parsers.values import found_text, lines_of, number, shorten

_DEVICE = re.compile(r"(?P<slot>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<rest>\S.*)")
_NUMBERS_ONLY = re.compile(r"(?P<class_id>[0-9a-f]{4}): (?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\b.*")
_CLASS_ID = re.compile(r"(.*?) \[([0-9a-f]{4})\]")
_IDS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\](?=[^\[\]]*$|.*\(rev)")
_UNNAMED = re.compile(r"\bDevice ([0-9a-f]{4})\b")
_REVISION = re.compile(r"\s*\((?:rev [0-9a-f]{2}|prog-if [^()]*(?:\([^()]*\))?[^()]*)\)\s*$")
_OPEN_BRACKET = re.compile(r"\s\([^()]*$")
_SUBSYSTEM = re.compile(r"\s+Subsystem: (.*)")
_DRIVER = re.compile(r"\s+Kernel driver in use: (\S+)\s*")
_LINK = re.compile(
    r"\s+(?P<side>LnkCap|LnkSta):\s+(?:Port #\d+, )?Speed (?P<speed>[\d.]{1,6}GT/s|unknown)(?: \([^)]*\))?, "
    r"Width (?:x(?P<width>\d{1,2})|unknown)\b"
)
_VENDORS = {"NVIDIA Corporation": "10de", "Mellanox Technologies": "15b3"}
"""Vendors by their name in pci.ids, for the ids that the parser needs."""

_LINE_LIMIT = 1000


def parse(text: str) -> Lspci:
    """Parse the devices.

    Ids are lower case without ``0x``, from ``-nn`` or ``-n``. Without these options the device's id is known only if
    lspci has no name for it (``Device 2330``), and the vendor's only for NVIDIA and Mellanox, by name; else they are
    None.

    Raise ParseError for other text and if the last device's line is truncated.
    """
    lines = lines_of(text)
    if lines[-1].strip() and not _DEVICE.fullmatch(lines[-1]):
        lines.pop()
    devices: list[dict[str, Any]] = []
    for raw in lines:
        line = raw[:_LINE_LIMIT].rstrip()
        match = _DEVICE.fullmatch(line)
        if match:
            devices.append(_device(match))
        elif devices:
            _take_detail(devices[-1], line)
    if not devices:
        raise ParseError(f"expected lines of lspci such as '1a:00.0 3D controller: ...', {found_text(text)}")
    last = devices[-1]
    numbered = sum(device["class_id"] is not None for device in devices)
    if numbered > len(devices) / 2 and not (last["class_id"] and last["device_id"]):
        raise ParseError(f"expected ids in every line of lspci -nn, found the last cut: '{shorten(last['slot'])}'")
    return checked(Lspci, {"devices": devices}, "lines of lspci")


def _device(match: re.Match[str]) -> dict[str, Any]:
    device: dict[str, Any] = {
        "slot": match["slot"],
        "class": None,
        "class_id": None,
        "vendor_id": None,
        "device_id": None,
        "subsystem_id": None,
        "description": None,
        "link": None,
        "kernel_driver": None,
    }
    rest = match["rest"]
    plain = _NUMBERS_ONLY.fullmatch(rest)
    if plain:
        return device | {"class_id": plain["class_id"], "vendor_id": plain["vendor"], "device_id": plain["device"]}
    name, colon, described = rest.partition(": ")
    if not colon:
        raise ParseError(f"expected 'CLASS: DEVICE' in a line of lspci, found '{shorten(rest)}': it is cut")
    while (shorter := _REVISION.sub("", described)) != described:
        described = shorter
    with_id = _CLASS_ID.fullmatch(name)
    device["class"] = with_id[1] if with_id else name
    device["class_id"] = with_id[2] if with_id else None
    device["vendor_id"], device["device_id"] = _ids(described)
    device["description"] = _OPEN_BRACKET.sub("", _IDS.sub("", described)).strip() or None
    return device


def _ids(described: str) -> tuple[str | None, str | None]:
    ids = _IDS.search(described)
    if ids:
        return ids[1], ids[2]
    vendor = next((number_ for name, number_ in _VENDORS.items() if described.startswith(name)), None)
    unnamed = _UNNAMED.search(described)
    return vendor, unnamed[1] if unnamed else None


def _take_detail(device: dict[str, Any], line: str) -> None:
    subsystem = _SUBSYSTEM.fullmatch(line)
    driver = _DRIVER.fullmatch(line)
    link = _LINK.match(line)
    if subsystem:
        vendor, part = _ids(subsystem[1])
        device["subsystem_id"] = f"{vendor}:{part}" if vendor and part else None
    elif driver:
        device["kernel_driver"] = driver[1]
    elif link:
        known = device["link"] or dict.fromkeys(("speed_gt_per_s", "width", "speed_max_gt_per_s", "width_max"))
        suffix = "_max" if link["side"] == "LnkCap" else ""
        known[f"speed{suffix}_gt_per_s"] = number(link["speed"].removesuffix("GT/s"))
        known[f"width{suffix}"] = int(link["width"]) if link["width"] else None
        device["link"] = known
