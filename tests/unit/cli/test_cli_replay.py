"""Folders of saved bundles: all of them, in order, one in memory at a time."""

import json
import re
import tracemalloc
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from gpunode.catalog import load
from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.facts import facts_from_bundle
from gpunode.isolation import AnswerLimits
from gpunode.judging.evaluator import Evaluator, NodeAnswer
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.probe.bundle import Bundle
from gpunode.provisioning.node_stack import with_request
from gpunode.stack import Request, plan
from gpunode.stack.picture import host_of

MIB = 1 << 20
DURATION = re.compile(r" \(\d+\.\d s\)")
"""The time that a run took."""
FIXTURES = Path(__file__).parents[2] / "fixtures" / "bundles"


def write_bundle(path: Path, size: int = 0) -> None:
    """A bundle with the file's name as its host, with a file of ``size`` bytes in it."""
    document = {
        "schema": "gpunode.bundle/1",
        "host": path.stem,
        "collected_at": "2026-11-20T00:00:00Z",
        "commands": {},
        "files": {"/big": "x" * size},
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def facts_of(places: list[str]) -> Iterator[NodeAnswer]:
    """The facts of saved bundles."""
    files = bundle_files(places)
    with Evaluator() as evaluator:
        yield from evaluator.facts_of_fleet(saved_answers(files), strict=len(files) == 1)


def test_files_and_folders_in_the_order_given(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for name in ("gpu-2", "gpu-1"):
        write_bundle(folder / f"{name}.json")
    (folder / "notes.txt").write_text("not read")
    write_bundle(tmp_path / "single.json")
    hosts = [node.host for node in facts_of([str(tmp_path / "single.json"), str(folder)])]
    assert hosts == ["single", "gpu-1", "gpu-2"]


def test_nothing_to_read_is_reported_before_the_first_is_read(tmp_path: Path) -> None:
    write_bundle(tmp_path / "good.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no bundle"):
        bundle_files([str(tmp_path / "good.json"), str(tmp_path / "empty")])


def test_memory_does_not_grow_with_the_number_of_bundles(tmp_path: Path) -> None:
    for number in range(100):
        write_bundle(tmp_path / f"gpu-{number:03d}.json", MIB)
    tracemalloc.start()
    try:
        names = [node.host for node in facts_of([str(tmp_path)])]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(names) == 100
    assert peak < 10 * MIB


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_a_bundle_that_costs_too_much_to_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The reading itself, and not only the facts, is the worker's."""
    real = Bundle.from_json

    def costly(text: bytes, where: str, records: object) -> Bundle:
        if where.endswith("b.json"):
            return re.fullmatch(r"(a+)+b", "a" * 60) if kind == "time" else bytes(1 << 30)  # type: ignore[return-value]
        return real(text, where)

    monkeypatch.setattr("gpunode.probe.bundle.Bundle.from_json", costly)
    monkeypatch.setattr("gpunode.judging.evaluator.AnswerLimits", lambda: AnswerLimits(cpu_s=1, memory_mib=200))
    for name in ("a", "b", "c"):
        write_bundle(tmp_path / f"{name}.json")
    nodes = list(facts_of([str(tmp_path)]))
    assert [node.host for node in nodes] == ["a", str(tmp_path / "b.json"), "c"]
    assert [node.facts is None for node in nodes] == [False, True, False]
    assert ("more than 1 s" if kind == "time" else "MiB of memory") in (nodes[1].reason or "")


@pytest.mark.parametrize("verb", ["plan", "env"])
def test_the_verbs_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    real = Bundle.from_json

    def costly(text: bytes, where: str, records: object) -> Bundle:
        return bytes(1 << 30) if where.endswith("b.json") else real(text, where)  # type: ignore[return-value]

    monkeypatch.setattr("gpunode.probe.bundle.Bundle.from_json", costly)
    monkeypatch.setattr("gpunode.judging.evaluator.AnswerLimits", lambda: AnswerLimits(memory_mib=200))
    for name in ("a", "b", "c"):
        write_bundle(tmp_path / f"{name}.json")
    assert run([verb, "--replay", str(tmp_path), "--format", "json"]) == 3
    captured = capfd.readouterr()
    assert "MiB of memory" in captured.out + captured.err
    document = json.loads(captured.out)
    assert [node["host"] for node in document["nodes"]] == ["a", "c"] if verb == "env" else len(document["groups"]) == 2


@pytest.mark.parametrize("variable", [{}, {"nvidia_driver_flavour": "open"}])
@pytest.mark.parametrize("version", ["999.99", "580+", "latest", "580.", "<a", "1"])
def test_a_driver_that_is_no_version_ends_no_plan_of_others(version: str, variable: dict[str, str]) -> None:
    text = (FIXTURES / "debian-12-driver.json").read_text()
    assert "535.261.03" in text
    hosts = []
    for name, answer in (("bad", text.replace("535.261.03", version)), ("good", text)):
        facts = facts_from_bundle(Bundle.from_json(answer, name))
        hosts.append(with_request(host_of(name, facts, load()), variable, Request()))
    document = plan(hosts, Request(), load(), date(2026, 11, 20))
    (good,) = [group for group in document.groups if "good" in group.hosts]
    assert good.stack is not None or good.conflict is not None


def test_many_bundles_print_results_before_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        write_bundle(tmp_path / f"gpu-{number}.json")
    select = ["validate", "--replay", str(tmp_path), "--select", "gpu.present"]
    run(select)
    usual = capsys.readouterr()
    assert usual.err == ""
    monkeypatch.setattr("gpunode.cli.validate.MANY_FILES", 3)
    run(select)
    shown = capsys.readouterr()
    assert DURATION.sub("", shown.out) == DURATION.sub("", usual.out)
    lines = shown.err.splitlines()
    assert lines[0] == "gpunode: gpu-0: error: 1 not determined, 1 skipped"
    assert lines[1] == "gpunode: 1 of 3 bundles evaluated: 1 error"
    assert [line.split(":")[1] for line in lines[2:]] == [" gpu-1", " gpu-2"]
