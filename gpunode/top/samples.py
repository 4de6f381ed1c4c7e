"""Lines of a node's stream, as typed samples, and what a window of samples means for a GPU.

Lines are a node's: bounded, and None for what is not as expected. The verdicts are pure functions."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean, median
from typing import Any

from gpunode.catalog.hardware import pcie_gb_per_s
from gpunode.checks.thermal import STUCK_MEMORY, STUCK_POWER, STUCK_USED
from gpunode.text import one_line

_FIELDS = (
    *("index", "uuid", "pci.bus_id", "name", "utilization.gpu", "utilization.memory", "memory.used", "memory.total"),
    "power.draw",
    *("enforced.power.limit", "temperature.gpu", "clocks.sm", "clocks.max.sm", "clocks_event_reasons.active"),
    *("pcie.link.gen.current", "pcie.link.width.current", "ecc.errors.corrected.volatile.total"),
    "ecc.errors.uncorrected.volatile.total",
)
GPU_FIELDS = (
    ",".join(_FIELDS),
    ",".join(name.replace("clocks_event_", "clocks_throttle_") for name in _FIELDS),
)
"""Fields of ``nvidia-smi --query-gpu``: today's names, and those of drivers before 535 (renamed there according to
utkuozdemir/nvidia_gpu_exporter#123)."""
_REASONS = {
    0x4: "power-limit",
    0x8: "hardware-slowdown",
    0x20: "heat-software",
    0x40: "heat",
    0x80: "power-brake",
}
"""Bits of ``nvmlClocksEventReasons`` in NVIDIA's nvml.h, without those that are no slowdown."""
_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,6})?")
_LOST = "[GPU is lost]"
_XID = re.compile(r"\] NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,20}\): (\d{1,6})\b")
_CONTAINER = re.compile(
    r"(?:docker|libpod|cri-containerd|crio|nerdctl|containerd)[-/]([0-9a-f]{64})\b|/([0-9a-f]{64})(?:/|$)"
)
_LXC = re.compile(r"/lxc(?:\.payload\.|/)([\w.-]{1,64})")
_SLURM = re.compile(r"/job_(\d{1,12})(?:/|$)")
INDEX_MOST = 255


@dataclass(frozen=True, slots=True)
class SampledGpu:
    """Which GPU a sample is about."""

    index: int
    uuid: str
    slot: str
    """Domain, bus and device in lower case, as the kernel's log has it: ``0000:1b:00``."""
    name: str


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of a GPU; None for a value that it does not report. ``at``: seconds of this machine's clock."""

    at: float
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    slowdowns: frozenset[str] | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class PcieSample:
    """PCIe rates of a GPU over 20 ms, from its own side; GB is 10^9."""

    at: float
    received_gb_per_s: float
    sent_gb_per_s: float


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """Who runs a process."""

    user: str
    name: str
    container: str | None
    slurm_job: str | None


def gpu_line(text: str, at: float) -> tuple[SampledGpu, GpuSample] | None:
    """Parse a GPU's values; None for a line of another form, such as a message of nvidia-smi."""
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != len(_FIELDS) or not cells[0].isascii() or not cells[0].isdigit() or int(cells[0]) > INDEX_MOST:
        return None
    values = dict(zip(_FIELDS, cells, strict=True))
    identity = SampledGpu(int(cells[0]), one_line(cells[1], 60), _slot(cells[2]), one_line(cells[3], 60))
    number = {name: _number(cell) for name, cell in values.items()}
    whole = {name: None if value is None else int(value) for name, value in number.items()}
    return identity, GpuSample(
        at=at,
        utilization_percent=number["utilization.gpu"],
        memory_utilization_percent=number["utilization.memory"],
        memory_used_mib=number["memory.used"],
        memory_total_mib=number["memory.total"],
        power_w=number["power.draw"],
        power_limit_w=number["enforced.power.limit"],
        temperature_c=number["temperature.gpu"],
        sm_clock_mhz=number["clocks.sm"],
        max_sm_clock_mhz=number["clocks.max.sm"],
        slowdowns=_slowdowns(values["clocks_event_reasons.active"]),
        pcie_gen=whole["pcie.link.gen.current"],
        pcie_width=whole["pcie.link.width.current"],
        corrected=whole["ecc.errors.corrected.volatile.total"],
        uncorrected=whole["ecc.errors.uncorrected.volatile.total"],
        lost=_LOST in cells,
    )


def _number(cell: str) -> float | None:
    return float(cell) if _NUMBER.fullmatch(cell) and cell.isascii() else None


def _slot(bus_id: str) -> str:
    return _short(bus_id.partition(".")[0])


def _short(slot: str) -> str:
    """Return a slot with four digits for its domain: nvidia-smi prints eight."""
    domain, colon, rest = slot.lower().partition(":")
    return one_line(f"{domain[-4:]}{colon}{rest}", 20)


def _slowdowns(cell: str) -> frozenset[str] | None:
    if not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
        return None
    return frozenset(name for bit, name in _REASONS.items() if int(cell, 16) & bit)


def pcie_line(text: str, at: float) -> tuple[int, PcieSample] | None:
    """Parse a row of ``nvidia-smi dmon -s t``: index, received and sent in MB/s; None for headers and ``-``."""
    cells = text.split()
    if len(cells) != 3 or any(_number(cell) is None for cell in cells) or float(cells[0]) > INDEX_MOST:
        return None
    return int(float(cells[0])), PcieSample(at, float(cells[1]) / 1000, float(cells[2]) / 1000)


def app_line(text: str) -> tuple[str, int, float | None] | None:
    """Parse a process on a GPU: the GPU's UUID, the process, its memory in MiB."""
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != 3 or not re.fullmatch(r"[0-9]{1,9}", cells[1]):
        return None
    return one_line(cells[0], 60), int(cells[1]), _number(cells[2])


def xid_line(text: str) -> tuple[str, int] | None:
    """Return the slot of the GPU and the Xid of a line of the kernel's log."""
    match = _XID.search(text)
    return (_short(match[1]), int(match[2])) if match else None


def owner_line(text: str) -> tuple[int, ProcessOwner] | None:
    """Parse who runs a process; container and Slurm job are in the path of its cgroup."""
    document = document_line(text)
    pid, group = document.get("pid"), document.get("cgroup")
    if not isinstance(pid, int) or not isinstance(group, str):
        return None
    container, lxc, job = _CONTAINER.search(group), _LXC.search(group), _SLURM.search(group)
    named = (container[1] or container[2])[:12] if container else lxc[1] if lxc else None
    user, name = (one_line(str(document.get(key, "?")), 32) for key in ("user", "name"))
    return pid, ProcessOwner(user, name, named, job[1] if job else None)


def document_line(text: str) -> dict[str, Any]:
    """Return the JSON object of a line; empty for anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def numbers_line(text: str, count: int) -> tuple[float, ...] | None:
    """Return the numbers of a line, separated by commas; None unless it has as many as expected."""
    numbers = [_number(cell.strip()) for cell in text.split(",", count)]
    return (
        tuple(number for number in numbers if number is not None)
        if len(numbers) == count and all(number is not None for number in numbers)
        else None
    )


STARVING_PERCENT, BOUND_PERCENT = 70.0, 80.0
"""Guides to training call a mean utilization under 70 to 80 % starved; no vendor publishes a figure. Below the lower
end the GPU is starving; PCIe is looked at below the upper end, and at rest by power: the driver counts a copy from the
host as utilization (an H200 with 580.159.04 reports 100 % at 19 % of its power limit)."""
PCIE_SHARE = 0.7
"""Our choice: of the link's rate, headers and all as the driver counts, by the median of readings over 20 ms each."""
IDLE_PERCENT = 5.0
"""Our choice."""
THROTTLED_SHARE = 0.25
"""Our choice: the share of readings with a slowdown by heat or hardware. A power limit does not count: fast GPUs run
at theirs under load."""
HEAVIER_SHARE, HEAVIER_MIB = 0.05, 1024.0
"""Our choice: of its memory, and at least. A context of CUDA takes 300 to 500 MiB (unsure), so that three of other
ranks on the first GPU are noticed."""
OCCUPIED_MIB = 1024.0
"""Our choice: memory in use without a known process; the driver's own share is smaller."""
SETTLED_SHARE = 0.5
"""Share of the window that samples have to span before there is a verdict. What makes a GPU stuck are the thresholds of
the check gpu.stuck."""


class VerdictKind(IntEnum):
    """Verdicts, the most urgent first."""

    LOST = 0
    STUCK = 1
    THROTTLED = 2
    PCIE_BOUND = 3
    STARVING = 4
    IDLE = 5
    HEAVIER = 6
    UNKNOWN = 7
    GOOD = 8
    FREE = 9

    @property
    def title(self) -> str:
        """Return the verdict as shown."""
        return _TITLES[self]

    @property
    def is_bad(self) -> bool:
        """Return whether somebody should look."""
        return self < VerdictKind.UNKNOWN


_TITLES = {
    VerdictKind.LOST: "lost",
    VerdictKind.STUCK: "stuck",
    VerdictKind.THROTTLED: "throttled",
    VerdictKind.PCIE_BOUND: "pcie-bound",
    VerdictKind.STARVING: "starving",
    VerdictKind.IDLE: "occupied-idle",
    VerdictKind.HEAVIER: "heavier",
    VerdictKind.UNKNOWN: "-",
    VerdictKind.GOOD: "ok",
    VerdictKind.FREE: "free",
}


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """A verdict, and the figures that it rests on, in one line."""

    kind: VerdictKind
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GpuWindow:
    """The latest samples of a GPU, oldest first, and who uses it."""

    index: int
    samples: Sequence[GpuSample]
    pcie: Sequence[PcieSample] = ()
    owners: frozenset[str] = frozenset()
    """Keys of the jobs on it: see ``verdicts``."""

    @property
    def occupied(self) -> bool:
        """Return whether a job uses it."""
        used = self.samples[-1].memory_used_mib if self.samples else None
        return bool(self.owners) or (used is not None and used >= OCCUPIED_MIB)


def verdicts(windows: Sequence[GpuWindow], window_s: float) -> list[GpuVerdict]:
    """Return the verdict of each GPU of a node. GPUs of one owner are siblings: they should be used alike."""
    gpu_verdicts = [gpu_verdict(window, window_s) for window in windows]
    return [
        _heavier(window, windows) or verdict if verdict.kind is VerdictKind.GOOD else verdict
        for window, verdict in zip(windows, gpu_verdicts, strict=True)
    ]


def gpu_verdict(window: GpuWindow, window_s: float) -> GpuVerdict:
    """Return the verdict of one GPU without its siblings."""
    samples = window.samples
    if not samples:
        return GpuVerdict(VerdictKind.UNKNOWN, "no sample yet")
    if samples[-1].lost:
        return GpuVerdict(VerdictKind.LOST, "nvidia-smi reports that the GPU is lost")
    span = samples[-1].at - samples[0].at
    if len(samples) < 2 or span < SETTLED_SHARE * window_s:
        return GpuVerdict(VerdictKind.UNKNOWN, f"{span:.0f} of {window_s:.0f} s sampled")
    throttled = _throttled(samples)
    if throttled is not None:
        return throttled
    loads = [sample.utilization_percent for sample in samples if sample.utilization_percent is not None]
    if not loads:
        return GpuVerdict(VerdictKind.UNKNOWN, "utilization is not reported")
    if not window.occupied and max(loads) <= IDLE_PERCENT:
        return GpuVerdict(VerdictKind.FREE)
    mean, rest = fmean(loads), _share_at_rest(samples)
    if max(loads) <= IDLE_PERCENT:
        return GpuVerdict(VerdictKind.IDLE, f"memory in use, at most {max(loads):.0f} % for {span:.0f} s")
    bound = _pcie_bound(window, mean) if mean < BOUND_PERCENT or rest is not None else None
    if bound is not None:
        return bound
    stuck = _stuck(samples, loads, rest) if rest is not None else None
    if stuck is not None:
        return stuck
    if mean < STARVING_PERCENT:
        return GpuVerdict(VerdictKind.STARVING, f"{mean:.0f} % on average over {span:.0f} s")
    return GpuVerdict(VerdictKind.GOOD)


def _throttled(samples: Sequence[GpuSample]) -> GpuVerdict | None:
    reported = [sample.slowdowns - {"power-limit"} for sample in samples if sample.slowdowns is not None]
    slowed = [reasons for reasons in reported if reasons]
    if not slowed or len(slowed) < THROTTLED_SHARE * len(reported):
        return None
    # The general bit is set together with the specific ones.
    named = frozenset().union(*slowed)
    named = named - {"hardware-slowdown"} or named
    share = 100 * len(slowed) / len(reported)
    return GpuVerdict(VerdictKind.THROTTLED, f"{', '.join(sorted(named))} in {share:.0f} % of the readings")


def _share_at_rest(samples: Sequence[GpuSample]) -> float | None:
    """Return the greatest share of the power limit, of a GPU that computes nothing by it; None for any other."""
    shares = (
        sample.power_w / sample.power_limit_w
        for sample in samples
        if sample.power_w is not None and sample.power_limit_w
    )
    return most if (most := max(shares, default=math.inf)) <= STUCK_POWER.value else None


def _stuck(samples: Sequence[GpuSample], loads: Sequence[float], share: float) -> GpuVerdict | None:
    memory = max((sample.memory_utilization_percent or 0.0 for sample in samples), default=0.0)
    if min(loads) < STUCK_USED.value or memory > STUCK_MEMORY.value:
        return None
    text = f"{min(loads):.0f} % at {100 * share:.0f} % of the power limit: does a collective hang?"
    return GpuVerdict(VerdictKind.STUCK, text)


def _pcie_bound(window: GpuWindow, mean: float) -> GpuVerdict | None:
    last = window.samples[-1]
    rate = pcie_gb_per_s(last.pcie_gen, last.pcie_width)
    if rate is None or len(window.pcie) < 2:
        return None
    received = median(sample.received_gb_per_s for sample in window.pcie)
    sent = median(sample.sent_gb_per_s for sample in window.pcie)
    if max(received, sent) < PCIE_SHARE * rate:
        return None
    text = f"{mean:.0f} %, PCIe at {max(received, sent):.1f} of {rate:.1f} GB/s"
    return GpuVerdict(VerdictKind.PCIE_BOUND, text)


def _heavier(window: GpuWindow, windows: Sequence[GpuWindow]) -> GpuVerdict | None:
    """Return the verdict for the first GPU of a job, if it holds more memory than each of the job's others."""
    others = [peer for peer in windows if peer.index != window.index and peer.owners & window.owners and peer.samples]
    if not others or any(peer.index < window.index for peer in others):
        return None
    last = window.samples[-1]
    used = [peer.samples[-1].memory_used_mib for peer in others]
    known = [value for value in used if value is not None]
    if last.memory_used_mib is None or last.memory_total_mib is None or not known:
        return None
    more = last.memory_used_mib - max(known)
    if more < max(HEAVIER_MIB, HEAVIER_SHARE * last.memory_total_mib):
        return None
    text = f"{more / 1024:.1f} GiB more than each of {len(known)} other GPUs of the job"
    return GpuVerdict(VerdictKind.HEAVIER, text)
