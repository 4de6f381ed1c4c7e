"""What the role gpu_settings left on a node, read back; the node's answer is not trusted."""

import hashlib
import json
from typing import Any

import pytest
from facts_samples import facts_with

SETTINGS, REPORT = "/etc/gpunode/gpu-settings.json", "/run/gpunode/gpu-settings.json"
RULES = json.dumps({"rules": [{"gpus": {"indexes": [0]}, "power_limit": "80%", "mig": ["3g.40gb"]}]})
ENTRY = {"value": 560.0, "result": "applied", "message": "was 700 W"}


def report(**changes: Any) -> str:
    digest = hashlib.sha256(RULES.encode()).hexdigest()
    gpus = {"GPU-0": {"index": 0, "name": "H100", "settings": {"power_limit_w": ENTRY}}}
    return json.dumps({"settings_sha256": digest, "gpus": gpus, **changes})


def test_rules_and_report() -> None:
    settings = facts_with(files={SETTINGS: RULES, REPORT: report()}).gpu_settings
    assert settings is not None
    assert settings.plain_rules() == [{"gpus": {"indexes": (0,)}, "power_limit": "80%", "mig": ["3g.40gb"]}]
    assert settings.reported is not None
    assert settings.reported["GPU-0"]["power_limit_w"].result == "applied"
    assert settings.current is True
    older = facts_with(files={SETTINGS: RULES, REPORT: report(settings_sha256="0")}).gpu_settings
    assert older is not None
    assert older.current is False


def test_no_settings_are_none_and_no_report_is_reported() -> None:
    facts = facts_with(files={SETTINGS: None, REPORT: None})
    assert facts.gpu_settings is None
    assert "gpu_settings" not in facts.gaps
    settings = facts_with(files={SETTINGS: RULES, REPORT: None}).gpu_settings
    assert settings is not None
    assert settings.reported is None


@pytest.mark.parametrize(
    ("rules", "reported"),
    [
        ("{", None),
        ("[]", None),
        ('{"rules": 3}', None),
        ('{"rules": [{"gpus": "some"}]}', None),
        ('{"rules": [{"gpus": "all", "power_limit": "%"}]}', None),
        ('{"rules": [{"gpus": "all", "sm_clock_mhz": [1, 2, 3]}]}', None),
        ('{"rules": [{"gpus": "all", "shell": "x"}]}', None),
        (RULES, "x"),
        (RULES, '{"gpus": 3}'),
        (RULES, '{"gpus": {"GPU-0": {}}}'),
        (RULES, '{"gpus": {"GPU-0": {"settings": {"ecc": {"value": 1, "result": "fine", "message": ""}}}}}'),
        (RULES, report(gpus={"GPU-0": {"settings": {"ecc": {**ENTRY, "message": "x" * 1000}}}})),
        ("[" * 100_000, None),
    ],
)
def test_what_is_malformed_is_a_gap(rules: str, reported: str | None) -> None:
    facts = facts_with(files={SETTINGS: rules, REPORT: reported})
    assert facts.gpu_settings is None
    assert "gpu_settings" in facts.gaps
