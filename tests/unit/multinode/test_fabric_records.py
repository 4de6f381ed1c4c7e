"""Output of ranks that is not what a payload prints: no line of it ends the verb, or costs another record its place."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from test_fabric_verdict import names, record

from gpunode.checks import Expectation, Finding
from gpunode.cli import run
from gpunode.fabric.records import ExpectedOfNodes, of_records, records_of
from gpunode.judging.report import NodeReport
from gpunode.report import formats

Out = pytest.CaptureFixture[str]
ROW = {"size_bytes": 2**28, "time_us": 9000.0, "algbw_gb_per_s": 30.0, "busbw_gb_per_s": 50.0, "wrong": 0}
VIEW = {"ranks": [0, 1, 2], "gpu": "0000:18:00.0", "network": "IB", "adapters": ["mlx5_0"], "direct": True, "nvls": 1}
REDUCED = {
    "record": "nccl.all-reduce",
    "values": {
        "ranks": 6,
        "nodes": 6,
        "backend": "nccl",
        "rows": [{**ROW, "size_bytes": 8}, ROW],
        "max_busbw_gb_per_s": 50.0,
        "kinds": ["NVLS"],
        "channels": 16,
        "nccl_version": "2.27.7",
        "views": [VIEW, {**VIEW, "ranks": [3, 4, 5], "direct": False, "staged": True, "fallbacks": ["GPU Direct off"]}],
        "connections": {
            "ways": ["NET/IB/0", "P2P/CUMEM"],
            "pairs": [[0, 1, 0], [1, 2, 1]],
            "rings": [[0, 1, 2, 3, 4, 5]],
            "tree": [-1, 0, 1, 2, 3, 4],
        },
    },
}
GOOD = [record("slow NIC"), REDUCED, {"record": "ddp.replicated", "values": {"wrong": 0}}]
HOSTILE = (
    *("5", "-1", "0", "true", "null", "[]", "{}", '""', "1e999", "-1e999", "NaN", "Infinity", "0.1", "1e-320", "1e300"),
    *('"x"', '"\\u001b[2J\\u202e"', '"\\ud800"', '"a\\u0000b"', '"nan"', '"5"', '[[["x"]]]', '{"record": "end"}'),
    *(str(10**9), str(-(2**63)), str(2**64), str(10**400), "9" * 5000, json.dumps("y" * 5000), f"[{'0,' * 20_000}0]"),
    *(f"{'[' * depth}{']' * depth}" for depth in (30, 400, 900, 200_000)),
    '{"a":' * 960 + "1" + "}" * 960,
    json.dumps(["z" * 300, "z" * 301]),
    json.dumps(["same"] * 50),
)
"""Values in the place of one of a record, as JSON or nearly so."""
LINES = (
    b"[" * 200_000,
    b'{"record": "nccl.all-gather", "values": ' + b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"record": "fabric.links", "values": ' + b"9" * 5000 + b"}",
    b'\xff\xfe{"record": "fabric.links"}',
    b'{"record": "\xff\xc0"}',
    b"\x00" * 1000,
    b"x" * 2 * 2**20,
    b'{"record": 5, "values": {"names": 5}}',
    b'{"record": null}',
    b'[{"record": "fabric.links"}]',
    b'"fabric.links"',
    b"1e999",
    b"-",
    b"\r",
    b'{"record": "container", "values": 5}',
    b'{"record": "watchdog", "ended": {"a": [1]}, "exit_code": 1e999}',
    b'{"record": "end", "records": -5}',
    b'{"record": "progress", "doing": [[[]]], "left_s": 1e999}',
    b'{"record": "x", "values": {"a": ' + b"[" * 960 + b"]" * 960 + b"}}",
)
"""Lines between those of a payload."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places(child, (*path, key))


def with_value(document: dict[str, Any], path: tuple[Any, ...], text: str) -> str:
    """The document as a line, with ``text`` in the place of one of its values."""
    changed = copy.deepcopy(document)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "HERE"
    return json.dumps(changed).replace('"HERE"', text)


def judged(path: Path, form: str, capsys: Out) -> tuple[int, str]:
    code = run(["validate", "--fabric", "--records", str(path), "--format", form])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert code in (1, 3) or (code == 2 and "no record of a rank" in err), err
    assert err.count("\n") == (code == 2 or not out), err[:2000]
    return code, out


def damaged(number: int) -> str:
    """The output of ranks with one to three values replaced by hostile ones."""
    source = random.Random(number)  # noqa: S311
    lines = [json.dumps(document) for document in GOOD]
    for at in source.sample(range(len(GOOD)), source.choice((1, 1, 1, 2, 3))):
        path = source.choice([path for path in places(GOOD[at]) if path])
        lines[at] = with_value(GOOD[at], path, source.choice(HOSTILE))
    return "\n".join(lines)


@pytest.mark.parametrize("number", range(effort(60, 4000)))
def test_a_hostile_value_is_a_finding_in_every_format(number: int, tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "slurm-1.out"
    path.write_text(damaged(number), encoding="utf-8")
    for form in formats.NAMES if number % 4 == 0 else ("console",):
        judged(path, form, capsys)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
@pytest.mark.parametrize("key", ["names", "rank_nodes", "pairs", "backend", "ranks", "causes"])
def test_a_hostile_value_of_the_links_costs_no_other_record(key: str, number: int) -> None:
    lines = [with_value(GOOD[0], ("values", key), HOSTILE[number]), *map(json.dumps, GOOD[1:])]
    verdict, nodes = of_records(records_of("\n".join(lines)), "slurm", 1.0, ExpectedOfNodes(Expectation(), {}))
    assert any("nodes.training" in {finding.check for finding in node.findings} for node in nodes)
    assert verdict.report is not None
    assert [collective.name for collective in verdict.report.collectives] == ["all-reduce"]


@pytest.mark.parametrize("number", range(effort(20, 500)))
def test_lines_that_are_no_records_change_nothing(number: int, tmp_path: Path, capsys: Out) -> None:
    source = random.Random(number)  # noqa: S311
    good = [json.dumps(document).encode() for document in GOOD]
    path = tmp_path / "slurm-1.out"
    path.write_bytes(b"\n".join(good))
    before = judged(path, "console", capsys)
    assert before[0] == 1
    lines = [*good]
    for line in source.sample(LINES, 4):
        lines.insert(source.randrange(len(lines) + 1), line)
    path.write_bytes(b"\n".join(lines))
    assert judged(path, "console", capsys) == before


def test_a_flood_of_records_is_limited_and_named(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "slurm-1.out"
    line = json.dumps({"record": "nccl.all-gather", "error": "no"})
    path.write_text("\n".join([*map(json.dumps, GOOD), *[line] * 20_000]), encoding="utf-8")
    code, out = judged(path, "console", capsys)
    assert code == 1
    assert "20003 records of measurements, the first 100 are read" in out
    path.write_text("x" * 5 * 2**20, encoding="utf-8")
    assert judged(path, "console", capsys) == (3, "")


def test_a_name_of_a_node_is_printable_and_each_node_has_one_report() -> None:
    document = record("none")
    document["values"]["names"] = ["a\x1b[2Jb", "same", "same", *names(6)[3:]]
    _, nodes = of_records([document], "slurm", 1.0, ExpectedOfNodes(Expectation(), {}))
    assert sorted(node.host for node in nodes) == ["a?[2Jb", *names(6)[3:], "same"]
    assert all(isinstance(node, NodeReport) and isinstance(node.findings[0], Finding) for node in nodes)
