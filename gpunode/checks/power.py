"""Checks on power draw and power state of GPUs."""

from gpunode.checks.compare import Scale, failed, passed, warned
from gpunode.checks.gpus import SeenGpu, gpu_check
from gpunode.checks.registry import CheckResult, Status
from gpunode.checks.thresholds import Threshold

HEALTH_VALIDATION = "NVIDIA Health Validation, gpu_average_power_draw"
OWN_LIMIT = "the card's own maximum"
GRACE_BLACKWELL = ("gb200", "gb300")
LEAST = Threshold(
    "gpu.power-draw.least",
    0.02,
    "of the maximum limit",
    "A data-centre model that draws less is not powered as it should be, or its sensor is broken: a warning.",
    source="our choice: idle recordings of data-centre models draw 9 % (A10G) and more",
    most=1,
)
MOST = Threshold(
    "gpu.power-draw.most",
    1.25,
    "of the maximum limit",
    "A higher average is implausible: a warning.",
    source=f"our choice, which is {HEALTH_VALIDATION}'s 1500 W for a limit of 1200 W",
    least=1,
)
LEAST_W = Threshold(
    "gpu.power-draw.least-watts",
    0,
    "W",
    "A model with a published range fails below; 0: it has none.",
    source=HEALTH_VALIDATION,
    by=dict.fromkeys(GRACE_BLACKWELL, 65),
)
MOST_W = Threshold(
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


@gpu_check(
    "gpu.power-draw",
    means="The average power of the GPU is plausible for its model: neither near zero nor above the board's limit.",
    remedy="nvidia-smi -q -d POWER shows the readings; a persistent value means a broken sensor or insufficient "
    "power: check cables and power supplies.",
    actions=("reset_gpu", "power_cycle", "replace_hardware"),
    state="drain",
    thresholds=(LEAST, MOST, LEAST_W, MOST_W),
)
def power_draw(gpu: SeenGpu) -> CheckResult:
    watts = gpu.reported.power_w
    limit = gpu.reported.power_max_limit_w or gpu.reported.power_limit_w
    if watts is None:
        return gpu.not_reported("its power draw", expected=gpu.for_servers)
    least, most = LEAST_W.of(gpu.match), MOST_W.of(gpu.match)
    draws = f"draws {watts:g} W"
    model: Scale = {"unit": "W", "source": HEALTH_VALIDATION}
    board: Scale = {"unit": "W", "source": OWN_LIMIT}
    if least and watts < least:
        return failed(f"{draws}, less than {least:g} W", expected=least, measured=watts, **model)
    if most and watts > most:
        return failed(f"{draws}, more than {most:g} W", expected=most, measured=watts, **model)
    if limit is None:
        status = Status.PASS if least or most else Status.SKIP
        return CheckResult(status, f"{draws}; its limit is not reported", measured=watts, unit="W")
    if watts > MOST.of(gpu.match) * limit:
        return warned(
            f"{draws}, its limit is at most {limit:g} W: no plausible reading", expected=limit, measured=watts, **board
        )
    if gpu.for_servers and watts < LEAST.of(gpu.match) * limit:
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
