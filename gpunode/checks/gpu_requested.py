"""Checks on the settings that the role gpu_settings requests: applied now, and applied after a reboot."""

from collections.abc import Iterator
from typing import Any

from gpunode.checks.compare import failed, passed, skipped, undetermined, warned
from gpunode.checks.gpu_settings import PERSISTENCE_UNIT, REQUESTED
from gpunode.checks.gpus import SeenGpu, of_one_gpu, seen_gpus
from gpunode.checks.registry import CheckResult, Skip, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.running import Unit
from gpunode.facts.settings import GpuSetting
from gpunode.onnode.gpu_settings import LATER, TITLES, busy, in_force, pending, requested, resolved, shown
from gpunode.text import listed

UNIT = "gpunode-gpu-settings.service"
NOT_DEPLOYED = "the role gpu_settings sets nothing on this node"
UNREADABLE = ("sm_clock_mhz", "memory_clock_mhz", "mig_layout")
"""Settings that nvidia-smi does not report; the unit's report of this boot has them."""


@registry.check(
    "gpu.settings",
    needs=("loaded_driver", "smi", "gpu_settings"),
    needs_gpu=True,
    means="Every GPU has the clocks, power limit, compute mode, ECC, MIG and accounting that the role "
    "gpu_settings configures. Locked clocks and the profiles of MIG instances are those that its unit reported "
    "in this boot.",
    remedy="journalctl -b -u gpunode-gpu-settings has the reasons; on idle GPUs run the role gpu_settings again.",
    state="observe",
    actions=("run_role:gpu_settings:gpu_settings", "fix_configuration"),
    scope="gpu",
)
def settings(node: NodeFacts) -> Iterator[CheckResult]:
    gpu_settings = node.gpu_settings
    if gpu_settings is None:
        raise Skip(NOT_DEPLOYED)
    gpus = seen_gpus(node)
    rules, reported = gpu_settings.plain_rules(), gpu_settings.reported or {}
    for gpu in gpus:
        problems = resolved(requested(rules, gpu.plain), gpu.plain)[1]
        entries = reported.get(str(gpu.reported.uuid), {})
        yield of_one_gpu(_settings_of, gpu, seen_by_guest=True, problems=problems, entries=entries)


def _settings_of(gpu: SeenGpu, problems: dict[str, str], entries: dict[str, GpuSetting]) -> CheckResult:
    if not gpu.requested and not problems:
        return skipped("no rule is for this GPU", source=REQUESTED)
    wrong, waiting, unknown = list(problems.values()), [], []
    for setting, value in gpu.requested.items():
        now = _now(setting, gpu, entries)
        title = TITLES[setting]
        if now == value:
            continue
        if pending(setting, gpu.plain) == value:
            waiting.append(f"{title} {shown(setting, value)} {LATER}")
        elif busy(gpu.plain):
            waiting.append(f"{title} waits: the GPU is busy")
        elif setting in entries and entries[setting].result == "refused":
            wrong.append(f"{title} {shown(setting, value)} was refused: {entries[setting].message}")
        elif now is None and setting not in UNREADABLE:
            unknown.append(title)
        elif now is None:
            wrong.append(f"{title} {shown(setting, value)} was not applied since the boot")
        else:
            wrong.append(f"{title} is {shown(setting, now)}, not {shown(setting, value)}")
    if wrong:
        return failed("; ".join([*wrong, *waiting]), source=REQUESTED)
    if unknown:
        return undetermined(f"nvidia-smi does not report {listed(unknown)}", source=REQUESTED)
    if waiting:
        return warned("; ".join(waiting), source=REQUESTED)
    values = ", ".join(f"{TITLES[name]} {shown(name, value)}" for name, value in gpu.requested.items())
    return passed(values, source=REQUESTED)


def _now(setting: str, gpu: SeenGpu, entries: dict[str, GpuSetting]) -> Any:
    """Return a setting's value; if nvidia-smi does not report it, the value that the unit applied in this boot."""
    expected = gpu.requested[setting]
    if setting == "mig_layout" and len(gpu.reported.mig_devices) != len(expected):
        return [f"{len(gpu.reported.mig_devices)} instances"]
    if setting not in UNREADABLE and expected != "default":
        return in_force(setting, gpu.plain)
    entry = entries.get(setting)
    return entry.value if entry is not None and entry.result in ("applied", "kept") else None


@registry.check(
    "gpu.settings-kept",
    needs=("loaded_driver", "smi", "units", "gpu_settings"),
    needs_gpu=True,
    means="GPU settings survive a reboot: the unit of the role gpu_settings is enabled and ran, and the "
    "persistence daemon, without which GPUs lose clocks and power limit, is enabled. Application clocks set by "
    "hand are lost.",
    remedy="Run the role gpu_settings with these values in gpu_settings_rules, or nvidia-smi -rac.",
    state="observe",
    actions=("run_role:gpu_settings:gpu_settings", "fix_configuration"),
    scope="gpu",
)
def settings_kept(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    if node.gpu_settings is not None:
        for name, why in ((UNIT, "the settings are not applied again"), (PERSISTENCE_UNIT, "GPUs forget them")):
            yield _kept_by(_unit(node, name), why).at(name.removesuffix(".service"))
    by_hand = [gpu for gpu in gpus if gpu.lost is None and _is_by_hand(gpu)]
    for gpu in by_hand:
        clocks = in_force("application_clocks_mhz", gpu.plain)
        message = f"application clocks {clocks[0]},{clocks[1]} MHz were set by hand: they are lost with the next reboot"
        yield warned(message, component=gpu.component, measured=f"{clocks[0]},{clocks[1]}")
    if not by_hand and node.gpu_settings is None:
        yield passed("no application clocks are set that a reboot loses")


def _unit(node: NodeFacts, name: str) -> Unit | None:
    return next((unit for unit in node.units or () if unit.name == name), None)


def _kept_by(unit: Unit | None, why: str) -> CheckResult:
    if unit is None:
        return warned(f"it is not installed: after a reboot {why}", expected="enabled")
    if unit.enabled != "enabled":
        message = f"it is {unit.enabled or 'not enabled'}: after a reboot {why}"
        return warned(message, expected="enabled", measured=unit.enabled)
    if unit.active != "active":
        return warned(f"it is {unit.active}", expected="active", measured=unit.active)
    return passed("enabled, and active since the boot", expected="enabled", measured=unit.enabled)


def _is_by_hand(gpu: SeenGpu) -> bool:
    """Return whether application clocks differ from the GPU's default without a rule that requests them."""
    now, usual = gpu.reported.application_clocks_mhz, gpu.reported.default_application_clocks_mhz
    known = now.graphics is not None and usual.graphics is not None
    return known and now != usual and "application_clocks_mhz" not in gpu.requested
