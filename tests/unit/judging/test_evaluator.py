"""The room that judges: each answer parsed once, in a child, whatever is requested of it."""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import effort

from gpunode.errors import UsageError
from gpunode.isolation import AnswerLimits
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.request import EvaluatedNode, Json, JudgingRequest
from gpunode.probe import Answer, Bundle, Collected
from gpunode.probe.bundle import PLACEHOLDER

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import without_gpu

SECRET = "correct horse"  # noqa: S105


@pytest.fixture
def parsed_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes that parsed a bundle, one entry for each time; filled when the test has ended the evaluation."""
    real = Bundle.from_json.__func__  # type: ignore[attr-defined]
    reader, writer = os.pipe()

    def from_json(cls: type[Bundle], *arguments: Any) -> Bundle:
        os.write(writer, os.getpid().to_bytes(4, "big"))
        bundle: Bundle = real(cls, *arguments)
        return bundle

    monkeypatch.setattr(Bundle, "from_json", classmethod(from_json))
    os.set_blocking(reader, False)
    pids = _Pids(reader)
    yield pids
    os.close(reader)
    os.close(writer)


class _Pids(list[int]):
    def __init__(self, reader: int) -> None:
        self._reader = reader

    def read(self) -> list[int]:
        """The entries so far."""
        data = os.read(self._reader, 1 << 16)
        self += [int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)]
        return self


def collected(host: str, text: bytes | None = None, **more: Any) -> Collected:
    """The answer of a node without a GPU, or this text."""
    return Collected(host, Answer(text or json.dumps(without_gpu()).encode(), host=host, **more), None, 0.5)


def judged(request: JudgingRequest, *nodes: Collected, strict: bool = False) -> list[JudgedNode]:
    with Evaluator(request) as evaluator:
        return list(evaluator.judge_fleet(nodes, strict=strict))


def name_of(node: EvaluatedNode) -> Json:
    return f"{node.facts.host} {node.report.status.value} {node.level}"


def test_an_answer_is_parsed_once_and_not_in_this_process(parsed_in: Any) -> None:
    request = JudgingRequest(documents=True, extracts={"name": name_of})
    nodes = judged(request, *(collected(f"n{number}") for number in range(5)))
    pids = parsed_in.read()
    assert len(pids) == 5
    assert os.getpid() not in pids
    assert [node.report.host for node in nodes] == [f"n{number}" for number in range(5)]
    assert [node.extracted for node in nodes] == [{"name": f"n{number} error standard"} for number in range(5)]
    for node in nodes:
        assert node.document is not None
        assert Bundle.from_json(node.document, "it").host == node.report.host


def test_records_and_secrets_belong_to_the_answer() -> None:
    """A workload's records are judged and saved with the bundle; what a node sends back of a password is in neither."""
    text = json.dumps({**without_gpu(), "files": {"/x": f"print {SECRET}"}}).encode()
    record = {"record": "seen", "values": {"level": "deep", "text": SECRET}}
    node = collected("a", text, records=(record,), secrets=(SECRET,))
    (evaluated,) = judged(JudgingRequest(documents=True), node)
    assert evaluated.level == "deep"
    assert evaluated.document is not None
    assert SECRET.encode() not in evaluated.document
    bundle = Bundle.from_json(evaluated.document, "it")
    assert bundle.files["/x"] == f"print {PLACEHOLDER}"
    assert bundle.results[-1:] == [{**record, "values": {"level": "deep", "text": PLACEHOLDER}, "simulated": True}]
    assert SECRET not in repr(node)


def test_a_refusal_names_no_secret() -> None:
    answer = Answer(json.dumps({**without_gpu(), "files": {SECRET: 1}}).encode(), secrets=(SECRET,))
    with pytest.raises(UsageError) as err:
        answer.bundle()
    assert PLACEHOLDER in str(err.value)
    assert SECRET not in str(err.value)


@pytest.mark.parametrize("seed", range(effort(3, 60)))
def test_no_answer_costs_another_node_its_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, huge and expensive answers between good ones, in any order; each node has one result, in the order."""
    chance = random.Random(seed)  # noqa: S311
    good = json.dumps(without_gpu()).encode()
    kinds = {
        "cut": lambda: good[: chance.randrange(len(good) - 1)],
        "nested": lambda: b'{"files": ' + b"[" * 100_000,
        "many": lambda: json.dumps({**without_gpu(), "results": [{"a": list(range(30_000))}]}).encode(),
        "costly": lambda: good.replace(b"{", b'{"simulated": false, ', 1),
        "good": lambda: good,
    }
    names = [chance.choice(list(kinds)) for _ in range(8)]

    def extract(node: EvaluatedNode) -> Json:
        return len(bytes(1 << 30)) if node.facts.host.startswith("costly") else 1

    monkeypatch.setattr("gpunode.judging.evaluator.AnswerLimits", lambda: AnswerLimits(cpu_s=10, memory_mib=300))
    nodes = [collected(f"{name}-{number}", kinds[name]()) for number, name in enumerate(names)]
    nodes.insert(chance.randrange(9), Collected("far", None, "no route to host", 1.0))
    evaluated = judged(JudgingRequest(extracts={"x": extract}), *nodes)
    assert [node.report.host for node in evaluated] == [node.host for node in nodes]
    for node in evaluated:
        kind = node.report.host.partition("-")[0]
        assert (node.extracted is not None) == (kind == "good"), kind
        assert (len(node.report.findings) == 1) == (kind != "good"), kind


def test_names_of_saved_bundles_and_of_files_that_are_none() -> None:
    text = json.dumps({**without_gpu(), "host": "a"}).encode()
    saved = [Collected(path, Answer(text, where=path), None, None) for path in ("1.json", "2.json")]
    bad = Collected("3.json", Answer(b"{", where="3.json"), None, None)
    evaluated = judged(JudgingRequest(), *saved, bad)
    assert [node.report.host for node in evaluated] == ["a", "a (2.json)", "3.json"]
    assert evaluated[2].report.findings[0].message.startswith("not a gpunode.bundle/1 bundle")
    with pytest.raises(UsageError, match=r"^3\.json: not a gpunode"):
        judged(JudgingRequest(), bad, strict=True)


def test_a_bundle_is_saved_though_it_cannot_be_judged() -> None:
    def extract(node: EvaluatedNode) -> Json:
        raise RuntimeError(node.facts.host)

    (evaluated,) = judged(JudgingRequest(documents=True, extracts={"x": extract}), collected("a"))
    assert evaluated.extracted is None
    assert "unexpected RuntimeError" in evaluated.report.findings[0].message
    assert Bundle.from_json(evaluated.document or b"", "it").host == "a"


def test_nothing_of_the_room_is_loaded_with_its_name() -> None:
    """A scheduler's prolog waits for what it loads."""
    source = Path(__file__).parents[3] / "gpunode" / "judging" / "__init__.py"
    assert "import" not in source.read_text(encoding="utf-8")
