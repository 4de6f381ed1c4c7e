"""The table of a profile: each pattern with its number, its cause, and what to change; and the document with it."""

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from gpunode.frozen import Frozen, FrozenByName
from gpunode.profiling.activity import Interval, ProfileActivity, ProfileError, common, length, merged

BUSY_SHARE = 0.8
"""Of the recorded time: guides name 70 to 80 % for a GPU that is not starving. The other limits are our choice."""
LOADING_SHARE = 0.1
COPY_SHARE = 0.1
SHORT_KERNEL_S, SMALL_GAP_S, LAUNCH_SHARE = 10e-6, 50e-6, 0.2
LONG_GAP_S, GAP_SHARE = 1e-3, 0.1
SYNC_SHARE = 0.2
NCCL_SHARE = 0.2
TENSOR_SHARE = 0.5
ALLOCATION_SHARE = 0.05
WAITING_SHARE = 0.5
"""Of the time in a DataLoader, or of its workers: below it, they wait more than they compute."""
PRODUCT = re.compile(r"gemm|gemv|conv|wgrad|dgrad|fprop|cutlass|xmma|nvjet|flash|fmha|attention", re.IGNORECASE)
TENSOR_CORE = re.compile(
    r"tensorop|hmma|imma|wgmma|[hs]\d*16816|[hs]1688|s884|h884|_tc\b|nvjet|flash|fmha|tf32|bf16|f16|fp8|e4m3",
    re.IGNORECASE,
)
"""Names of kernels that use tensor cores: from the names of cuBLAS, cuDNN and CUTLASS, an estimate."""
SYNCHRONIZING = re.compile(r"cuda(Device|Stream|Event)Synchronize")
ALLOCATING = re.compile(r"cuda(Malloc|Free|HostAlloc|FreeHost)")
COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)


class ProfilePattern(Frozen):
    """One line of the table."""

    pattern: str
    value: float | None
    """A share of the recorded time, or None if it was not recorded."""
    measured: str
    """The number in words."""
    status: Literal["ok", "look", "unknown"]
    cause: str = ""
    change: str = ""


@dataclass(frozen=True)
class RunNotes:
    """What the hook reports beside the trace."""

    steps: int = 0
    window_s: float = 0.0
    loading_s: float = 0.0
    loading_active_s: float = 0.0
    """Of it, running or waiting for a core."""
    workers: int = 0
    workers_active_s: float | None = None
    threads: int = 0
    cpus: int = 0
    torch: str | None = None


def patterns(activity: ProfileActivity, notes: RunNotes) -> list[ProfilePattern]:
    """Return the table of a profile."""
    span = activity.span_s
    kernels = merged((kernel.start, kernel.end) for kernel in activity.kernels)
    copies = merged((copy.start, copy.end) for copy in activity.copies)
    busy = merged((*kernels, *copies))
    rows = [_device(activity, span)]
    rows.extend(_loading(activity, notes, span, busy))
    if not activity.kernels:
        rows.extend(_operations(activity, notes))
        return rows
    rows.extend(_gaps(activity, span, busy))
    rows.append(_copies(activity, span, kernels))
    rows.append(_calls(activity, span, SYNCHRONIZING, "synchronization", SYNC_SHARE))
    rows.append(_calls(activity, span, ALLOCATING, "allocation", ALLOCATION_SHARE))
    rows.append(_collectives(activity, span))
    rows.append(_tensor_cores(activity))
    return rows


def _row(  # noqa: PLR0913 (a line of the table)
    pattern: str, share: float, measured: str, *, bad: bool, cause: str, change: str
) -> ProfilePattern:
    return ProfilePattern(
        pattern=pattern,
        value=round(share, 4),
        measured=measured,
        status="look" if bad else "ok",
        cause=cause if bad else "",
        change=change if bad else "",
    )


def _unknown(pattern: str, measured: str, cause: str = "") -> ProfilePattern:
    return ProfilePattern(pattern=pattern, value=None, measured=measured, status="unknown", cause=cause)


def percent(share: float) -> str:
    """Return a share for messages."""
    return f"{100 * share:.3g} %"


def _device(activity: ProfileActivity, span: float) -> ProfilePattern:
    devices = sorted({device for device, _ in activity.on_devices})
    if not devices:
        return _unknown("device share", "no activity of a GPU was recorded", "the command used no GPU")
    shares = {
        device: length(merged(interval for owner, interval in activity.on_devices if owner == device)) / span
        for device in devices
    }
    least = min(shares, key=lambda device: shares[device])
    where = f"GPU {least}, the lowest of {len(devices)}" if len(devices) > 1 else f"GPU {least}"
    return _row(
        "device share",
        shares[least],
        f"{percent(shares[least])} of {span:.3g} s ({where})",
        bad=shares[least] < BUSY_SHARE,
        cause="the GPU waits for the host",
        change="see the rows below: the largest share comes first",
    )


def _loading(
    activity: ProfileActivity, notes: RunNotes, span: float, busy: Sequence[Interval]
) -> Iterator[ProfilePattern]:
    loading = merged(activity.loading)
    if not loading:
        yield _unknown("data loading", "no DataLoader was seen")
        return
    share = length(loading) / span
    hidden = common(loading, busy) / span
    measured = f"{percent(share)} of {span:.3g} s in the DataLoader"
    if busy:
        measured += f", {percent(hidden)} while the GPU computes"
    cause, change = _why_loading(activity, notes)
    yield _row("data loading", share, measured, bad=share - hidden > LOADING_SHARE, cause=cause, change=change)


def _why_loading(activity: ProfileActivity, notes: RunNotes) -> tuple[str, str]:
    """Return why the main thread is in the DataLoader, and what to change."""
    measure = "gpunode validate --level deep --data DIR names the limit of the files"
    most = f"num_workers up to {max(1, notes.cpus - 1)}; decode on the GPU (nvJPEG, DALI)"
    if activity.single_process:
        if not notes.loading_s:
            return "samples are prepared in the main process", f"num_workers above 0; {measure}"
        active = notes.loading_active_s / notes.loading_s
        if active < WAITING_SHARE:
            cause = f"the main process waits for samples (active {percent(active)}): storage, network or a sleep"
            return cause, f"num_workers above 0, so that several wait at once; {measure}"
        return f"the main process prepares samples itself (active {percent(active)}): decoding, Python", most
    if not notes.workers or not notes.window_s or notes.workers_active_s is None:
        return "the workers deliver too slowly", measure
    active = notes.workers_active_s / (notes.workers * notes.window_s)
    number = f"{notes.workers} worker{'s' if notes.workers > 1 else ''}"
    if active < WAITING_SHARE:
        cause = f"{number} wait (active {percent(active)}): storage, network, a sleep or a lock"
        return cause, f"more workers or prefetch_factor hide the latency; {measure}"
    if notes.workers >= notes.cpus:
        cause = f"{number} on {notes.cpus} cores compute (active {percent(active)} each): decoding, Python"
        return cause, "cheaper samples: smaller images, decoding on the GPU (nvJPEG, DALI), shards; or more cores"
    return f"{number} compute (active {percent(active)} each): decoding, Python", most


def _operations(activity: ProfileActivity, notes: RunNotes) -> Iterator[ProfilePattern]:
    total = sum(activity.operations.values())
    if not total:
        return
    largest = sorted(activity.operations.items(), key=lambda row: -row[1])[:3]
    named = ", ".join(f"{name} {percent(seconds / total)}" for name, seconds in largest)
    share = total / activity.span_s
    shown = f"{percent(share)} of {activity.span_s:.3g} s on the processor ({notes.threads} threads): {named}"
    yield _row("operations", share, shown, bad=False, cause="", change="")


def _gaps(activity: ProfileActivity, span: float, busy: Sequence[Interval]) -> Iterator[ProfilePattern]:
    loading = merged(activity.loading)
    gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(busy)]
    long = [gap for gap in gaps if gap[1] - gap[0] > LONG_GAP_S]
    outside = max(0.0, length(long) - common(long, loading))
    longest = max((end - start for start, end in long), default=0.0)
    yield _row(
        "host gaps",
        outside / span,
        f"{percent(outside / span)} in {len(long)} gaps above 1 ms outside data loading, the longest "
        f"{longest * 1e3:.3g} ms",
        bad=outside / span > GAP_SHARE,
        cause="Python between the kernels: logging, .item(), metrics, checkpoints",
        change="do it every n steps, without .item() and print of tensors; save checkpoints asynchronously",
    )
    small = length([gap for gap in gaps if gap[1] - gap[0] <= SMALL_GAP_S]) / span
    medium = length([gap for gap in gaps if SMALL_GAP_S < gap[1] - gap[0] <= LONG_GAP_S]) / span
    median = statistics.median(kernel.end - kernel.start for kernel in activity.kernels)
    yield _row(
        "launch-bound",
        small + medium,
        f"{percent(small + medium)} in gaps up to 1 ms; {len(activity.kernels)} kernels, median {median * 1e6:.3g} us",
        bad=small + medium > LAUNCH_SHARE and median < SHORT_KERNEL_S,
        cause="kernels are shorter than their launch",
        change="torch.compile (mode=reduce-overhead) or CUDA graphs, a larger batch, fused optimizers",
    )


def _copies(activity: ProfileActivity, span: float, kernels: Sequence[Interval]) -> ProfilePattern:
    host = [copy for copy in activity.copies if copy.direction in ("HtoD", "DtoH")]
    intervals = merged((copy.start, copy.end) for copy in host)
    alone = (length(intervals) - common(intervals, kernels)) / span
    size = sum(copy.size_bytes or 0 for copy in host)
    took = sum(copy.end - copy.start for copy in host)
    pageable = sum(copy.end - copy.start for copy in host if copy.pageable)
    measured = f"{percent(length(intervals) / span)} in copies between host and GPU, {percent(alone)} without a kernel"
    if size and took:
        measured += f", {size / took / 1e9:.3g} GB/s, {percent(pageable / took)} of the time from pageable memory"
    slow = took > 0 and pageable / took > WAITING_SHARE
    return _row(
        "copies",
        length(intervals) / span,
        measured,
        bad=alone > COPY_SHARE,
        cause="pageable memory is copied twice, and the host waits" if slow else "much data moves between host and GPU",
        change="pin_memory=True and .to(device, non_blocking=True)"
        if slow
        else "keep data on the GPU, copy smaller types (uint8, bf16), prefetch the next batch on a stream",
    )


def _calls(activity: ProfileActivity, span: float, names: re.Pattern[str], pattern: str, most: float) -> ProfilePattern:
    intervals = [call for name, calls in activity.calls.items() if names.match(name) for call in calls]
    share = length(merged(intervals)) / span
    synchronizing = pattern == "synchronization"
    return _row(
        pattern,
        share,
        f"{percent(share)} in {len(intervals)} calls",
        bad=share > most and (not synchronizing or len(intervals) > 0),
        cause="the host waits for the GPU: .item(), .cpu(), print, synchronize"
        if synchronizing
        else "memory is allocated and freed all the time",
        change="synchronize every n steps; harmless if the device share is high"
        if synchronizing
        else "PYTORCH_ALLOC_CONF=expandable_segments:True, constant shapes, no empty_cache in the loop",
    )


def _collectives(activity: ProfileActivity, span: float) -> ProfilePattern:
    collective = merged((kernel.start, kernel.end) for kernel in activity.kernels if COLLECTIVE.search(kernel.name))
    compute = merged((kernel.start, kernel.end) for kernel in activity.kernels if not COLLECTIVE.search(kernel.name))
    alone = (length(collective) - common(collective, compute)) / span
    return _row(
        "NCCL",
        length(collective) / span,
        f"{percent(length(collective) / span)} in collectives, {percent(alone)} not hidden by computation",
        bad=alone > NCCL_SHARE,
        cause="communication is not hidden: slow links, a slow rank, or small batches",
        change="gpunode validate --level deep (performance.collectives); gradient accumulation, larger buckets",
    )


def _tensor_cores(activity: ProfileActivity) -> ProfilePattern:
    products = [
        kernel for kernel in activity.kernels if PRODUCT.search(kernel.name) and not COLLECTIVE.search(kernel.name)
    ]
    total = sum(kernel.end - kernel.start for kernel in products)
    if not total:
        return _unknown("tensor cores", "no matrix product was recorded")
    used = sum(kernel.end - kernel.start for kernel in products if TENSOR_CORE.search(kernel.name)) / total
    return _row(
        "tensor cores",
        used,
        f"{percent(used)} of the time of matrix products, by the kernels' names",
        bad=used < TENSOR_SHARE,
        cause="products in FP32, or shapes that are not multiples of 8",
        change="torch.autocast with bfloat16, torch.set_float32_matmul_precision('high'), dimensions in multiples of 8",
    )


LINE = re.compile(r"(.+) (\d+)$")
LOADER = re.compile(r"torch/utils/data/|tensorflow/python/data/")
MOST_SHOWN = 3


def stack_patterns(text: str) -> list[ProfilePattern]:
    """Return the table of py-spy's samples. Raises ProfileError for another format.

    A line of ``--format raw`` has frames joined by ``;``, then the number of samples.
    """
    loading = total = 0
    last: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.strip():
            continue
        match = LINE.match(line)
        if match is None:
            raise ProfileError(f"py-spy's output has a line that is not a stack: {line[:80]!r}")
        frames, number = match[1].split(";"), int(match[2])
        total += number
        loading += number if any(LOADER.search(frame) for frame in frames) else 0
        last[frames[-1]] += number
    if not total:
        raise ProfileError("py-spy recorded no sample: the command ended at once, or started no Python")
    share = loading / total
    hottest = ", ".join(f"{name} {percent(number / total)}" for name, number in last.most_common(MOST_SHOWN))
    bad = share > LOADING_SHARE
    return [
        ProfilePattern(
            pattern="data loading",
            value=round(share, 4),
            measured=f"{percent(share)} of {total} samples of all threads and processes",
            status="look" if bad else "ok",
            cause="samples are prepared in these processes" if bad else "",
            change="num_workers; gpunode validate --level deep --data DIR names the limit of the files" if bad else "",
        ),
        ProfilePattern(pattern="functions", value=None, measured=hottest, status="ok"),
    ]


class ProfileDocument(FrozenByName):
    """The document ``gpunode.profile/1``."""

    schema_name: Literal["gpunode.profile/1"] = Field("gpunode.profile/1", alias="schema")
    tool: Literal["nsys", "torch", "py-spy"]
    seconds: float
    """Of the whole command."""
    exit_code: int | None
    """None: it was interrupted at the time limit."""
    signal: int | None
    steps: int
    """Recorded ones; 0 for tools that record the whole run."""
    torch: str | None
    """Version."""
    patterns: tuple[ProfilePattern, ...]
    utilization_percent: tuple[float, ...]
    """Samples of all GPUs, one each second; empty: no nvidia-smi."""
    trace: str | None
    checked: tuple[str, ...]
    """Versions and permissions, before the run."""
    remarks: tuple[str, ...]
