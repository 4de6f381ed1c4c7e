"""Evaluation of Xids: by the catalog, 74 (NVLink) by its registers, 144 to 150 (NVLink 5) by their messages.

The bits of 74 and their meanings are those of NVIDIA's XID catalogue, workflow NVLINK_ERR, as NVIDIA/NVSentinel quotes
it (issue 364, design 022). It documents the first, third, fourth and fifth register, of Hopper. The table of the others
is ``xid_nvlink5.tsv`` of the catalog, NVIDIA's XID catalogue, sheet "XID 144-150 Decode".
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from gpunode.catalog import GpuMatch, load
from gpunode.checks.actions import State
from gpunode.checks.compare import warned
from gpunode.checks.registry import CheckResult, Status
from gpunode.checks.thresholds import Threshold
from gpunode.facts.kernel_log import KernelEvent
from gpunode.text import listed

SOURCE = "catalog (xids.yml)"
BAD = ("critical", "high")
HARMLESS = ("info", "low")
APPLICATIONS_OWN: tuple[str, ...] = ("none",)
"""Actions for an Xid that an application caused: none on the node."""
RECOVERY = 154
"""The Xid that is not a fault itself: it reports the recovery action that a GPU needs after others, or that none is
left."""
RECOVERED = re.compile(r"\bto 0x0+ \(None\)", re.I)
NVLINK_ERROR = 74
ARCHITECTURE = "hopper"
REGISTERS_SOURCE = "NVIDIA's XID catalogue, workflow NVLINK_ERR"
ECC_MOST = Threshold(
    "gpu.xid.nvlink-ecc",
    2,
    "times",
    "Xid 74 with ECC or parity bits that occurs more often on one link is a fault.",
    source=REGISTERS_SOURCE,
)
REPEATED = Threshold(
    "gpu.xid.nvlink-repeated",
    2,
    "times",
    "Xid 74 with bits that are relevant when repeated is a fault from this number on.",
    source=f"{REGISTERS_SOURCE}; the number is NVSentinel's",
    least=1,
)
_REGISTERS = re.compile(
    r"\blink (?P<link>\d{1,3})\s?\((?P<registers>0x[0-9a-f]{1,8}(?:,\s?0x[0-9a-f]{1,8}){6})\)", re.I
)


@dataclass(frozen=True)
class BitGroup:
    """The meaning of a group of bits."""

    meaning: str
    actions: tuple[str, ...]


SUPPORT = ("open_support_case",)
HARDWARE = ("reset_gpu", "open_support_case", "replace_hardware")
IGNORED = BitGroup("bits without meaning", ("none",))
CONTINUE = BitGroup("a threshold of corrected errors was exceeded; nothing is lost", ("none",))
SECONDARY = BitGroup("a consequence of another error", SUPPORT)
FABRIC = BitGroup("a consequence of another error that needs a reset of the fabric", ("reset_gpu", "restart_os"))
ECC = BitGroup("ECC or parity of the link, likely its hardware", HARDWARE)
MECHANICAL = BitGroup("possibly hardware: check the link's connection and reseat it", HARDWARE)
SIGNAL = BitGroup("marginal signal integrity: check the link's connection", HARDWARE)
RECURRING = BitGroup("an error that is relevant when repeated", SUPPORT)
UNEXPECTED = BitGroup("bits that are not expected", SUPPORT)

BITS: dict[int, dict[BitGroup, tuple[int, ...]]] = {
    0: {
        IGNORED: (0, 23, 30),
        SECONDARY: (1, 20),
        ECC: (4, 5),
        MECHANICAL: (8, 9, 12, 16, 17, 24, 28),
        SIGNAL: (21, 22),
        RECURRING: (27, 29),
    },
    2: {ECC: (0, 1, 2, 6), RECURRING: (16, 17, 18, 19)},
    3: {SECONDARY: (16, 17), FABRIC: (18,)},
    4: {ECC: (18, 19, 21, 22, 24, 25, 27, 28), CONTINUE: (20, 23, 26, 29)},
}
"""Register (from 0), kind and bits; any other bit is unexpected, bit 13 of the third is documented by name."""
_KIND = {(register, bit): kind for register, kinds in BITS.items() for kind, bits in kinds.items() for bit in bits}


@dataclass(frozen=True)
class Decoded:
    """One line of Xid 74."""

    link: int
    bits: tuple[tuple[int, int], ...]
    """(register, bit), both from 0."""

    @property
    def kinds(self) -> tuple[BitGroup, ...]:
        """Return the meanings of the bits, each once."""
        return tuple(dict.fromkeys(_KIND.get(bit, UNEXPECTED) for bit in self.bits))


@dataclass(frozen=True)
class NvlinkVerdict:
    """The combined meaning of the lines of one GPU."""

    status: Status
    meaning: str
    actions: tuple[str, ...]


def decode_registers(message: str) -> Decoded | None:
    """Parse ``NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)``; None for other text."""
    match = _REGISTERS.search(message)
    if match is None:
        return None
    values = [int(word, 16) for word in match["registers"].split(",")]
    bits = tuple((at, bit) for at in BITS for bit in range(32) if values[at] >> bit & 1)
    return Decoded(int(match["link"]), bits)


def judge_registers(events: list[KernelEvent], *, alone: bool) -> NvlinkVerdict | None:
    """Return the meaning of the lines of one GPU; None if one has no registers. ``alone``: no other Xid accompanied
    them."""
    decoded = [decode_registers(event.message) for event in events]
    lines = [line for line in decoded if line is not None]
    if not lines or len(lines) < len(decoded):
        return None
    times = Counter((line.link, kind) for line in lines for kind in line.kinds)
    verdicts = list(_verdicts(lines, times, alone=alone))
    worst = next(
        (status for status in (Status.FAIL, Status.WARN) if any(grade is status for grade, _, _ in verdicts)), None
    )
    if worst is None:
        links = listed(sorted({str(line.link) for line in lines}))
        return NvlinkVerdict(Status.PASS, f"link {links}: {IGNORED.meaning}", IGNORED.actions)
    of_worst = [(link, kind) for status, link, kind in verdicts if status is worst]
    words = [f"link {link}: {kind.meaning}" for link, kind in dict.fromkeys(of_worst)]
    return NvlinkVerdict(worst, listed(words, most=3), of_worst[0][1].actions)


def _verdicts(
    lines: list[Decoded], times: Counter[tuple[int, BitGroup]], *, alone: bool
) -> Iterator[tuple[Status, int, BitGroup]]:
    for line in lines:
        for kind in line.kinds or (UNEXPECTED,):
            solo = alone and len(line.kinds) == 1
            bad = {
                ECC: times[line.link, kind] > ECC_MOST.value,
                RECURRING: times[line.link, kind] >= REPEATED.value,
                SECONDARY: solo,
                FABRIC: solo,
                SIGNAL: solo,
                MECHANICAL: True,
                UNEXPECTED: True,
            }.get(kind, False)
            if kind is not IGNORED:
                yield (Status.FAIL if bad else Status.WARN), line.link, kind


NVLINK_EVENTS = range(144, 151)
EVENTS_SOURCE = "NVIDIA's XID catalogue, XID 144-150 Decode"
_EVENT = re.compile(
    r"\b(?P<unit>[A-Z][A-Z0-9_]+)\s+\w+\s+XC\s?\d+\s+i\s?\d+\s+Link\s+(?P<link>\d{1,3})\s+"
    r"\(0x(?P<info>[0-9a-f]{1,8})(?:\s+0x(?P<status>[0-9a-f]{1,8}))?",
    re.IGNORECASE,
)
_NONFATAL = re.compile(r"\bNon-?fatal\b", re.IGNORECASE)
# The unit's own bit, above the unit's number: the formats before and from driver 575 on.
_ESCALATED = ((0x7FF, 0x4C2), (0xFF, 0x86))
MEANINGS: Mapping[str, tuple[Status, str, tuple[str, ...]]] = {
    "IGNORE": (Status.PASS, "no action is needed", ("none",)),
    "XID_154_EVAL": (Status.WARN, "Xid 154 reports the action; without it restart the application", ("none",)),
    "RESET_GPU": (Status.FAIL, "the GPU needs a reset", ("reset_gpu", "open_support_case")),
}


@cache
def decode_table() -> Mapping[tuple[int, str, int], Mapping[str, str]]:
    """Return the actions by (Xid, unit, sub-code), each by error status in hexadecimal or ``*``."""
    text = files("gpunode.catalog").joinpath("xid_nvlink5.tsv").read_text(encoding="utf-8")
    actions: dict[tuple[int, str, int], dict[str, str]] = {}
    for number, unit, action, codes in (line.split("\t") for line in text.splitlines() if not line.startswith("#")):
        for sub, status in (code.split(":") for code in codes.split()):
            actions.setdefault((int(number), unit, int(sub)), {})[status] = action
    return actions


def decode_event(number: int, message: str) -> tuple[int, str] | None:
    """Return the link and the action of ``NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 …)``; None for
    text or values that the table does not have."""
    match = _EVENT.search(message)
    if match is None:
        return None
    info = int(match["info"], 16)
    actions = decode_table().get((number, match["unit"].upper(), info >> 20 & 0x3F), {})
    action = actions.get(f"{int(match['status'] or '0', 16):x}") or actions.get("*")
    if action is None:
        return None
    first, _, escalated = action.partition("|")
    escalates = any(info & mask == value for mask, value in _ESCALATED)
    return int(match["link"]), escalated if escalated and escalates else first


def judge_event(number: int, events: list[KernelEvent]) -> NvlinkVerdict | None:
    """Return the meaning of the lines of one Xid of one GPU; None if one that is not in the table may be fatal."""
    decoded = [decode_event(number, event.message) for event in events]
    lines = [line for line in decoded if line is not None]
    unknown = [event.message for event, line in zip(events, decoded, strict=True) if line is None]
    if (not lines and not unknown) or not all(_NONFATAL.search(message) for message in unknown):
        return None
    if unknown and not any(action == "RESET_GPU" for _, action in lines):
        return NvlinkVerdict(Status.WARN, "not fatal by the driver, and not in NVIDIA's table", ("open_support_case",))
    worst = max((action for _, action in lines), key=list(MEANINGS).index)
    links = sorted({link for link, action in lines if action == worst})
    status, meaning, actions = MEANINGS[worst]
    return NvlinkVerdict(status, f"link {listed([str(link) for link in links])}: {meaning}", actions)


def xid_verdict(
    component: str, number: int, events: list[KernelEvent], model: GpuMatch | None, others: tuple[int, ...] = ()
) -> CheckResult:
    """Return the result for all lines of one Xid of one GPU. ``others``: the Xids in the same incidents."""
    row = load().xid(number)
    known = row.on(model.common.get("compute_capability") if model else None) if row else None
    last = events[-1]
    distinct = len({event.message for event in events})
    often = f", {len(events)} times{f' ({distinct} distinct)' if distinct > 1 else ''}" if len(events) > 1 else ""
    when = f", last at {last.time}" if last.time else ""
    who = f", process {last.process}" if last.process else ""
    beside = f"; in the same incident: Xid {listed([str(other) for other in others])}" if others else ""
    verdict = warned(
        "", component=component, expected=0, measured=len(events), unit="events", source=SOURCE, actions=None
    )
    if known is None or known.severity == "unused":
        details = f" ({last.message})" if last.message else ""
        message = f"Xid {number}{often}{when}{who}: the catalog has no meaning for it{details}{beside}"
        return replace(verdict, message=message, actions=("open_support_case",))
    status = Status.FAIL if known.severity in BAD else Status.PASS if known.severity in HARMLESS else Status.WARN
    if known.cancelled_by and status is Status.PASS:
        status = Status.WARN  # a state that holds until another Xid ends it
    meaning = known.meaning
    if not known.sure("severity"):
        status = Status.WARN
        reason = known.unsure.get("severity", "its row")
        meaning += f" (not sure for {model.gpu.name if model and model.gpu else 'this GPU'}: {reason})"
    if number == RECOVERY:
        # Each reports the state from then on: only the last one applies.
        meaning = f"{meaning}: {last.message}" if last.message else meaning
        status = Status.PASS if RECOVERED.search(last.message) else status
    by_application = known.severity == "application"
    follow = f" (where Xid {' or '.join(known.follow)} follows, that one applies)" if known.follow else ""
    verdict = replace(
        verdict,
        status=status,
        message=f"Xid {number}{often}{when}{who}: {meaning}{beside}",
        remedy=f"{known.action}{follow}",
        actions=APPLICATIONS_OWN if by_application else None,
        state=State.NONE if by_application else None,
    )
    decoded, details = None, REGISTERS_SOURCE
    if number == NVLINK_ERROR and _has_registers(model):
        decoded = judge_registers(events, alone=not others)
    elif number in NVLINK_EVENTS:
        decoded, details = judge_event(number, events), EVENTS_SOURCE
    if decoded is None:
        return verdict
    message = f"Xid {number}{often}{when}{who}: {meaning}; {decoded.meaning}{beside}"
    source = f"{SOURCE}; {details}"
    return replace(verdict, status=decoded.status, message=message, actions=decoded.actions, source=source)


def _has_registers(model: GpuMatch | None) -> bool:
    """Return whether the registers of Xid 74 are documented for the model."""
    return model is not None and model.common.get("architecture") == ARCHITECTURE
