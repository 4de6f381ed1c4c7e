"""Evaluation of the Xids 144 to 150 (NVLink 5) by unit, sub-code and error status in their messages.

The table is ``xid_nvlink5.tsv`` of the catalog, NVIDIA's XID catalogue, sheet "XID 144-150 Decode".
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from gpunode.checks.registry import Status
from gpunode.checks.xid_registers import RegisterVerdict
from gpunode.facts.kernel_log import KernelEvent
from gpunode.text import listed

NUMBERS = range(144, 151)
SOURCE = "NVIDIA's XID catalogue, XID 144-150 Decode"
_LINE = re.compile(
    r"\b(?P<unit>[A-Z][A-Z0-9_]+)\s+\w+\s+XC\s?\d+\s+i\s?\d+\s+Link\s+(?P<link>\d{1,3})\s+"
    r"\(0x(?P<info>[0-9a-f]{1,8})(?:\s+0x(?P<status>[0-9a-f]{1,8}))?",
    re.IGNORECASE,
)
NONFATAL = re.compile(r"\bNon-?fatal\b", re.IGNORECASE)
# The unit's own bit, above the unit's number: the formats before and from driver 575 on.
_ESCALATED = ((0x7FF, 0x4C2), (0xFF, 0x86))
MEANINGS: Mapping[str, tuple[Status, str, tuple[str, ...]]] = {
    "IGNORE": (Status.PASS, "no action is needed", ("none",)),
    "XID_154_EVAL": (Status.WARN, "Xid 154 reports the action; without it restart the application", ("none",)),
    "RESET_GPU": (Status.FAIL, "the GPU needs a reset", ("reset_gpu", "open_support_case")),
}


@cache
def table() -> Mapping[tuple[int, str, int], Mapping[str, str]]:
    """Return the actions by (Xid, unit, sub-code), each by error status in hexadecimal or ``*``."""
    text = files("gpunode.catalog").joinpath("xid_nvlink5.tsv").read_text(encoding="utf-8")
    actions: dict[tuple[int, str, int], dict[str, str]] = {}
    for number, unit, action, codes in (line.split("\t") for line in text.splitlines() if not line.startswith("#")):
        for sub, status in (code.split(":") for code in codes.split()):
            actions.setdefault((int(number), unit, int(sub)), {})[status] = action
    return actions


def decode(number: int, message: str) -> tuple[int, str] | None:
    """Return the link and the action of ``NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 …)``; None for
    text or values that the table does not have."""
    match = _LINE.search(message)
    if match is None:
        return None
    info = int(match["info"], 16)
    actions = table().get((number, match["unit"].upper(), info >> 20 & 0x3F), {})
    action = actions.get(f"{int(match['status'] or '0', 16):x}") or actions.get("*")
    if action is None:
        return None
    first, _, escalated = action.partition("|")
    escalates = any(info & mask == value for mask, value in _ESCALATED)
    return int(match["link"]), escalated if escalated and escalates else first


def judge(number: int, events: list[KernelEvent]) -> RegisterVerdict | None:
    """Return the meaning of the lines of one Xid of one GPU; None if one that is not in the table may be fatal."""
    decoded = [decode(number, event.message) for event in events]
    lines = [line for line in decoded if line is not None]
    unknown = [event.message for event, line in zip(events, decoded, strict=True) if line is None]
    if (not lines and not unknown) or not all(NONFATAL.search(message) for message in unknown):
        return None
    if unknown and not any(action == "RESET_GPU" for _, action in lines):
        return RegisterVerdict(
            Status.WARN, "not fatal by the driver, and not in NVIDIA's table", ("open_support_case",)
        )
    worst = max((action for _, action in lines), key=list(MEANINGS).index)
    links = sorted({link for link, action in lines if action == worst})
    status, meaning, actions = MEANINGS[worst]
    return RegisterVerdict(status, f"link {listed([str(link) for link in links])}: {meaning}", actions)
