"""What the checks on GPU settings find where a node waits, refuses, or was set by hand."""

from typing import Any

import pytest
from test_checks_gpus import judged, node, one, smi_gpu

from gpunode.facts.running import Unit
from gpunode.facts.settings import GpuRule, GpuSetting, GpuSettings

H100: dict[str, Any] = {
    "uuid": "GPU-0",
    "name": "NVIDIA H100 80GB HBM3",
    "power_limit_w": 500.0,
    "power_default_limit_w": 700.0,
    "power_min_limit_w": 200.0,
    "power_max_limit_w": 700.0,
    "max_clocks_mhz": {"sm": 1980, "memory": 2619},
    "compute_mode": "Default",
    "ecc": {"enabled": True, "pending": True},
    "mig_mode": False,
    "mig_mode_pending": False,
    "mig_devices": [],
    "processes": [],
}
UNITS = tuple(
    Unit(name=name, load="loaded", active="active", sub="exited", enabled="enabled")
    for name in ("gpunode-gpu-settings.service", "nvidia-persistenced.service")
)


def asked(*rules: dict[str, Any], **entries: tuple[Any, str]) -> GpuSettings:
    """Rules, and the report of this boot about the one GPU: setting to (value, result)."""
    settings = {
        name: GpuSetting(value=value, result=result, message="why") for name, (value, result) in entries.items()
    }
    return GpuSettings(
        rules=tuple(GpuRule.model_validate({"gpus": "all", **rule}) for rule in rules),
        reported={"GPU-0": settings},
        current=True,
    )


def verdict(settings: GpuSettings | None, **gpu: Any) -> tuple[str, str]:
    return one("gpu.settings", node(smi_gpu("2330", **{**H100, **gpu}), gpu_settings=settings))


def test_a_power_limit_of_the_rules_is_no_fault() -> None:
    facts = node(smi_gpu("2330", **H100), gpu_settings=asked({"power_limit": 500}))
    assert one("gpu.power-limit", facts)[0] == "pass"
    assert one("gpu.settings", facts) == ("pass", "power limit 500 W")
    assert one("gpu.power-limit", node(smi_gpu("2330", **H100), gpu_settings=None))[0] == "warn"
    assert (
        one("gpu.power-limit", node(smi_gpu("2330", **H100), gpu_settings=asked({"power_limit": "max"})))[0] == "warn"
    )


def test_a_compute_mode_of_the_rules_is_no_fault() -> None:
    mode = {"compute_mode": "Exclusive_Process"}
    facts = node(smi_gpu("2330", **H100) | mode, gpu_settings=asked({"compute_mode": "exclusive_process"}))
    assert one("gpu.compute-mode", facts)[0] == "pass"
    assert one("gpu.compute-mode", node(smi_gpu("2330", **H100) | mode, gpu_settings=None))[0] == "warn"


@pytest.mark.parametrize(
    ("settings", "gpu", "status", "words"),
    [
        (asked({"power_limit": 600}), {}, "fail", "power limit is 500 W, not 600 W"),
        (asked({"power_limit": 600}), {"processes": [{"pid": 4242, "type": "C"}]}, "warn", "the GPU is busy"),
        (asked({"power_limit": 900}), {}, "fail", "200 to 700 W"),
        (asked({"ecc": False}), {"ecc": {"enabled": True, "pending": False}}, "warn", "next reset"),
        (asked({"ecc": False}), {"ecc": {"enabled": None, "pending": None}}, "error", "does not report ECC"),
        (asked({"sm_clock_mhz": 1500}, sm_clock_mhz=([1500, 1500], "applied")), {}, "pass", "1500 MHz"),
        (asked({"sm_clock_mhz": 1500}, sm_clock_mhz=([1500, 1500], "refused")), {}, "fail", "was refused: why"),
        (asked({"sm_clock_mhz": 1500}), {}, "fail", "was not applied since the boot"),
        (
            asked({"mig": ["1g.10gb"]}),
            {"mig_mode": True, "mig_mode_pending": True},
            "fail",
            "MIG layout is 0 instances",
        ),
        (asked({"gpus": {"indexes": [3]}, "ecc": True}), {}, "skip", "no rule is for this GPU"),
        (None, {}, "skip", "sets nothing on this node"),
    ],
)
def test_what_is_not_as_requested_is_named(
    settings: GpuSettings | None, gpu: dict[str, Any], status: str, words: str
) -> None:
    outcome = verdict(settings, **gpu)
    assert outcome[0] == status
    assert words in outcome[1]


def test_mig_on_the_gpus_that_the_rules_name_is_no_difference() -> None:
    on = {"mig_mode": True, "mig_mode_pending": True, "mig_devices": [{"index": 0}]}
    gpus = (
        smi_gpu("2330", **H100),
        {**smi_gpu("2330", **H100), **on, "index": 1, "pci_bus_id": "0000:3d:00.0", "uuid": "GPU-1"},
    )
    rules = asked({"mig": False}, {"gpus": {"indexes": [1]}, "mig": ["7g.80gb"]})
    assert {finding.status.value for finding in judged("gpu.mig", node(*gpus, gpu_settings=rules))} == {"pass"}
    assert "warn" in {finding.status.value for finding in judged("gpu.mig", node(*gpus, gpu_settings=None))}


@pytest.mark.parametrize(
    ("units", "status"),
    [
        (UNITS, "pass"),
        (UNITS[:1], "warn"),
        ((UNITS[0].model_copy(update={"enabled": "disabled"}), UNITS[1]), "warn"),
        ((UNITS[0].model_copy(update={"active": "failed"}), UNITS[1]), "warn"),
    ],
)
def test_settings_survive_with_the_unit_and_the_daemon(units: tuple[Unit, ...], status: str) -> None:
    findings = judged(
        "gpu.settings-kept", node(smi_gpu("2330", **H100), units=units, gpu_settings=asked({"ecc": True}))
    )
    assert max((finding.status.value for finding in findings), key=["pass", "warn"].index) == status


def test_application_clocks_set_by_hand_are_lost() -> None:
    clocks = {"memory": 877, "graphics": 1380}
    by_hand = {"application_clocks_mhz": clocks, "default_application_clocks_mhz": {**clocks, "graphics": 1230}}
    assert one("gpu.settings-kept", node(smi_gpu("1db6", **by_hand), gpu_settings=None))[0] == "warn"
    default = {"application_clocks_mhz": clocks, "default_application_clocks_mhz": clocks}
    assert one("gpu.settings-kept", node(smi_gpu("1db6", **default), gpu_settings=None))[0] == "pass"
