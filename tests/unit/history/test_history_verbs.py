"""validate and collect keep their runs, compare them, and print the same verdict without a history."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshots import good, in_command, raw, swapped

from gpunode import fleet
from gpunode.checks import Expectation, Status
from gpunode.checks.registry import EarlierGpus
from gpunode.checks.thresholds import NO_POLICY
from gpunode.cli import run as cli
from gpunode.facts import facts_from_bundle
from gpunode.history.runs import Recorder
from gpunode.history.snapshot import Snapshot, Verdict
from gpunode.history.store import History
from gpunode.judging.request import JudgingRequest, findings_of
from gpunode.probe.bundle import Bundle

DURATION = re.compile(r" \(\d+\.\d s\)")
"""The time that a run took."""
SELECT = ("--select", "gpu.present,driver.module-loaded,link.pcie-width", "--level", "quick")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "history"))
    return tmp_path / "history"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "gpu-01.json"
    path.write_text(raw())
    return path


def replay(path: Path, *options: str) -> int:
    return cli(["validate", "--replay", str(path), *SELECT, *options])


def test_a_run_is_kept_and_the_next_one_is_compared_with_it(
    bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(bundle) == 0
    assert not folder.exists(), "a replay is not saved by default"
    assert replay(bundle, "--history") == 0
    assert replay(bundle, "--since", "last") == 0
    assert "1 node, no change\n" in capsys.readouterr().out
    bundle.write_text(in_command("nvidia-smi-xml", "<current_link_width>16x", "<current_link_width>8x", 1)(raw()))
    assert cli(["validate", "--replay", str(bundle), "--select", "driver.module-loaded", "--since", "last"]) == 1
    shown = capsys.readouterr().out
    assert "worse   gpu-01: gpu0: pcie width current: 16 -> 8\n" in shown
    assert replay(bundle, "--since", "last", "--format", "json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["fleet"]["since"]["schema"] == "gpunode.comparison/1"
    assert document["fleet"]["outliers"] is None, "one node is not a fleet"
    with History(folder) as history:
        assert len(history.runs()) == 1
        assert history.bundle_path(history.runs()[0], "gpu-01").exists()


@pytest.mark.parametrize("since", ["yesterday", "99", "nowhere/run.json"])
def test_a_run_that_does_not_exist_is_wrong_usage(since: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(bundle, "--history") == 0
    assert replay(bundle, "--since", since) == 2
    assert since in capsys.readouterr().err


def test_since_without_a_history_is_undetermined(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(bundle, "--since", "last") == 3
    assert "no run was saved there yet" in capsys.readouterr().err


def test_a_history_that_cannot_be_written_changes_no_verdict(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert replay(bundle) == 0
    usual = capsys.readouterr().out
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "file" / "x"))
    assert replay(bundle, "--history") == 0
    shown = capsys.readouterr()
    assert DURATION.sub("", shown.out) == DURATION.sub("", usual)
    assert shown.err.count("\n") == 1


def test_outliers_of_a_fleet_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    driver = good().stack.driver or ""
    for number in range(4):
        text = raw().replace('"host": "gpu-01"', f'"host": "gpu-{number:02d}"')
        (bundles / f"{number}.json").write_text(swapped(driver, "999.10.01")(text) if number == 3 else text)
    cli(["validate", "--replay", str(bundles), *SELECT, "--format", "json"])
    fleet = json.loads(capsys.readouterr().out)["fleet"]
    assert [(outlier["hosts"], outlier["what"]) for outlier in fleet["outliers"]] == [
        (["gpu-03"], "loaded driver version")
    ]
    assert fleet["inconsistencies"] == []
    cli(["validate", "--replay", str(bundles), *SELECT])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("differs"))
    assert line.startswith(f"differs  gpu-03: loaded driver version: 999.10.01, usual {driver} (1 of 4); also ")


def test_compare_names_runs_reports_and_bundles(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert replay(bundle, "--history", "--format", "json", "--output", str(report)) == 0
    for before, after in (("last", "1"), ("last", str(bundle)), (str(report), str(report)), (str(bundle), str(report))):
        capsys.readouterr()
        assert cli(["compare", before, after]) in (0, 1), (before, after)
        shown = capsys.readouterr().out
        assert " 1 node, " in shown
        assert "removed" not in shown, "a report has no facts: nothing was removed"
    assert cli(["compare", str(bundle), str(tmp_path / "nowhere.json")]) == 2
    assert cli(["compare", "last", "last", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["changes"] == []


def test_gpus_that_are_missing_since_an_earlier_run_are_a_failure(
    bundle: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four = good()
    with Recorder("validate", "quick", "2026-11-20T09:00:00Z") as recorder:
        recorder.node(four, "pass")
        recorder.finish("pass", "2026-11-20T09:00:00Z")
    three = four.model_copy(
        update={"gpus_on_bus": 3, "verdicts": {"gpu.present": Verdict(status=Status.FAIL)}, "gpus": four.gpus[1:]}
    )
    with Recorder("validate", "quick", "2026-11-21T09:00:00Z") as recorder:
        recorder.node(three, "fail")
        recorder.finish("fail", "2026-11-21T09:00:00Z")
        earlier = recorder.earlier_gpus(["gpu-01", "unknown"])
    assert earlier == {"gpu-01": EarlierGpus("run 1 of 2026-11-20T09:00:00Z", 4, "l40s")}
    document = json.loads(raw())
    slot = four.gpus[0].slot or ""
    document["files"] = {path: text for path, text in document["files"].items() if slot not in path}
    document["commands"]["nvidia-smi-xml"]["stdout"] = ""
    text = Bundle.from_json(json.dumps(document).encode(), "a test's bundle")
    request = JudgingRequest(
        expectation=Expectation(), checks=frozenset({"gpu.present"}), earlier_gpus={"gpu-01": earlier["gpu-01"]}
    )
    findings = findings_of(text, facts_from_bundle(text), request, level="quick", policy=NO_POLICY)
    assert [(finding.status, finding.source) for finding in findings] == [
        (Status.FAIL, "run 1 of 2026-11-20T09:00:00Z")
    ]
    # A bundle that another transport brought: collect names it by its host.
    bundle.write_text(json.dumps(document))
    assert replay(bundle, "--select", "gpu.present", "--history", "--since", "1") == 1
    shown = capsys.readouterr().out
    assert "the previous run found 4" in shown
    assert f"gpu0: GPU: NVIDIA L40S, serial {four.gpus[0].serial}, " in shown


def test_the_bundle_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["collect", "--print-probe"]) == 0
    assert capsys.readouterr().out.startswith(('"""', "#"))
    for wrong in (["gpu-01", "--on-node"], ["--on-node", "-K"], ["--on-node", "--limit", "a"]):
        assert cli(["collect", "--save", str(tmp_path / "b"), *wrong]) == 2
    assert cli(["collect", "--on-node"]) == 2
    assert "--save DIR is missing" in capsys.readouterr().err


def test_a_node_that_was_not_reached(folder: Path) -> None:
    with Recorder("validate", "quick", "2026-11-20T09:00:00Z") as recorder:
        recorder.node(Snapshot(host="gpu-09", level="quick"), "error")
        recorder.finish("error", "2026-11-20T09:00:00Z")
    with History(folder) as history:
        assert [node.reached for node in history.snapshots(1)] == [False]


def fleet_of(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | None]) -> None:
    """Replace the collection of a fleet: each host sends its text, or cannot be reached."""

    def collect(targets: list[fleet.Target], **_: object) -> Iterator[fleet.Collected]:
        for target in targets:
            text = answers[target.name]
            answer = None if text is None else fleet.Answer(text.encode(), host=target.name)
            yield fleet.Collected(target.name, answer, "no route to host" if text is None else None, 0.5)

    monkeypatch.setattr("gpunode.fleet.collect", collect)


def test_collect_saves_its_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpunode.fleet.targets_from_hosts", lambda hosts: [fleet.Target(host, "ssh") for host in hosts])
    fleet_of(monkeypatch, {"gpu-01": raw(), "far": None})
    collect = ["collect", "--save", str(tmp_path / "bundles")]
    assert cli([*collect, "gpu-01", "--no-history"]) == 0
    assert not folder.exists()
    assert cli([*collect, "gpu-01"]) == 0
    assert cli([*collect, "gpu-01", "far"]) == 3
    with History(folder) as history:
        first, second = sorted(history.runs(), key=lambda run: run.id)
        assert (first.verb, first.status, second.status) == ("collect", "collected", "error")
        for run in (first, second):
            (node,) = history.snapshots(run.id)
            assert (node.host, node.gpus, node.facts) == ("gpu-01", good().gpus, good().facts)
            assert history.bundle_path(run, "gpu-01").exists()
    capsys.readouterr()
    assert cli(["compare", str(first.id), str(second.id)]) == 0
    assert "1 node, no change\n" in capsys.readouterr().out


def test_racks_of_the_inventory_reach_the_outliers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two racks with a driver each are no outliers; a node with the other rack's driver is one, in its rack."""
    driver = good().stack.driver or ""
    racks = {f"gpu-{number:02d}": "r1" if number < 5 else "r2" for number in range(10)}
    answers = {host: raw() if rack == "r1" else swapped(driver, "999.10.01")(raw()) for host, rack in racks.items()}
    answers["gpu-09"] = raw()
    hosts = {host: {"gpunode_rack": rack} for host, rack in racks.items()}
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"all": {"vars": {"ansible_connection": "local"}, "hosts": hosts}}))
    fleet_of(monkeypatch, dict(answers))
    cli(["validate", "-i", str(inventory), *SELECT, "--no-history", "--format", "json"])
    outliers = json.loads(capsys.readouterr().out)["fleet"]["outliers"]
    assert [(outlier["hosts"], outlier["what"], outlier["usual"]) for outlier in outliers] == [
        (["gpu-09"], "loaded driver version", "999.10.01")
    ]
    assert outliers[0]["group"].endswith(" in r2")
