"""Looks at nodes: an answer with a number that JSON does not have costs that node its snapshot, and no other."""

import copy
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import effort

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx_measured

from gpunode.fleet import Target
from gpunode.history.runs import SNAPSHOT
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.report import unreachable
from gpunode.judging.request import JudgingRequest
from gpunode.probe import Answer, Collected
from gpunode.upgrade import looks
from gpunode.upgrade.looks import EXTRACTS, LOOK, Connections, look_at, write_measured


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in a document."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(child, int | float) and not isinstance(child, bool):
            yield (*path, key)
        yield from numbers(child, (*path, key))


def test_a_number_that_is_not_finite_is_the_reason_of_its_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    document = copy.deepcopy(hgx_measured())
    records = document.pop("results")
    answer = json.dumps(document).encode()
    source = random.Random(1)  # noqa: S311
    of_kind = {(records[path[0]]["record"], path[-1]): path for path in numbers(records)}
    known = [path for (record, key), path in of_kind.items() if (record, key) == ("gemm.bf16", "tflops")]
    chosen = known + source.sample(sorted(of_kind.values(), key=str), effort(12, 400))
    answers = [Collected("good", Answer(answer, host="good", records=tuple(records)), None, 1.0)]
    for number, path in enumerate(chosen):
        inner: Any = (damaged := copy.deepcopy(records))
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = source.choice([math.inf, -math.inf, math.nan]) if number else math.inf
        host = f"bad-{number}"
        answers.append(Collected(host, Answer(answer, host=host, records=tuple(damaged)), None, 1.0))
    monkeypatch.setattr(looks, "collect", lambda *_, **__: iter(answers))
    targets = {answer.host: Target(answer.host, "local") for answer in answers}
    with Evaluator(JudgingRequest(extracts=EXTRACTS)) as evaluator:
        looks_by_host = look_at(Connections(targets, (), 1, 1), evaluator, targets)
    assert list(looks_by_host) == list(targets)
    assert looks_by_host["good"].snapshot is not None
    assert looks_by_host["good"].snapshot.figures
    for look in looks_by_host.values():
        values = [figure.value for figure in look.snapshot.figures] if look.snapshot is not None else []
        assert all(map(math.isfinite, values))
        assert bool(look.reason) == (look.snapshot is None)


def test_a_malformed_result_is_a_reason_in_one_line(tmp_path: Path) -> None:
    snapshot = {"level": "standard", "figures": [{"metric": "gemm", "component": "gpu0", "value": None}]}
    extracted: Any = {SNAPSHOT: snapshot, LOOK: {"picture": {}, "undetermined": None, "busy": ""}}

    class Judge:
        def judge_fleet(self, _: object) -> list[JudgedNode]:
            return [JudgedNode(unreachable("gpu-1", "", 1.0), "standard", extracted)]

    judge: Any = Judge()
    look = look_at(Connections({}, (), 1, 1), judge, ())["gpu-1"]
    assert look.reason == "its answer has a malformed value (figures.0.value: Input should be a valid number)"
    assert write_measured(tmp_path, look, "image") == {
        "gpu-1": f"nothing was measured before the change: {look.reason}"
    }
