"""A site's policy: limits of its own, checks that are muted or observed, and what is refused."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[2] / "contract"), str(Path(__file__).parent)]

from bundles import apply, hgx, stdout
from jsonschema import Draft202012Validator
from machines import Document

from gpunode import fleet
from gpunode.cli import run
from gpunode.cli.reference import schema_of

LATER = (datetime.now(UTC) + timedelta(days=30)).date().isoformat()
PAST = "2026-01-31"
SMI = "nvidia-smi-xml"


def warm() -> Document:
    """Eight H100; GPU 0 has corrected so many ECC errors that only a strict site minds."""
    document = hgx()
    xml = document["commands"][SMI]["stdout"]
    old = xml[xml.index("<volatile>") : xml.index("</volatile>")]
    new = old.replace("<dram_correctable>0<", "<dram_correctable>5000<")
    assert old != new
    return apply(document, [stdout(SMI, old, new)])


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def statuses(self) -> dict[str, str]:
        (node,) = json.loads(self.out)["nodes"]
        worst = ("fail", "error", "warn", "note", "pass", "skip")
        by_check: dict[str, str] = {}
        for finding in node["findings"]:
            name = finding["check"]
            by_check[name] = min(by_check.get(name, "skip"), finding["status"], key=worst.index)
        return by_check

    def node(self) -> Any:
        document = json.loads(self.out)
        Draft202012Validator(json.loads(schema_of("report"))).validate(document)
        return document["nodes"][0]

    def findings(self, check: str) -> list[Any]:
        return [finding for finding in self.node()["findings"] if finding["check"] == check]


@pytest.fixture
def judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Validate the bundle with a policy; None: without one."""
    bundle = tmp_path / "node.json"
    bundle.write_text(json.dumps(warm()))

    def call(policy: str | None, *more: str) -> Ended:
        words = ["validate", "--replay", str(bundle), "--level", "quick", "--format", "json", *more]
        if policy is not None:
            path = tmp_path / "site.yml"
            path.write_text(policy)
            words += ["--policy", str(path)]
        capsys.readouterr()
        code = run(words)
        return Ended(code, *capsys.readouterr())

    return call


def test_one_bundle_by_four_policies(judge: Any) -> None:
    """Without one it passes; a stricter limit warns; the same is muted, and observed. Nothing else moves."""
    strict = "thresholds: {gpu.ecc-corrected.most: {hopper: 1000}}\n"
    rule = "checks: {gpu.ecc-corrected: {mode: %s, reason: known card, until: " + LATER + "}}\n"
    loose = judge(None, "--strict")
    tight = judge(strict, "--strict")
    muted = judge(strict + rule % "mute", "--strict")
    observed = judge(strict + rule % "observe", "--strict")
    others = [{**ended.statuses(), "gpu.ecc-corrected": ""} for ended in (loose, tight, muted, observed)]
    assert all(other == others[0] for other in others)
    assert [ended.code for ended in (loose, tight, muted, observed)] == [0, 1, 0, 0]
    assert [ended.statuses()["gpu.ecc-corrected"] for ended in (loose, tight, muted, observed)] == [
        "pass",
        "warn",
        "skip",
        "warn",
    ]
    assert [ended.node()["status"] for ended in (loose, tight, muted, observed)] == ["pass", "warn", "pass", "pass"]
    assert [ended.node()["recommended_state"] for ended in (loose, tight, observed)] == ["none", "observe", "none"]
    (finding,) = [finding for finding in tight.findings("gpu.ecc-corrected") if finding["status"] == "warn"]
    assert (finding["component"], finding["expected"]) == ("gpu0", 1000)
    assert "policy site.yml (gpu.ecc-corrected.most 1000 errors)" in finding["source"]
    assert "known card" in muted.findings("gpu.ecc-corrected")[0]["message"]
    assert {finding["observed"] for finding in observed.findings("gpu.ecc-corrected")} == {
        f"known card (until {LATER})"
    }
    counts = [json.loads(ended.out)["counts"] for ended in (loose, tight, observed)]
    assert [(count["warn"], count["observed"]) for count in counts] == [(0, 0), (1, 0), (0, 8)]


def test_what_is_observed_is_marked_on_the_console(judge: Any, tmp_path: Path) -> None:
    rule = "checks: {gpu.ecc-corrected: {mode: observe, reason: known card, until: " + LATER + "}}\n"
    out = tmp_path / "out.txt"
    judge("thresholds: {gpu.ecc-corrected.most: 1000}\n" + rule, "--format", "console", "--output", str(out))
    text = out.read_text()
    assert f"observed only, does not affect the result: known card (until {LATER})" in text
    assert "8 observed only" in text
    assert text.splitlines()[0].endswith("ok")


def test_a_policy_may_loosen(judge: Any) -> None:
    strict = judge("thresholds: {gpu.temperature.near: 40}\n")
    loose = judge("thresholds: {gpu.temperature.near: {default: 40, h100-sxm5-80gb: 1}}\n")
    assert (strict.statuses()["gpu.temperature"], loose.statuses()["gpu.temperature"]) == ("pass", "pass")
    strict = judge("thresholds: {gpu.temperature.near: 70}\n")
    loose = judge("thresholds: {gpu.temperature.near: {default: 70, h100-sxm5-80gb: 1}}\n")
    assert (strict.statuses()["gpu.temperature"], loose.statuses()["gpu.temperature"]) == ("warn", "pass")


def test_a_rule_that_has_ended_counts_no_more_and_is_reported(judge: Any, tmp_path: Path) -> None:
    policy = f"""
thresholds: {{gpu.ecc-corrected.most: 1000}}
checks: {{gpu.ecc-corrected: {{mode: observe, reason: known card, until: {PAST}}}}}
"""
    ended = judge(policy, "--strict")
    assert (ended.code, ended.statuses()["gpu.ecc-corrected"]) == (1, "warn")
    (line,) = ended.node()["policy"]["expired"]
    assert line.startswith(f"gpu.ecc-corrected: observe ended on {PAST}")
    shown = judge(policy, "--format", "console", "--output", str(tmp_path / "out.txt"))
    assert shown.code == 0
    assert line in (tmp_path / "out.txt").read_text()


RULE = "checks: {host.time: {mode: mute, reason: x, until: 2099-01-01}}"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("", ("is empty",)),
        ("- a\n", ("a list",)),
        ("treshold: {}", ("treshold", "did you mean thresholds")),
        ("thresholds: {gpu.temperatur.near: 3}", ("gpu.temperatur.near", "gpu.temperature.near", "--thresholds")),
        ("thresholds: {gpu.temperature.near: -1}", ("gpu.temperature.near", "0 or more", "-1")),
        ("thresholds: {host.disk-space.full: 101}", ("from 0 to 100", "101")),
        ("thresholds: {host.disk-space.full: .nan}", ("nan",)),
        ("thresholds: {host.disk-space.full: .inf}", ("inf",)),
        ("thresholds: {host.disk-space.full: yes}", ("True",)),
        ("thresholds: {host.disk-space.full: '90'}", ("'90'",)),
        ("thresholds: {host.disk-space.full: {}}", ("expected a number",)),
        ("thresholds: {gpu.temperature.near: {hoper: 3}}", ("hoper", "hopper")),
        ("thresholds: [1]", ("a list",)),
        (RULE.replace("host.time", "host.tim"), ("host.tim", "host.time")),
        (RULE.replace("mute", "off"), ("mute or observe", "False")),
        (RULE.replace("reason: x, ", ""), ("reason", "None")),
        (RULE.replace("reason: x", "reason: ' '"), ("reason",)),
        (RULE.replace("2099-01-01", "soon"), ("YYYY-MM-DD", "soon")),
        (RULE.replace(", until: 2099-01-01", ""), ("until", "None")),
        (RULE.replace("reason", "raeson"), ("raeson", "reason")),
        ("checks: {host.time: {mode: mute, reason: x, until: 2099-01-01}, host.time: {}}", ("duplicate key",)),
        ("own_checks: site.yml", ("a list of files",)),
        ("own_checks: [nowhere.yml]", ("nowhere.yml", "No such file")),
        ("a: &a [*a]", ("a",)),
    ],
)
def test_an_invalid_policy_is_refused_with_one_line(judge: Any, policy: str, words: tuple[str, ...]) -> None:
    ended = judge(policy)
    assert (ended.code, json.loads(ended.out)["message"]) == (2, ended.err.strip()), ended.err
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert not [word for word in (*words, "site.yml") if word not in ended.err], ended.err


def test_limits_are_listed_with_what_a_policy_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "site.yml"
    path.write_text("thresholds: {gpu.temperature.near: {hopper: 8}}\n")
    assert run(["checks", "--thresholds", "--policy", str(path)]) == 0
    out = capsys.readouterr().out
    assert "gpu.temperature.near  5 °C  policy: 8 (hopper)" in out
    assert out.count("framework.max-error") == 1
    assert run(["checks", "--format", "json", "--policy", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(schema_of("checks"))).validate(document)
    (entry,) = [check for check in document["checks"] if check["id"] == "gpu.temperature"]
    assert entry["thresholds"][0]["policy"] == {"hopper": 8}


@pytest.mark.parametrize("form", ["path", "mapping"])
def test_the_inventory_has_a_policy_for_each_host(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts with one bundle: the one with a policy is judged by it, --policy holds for both."""
    strict = {"thresholds": {"gpu.ecc-corrected.most": 1000}}
    (tmp_path / "strict.yml").write_text(json.dumps(strict))
    value = str(tmp_path / "strict.yml") if form == "path" else strict
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        json.dumps(
            {"all": {"vars": {"ansible_connection": "local"}, "hosts": {"a": {"gpunode_policy": value}, "b": {}}}}
        )
    )
    text = json.dumps(warm()).encode()

    def collect(targets: Any, **_: Any) -> Any:
        return (fleet.Collected(target.name, fleet.Answer(text, host=target.name), None, 0.1) for target in targets)

    monkeypatch.setattr(fleet, "collect", collect)
    words = ["validate", "-i", str(inventory), "--level", "quick", "--select", "gpu.ecc-corrected", "--format", "json"]
    run(words)
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [(node["host"], node["status"], node["policy"] is None) for node in nodes] == [
        ("a", "warn", False),
        ("b", "pass", True),
    ]
    (tmp_path / "all.yml").write_text("thresholds: {gpu.ecc-corrected.most: 4000}\n")
    run([*words, "--policy", str(tmp_path / "all.yml")])
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [(node["status"], node["policy"]["source"]) for node in nodes] == [("warn", "policy all.yml")] * 2
