"""Checks on settings and use of GPUs: persistence, compute mode, MIG, power limit, clocks, memory."""

from collections.abc import Iterator

from gpunode.checks.compare import Scale, at_least, at_most, failed, first_fault, passed, skipped, undetermined, warned
from gpunode.checks.gpu import SITE
from gpunode.checks.gpus import CATALOG, SeenGpu, gpu_check, of_one_gpu, seen_gpus
from gpunode.checks.registry import CheckResult, Expectation, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.smi import Number
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

PERSISTENCE_UNIT = "nvidia-persistenced.service"
OWN = "the card's own maximum"
OWN_DEFAULT = "the card's own default"
REQUESTED = "/etc/gpunode/gpu-settings.json (role gpu_settings)"
PERSISTENCED = "nvidia-persiste"  # truncated as in /proc/PID/comm
PERSISTENCE_REMEDY = "Switch persistence on: role nvidia_driver, tag nvidia_driver_service."
LIMIT_ROUNDING = Threshold(
    "gpu.power-limit.rounding",
    1,
    "W",
    "A limit that is lower than the default by more than this warns: limits are set in whole watts and printed with "
    "decimals.",
    source="our choice: the rounding of the tool",
)
BUSY = Threshold(
    "gpu.clocks.busy", 90, "%", "A GPU that is used from here on counts as busy.", source="our choice", most=100
)
LEAST_OF_MODEL = Threshold(
    "gpu.clocks.least-of-model",
    0.9,
    "of the model's clock",
    "A card that offers less warns.",
    source="our choice: vendors' cards differ by a few percent",
    most=1,
)
LEAST_WHEN_BUSY = Threshold(
    "gpu.clocks.least-when-busy",
    0.75,
    "of the highest clock",
    "A busy, unthrottled GPU that runs below it warns; GPUs that boost by temperature and voltage seldom reach the "
    "highest clock.",
    source="our choice",
    most=1,
)
IDLE_MEMORY = Threshold(
    "gpu.memory-used.idle-most",
    512,
    "MiB",
    "More memory in use that no process has warns.",
    source="our choice: above the driver's own use",
)
LEAST_OF_MEMORY = Threshold(
    "gpu.memory-size.least",
    0.9,
    "of the model's memory",
    "Less is a failure: drivers reserve a part, and ECC uses a sixteenth of GDDR memory.",
    source="our choice: below both",
    most=1,
)
MOST_OF_MEMORY = Threshold(
    "gpu.memory-size.most",
    1.1,
    "of the model's memory",
    "More warns: it may be another model.",
    source="our choice",
    least=1,
)


@registry.check(
    "gpu.persistence",
    needs=("loaded_driver", "smi", "units"),
    needs_gpu=True,
    means="Every GPU is kept initialized by the active persistence daemon: without it the driver releases an "
    "idle GPU, which loses its settings and its fast start.",
    remedy=PERSISTENCE_REMEDY,
    state="observe",
    actions=("run_role:nvidia_driver:nvidia_driver_service",),
    scope="gpu",
)
def persistence(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    for gpu in gpus:
        yield of_one_gpu(_mode_of, gpu, seen_by_guest=True, held=_held_by_daemon(node))
    if node.systemd is False:
        yield skipped("not booted with systemd: what sets the mode is unknown", component="nvidia-persistenced")
        return
    daemon = next((unit for unit in node.units or () if unit.name == PERSISTENCE_UNIT), None)
    state = daemon.active if daemon is not None else "not installed"
    if state == "active":
        yield passed("the persistence daemon is active", component="nvidia-persistenced", measured=state)
    else:
        yield warned(
            f"the persistence daemon is {state}: the mode is not set again after a reboot",
            component="nvidia-persistenced",
            expected="active",
            measured=state,
        )


def _held_by_daemon(node: NodeFacts) -> frozenset[str]:
    """Return the device files that the persistence daemon holds open."""
    return frozenset(
        device for process in node.gpu_processes or () if process.name == PERSISTENCED for device in process.devices
    )


def _mode_of(gpu: SeenGpu, held: frozenset[str]) -> CheckResult:
    mode = gpu.reported.persistence_mode
    if gpu.is_vgpu:
        raise Skip("a vGPU: its host keeps the GPU initialized")
    if mode is None:
        raise Undetermined("nvidia-smi does not report the persistence mode")
    if mode:
        return passed("persistence mode is on", expected=True, measured=True)
    if f"/dev/nvidia{gpu.reported.minor_number}" in held:
        # Drivers from 590 on may print "Disabled" for a GPU that the daemon keeps initialized.
        return passed("the persistence daemon keeps it initialized", expected=True, measured=True)
    return failed("persistence mode is off", expected=True, measured=False)


@gpu_check(
    "gpu.compute-mode",
    means="Any number of processes may use the GPU (compute mode Default), or the mode is the one that the role "
    "gpu_settings sets.",
    remedy="Run nvidia-smi -i GPU -c DEFAULT, unless a running job requested the mode.",
    seen_by_guest=True,
    state="drain",
    actions=("fix_configuration",),
)
def compute_mode(gpu: SeenGpu) -> CheckResult:
    mode = gpu.reported.compute_mode
    if mode is None:
        return undetermined("nvidia-smi does not report the compute mode")
    if mode == gpu.requested.get("compute_mode"):
        return passed(f"compute mode is {mode}", expected=mode, measured=mode, source=REQUESTED)
    if mode == "Default":
        return passed("compute mode is Default", expected="Default", measured=mode)
    if mode == "Prohibited":
        return failed("compute mode is Prohibited: CUDA cannot start", expected="Default", measured=mode)
    return warned(f"compute mode is {mode}: a second process on this GPU fails", expected="Default", measured=mode)


@registry.check(
    "gpu.mig",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means="MIG matches the site file, is the same on all GPUs, has instances if enabled, and has no change "
    "pending until a reset.",
    remedy="Run nvidia-smi -i GPU -mig 0 or 1 and reset the idle GPU to change the mode; nvidia-smi mig -cgi "
    "PROFILE -C creates instances.",
    state="drain",
    actions=("fix_configuration", "reset_gpu"),
    scope="gpu",
)
def mig(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    modes = {gpu.reported.mig_mode for gpu in gpus if gpu.lost is None}
    if modes <= {None}:
        can = [gpu.component for gpu in gpus if gpu.known.get("mig_instances") and gpu.for_servers and not gpu.is_vgpu]
        if can:
            yield undetermined(f"nvidia-smi does not report the MIG mode of {listed(can)}")
        else:
            yield skipped("these GPUs have no MIG")
        return
    for gpu in gpus:
        yield of_one_gpu(_mig_of, gpu, seen_by_guest=True, expected=expect.mig)
    meant = all(gpu.reported.mig_mode == gpu.requested.get("mig") for gpu in gpus if "mig" in gpu.requested)
    if len(modes) > 1 and not (meant and any("mig" in gpu.requested for gpu in gpus)):
        on = [gpu.component for gpu in gpus if gpu.mig]
        yield warned(f"MIG is on for some GPUs only: {listed(on, most=8)}")


def _mig_of(gpu: SeenGpu, expected: bool | None) -> CheckResult:
    mode, pending = gpu.reported.mig_mode, gpu.reported.mig_mode_pending
    if mode is None:
        return skipped(f"{gpu.name} has no MIG")
    word = "on" if mode else "off"
    if expected is not None and mode != expected:
        return failed(f"MIG is {word}", expected=expected, measured=mode, source=SITE)
    if pending is not None and pending != mode:
        after = "on" if pending else "off"
        return warned(f"MIG is {word}, and {after} after the next reset", expected=pending, measured=mode)
    if mode and not gpu.reported.mig_devices:
        return warned("MIG is on and has no instance: nothing can run on this GPU")
    instances = f" with {counted(len(gpu.reported.mig_devices or ()), 'instance')}" if mode else ""
    return passed(f"MIG is {word}{instances}", measured=mode)


@gpu_check(
    "gpu.power-limit",
    means="The power limit in force is the card's default, or that of the role gpu_settings; with a lower one the card "
    "is slower than others of its model.",
    remedy="Unless the limit is intended, run nvidia-smi -i GPU -pl DEFAULT to reset it.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(LIMIT_ROUNDING,),
)
def power_limit(gpu: SeenGpu) -> CheckResult:
    limit, default = gpu.reported.power_limit_w, gpu.reported.power_default_limit_w
    if limit is None or default is None:
        return gpu.not_reported("the power limit", expected=gpu.for_servers)
    meant = gpu.requested.get("power_limit_w")
    default = default if meant is None else meant
    good, bad = f"the power limit is {limit:g} W", f"the power limit is {limit:g} W of {default:g} W"
    return at_least(
        limit,
        default - LIMIT_ROUNDING.of(gpu.match),
        good,
        bad,
        fault=Status.WARN,
        expected=default,
        unit="W",
        source=OWN_DEFAULT if meant is None else REQUESTED,
    )


@gpu_check(
    "gpu.clocks",
    means="The maximum clocks of the GPU are those of its model, and a busy, unthrottled GPU runs near them.",
    remedy="nvidia-smi -q -d CLOCK,PERFORMANCE shows what limits the clocks; nvidia-smi -i GPU -rgc and -rmc "
    "remove locked clocks.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(BUSY, LEAST_OF_MODEL, LEAST_WHEN_BUSY),
)
def clocks(gpu: SeenGpu) -> CheckResult:
    now, most = gpu.reported.clocks_mhz.sm, gpu.reported.max_clocks_mhz.sm
    if most is None or now is None:
        return gpu.not_reported("the clocks", expected=gpu.for_servers)
    lower: list[tuple[str, Number, int]] = []
    offers = (("SM", "sm_clock_mhz", most), ("memory", "memory_clock_mhz", gpu.reported.max_clocks_mhz.memory))
    for kind, field, offered in offers:
        expected = gpu.known.get(field)
        if expected is not None and offered is not None and offered < LEAST_OF_MODEL.of(gpu.match) * expected:
            lower.append((kind, offered, expected))
    problems = [
        f"the card offers a {kind} clock of {has} MHz at most, its model {expected} MHz"
        for kind, has, expected in lower
    ]
    busy = (gpu.reported.utilization_percent or 0) >= BUSY.of(gpu.match)
    held_back = set(gpu.reported.throttle_reasons or ())
    slow = busy and not held_back and now < LEAST_WHEN_BUSY.of(gpu.match) * most
    if slow:
        problems.append(f"busy, held back by nothing, and its SM clock is {now} of {most} MHz")
    known = CATALOG if gpu.known.get("sm_clock_mhz") is not None else OWN
    if not problems:
        return passed(f"up to {most} MHz are offered", measured=most, unit="MHz", source=known)
    measured, expected = (lower[0][1], lower[0][2]) if lower else (now, most)
    return warned(
        "; ".join(problems), expected=expected, measured=measured, unit="MHz", source=CATALOG if lower else OWN
    )


@registry.check(
    "gpu.memory-used",
    needs=("loaded_driver", "smi", "gpu_processes"),
    needs_gpu=True,
    means="All used GPU memory belongs to a visible process. Other memory is left by a process that died, or "
    "used by one in a container that is not visible. Skipped if the operating system manages GPU memory "
    "(superchips, ATS): it keeps pages after their process ended, and uses GPU memory itself.",
    remedy="Run fuser -v /dev/nvidia* as root to find processes that use the GPU; if there are none, reset the "
    "idle GPU.",
    state="observe",
    actions=("reset_gpu",),
    category="memory",
    scope="gpu",
    thresholds=(IDLE_MEMORY,),
)
def memory_used(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    for gpu in gpus:
        yield of_one_gpu(_memory_of, gpu, seen_by_guest=True, node=node)


def _memory_of(gpu: SeenGpu, node: NodeFacts) -> CheckResult:
    used = gpu.reported.memory_used_mib
    if gpu.is_vgpu or gpu.mig:
        return skipped("memory of a divided GPU is not counted by process")
    if gpu.known.get("form") == "superchip" or gpu.reported.addressing_mode == "ATS":
        # NVML's known issues: if GPUs are NUMA nodes, pages stay allocated after their process ended.
        return skipped("the operating system manages this GPU's memory with its own", measured=used)
    if used is None:
        # A superchip's memory belongs to the machine.
        return gpu.not_reported("the memory in use", expected=gpu.for_servers)
    idle_most = IDLE_MEMORY.of(gpu.match)
    device = f"/dev/nvidia{gpu.reported.minor_number}"
    users = [
        process
        for process in node.gpu_processes or ()
        if process.gpu == gpu.component or (process.computes and device in process.devices)
    ]
    if used > idle_most and not users:
        message = f"{used} MiB are in use, and no process has them"
        return warned(message, expected=idle_most, measured=used, unit="MiB")
    if users:
        return passed(
            f"{used} MiB are in use by {counted(len(users), 'process', 'processes')}", measured=used, unit="MiB"
        )
    return passed(f"{used} MiB are in use", expected=idle_most, measured=used, unit="MiB")


@gpu_check(
    "gpu.memory-size",
    means="The driver reports the memory size of the GPU model, less the part used by ECC.",
    remedy="Reset the idle GPU (nvidia-smi --gpu-reset -i GPU) or restart the node; a card that stays smaller is "
    "defective or another model.",
    state="drain",
    actions=("reset_gpu", "restart_os", "replace_hardware"),
    category="memory",
    thresholds=(LEAST_OF_MEMORY, MOST_OF_MEMORY),
)
def memory_size(gpu: SeenGpu) -> CheckResult:
    total = gpu.reported.memory_total_mib
    sold, gigabytes = gpu.known.get("memory_mib"), gpu.known.get("memory_gb")
    expected = sold if sold is not None else None if gigabytes is None else round(gigabytes * 1e9 / 2**20)
    if gpu.known.get("form") == "superchip" and total is None:
        return skipped("the operating system manages this GPU's memory with its own")
    if total is None:
        return gpu.not_reported("the memory size", expected=gpu.for_servers)
    if expected is None:
        reason = (
            "a model that the catalog does not have (gpu.model)" if gpu.match is None else f"the size of {gpu.name}"
        )
        return skipped(f"{total} MiB; the catalog does not have {reason}", measured=total, unit="MiB")
    sure = gpu.sure("memory_mib" if sold is not None else "memory_gb")
    good, bad = f"{total} MiB of memory", f"{total} MiB of memory, its model has {expected}"
    least, most = LEAST_OF_MEMORY.of(gpu.match) * expected, MOST_OF_MEMORY.of(gpu.match) * expected
    size: Scale = {"unit": "MiB", "source": CATALOG}
    return first_fault(
        at_least(total, least, good, bad, fault=Status.FAIL if sure else Status.WARN, expected=expected, **size),
        at_most(total, most, good, f"{bad}: it may be another model", fault=Status.WARN, expected=expected, **size),
    )


@registry.check(
    "gpu.vbios",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means="All GPUs of one model have the same VBIOS: different firmware has different limits and faults.",
    remedy="nvidia-smi --query-gpu=index,vbios_version --format=csv lists them; ask the vendor for one version.",
    state="observe",
    actions=("open_support_case",),
)
def vbios(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    verdict = [gpu for gpu in gpus if gpu.lost is None and gpu.reported.vbios_version and not gpu.is_vgpu]
    by_model: dict[str, dict[str | None, list[str]]] = {}
    for gpu in verdict:
        model = f"{gpu.reported.pci_device_id} {gpu.reported.pci_subsystem_id}"
        by_model.setdefault(model, {}).setdefault(gpu.reported.vbios_version, []).append(gpu.component)
    mixed = [versions for versions in by_model.values() if len(versions) > 1]
    for versions in mixed:
        words = listed([f"{version}: {listed(names, most=8)}" for version, names in sorted(versions.items())])
        yield warned(f"VBIOS differs: {words}", expected=1, measured=len(versions), unit="versions")
    if not verdict:
        yield skipped("nvidia-smi reports no VBIOS version of these GPUs")
    elif not mixed and all(len(names) == 1 for versions in by_model.values() for names in versions.values()):
        yield skipped("no two GPUs of one model to compare")
    elif not mixed:
        yield passed("GPUs of one model have one VBIOS version", expected=1, measured=1, unit="versions")
