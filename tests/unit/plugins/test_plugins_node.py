"""The filters on the node's facts: findings and their lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpunode.node.plugins.plugin_utils.policy import unusable
from plugin_loader import load

from gpunode.facts import facts_from_bundle
from gpunode.probe import Bundle

node = load("node")

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"


@pytest.fixture
def facts() -> dict[str, Any]:
    bundle = Bundle.from_json(BUNDLE.read_text(encoding="utf-8"), "a node")
    return facts_from_bundle(bundle).model_dump(mode="json")


def test_findings_are_those_of_the_checks(facts: dict[str, Any]) -> None:
    findings = node.findings(facts, ["driver.held", "driver.closure"])
    assert {finding["check"]: finding["status"] for finding in findings} == {
        "driver.held": "pass",
        "driver.closure": "pass",
    }
    assert node.finding_line(findings[0]).startswith(f"pass {findings[0]['check']}: ")


def test_a_check_that_does_not_exist_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match=r"unknown check: driver\.helt"):
        node.findings(facts, ["driver.helt"])


def test_invalid_facts_are_refused() -> None:
    with pytest.raises(AnsibleFilterError, match="not a NodeFacts document"):
        node.findings({"host": 1})


def test_without_the_package_the_filters_report_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MISSING", unusable(ImportError("No module named 'gpunode'")))
    with pytest.raises(AnsibleFilterError, match=rf"-m pip install {ROOT}$"):
        node.findings({})


def test_every_filter_is_documented() -> None:
    names = [file.stem for file in (ROOT / "plugins" / "filter").glob("*.py")]
    assert "node" in names
    for name in names:
        for filter_name in load(name).FilterModule().filters():
            assert (ROOT / "plugins" / "filter" / f"{filter_name}.yml").exists(), filter_name


def test_the_fixture_is_a_bundle_of_this_project() -> None:
    assert json.loads(BUNDLE.read_text(encoding="utf-8"))["schema"] == "gpunode.bundle/1"
