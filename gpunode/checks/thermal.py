"""Checks on power and heat of GPUs: their draw and power state, reduced clocks, and distance to their limits."""

from collections.abc import Iterator

from gpunode.checks.compare import Scale, at_most, failed, passed, undetermined, warned
from gpunode.checks.gpus import SeenGpu, gpu_check, seen_gpus
from gpunode.checks.registry import CheckResult, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.gpu import GpuUsage
from gpunode.facts.models.smi import SmiGpu
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

HEALTH_VALIDATION = "NVIDIA Health Validation, gpu_average_power_draw"
OWN_MAXIMUM = "the card's own maximum"
GRACE_BLACKWELL = ("gb200", "gb300")
DRAW_LEAST = Threshold(
    "gpu.power-draw.least",
    0.02,
    "of the maximum limit",
    "A data-centre model that draws less is not powered as it should be, or its sensor is broken: a warning.",
    source="our choice: idle recordings of data-centre models draw 9 % (A10G) and more",
    most=1,
)
DRAW_MOST = Threshold(
    "gpu.power-draw.most",
    1.25,
    "of the maximum limit",
    "A higher average is implausible: a warning.",
    source=f"our choice, which is {HEALTH_VALIDATION}'s 1500 W for a limit of 1200 W",
    least=1,
)
DRAW_LEAST_W = Threshold(
    "gpu.power-draw.least-watts",
    0,
    "W",
    "A model with a published range fails below; 0: it has none.",
    source=HEALTH_VALIDATION,
    by=dict.fromkeys(GRACE_BLACKWELL, 65),
)
DRAW_MOST_W = Threshold(
    "gpu.power-draw.most-watts",
    0,
    "W",
    "A model with a published range fails above; 0: it has none.",
    source=HEALTH_VALIDATION,
    by=dict.fromkeys(GRACE_BLACKWELL, 1500),
)
BUSY = Threshold(
    "gpu.power-state.busy",
    50,
    "% utilization",
    "A GPU that works this much or more is expected in a performance state that does not save power.",
    source="our choice: recordings of GPUs under load are in P0 and P2",
    most=100,
)
SLOWEST = Threshold(
    "gpu.power-state.slowest",
    2,
    "performance state",
    "A busy GPU in a slower state (a higher number) warns.",
    source="recordings of GPUs under load are in P0 and P2",
    most=15,
)


STUCK_SOURCE = "our choice, by a report of 8 GPUs at 100 % and 128 W of 700 W (nebius/soperator 796)"
STUCK_USED = Threshold("gpu.stuck.used", 99, "% utilization", "A GPU in use this much may wait.", source=STUCK_SOURCE)
STUCK_MEMORY = Threshold(
    "gpu.stuck.memory", 1, "% memory utilization", "A GPU that reads more memory works.", source=STUCK_SOURCE
)
STUCK_POWER = Threshold(
    "gpu.stuck.power", 0.35, "of the power limit", "A GPU that draws more works.", source=STUCK_SOURCE, most=1
)
STUCK_GPUS = Threshold("gpu.stuck.gpus", 2, "GPUs", "This many that wait warn.", source="a collective has two ranks")


@gpu_check(
    "gpu.power-draw",
    means="The average power of the GPU is plausible for its model: neither near zero nor above the board's limit.",
    remedy="nvidia-smi -q -d POWER shows the readings; a persistent value means a broken sensor or insufficient "
    "power: check cables and power supplies.",
    actions=("reset_gpu", "power_cycle", "replace_hardware"),
    state="drain",
    thresholds=(DRAW_LEAST, DRAW_MOST, DRAW_LEAST_W, DRAW_MOST_W),
)
def power_draw(gpu: SeenGpu) -> CheckResult:
    watts = gpu.reported.power_w
    limit = gpu.reported.power_max_limit_w or gpu.reported.power_limit_w
    if watts is None:
        return gpu.not_reported("its power draw", expected=gpu.for_servers)
    least, most = DRAW_LEAST_W.of(gpu.match), DRAW_MOST_W.of(gpu.match)
    draws = f"draws {watts:g} W"
    model: Scale = {"unit": "W", "source": HEALTH_VALIDATION}
    board: Scale = {"unit": "W", "source": OWN_MAXIMUM}
    if least and watts < least:
        return failed(f"{draws}, less than {least:g} W", expected=least, measured=watts, **model)
    if most and watts > most:
        return failed(f"{draws}, more than {most:g} W", expected=most, measured=watts, **model)
    if limit is None:
        status = Status.PASS if least or most else Status.SKIP
        return CheckResult(status, f"{draws}; its limit is not reported", measured=watts, unit="W")
    if watts > DRAW_MOST.of(gpu.match) * limit:
        return warned(
            f"{draws}, its limit is at most {limit:g} W: no plausible reading", expected=limit, measured=watts, **board
        )
    if gpu.for_servers and watts < DRAW_LEAST.of(gpu.match) * limit:
        return warned(f"{draws}, next to nothing for a limit of {limit:g} W", expected=limit, measured=watts, **board)
    return passed(f"{draws}, its limit is at most {limit:g} W", expected=limit, measured=watts, **board)


@gpu_check(
    "gpu.power-state",
    means="The GPU is awake on the bus (D0), and while it works it is in a performance state that does not save power.",
    remedy="D3: disable runtime power management for the GPU (power/control: on) or keep it initialized (role "
    "nvidia_driver, tag nvidia_driver_service). A slow state under load: see gpu.throttling and gpu.clocks.",
    actions=("run_role:nvidia_driver:nvidia_driver_service", "reset_gpu"),
    state="observe",
    thresholds=(BUSY, SLOWEST),
)
def power_state(gpu: SeenGpu) -> CheckResult:
    on_bus = gpu.device.power_state if gpu.device else None
    if on_bus is not None and on_bus.startswith("D3"):
        return warned(f"sleeps on the bus ({on_bus})", expected="D0", measured=on_bus)
    state, used = gpu.reported.performance_state, gpu.reported.utilization_percent
    number = int(state[1:]) if isinstance(state, str) and state[:1] == "P" and state[1:].isdecimal() else None
    if number is None:
        return gpu.not_reported("its performance state", expected=gpu.for_servers)
    slow = used is not None and used >= BUSY.of(gpu.match) and number > SLOWEST.of(gpu.match)
    return CheckResult(
        Status.WARN if slow else Status.PASS,
        f"in {state}{f' at {used:g} % utilization' if used is not None else ''}",
        expected=f"P{SLOWEST.of(gpu.match):g} or faster under load",
        measured=state,
    )


@registry.check(
    "gpu.stuck",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means="No job hangs in a collective: no two GPUs are in full use at next to idle power, without reading memory, in "
    "two samples. Kernels that wait for another GPU count as full use.",
    remedy="Look at the processes with py-spy dump --pid PID, and at the ranks on other nodes: one of them is late or "
    "gone. scancel JOB or kill PID ends the job.",
    state="none",
    actions=("none",),
    thresholds=(STUCK_USED, STUCK_MEMORY, STUCK_POWER, STUCK_GPUS),
)
def stuck(node: NodeFacts) -> Iterator[CheckResult]:
    first = [gpu for gpu in seen_gpus(node) if _waits(gpu, gpu.reported)]
    least = STUCK_GPUS.value
    if len(first) < least:
        yield passed("no job waits in full use", expected=0, measured=len(first), unit="GPUs")
        return
    names = listed([gpu.component for gpu in first], most=8)
    if node.gpu_usage_again is None:
        reason = node.gap("gpu_usage_again") or "the probe took one sample"
        raise Undetermined(f"{names} may wait for each other; no second sample: {reason}")
    again = {usage.pci_bus_id: usage for usage in node.gpu_usage_again}
    both = [(gpu, again[slot]) for gpu in first if (slot := gpu.reported.pci_bus_id) is not None and slot in again]
    waiting = [(gpu, usage) for gpu, usage in both if _waits(gpu, usage)]
    if len(waiting) < least:
        yield passed("no job waits in full use", expected=0, measured=len(waiting), unit="GPUs")
        return
    components = [gpu.component for gpu, _ in waiting]
    users = [process.title for process in node.gpu_processes or () if process.gpu in components]
    gpu, usage = waiting[0]
    power = f"{usage.power_w:g} W of {gpu.reported.power_limit_w:g} W"
    message = f"{listed(components, most=8)} in full use at {power} in two samples: a collective may hang"
    who = f"; {listed(list(dict.fromkeys(users)), most=8)}" if users else ""
    yield warned(f"{message}{who}", expected=0, measured=len(waiting), unit="GPUs")


def _waits(gpu: SeenGpu, sample: GpuUsage | SmiGpu) -> bool:
    """Return True if a GPU is in full use, reads no memory, and draws next to idle power."""
    used, memory, power = sample.utilization_percent, sample.memory_utilization_percent, sample.power_w
    limit = gpu.reported.power_limit_w
    if used is None or memory is None or power is None or not limit:
        return False
    model = gpu.match
    return used >= STUCK_USED.of(model) and memory <= STUCK_MEMORY.of(model) and power <= STUCK_POWER.of(model) * limit


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
