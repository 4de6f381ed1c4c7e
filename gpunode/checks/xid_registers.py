"""Evaluation of Xid 74 (NVLink) by the registers in its message.

The bits and their meanings are those of NVIDIA's XID catalogue, workflow NVLINK_ERR, as NVIDIA/NVSentinel quotes it
(issue 364, design 022). It documents the first, third, fourth and fifth register, of Hopper.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.checks.registry import Status
from gpunode.checks.thresholds import Threshold
from gpunode.facts.kernel_log import KernelEvent
from gpunode.text import listed

NVLINK_ERROR = 74
ARCHITECTURE = "hopper"
SOURCE = "NVIDIA's XID catalogue, workflow NVLINK_ERR"
ECC_MOST = Threshold(
    "gpu.xid.nvlink-ecc",
    2,
    "times",
    "Xid 74 with ECC or parity bits that occurs more often on one link is a fault.",
    source=SOURCE,
)
REPEATED = Threshold(
    "gpu.xid.nvlink-repeated",
    2,
    "times",
    "Xid 74 with bits that are relevant when repeated is a fault from this number on.",
    source=f"{SOURCE}; the number is NVSentinel's",
    least=1,
)
_LINE = re.compile(r"\blink (?P<link>\d{1,3})\s?\((?P<registers>0x[0-9a-f]{1,8}(?:,\s?0x[0-9a-f]{1,8}){6})\)", re.I)


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
class RegisterVerdict:
    """The combined meaning of the lines of one GPU."""

    status: Status
    meaning: str
    actions: tuple[str, ...]


def decode(message: str) -> Decoded | None:
    """Parse ``NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)``; None for other text."""
    match = _LINE.search(message)
    if match is None:
        return None
    values = [int(word, 16) for word in match["registers"].split(",")]
    bits = tuple((at, bit) for at in BITS for bit in range(32) if values[at] >> bit & 1)
    return Decoded(int(match["link"]), bits)


def judge(events: list[KernelEvent], *, alone: bool) -> RegisterVerdict | None:
    """Return the meaning of the lines of one GPU; None if one has no registers. ``alone``: no other Xid accompanied
    them."""
    decoded = [decode(event.message) for event in events]
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
        return RegisterVerdict(Status.PASS, f"link {links}: {IGNORED.meaning}", IGNORED.actions)
    of_worst = [(link, kind) for status, link, kind in verdicts if status is worst]
    words = [f"link {link}: {kind.meaning}" for link, kind in dict.fromkeys(of_worst)]
    return RegisterVerdict(worst, listed(words, most=3), of_worst[0][1].actions)


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
