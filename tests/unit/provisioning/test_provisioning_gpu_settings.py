"""The plan of gpu_settings: rules, what a card does not support, what is pending, what waits."""

import json
import re
from typing import Any

import pytest
from plan_samples import planned, state_of

from gpunode.errors import UsageError
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.onnode.gpu_settings import MEMORY, REPORT, SETTINGS
from gpunode.provisioning.gpu_settings import (
    DAEMON,
    DAEMON_FILES,
    DROP_IN,
    PROGRAM,
    UNIT,
    UNIT_FILE,
    GpuSettingsResult,
    parsed_rules,
)
from gpunode.provisioning.manifest import Manifest

H100: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-0",
    "name": "NVIDIA H100 80GB HBM3",
    "pci_device_id": "10de:2330",
    "power_limit_w": 700.0,
    "power_default_limit_w": 700.0,
    "power_min_limit_w": 200.0,
    "power_max_limit_w": 700.0,
    "max_clocks_mhz": {"sm": 1980, "memory": 2619},
    "supported_clocks_mhz": {"memory": [1593, 2619], "graphics_min": 345},
    "application_clocks_mhz": {"graphics": None, "memory": None},
    "compute_mode": "Default",
    "accounting_mode": False,
    "ecc": {"enabled": True, "pending": True},
    "mig_mode": False,
    "mig_mode_pending": False,
    "mig_devices": [],
    "processes": [],
}
UNITS = [
    {"name": name, "load": "loaded", "active": "active", "sub": "exited", "enabled": "enabled"}
    for name in (DAEMON, UNIT)
]
TRAINING = [{"pid": 1, "type": "C", "name": "python3", "memory_used_mib": 1}]


def manifest(rules: list[dict[str, Any]], *gpus: dict[str, Any], **more: Any) -> Manifest:
    """The plan for a node with these GPUs, changed from an idle H100."""
    listed = [{**H100, "index": number, "uuid": f"GPU-{number}", **gpu} for number, gpu in enumerate(gpus)]
    document = {"driver_version": "580.95.05", "attached_gpus": len(listed), "gpus": listed}
    facts = {
        "host": "node",
        "collected_at": "2026-11-20T10:00:00Z",
        "loaded_driver": {"version": "580.95.05", "flavour": "open"},
        "smi": Smi[SmiLog](document=document) if listed else None,
        "units": UNITS,
        "packages": [],
    }
    contents = {path: json.dumps(document) for path, document in more.pop("documents", {}).items()}
    state = state_of(facts, contents={**contents, **more.pop("contents", {})})
    return planned("gpu_settings", state, {"gpu_settings": {"rules": rules, **more}})


def about_gpus(plan: Manifest) -> list[str]:
    """What is pending of the GPUs themselves."""
    return [reason for reason in plan.pending_reasons if re.match("gpu[0-9]", reason)]


def reported(**settings: Any) -> dict[str, Any]:
    """A report of this boot about GPU 0: setting to (value, result)."""
    entries = {name: {"value": value, "result": result, "message": "why"} for name, (value, result) in settings.items()}
    return {REPORT: {"gpus": {"GPU-0": {"settings": entries}}}}


@pytest.mark.parametrize(
    ("rule", "where"),
    [
        ({"gpus": "all", "sm_clock_mhz": "fast"}, r"gpu_settings_rules\[1\].sm_clock_mhz: fast is max, default"),
        ({"gpus": "all", "sm_clock_mhz": [1500, 210]}, r"gpu_settings_rules\[1\].sm_clock_mhz"),
        ({"gpus": "all", "power_limit": "much"}, r"gpu_settings_rules\[1\].power_limit: much is max"),
        ({"gpus": "all", "power_limit": True}, r"gpu_settings_rules\[1\].power_limit"),
        ({"gpus": "all", "mig": ["3g"]}, r"gpu_settings_rules\[1\].mig: 3g is not the name of a MIG profile"),
        ({"gpus": "all", "compute_mode": "shared"}, r"gpu_settings_rules\[1\].compute_mode"),
        ({"gpus": "all", "clock": 3}, r"gpu_settings_rules\[1\].clock"),
        ({"gpus": "H1000", "ecc": True}, r"gpu_settings_rules\[1\].gpus: unknown GPU 'H1000'"),
        ({"gpus": [], "ecc": True}, r"gpu_settings_rules\[1\].gpus: is all, a list of indexes"),
        ({"ecc": True}, r"gpu_settings_rules\[1\].gpus: Field required"),
    ],
)
def test_a_malformed_rule_is_reported_with_its_position(rule: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError, match=where):
        parsed_rules([{"gpus": "all", "ecc": True}, rule])


def test_mig_is_a_switch_or_a_bounded_list() -> None:
    rules = parsed_rules([{"gpus": "all", "mig": True}, {"gpus": 0, "mig": False}, {"gpus": 1, "mig": ["1g.10gb"]}])
    assert [rule["mig"] for rule in rules] == [True, False, ["1g.10gb"]]
    with pytest.raises(UsageError, match="mig"):
        parsed_rules([{"gpus": "all", "mig": ["1g.10gb"] * 9}])


def test_models_become_pci_ids_and_values_numbers() -> None:
    rules = parsed_rules([{"gpus": ["A100 SXM 80GB", "10de:2330"], "power_limit": "80 %", "sm_clock_mhz": "1410"}])
    assert rules == [{"gpus": {"pci_ids": ["10de:20b2", "10de:2330"]}, "power_limit": "80%", "sm_clock_mhz": 1410}]
    assert parsed_rules([{"gpus": 3, "power_limit": "500 W"}]) == [{"gpus": {"indexes": [3]}, "power_limit": 500.0}]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"power_limit": 900}, ("power_limit", "gpu0", "200 to 700 W")),
        ({"power_limit": "10%"}, ("power_limit", "70 W", "200 to 700 W")),
        ({"sm_clock_mhz": 2500}, ("sm_clock_mhz", "345 to 1980 MHz")),
        ({"sm_clock_mhz": [100, 1980]}, ("sm_clock_mhz", "345 to 1980 MHz")),
        ({"memory_clock_mhz": 2000}, ("memory_clock_mhz", "1593, 2619 MHz")),
        ({"application_clocks_mhz": {"memory": 2619, "graphics": 1980}}, ("no application clocks", "sm_clock_mhz")),
    ],
)
def test_what_the_card_does_not_support_is_refused_with_its_range(rule: dict[str, Any], words: tuple[str, ...]) -> None:
    plan = manifest([{"gpus": "all", "accounting": True}, {"gpus": "all", **rule}], {})
    assert len(plan.refusals) == 1
    assert all(word in plan.refusals[0] for word in words)
    assert not plan.files


def test_the_last_rule_for_a_gpu_wins_setting_by_setting() -> None:
    rules: list[dict[str, Any]] = [
        {"gpus": "all", "power_limit": 600, "accounting": True},
        {"gpus": [1], "power_limit": "default"},
    ]
    plan = manifest(rules, {}, {})
    assert set(about_gpus(plan)) == {
        "gpu0: power limit is 700 W, not 600 W",
        "gpu0: accounting is off, not on",
        "gpu1: accounting is off, not on",
    }
    assert [(unit.name, unit.state) for unit in plan.units] == [(DAEMON, "started"), (UNIT, "restarted")]


def test_a_node_that_has_it_all_is_settled() -> None:
    rules = [{"gpus": "all", "power_limit": 500, "sm_clock_mhz": 1500, "compute_mode": "exclusive_process"}]
    set_so = {"power_limit_w": 500.0, "compute_mode": "Exclusive_Process"}
    applied = reported(sm_clock_mhz=([1500, 1500], "applied"))
    first = manifest(rules, set_so, documents=applied)
    files = {file.path for file in first.files if file.content is not None}
    assert files == {PROGRAM, UNIT_FILE, SETTINGS}
    assert not about_gpus(first)
    assert [unit.state for unit in first.units] == ["started", "started"]
    # Locked clocks are known from the report of this boot alone.
    assert "gpu0: locked SM clock is unknown, not 1500 MHz" in manifest(rules, set_so).pending_reasons


def test_what_was_refused_is_reported_and_not_tried_again() -> None:
    rules = [{"gpus": "all", "memory_clock_mhz": "max"}]
    plan = manifest(rules, {}, documents=reported(memory_clock_mhz=([2619, 2619], "refused")))
    assert not about_gpus(plan)
    assert plan.notes == ("gpu0: locked memory clock 2619 MHz was refused: why",)


def test_a_busy_gpu_is_left_alone_and_reported() -> None:
    plan = manifest([{"gpus": "all", "power_limit": 500}], {"processes": TRAINING}, {})
    assert about_gpus(plan) == ["gpu1: power limit is 700 W, not 500 W"]
    assert plan.notes == ("gpu0: power limit is not changed: a process computes on the GPU",)


def test_what_waits_for_a_reset_is_a_reason_for_a_reboot() -> None:
    plan = manifest([{"gpus": "all", "ecc": False}], {"ecc": {"enabled": True, "pending": False}}, {})
    assert plan.reboot_reasons == (
        "ECC off of gpu0 takes effect with the next reset of the GPU or restart of the node",
    )
    assert about_gpus(plan) == ["gpu1: ECC is on, not off"]


def test_a_layout_is_compared_by_the_report_and_the_number_of_devices() -> None:
    rules = [{"gpus": "all", "mig": ["1g.10gb", "3g.40gb"]}]
    on = {"mig_mode": True, "mig_mode_pending": True}
    done = reported(mig_layout=(["3g.40gb", "1g.10gb"], "applied"))
    devices = [{"index": 0}, {"index": 1}]
    assert not [
        line
        for line in manifest(rules, {**on, "mig_devices": devices}, documents=done).pending_reasons
        if "MIG" in line
    ]
    lost = manifest(rules, on, documents=done)
    assert "gpu0: MIG layout is unknown, not 3g.40gb, 1g.10gb" in lost.pending_reasons


def test_a_lost_gpu_is_named_and_the_others_are_set() -> None:
    silent = {"power_max_limit_w": None, "power_default_limit_w": None, "errors": ["GPU is lost"]}
    plan = manifest([{"gpus": "all", "power_limit": 500}], silent, {})
    assert plan.refusals == ()
    assert plan.notes == ("gpu0: no setting is applied, the GPU does not respond",)
    assert about_gpus(plan) == ["gpu1: power limit is 700 W, not 500 W"]


def test_an_index_that_the_node_lacks_is_named() -> None:
    plan = manifest([{"gpus": "all", "accounting": True}, {"gpus": [7], "ecc": True}], {"accounting_mode": True})
    assert plan.notes == ("gpu_settings_rules[1].gpus: the node has no such GPU; it has 1",)


def test_without_a_driver_everything_is_prepared_and_nothing_started() -> None:
    plan = manifest([{"gpus": "all", "power_limit": 500}])
    assert {file.path for file in plan.files if file.content} == {PROGRAM, UNIT_FILE, SETTINGS}
    assert {unit.state for unit in plan.units} == {None}


def test_ubuntus_daemon_is_configured_to_keep_gpus_initialised() -> None:
    command = "/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose"
    unit = f"[Unit]\nDescription=NVIDIA\n[Service]\nType=forking\nExecStart={command}\n"
    plan = manifest([{"gpus": "all", "accounting": True}], {}, contents={DAEMON_FILES[1]: unit})
    text = {file.path: file.content for file in plan.files}[DROP_IN]
    assert text is not None
    assert text.endswith(f"ExecStart=\nExecStart={command.replace('--no-', '--')}\n")


@pytest.mark.parametrize(("rules", "state"), [([], "present"), ([{"gpus": "all", "ecc": True}], "absent")])
def test_removal_restores_what_was_recorded(rules: list[dict[str, Any]], state: str) -> None:
    recorded = {MEMORY: {"GPU-0": {"power_limit_w": 700.0}}}
    plan = manifest(rules, {"power_limit_w": 500.0}, documents=recorded, state=state)
    assert {file.content for file in plan.files} == {None}
    assert plan.result == GpuSettingsResult(restore=True)
    assert [(unit.name, unit.enabled) for unit in plan.units] == [(UNIT, False)]
    busy = manifest(rules, {"processes": TRAINING}, documents=recorded, state=state)
    assert "gpu-busy" in busy.refusals[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"gpus": 3}', '{"gpus": {"GPU-0": {"settings": [1]}}}'])
def test_a_malformed_report_counts_as_none(text: str) -> None:
    plan = manifest([{"gpus": "all", "sm_clock_mhz": 1500}], {}, contents={REPORT: text, MEMORY: text})
    assert "gpu0: locked SM clock is unknown, not 1500 MHz" in plan.pending_reasons
