"""How mature a check is follows from the tests: the file of it is what they come to now."""

import json

import pytest
from maturity import BUNDLES, EVIDENCE, document, hardware, recordings, seconds
from test_captures_judged import names

from gpunode.checks import registry
from gpunode.checks.pages import evidence
from gpunode.facts import facts_from_bundle
from gpunode.probe.bundle import Bundle


@pytest.mark.captures(*names())
def test_the_file_is_what_the_tests_come_to() -> None:
    now = document()
    written = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    assert written == now, "out of date: .venv/bin/python tests/captures/maturity.py"


@pytest.mark.captures(*names())
def test_it_names_checks_alone() -> None:
    known = {check.id for check in registry}
    assert set(recordings()) <= known
    assert set(evidence().seconds) <= known


def test_nothing_simulated_counts_as_hardware() -> None:
    real = [
        path
        for path in BUNDLES.glob("*.json")
        if not (node := facts_from_bundle(Bundle.from_json(path.read_bytes(), str(path)))).simulated
        and node.gpus_on_bus
    ]
    assert bool(hardware()) is bool(real)


def test_seconds_are_those_of_the_commands_that_a_check_reads() -> None:
    path = BUNDLES / "debian-12-driver.json"
    bundle = Bundle.from_json(path.read_bytes(), str(path))
    slow = {key: result.model_copy(update={"seconds": 100.0}) for key, result in bundle.commands.items()}
    key = "dpkg-packages"
    changed = bundle.model_copy(update={"commands": {**bundle.commands, key: slow[key]}})
    before, after = seconds(bundle), seconds(changed)
    moved = {check for check in after if after[check] != before[check]}
    assert "driver.held" in moved
    assert "gpu.temperature" not in moved
    assert after["driver.held"] == pytest.approx(before["driver.held"] + 100.0 - bundle.commands[key].seconds, abs=0.02)
