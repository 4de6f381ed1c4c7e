"""Checks on measurements of single GPUs: copies, memory, products, clocks, sustained load."""

from collections.abc import Iterator

from gpunode.catalog import Gpu
from gpunode.checks.compare import at_most, failed, first_fault, passed, undetermined
from gpunode.checks.gpus import CATALOG
from gpunode.checks.measurements import OF_FIGURES, MeasuredNode, judged, measurement_check, words, worst_of
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined
from gpunode.checks.thermal import HARDWARE, SOFTWARE_HEAT, WORDS
from gpunode.checks.thresholds import Threshold
from gpunode.expectations import Figure
from gpunode.expectations.limits import Where
from gpunode.facts.models.measured import (
    GEMM_TYPES,
    BurnValues,
    Corruption,
    DeviceCopyValues,
    GemmValues,
    HostCopyValues,
    LoadState,
    PeerCopyValues,
    StreamValues,
)
from gpunode.facts.models.workload import DeviceIdentity, Record
from gpunode.text import counted, listed

THROTTLED = Threshold(
    "performance.clocks.throttled",
    0.05,
    "of the samples",
    "More of them with a reason that is heat or a power brake: a failure (heat that software reacts to: a warning).",
    source="our choice: a single sample at the start of a load is not a fault",
    most=1,
)
CLOCK_LEAST = Threshold(
    "performance.clocks.least",
    0.5,
    "of the model's maximum",
    "A lower clock under load without a power limit as its cause (for example clocks locked low) is a failure.",
    source="our choice",
    most=1,
)
CLOCK_CAPPED = Threshold(
    "performance.clocks.capped",
    0.35,
    "of the model's maximum",
    "A power limit that reduces the clock below this under load warns.",
    source="our choice: cards of 70 W run products at about half of their maximum",
    most=1,
)
DRIFT_WARNS = Threshold(
    "performance.burn.drift-warns",
    0.05,
    "of the rate",
    "A sustained load that loses more between its beginning and its end warns.",
    source="our choice",
    most=1,
)
DRIFT_FAILS = Threshold(
    "performance.burn.drift-fails",
    0.15,
    "of the rate",
    "A sustained load that loses more is a failure.",
    source="our choice",
    most=1,
)
WRONG = (
    "A wrong result on only one GPU is a fault of that GPU: stop using it and run dcgmi diag -r 3. "
    "Several GPUs with wrong results at once: the driver, or a bus in between."
)
NOT_LISTED = -1
"""Index for a GPU that nvidia-smi does not list: the shape has no data of it."""
REPLACE = ("reset_gpu", "open_support_case", "replace_hardware")


class Loaded(DeviceIdentity):
    """Protocol of the values of any record of a load on a GPU."""

    load: LoadState = LoadState()


def corrupted(number: int, label: str, component: str = "node") -> CheckResult:
    """Return the result for elements that arrived or were computed wrong."""
    text = f"{label}: {counted(number, 'element')} wrong"
    return failed(
        text, component=component, expected=0, measured=number, unit="elements", remedy=WRONG, actions=REPLACE
    )


@measurement_check(
    "performance.host-copy",
    ("copy.host",),
    HostCopyValues,
    means="Copies between pinned memory of the host and every GPU reach what its PCIe link carries, in both "
    "directions, and arrive unchanged.",
    remedy="link.pcie-width and link.pcie-speed show a link that trained low. Only one GPU: reseat it. Both "
    "directions of all GPUs: the BIOS's settings for PCIe (payload size, relaxed ordering), ACS and IOMMU (host.acs, "
    "host.iommu), power saving of the processor (host.cpu-governor).",
    state="observe",
    actions=("fix_configuration", "open_support_case"),
    thresholds=OF_FIGURES,
    category="pcie",
    scope="gpu",
)
def host_copy(values: HostCopyValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    index = run.index_of(record)
    for direction in ("host_to_device", "device_to_host"):
        copies = [copy for copy in values.copies if copy.direction == direction]
        wrong = sum(copy.wrong for copy in copies)
        if wrong:
            yield corrupted(wrong, words(direction))
        pinned = [copy for copy in copies if copy.pinned and copy.near is not False]
        if not pinned:
            yield undetermined(f"{words(direction)}: no copy from pinned memory near the GPU was recorded")
        elif not wrong:
            best = max(pinned, key=lambda copy: copy.bandwidth_gb_per_s)
            where = Where(gpu=NOT_LISTED if index is None else index)
            figure = Figure(direction, best.bandwidth_gb_per_s, where, best.size_bytes)
            yield judged(figure, run.shape, run.expect, _name(index))


def _name(index: int | None) -> str:
    """Return ``gpu3``, or ``node`` for a GPU that nvidia-smi does not list; the record's component replaces it."""
    return "node" if index is None else f"gpu{index}"


@measurement_check(
    "performance.device-copy",
    ("copy.device",),
    DeviceCopyValues,
    means="Copies within the memory of every GPU reach what the memory carries, and arrive unchanged.",
    remedy="nvidia-smi -q -d CLOCK,PERFORMANCE during the copy shows the memory clock and what limits it; "
    "gpu.remapped-rows and gpu.ecc-uncorrected show failing memory. " + WRONG,
    state="observe",
    actions=REPLACE,
    thresholds=OF_FIGURES,
    category="memory",
    scope="gpu",
)
def device_copy(values: DeviceCopyValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    if values.wrong:
        yield corrupted(values.wrong, "copy within the memory")
        return
    figure = Figure("on_device", values.bandwidth_gb_per_s, Where(), values.size_bytes)
    yield judged(figure, run.shape, run.expect, _name(run.index_of(record)))


@measurement_check(
    "performance.peer-copy",
    ("copy.peer",),
    PeerCopyValues,
    means="Copies between every two GPUs reach what connects them: NVLink or PCIe. They arrive unchanged.",
    remedy="NVLink: nvlink.count, nvlink.speed, nvlink.errors and fabric.state. PCIe: host.acs, host.iommu, "
    "link.pcie-width. A pair that uses the host although NVLink connects it: framework.p2p and link.p2p.",
    state="observe",
    actions=("fix_configuration", "reset_gpu", "open_support_case"),
    thresholds=OF_FIGURES,
    category="nvlink",
    scope="link",
)
def peer_copy(values: PeerCopyValues, run: MeasuredNode) -> Iterator[CheckResult]:
    indices = [run.index(uuid) for uuid in values.uuids]
    verdicts: list[CheckResult] = []
    for pair in values.pairs:
        if max(pair.source, pair.target) >= len(indices):
            raise Undetermined("the record refers to a GPU that it does not list")
        first, second = indices[pair.source], indices[pair.target]
        name = "node" if first is None or second is None else f"gpu{first}-gpu{second}"
        sides = (NOT_LISTED if first is None else first, NOT_LISTED if second is None else second)
        linked = run.shape.links_between(*sides)
        if pair.wrong:
            verdicts.append(corrupted(pair.wrong, f"{name} peer to peer", name))
        elif not pair.direct and linked:
            message = f"{name}: copies go through the host, although {linked} NVLinks connect the GPUs"
            verdicts.append(failed(message, component=name, measured=round(pair.bandwidth_gb_per_s, 3), unit="GB/s"))
        elif pair.direct:
            figure = Figure("peer_to_peer", pair.bandwidth_gb_per_s, Where(*sides), values.size_bytes)
            verdicts.append(judged(figure, run.shape, run.expect, name, label=f"{name} peer to peer"))
    if not verdicts:
        raise Skip("no two GPUs reach each other without the host (framework.p2p reports which)")
    yield from worst_of(verdicts)


@measurement_check(
    "performance.memory",
    ("memory.stream",),
    StreamValues,
    level="deep",
    means="Reading, writing and computing (triad) over the memory of every GPU reach what it carries.",
    remedy="nvidia-smi -q -d CLOCK,PERFORMANCE during the load shows the memory clock and what limits it; "
    "gpu.remapped-rows and gpu.ecc-uncorrected show failing memory. " + WRONG,
    state="observe",
    actions=REPLACE,
    thresholds=OF_FIGURES,
    category="memory",
    scope="gpu",
)
def memory(values: StreamValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    if not values.kernels:
        raise Undetermined("no pattern of access was recorded")
    for kernel in values.kernels:
        if kernel.wrong:
            yield corrupted(kernel.wrong, f"memory {kernel.kernel}")
            continue
        figure = Figure(f"memory_{kernel.kernel}", kernel.bandwidth_gb_per_s, Where(), values.size_bytes)
        yield judged(figure, run.shape, run.expect, _name(run.index_of(record)))


@measurement_check(
    "performance.gemm",
    tuple(f"gemm.{dtype}" for dtype in GEMM_TYPES),
    GemmValues,
    means="Matrix products are correct in every element, and as fast as the measured clock allows. A wrong "
    "element is silent data corruption; its GPU and block are reported.",
    remedy="Slow: performance.clocks shows what held the clock down; the image's cuBLAS may be older than the GPU. "
    + WRONG,
    state="drain",
    actions=REPLACE,
    thresholds=OF_FIGURES,
    scope="gpu",
)
def gemm(values: GemmValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    dtype = record.record.partition(".")[2]
    if values.wrong or values.corrupted:
        yield corrupted(values.wrong, f"silent corruption in {dtype} products{_blocks(values.corrupted)}")
        return
    figure = Figure(f"gemm_{dtype}", values.tflops, Where(clock_mhz=values.load.sm_clock_mhz))
    yield judged(figure, run.shape, run.expect, _name(run.index_of(record)))


def _blocks(corruptions: tuple[Corruption, ...]) -> str:
    """Return the location of wrong results: product, block and its first element."""
    places = [
        f"product {block.round}, rows {block.row} to {block.row + block.rows - 1}, columns {block.column} to "
        f"{block.column + block.columns - 1}, first at ({block.first_row}, {block.first_column})"
        for block in corruptions
    ]
    return f" ({listed(places, most=2)})" if places else ""


@measurement_check(
    "performance.clocks",
    (*(f"gemm.{dtype}" for dtype in GEMM_TYPES), "burn.gemm"),
    Loaded,
    broken_in="performance.gemm or performance.burn",
    means="Neither heat, power brake nor settings reduce the clocks under load. A power limit is a fault only "
    "if it reduces the clock strongly.",
    remedy="Heat: fans, air flow, dust, ambient temperature. Power brake: power supplies, cabling, and the limit that "
    "the chassis sets. Locked clocks: nvidia-smi -rgc, nvidia-smi -rac. A low power limit: gpu.power-limit. "
    "nvidia-smi -q -d PERFORMANCE under load shows the reasons.",
    state="drain",
    actions=("fix_configuration", "replace_hardware"),
    thresholds=(THROTTLED, CLOCK_LEAST, CLOCK_CAPPED),
    scope="gpu",
)
def clocks(values: Loaded, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    held = throttled(values.load, record.record)
    low = None if held.status is not Status.PASS else _low(values.load, run.shape.gpu, record.record)
    yield held if low is None else low


def _low(load: LoadState, gpu: Gpu | None, label: str) -> CheckResult | None:
    """Return the result for a clock that is low although neither heat nor a power brake is reported."""
    if gpu is None or gpu.sm_clock_mhz is None or load.sm_clock_mhz is None:
        return None
    capped = (load.throttle_reasons or {}).get("sw_power_cap", 0) > THROTTLED.value
    least, status = (CLOCK_CAPPED, Status.WARN) if capped else (CLOCK_LEAST, Status.FAIL)
    expected = round(least.value * gpu.sm_clock_mhz)
    if load.sm_clock_mhz >= expected:
        return None
    status = status if gpu.sure("sm_clock_mhz") else Status.WARN
    why = "due to the power limit" if capped else "no reason is reported: are the clocks locked?"
    text = f"{label}: {load.sm_clock_mhz:.0f} MHz under load, the model's maximum is {gpu.sm_clock_mhz}; {why}"
    return CheckResult(status, text, expected=expected, measured=load.sm_clock_mhz, unit="MHz", source=CATALOG)


def throttled(load: LoadState, label: str) -> CheckResult:
    """Return the result for the reasons that reduced clocks during a load; raise Undetermined if none are known."""
    if load.throttle_reasons is None or not load.samples:
        raise Undetermined(f"{label}: NVML reported no reasons for lower clocks")
    shares = {name: share for name, share in load.throttle_reasons.items() if share > THROTTLED.value}
    clock = f"{load.sm_clock_mhz:.0f} MHz" if load.sm_clock_mhz is not None else "clock unknown"
    for reasons, status in ((HARDWARE, Status.FAIL), (SOFTWARE_HEAT, Status.WARN)):
        named = [f"{WORDS[name]} in {share:.0%} of the samples" for name, share in shares.items() if name in reasons]
        if named:
            message = f"{label}: {clock}, slowed down: {listed(named)}"
            return CheckResult(status, message, measured=load.sm_clock_mhz, unit="MHz")
    limited = f", power limit in {shares['sw_power_cap']:.0%} of the samples" if "sw_power_cap" in shares else ""
    message = f"{label}: {clock}, neither heat nor power brake{limited}"
    return passed(message, measured=load.sm_clock_mhz, unit="MHz")


@measurement_check(
    "performance.burn",
    ("burn.gemm",),
    BurnValues,
    level="deep",
    means="A sustained load keeps its rate from beginning to end, and every compared result is correct.",
    remedy="A falling clock is mostly caused by heat: fans, air flow, dust, thermal paste; see "
    "performance.clocks for the reason. " + WRONG,
    state="drain",
    actions=("fix_configuration", *REPLACE),
    thresholds=(DRIFT_WARNS, DRIFT_FAILS),
    scope="gpu",
)
def burn(values: BurnValues) -> Iterator[CheckResult]:
    if values.wrong or values.corrupted:
        yield corrupted(values.wrong, f"silent corruption under sustained load{_blocks(values.corrupted)}")
        return
    slope = values.tflops_slope_percent_per_minute
    if slope is None:
        raise Undetermined(f"too few points in {values.burn_seconds:.0f} s for a slope")
    lost = -slope / 100 * values.burn_seconds / 60
    clock = values.sm_clock_slope_mhz_per_minute
    clocks_say = f", clock {clock:+.1f} MHz per minute" if clock is not None else ""
    message = f"{values.tflops:.0f} TFLOPS for {values.burn_seconds:.0f} s, {-lost:+.1%} from begin to end{clocks_say}"
    yield first_fault(
        at_most(
            lost, DRIFT_FAILS.value, message, expected=-DRIFT_FAILS.value, measured=round(-lost, 4), unit="of the rate"
        ),
        at_most(
            lost,
            DRIFT_WARNS.value,
            message,
            fault=Status.WARN,
            expected=-DRIFT_WARNS.value,
            measured=round(-lost, 4),
            unit="of the rate",
        ),
    )
