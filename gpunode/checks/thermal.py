"""Checks on heat and power: reasons for reduced clocks, and distance of a GPU to its limits."""

from gpunode.checks.compare import Scale, at_most, failed, passed, undetermined, warned
from gpunode.checks.gpus import SeenGpu, gpu_check
from gpunode.checks.registry import CheckResult, Status
from gpunode.checks.thresholds import Threshold
from gpunode.text import listed

HARDWARE = frozenset({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
SOFTWARE_HEAT = frozenset({"sw_thermal_slowdown"})
WORDS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "hardware slowdown for heat",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "slowdown for heat",
}
OWN_LIMIT = "the card's own limit"
HBM_SOURCE = "sichek's specifications (HBM: 95 °C), as A100 cards print it"
NEAR = Threshold(
    "gpu.temperature.near",
    5,
    "°C",
    "Below the temperature at which the card slows down by less than this: a warning.",
    source="our choice: no source gives a distance",
)
MEMORY_MOST = Threshold(
    "gpu.temperature.memory-most",
    95,
    "°C",
    "Memory of a GPU without a reported limit is too hot above this: a warning.",
    source=HBM_SOURCE,
)
MEMORY_MARGIN = Threshold(
    "gpu.temperature.memory-margin",
    10,
    "°C",
    "Above memory-most by this: a failure.",
    source="our choice: the limit above is another card's",
)
READ_AGAIN = "nvidia-smi -q -d TEMPERATURE,PERFORMANCE shows the reading again; one that stays is a broken sensor."


@gpu_check(
    "gpu.throttling",
    means="The GPU is not throttled by heat or a power brake. Idle state, a power limit and configured clocks "
    "are ignored. Several reasons may be active at once; each is evaluated.",
    remedy="Heat: fans, air flow, dust, ambient temperature. Power brake: power supplies, cabling, and the limit that "
    "the chassis sets. nvidia-smi -q -d PERFORMANCE shows the reasons.",
    state="drain",
    actions=("fix_configuration", "replace_hardware"),
)
def throttling(gpu: SeenGpu) -> CheckResult:
    reasons = gpu.reported.throttle_reasons
    if reasons is None:
        return gpu.not_reported("what slows it down", expected=gpu.for_servers)
    hard = [reason for reason in reasons if reason in HARDWARE]
    soft = [reason for reason in reasons if reason in SOFTWARE_HEAT]
    measured = ", ".join(reasons) or "none"
    if hard:
        # hw_slowdown includes the other two, which are more specific.
        named = [reason for reason in hard if reason != "hw_slowdown"] or hard
        words = listed([WORDS[reason] for reason in (*named, *soft)])
        return failed(f"slowed down: {words}", expected="none", measured=measured)
    if soft:
        words = listed([WORDS[reason] for reason in soft])
        return warned(f"slowed down: {words}", expected="none", measured=measured)
    return passed("nothing slows it down", expected="none", measured=measured)


@gpu_check(
    "gpu.temperature",
    means="The GPU, and its memory if it has a sensor, are well below the slowdown temperatures.",
    remedy="Check fans, air flow, dust and the ambient temperature; nvidia-smi -q -d TEMPERATURE shows the limits.",
    state="drain",
    actions=("fix_configuration", "replace_hardware"),
    thresholds=(NEAR, MEMORY_MOST, MEMORY_MARGIN),
)
def temperature(gpu: SeenGpu) -> CheckResult:
    now = gpu.reported.temperature_c
    if now is None:
        return gpu.not_reported("its temperature", expected=gpu.for_servers)
    hot = _memory_heat(gpu)
    if hot is not None:
        return hot
    if _implausible(gpu):
        message = f"T.Limit reads 0 at {now} °C, and no heat slows the GPU down: the reading is implausible"
        return undetermined(message, measured=now, unit="°C", remedy=READ_AGAIN)
    slowdown = _slowdown_c(gpu, now)
    if slowdown is None:
        return gpu.not_reported(f"the limit of its temperature ({now} °C)", expected=gpu.for_servers)
    near = NEAR.of(gpu.match)
    degrees: Scale = {"unit": "°C", "source": OWN_LIMIT}
    if now >= slowdown:
        return failed(
            f"{now} °C: the card slows down from {slowdown} °C on", expected=slowdown, measured=now, **degrees
        )
    bad = f"{now} °C: less than {near} °C below {slowdown} °C, where the GPU slows down"
    good = f"{now} °C, it slows down at {slowdown} °C"
    return at_most(now, slowdown - near, good, bad, fault=Status.WARN, expected=slowdown, **degrees)


def _memory_heat(gpu: SeenGpu) -> CheckResult | None:
    """Return the result for memory that is too hot. GPUs with T.Limit print no limit in degrees: others' applies."""
    memory, most = gpu.reported.memory_temperature_c, gpu.reported.memory_max_temperature_c
    if memory is None:
        return None
    limit, source = (most, OWN_LIMIT) if most is not None else (MEMORY_MOST.of(gpu.match), HBM_SOURCE)
    if memory < limit:
        return None
    status = Status.FAIL if most is not None or memory >= limit + MEMORY_MARGIN.of(gpu.match) else Status.WARN
    message = f"memory is at {memory} °C, its limit is {limit} °C"
    return CheckResult(status, message, expected=limit, measured=memory, unit="°C", source=source)


def _implausible(gpu: SeenGpu) -> bool:
    """Return True if the distance to the limit reads 0, and neither hardware nor software slows the GPU down for
    heat."""
    reasons = set(gpu.reported.throttle_reasons or ())
    at_limit = gpu.reported.tlimit_c == 0 and gpu.reported.slowdown_temperature_c is None
    return at_limit and not reasons & (HARDWARE | SOFTWARE_HEAT)


def _slowdown_c(gpu: SeenGpu, now: float) -> float | None:
    """Return the slowdown temperature; newer GPUs print the distance to their limit instead (T.Limit)."""
    slowdown = gpu.reported.slowdown_temperature_c
    margin, margin_at_slowdown = gpu.reported.tlimit_c, gpu.reported.slowdown_tlimit_c
    if slowdown is None and margin is not None and margin_at_slowdown is not None:
        slowdown = now + margin - margin_at_slowdown
    return slowdown
