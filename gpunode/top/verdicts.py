"""What a window of samples means for a GPU: pure functions, and the figures that they compare with.

Those of ``stuck`` are the thresholds of the check gpu.stuck.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean, median

from gpunode.catalog.limits import pcie_gb_per_s
from gpunode.checks.thermal import STUCK_MEMORY, STUCK_POWER, STUCK_USED
from gpunode.top.samples import GpuSample, PcieSample

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
"""Share of the window that samples have to span before there is a verdict."""


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
