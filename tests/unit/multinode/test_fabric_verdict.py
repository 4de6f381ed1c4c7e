"""Records of ranks on many nodes to findings and a matrix; records of hostile nodes raise nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import random

from fabric_search import SimulatedFabric, fault

from gpunode.checks import Baseline, Expectation, Status
from gpunode.cli import run
from gpunode.fabric.verdict import FabricVerdict, verdict_of
from gpunode.judging.report import report
from gpunode.report import formats
from gpunode.workload.payload.fabric import found_by, odd_versions, positions_of, version_text
from gpunode.workload.payload.fabric_search import FabricSearch, LateLimits

SIZE = 256 * 2**20


def names(number: int) -> list[str]:
    return [f"node{index:02}" for index in range(number)]


def record(kind: str, nodes: int = 6, rails: int = 1, **changes: Any) -> dict[str, Any]:
    """The record of a search on a simulated fabric with one fault of node 2 or its rail, rack or rank."""
    seed = next(
        number
        for number in range(1000)
        if random.Random(number).randrange(nodes) == 2  # noqa: S311
    )
    made, _ = fault(kind, random.Random(seed), nodes, rails, nodes // 2)  # noqa: S311
    fabric = SimulatedFabric(nodes, rails, nodes // 2, made, seed=1)
    of_ranks = [name for name in names(nodes) for _ in range(rails)]
    racks = {name: f"r{number // (nodes // 2)}" for number, name in enumerate(names(nodes))}
    positions, node_names = positions_of(of_ranks, racks)
    search = FabricSearch(positions, LateLimits())
    while (tried := search.next_round()) is not None:
        search.take(*fabric.run(tried))
    values = {
        "backend": "nccl",
        "ranks": nodes * rails,
        "names": node_names,
        "rank_nodes": [position.node for position in positions],
        "missing": [],
        "size_bytes": SIZE,
        **found_by(search, SIZE),
    }
    return {"record": "fabric.links", "values": json.loads(json.dumps(values, default=vars)), **changes}


def verdict(*records: dict[str, Any], nodes: int = 6) -> FabricVerdict:
    return verdict_of(records, nodes=names(nodes), engine="ssh", backend="nccl", ranks=nodes, minutes=1.0)


def test_ranks_with_other_versions_are_named() -> None:
    usual, odd = (version_text(torch, "nccl") for torch in ("2.13.0", "2.11.0"))
    assert "NCCL" in usual
    assert "NCCL" not in version_text("2.13.0", "gloo")
    links = record("none", rails=2)
    most, others = odd_versions([odd if rank in (4, 5) else usual for rank in range(12)])
    links["values"] |= {"versions": most, "odd_versions": others}
    judgement = verdict(links)
    named = {
        name: finding
        for name, several in judgement.findings.items()
        for finding in several
        if finding.check == "nodes.versions"
    }
    assert list(named) == ["node02"]
    assert named["node02"].status is Status.WARN
    assert all(word in named["node02"].message for word in ("2.11.0", "2.13.0"))
    assert odd_versions([usual] * 12) == (usual, [])
    links["values"]["odd_versions"] = []
    assert not any(
        finding.check == "nodes.versions" for several in verdict(links).findings.values() for finding in several
    )


@pytest.mark.parametrize(
    ("kind", "rails", "check", "of"),
    [
        ("slow GPU", 1, "nodes.gpu", ["node02"]),
        ("slow NIC", 1, "nodes.node", ["node02"]),
        ("slow NIC", 2, "nodes.nic", ["node02"]),
        ("wrong MTU", 1, "nodes.node", ["node02"]),
        ("no GPUDirect RDMA", 2, "nodes.node", ["node02"]),
        ("hanging rank", 1, "nodes.stopped", ["node02"]),
        ("slow rail", 2, "nodes.rail", names(6)),
        ("slow uplink", 1, "nodes.racks", names(6)),
    ],
)
def test_each_fault_is_a_finding_of_its_nodes(kind: str, rails: int, check: str, of: list[str]) -> None:
    judgement = verdict(record(kind, rails=rails))
    failed = {
        name: [finding for finding in several if finding.status is Status.FAIL]
        for name, several in judgement.findings.items()
    }
    assert {name for name, several in failed.items() if several} == set(of)
    assert {finding.check for several in failed.values() for finding in several} == {check}
    assert all(finding.remedy for several in failed.values() for finding in several)
    if kind == "wrong MTU":
        assert "MTU" in failed["node02"][0].message
    passed = {
        name for name, several in judgement.findings.items() if {finding.status for finding in several} == {Status.PASS}
    }
    assert passed == set(names(6)) - set(of)


def test_a_healthy_fabric_passes_on_every_node_and_in_every_format() -> None:
    judgement = verdict(record("none"))
    assert {finding.status for several in judgement.findings.values() for finding in several} == {Status.PASS}
    assert judgement.report is not None
    matrix = judgement.report.matrix
    assert matrix is not None
    assert all(
        (cell is None) == (row == column) for row, cells in enumerate(matrix.rows) for column, cell in enumerate(cells)
    )
    document = report([], level="standard", version="0", started_at="", finished_at="", fabric=judgement.report)
    for name in formats.NAMES:
        assert "".join(formats.parts(name, document, verbose=True))
    assert "node00" in "".join(formats.parts("html", document, verbose=False))


@pytest.mark.parametrize(
    ("part", "check", "status"),
    [
        ({"record": "nccl.all-reduce", "error": "it failed"}, "nodes.collectives", Status.ERROR),
        ({"record": "nccl.all-reduce", "values": {"rows": 7}}, "nodes.records", Status.ERROR),
        ({"record": "ddp.replicated", "values": {"wrong": 3}}, "nodes.training", Status.FAIL),
        ({"record": "ddp.replicated", "values": {"wrong": 0}}, "nodes.training", Status.PASS),
        ({"record": "ddp.sharded", "skipped": "too old"}, "nodes.training", Status.SKIP),
    ],
)
def test_other_parts_are_findings(part: dict[str, Any], check: str, status: Status) -> None:
    judgement = verdict(record("none"), part)
    assert (check, status) in {(each.check, each.status) for each in judgement.findings["node00"]}


def test_without_a_record_nothing_passes() -> None:
    assert {finding.status for several in verdict().findings.values() for finding in several} == {Status.ERROR}
    failed = verdict(record("none", error="out of memory"))
    assert {finding.status for several in failed.findings.values() for finding in several} == {Status.ERROR}


def test_a_rank_that_ended_is_named_and_no_node_passes() -> None:
    """The record of the payload's own process, which knows no names of nodes, when one of its ranks was killed."""
    values = {"backend": "gloo", "ranks": 6, "nodes": 6, "missing": [2]}
    error = "rank 2 of 6 ended or did not answer within 30 s"
    judgement = verdict_of(
        [{"record": "fabric.links", "values": values, "error": error}],
        nodes=names(6),
        engine="ssh",
        backend="gloo",
        ranks=6,
        minutes=1.0,
        rank_names=names(6),
    )
    statuses = {
        name: [(finding.check, finding.status) for finding in several] for name, several in judgement.findings.items()
    }
    assert statuses.pop("node02") == [("nodes.stopped", Status.FAIL)]
    assert statuses == {name: [("nodes.links", Status.ERROR)] for name in names(6) if name != "node02"}


def test_ranks_of_one_node_do_not_pass() -> None:
    links = record("none", nodes=4)
    links["values"] |= {"names": ["node00"], "rank_nodes": [0] * 4, "pairs": []}
    judgement = verdict_of([links], nodes=["node00"], engine="mpi", backend="gloo", ranks=4, minutes=1.0)
    assert [each.status for each in judgement.findings["node00"]] == [Status.ERROR]


def test_a_healthy_node_has_the_median_rate_of_its_exchanges_as_a_figure() -> None:
    judgement = verdict(record("slow NIC"))
    figures = {
        name: [finding.figure for finding in several if finding.figure] for name, several in judgement.findings.items()
    }
    assert {name for name, several in figures.items() if several} == set(names(6)) - {"node02"}
    assert {figure.metric for several in figures.values() for figure in several} == {"fabric_exchange"}


def test_a_node_below_its_baseline_is_named() -> None:
    links = record("none")
    usual = links["values"]["usual_gb_per_s"]
    earlier = Baseline("before.json", {("fabric_exchange", "node", SIZE): 2 * usual})
    expects = {"node03": Expectation().with_baseline(earlier)}
    judgement = verdict_of([links], nodes=names(6), engine="ssh", backend="nccl", ranks=6, minutes=1.0, expects=expects)
    failed = {name for name, several in judgement.findings.items() for each in several if each.status is Status.FAIL}
    assert failed == {"node03"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*record("none")["values"], "rows", "kind", "ranks", "wrong", "views", "adapters"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["fabric.links", "nccl.all-reduce", "ddp.sharded", "x"]), JSON, JSON), max_size=4
    )
)
@settings(max_examples=effort(60, 5000), deadline=None)
def test_hostile_records_are_findings_or_ignored(given_records: list[tuple[str, Any, Any]]) -> None:
    records = [{"record": name, "values": values, "error": error} for name, values, error in given_records]
    judgement = verdict(*records, nodes=2)
    assert judgement.report is not None
    judgement.report.model_dump_json()
    assert set(names(2)) <= set(judgement.findings)


def test_saved_records_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slurm-1.out"
    path.write_text(f"noise\n{json.dumps(record('slow NIC'))}\n", encoding="utf-8")
    assert run(["validate", "--fabric", "--records", str(path)]) == 1
    out = capsys.readouterr().out
    assert "nodes.node" in out
    assert "node02" in out
    path.write_text("noise\n", encoding="utf-8")
    assert run(["validate", "--fabric", "--records", str(path)]) == 2
