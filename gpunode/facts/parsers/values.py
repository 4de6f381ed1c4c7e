"""Single values as NVIDIA's and the kernel's tools print them: quantities, switches, PCI ids.

Every function returns None for text without a value: ``N/A``, ``[Not Supported]``, ``Unknown Error``, a number without
its unit.
"""

import re
from functools import lru_cache

NOTHING = frozenset(
    {
        "",
        "n/a",
        "none",
        "not supported",
        "not available",
        "not applicable",
        "not found",
        "unknown",
        "unknown error",
        "err!",
        "error",
        "gpu is lost",
        "gpu requires reset",
        "insufficient permissions",
        "requested functionality has been deprecated",
        "not available in wddm driver model",
    }
)
"""Text that the tools print in place of a value, in lower case and without brackets."""

MOST_GPUS = 256
"""The most GPUs that a listing may have; a node has sixteen, larger numbers are treated as an attack."""
_YES = frozenset({"yes", "enabled", "active", "true", "on"})
_NO = frozenset({"no", "disabled", "not active", "false", "off"})
_KNOWN_CHARACTERS = 64
_NUMBER = r"[+-]?\d{1,30}(?:\.\d{1,30})?"
_PLAIN = re.compile(_NUMBER)
_QUANTITY = re.compile(rf"({_NUMBER})\s*([^\s\d].{{0,20}})?")
_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?")
_DEVICE_AND_VENDOR = re.compile(r"(?:0[xX])?([0-9a-fA-F]{4})([0-9a-fA-F]{4})")
_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9})+")


def unbracketed(text: str) -> str:
    """Return ``[N/A]`` as ``N/A``, other text stripped of blanks."""
    text = text.strip()
    return text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text


def is_nothing(text: str | None) -> bool:
    """Return True for None and for text that the tools print in place of a value."""
    return text is None or unbracketed(text).lower() in NOTHING


def text_or_none(text: str | None) -> str | None:
    """Return the text stripped of blanks; None if it stands for no value."""
    return None if text is None or is_nothing(text) else text.strip()


def number(text: str | None) -> int | float | None:
    """Return a bare number: ``12`` as int, ``12.5`` as float."""
    if text is None:
        return None
    text = text.strip()
    return _to_number(text) if _PLAIN.fullmatch(text) else None


def integer(text: str | None) -> int | None:
    """Return a bare integer."""
    value = number(text)
    return value if isinstance(value, int) else None


def quantity(text: str | None, *units: str) -> int | float | None:
    """Return the number before one of ``units`` (compared without case); None without its unit, as the text is
    truncated."""
    if text is None:
        return None
    # The GPUs of a node print mostly the same values; longer texts are not remembered, for a node must not fill memory.
    return _known_quantity(text, units) if len(text) <= _KNOWN_CHARACTERS else _quantity(text, units)


@lru_cache(maxsize=4096)
def _known_quantity(text: str, units: tuple[str, ...]) -> int | float | None:
    return _quantity(text, units)


def _quantity(text: str, units: tuple[str, ...]) -> int | float | None:
    match = _QUANTITY.fullmatch(text.strip())
    if not match or (match[2] or "").strip().lower() not in {unit.lower() for unit in units}:
        return None
    return _to_number(match[1])


def mebibytes(text: str | None) -> int | float | None:
    """Return memory in MiB. nvidia-smi prints ``MiB``, drivers up to 331 ``MB`` or ``Mb``; all mean 2^20."""
    return quantity(text, "MiB", "MB")


def flag(text: str | None) -> bool | None:
    """Return a switch: Yes/No, Enabled/Disabled, Active/Not Active, True/False, On/Off."""
    if text is None:
        return None
    word = text.strip().lower()
    if word in _YES:
        return True
    return False if word in _NO else None


def version(text: str | None) -> str | None:
    """Return a dotted version at the beginning of the text; drivers 610 and later append a remark."""
    match = _VERSION.match(text.strip()) if text else None
    return match[0] if match else None


def bus_id(text: str | None) -> str | None:
    """Return a PCI address in sysfs form ``0000:1a:00.0``: four digits of domain (more if needed), lower case.

    Accepts ``00000000:1A:00.0``, ``1a:00.0``, ``0000:1a:00`` (the kernel's Xid lines) and ``0:26:0`` (drivers of the
    270 branch, also hexadecimal).
    """
    match = _BUS_ID.fullmatch(text.strip()) if text else None
    if not match:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"


def device_and_vendor(text: str | None) -> str | None:
    """Return nvidia-smi's combined id ``233010DE`` (``0x233010DE`` as text) as ``10de:2330``."""
    match = _DEVICE_AND_VENDOR.fullmatch(text.strip()) if text else None
    return f"{match[2]}:{match[1]}".lower() if match else None


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with any line ending; other control characters do not split lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def shorten(text: str, limit: int = 60) -> str:
    """Return the text on one line and truncated for a message; characters that are not printable become dots."""
    first = next((line.strip() for line in lines_of(text[:4096]) if line.strip()), "")
    clean = "".join(char if char.isprintable() else "." for char in first[: limit + 1])
    return f"{clean[:limit]}..." if len(first) > limit else clean


def found_text(text: str) -> str:
    """Return what was found, for a message about what was expected."""
    return f"found '{shorten(text)}'" if text.strip() else "found nothing"


def _to_number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
