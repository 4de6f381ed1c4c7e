"""Numbers that no machine has, in one node's answer: no verb loses the results of the other nodes."""

import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from effort import effort

from gpunode.cli import collect as collecting
from gpunode.cli import run
from gpunode.history.runs import Recorder
from gpunode.history.store import History
from gpunode.judging.evaluator import Evaluator
from gpunode.probe import Answer, Collected

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx_measured, pcie_measured

NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "1e308", "-1e308", "1" + "0" * 400, "-1" + "0" * 400, "5e-324", "-0.0")
"""As JSON of a node has them: Python's own writes and reads NaN and Infinity too."""
GOOD = ("a-good", "z-good")
MARK = re.compile(r'"#(\d+)#"')
TOKEN = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")


class Marked(NamedTuple):
    """A bundle's text with a mark in place of each number of its own and of its records."""

    text: str
    numbers: list[str]
    before_records: int
    """So many of them are not of records."""


@cache
def marked(which: str) -> Marked:
    """The bundle of a measured machine."""
    numbers: list[str] = []

    def marks(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append(json.dumps(value))
            return f"#{len(numbers) - 1}#"
        if isinstance(value, dict):
            return {key: marks(part) for key, part in value.items()}
        return [marks(part) for part in value] if isinstance(value, list) else value

    document = hgx_measured() if which == "hgx" else pcie_measured()
    others = marks({key: part for key, part in document.items() if key != "results"})
    before = len(numbers)
    return Marked(json.dumps(others | {"results": marks(document["results"])}), numbers, before)


def with_numbers(which: str, new: dict[int, str]) -> bytes:
    """The bundle with other numbers at these places."""
    bundle = marked(which)
    return MARK.sub(lambda match: new.get(int(match[1]), bundle.numbers[int(match[1])]), bundle.text).encode()


def hostile(seed: int) -> Iterator[bytes]:
    """Yield bundles: numbers of the records replaced by one and by several, of all, and in the texts of tools."""
    source = random.Random(seed)  # noqa: S311
    which = source.choice(("hgx", "pcie"))
    places, number = range(len(marked(which).numbers)), NUMBERS[seed % len(NUMBERS)]
    records = places[marked(which).before_records :]
    for chosen, share in ((records, 1.0), (records, 0.1), (places, 0.01), (places, 0.001)):
        yield with_numbers(which, {position: number for position in chosen if source.random() < share})
    yield with_numbers(which, {position: source.choice(NUMBERS) for position in records if source.random() < 0.1})
    document = json.loads(with_numbers(which, {}))
    share = source.choice((1.0, 0.1, 0.01))

    def changed(text: str) -> str:
        return TOKEN.sub(lambda match: source.choice(NUMBERS) if source.random() < share else match[0], text)

    for command in document["commands"].values():
        command["stdout"] = changed(command["stdout"])
    for record in document["results"]:
        for key, value in record["values"].items():
            record["values"][key] = changed(value) if isinstance(value, str) else value
    yield json.dumps(document).encode()


def fleet(folder: Path, seed: int) -> int:
    """Write a node that is good, before and after hostile ones; return the number of the hostile ones."""
    folder.mkdir()
    good = json.loads(with_numbers("pcie", {}))
    for name in GOOD:
        (folder / f"{name}.json").write_text(json.dumps(good | {"host": name}))
    texts = list(hostile(seed))
    for number, text in enumerate(texts):
        host = f'"host": "hostile-{number}"'
        (folder / f"hostile-{number}.json").write_bytes(re.sub(rb'"host": "[^"]*"', host.encode(), text, count=1))
    return len(texts)


def strict_json(text: str) -> Any:
    """A document without NaN and Infinity, which JSON does not have."""

    def refused(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("seed", range(effort(2, 50)))
def test_a_number_costs_no_other_node_its_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "history"))
    bundles, written = tmp_path / "bundles", str(tmp_path / "written")
    number = fleet(bundles, seed)
    for verb, *words in (("validate", "--history"), ("plan",), ("env",), ("advise",), ("advise", "--figures")):
        assert run([verb, "--replay", str(bundles), *words, "--format", "json"]) in (0, 1, 3)
        out = capfd.readouterr().out
        document = strict_json(out)
        assert all(f'"{name}"' in out for name in GOOD), verb
        if verb == "validate":
            statuses = {node["host"]: node["status"] for node in document["nodes"]}
            assert len(statuses) == number + len(GOOD)
            assert {statuses.pop(name) for name in GOOD} == {"pass"}, statuses
    for words in (
        ["validate", "--replay", str(bundles), "--history", "--since", "last", "--format", "html", "--output", written],
        ["env", "--replay", str(bundles)],
        ["compare", "1", "2", "--format", "json"],
        ["history", "show", "hostile-0"],
        ["history", "trends"],
        ["history", "export", "last", "--output", written],
    ):
        assert run(words) in (0, 1, 3), words
    assert len(strict_json(Path(written).read_text())["nodes"]) == number + len(GOOD)


class Saved(NamedTuple):
    """Bundles in place of nodes that answer."""

    folder: Path

    def collect(self) -> Iterator[Collected]:
        for path in sorted(self.folder.glob("*.json")):
            yield Collected(path.stem, Answer(path.read_bytes(), host=path.stem), None, 1.0)


@pytest.mark.parametrize("seed", range(effort(1, 50)))
def test_collect_saves_the_others_and_what_it_saved_is_judged_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "history"))
    bundles, saved = tmp_path / "bundles", tmp_path / "saved"
    number = fleet(bundles, seed)
    saved.mkdir()
    with Recorder("collect", "quick", "2026-11-29T00:00:00Z") as recorder, Evaluator() as evaluator:
        source: Any = Saved(bundles)  # in place of nodes over SSH
        nodes = list(collecting._collected(source, saved, recorder, evaluator, verbose=False))
        recorder.finish("collected", "2026-11-29T00:00:01Z")
        live = {node.report.host: node.report for node in evaluator.judge_fleet(Saved(bundles).collect())}
        again = {node.report.host: node.report for node in evaluator.judge_fleet(Saved(saved).collect())}
    collected = {node.host for node in nodes if node.status == "collected"}
    assert len(nodes) == number + len(GOOD)
    assert set(GOOD) < collected == set(again)
    with History(tmp_path / "history") as history:
        assert set(GOOD) < set(history.hosts_of(1)) <= collected
    assert {host: live[host].findings for host in collected} == {host: again[host].findings for host in collected}
