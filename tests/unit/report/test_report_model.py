"""What findings come to: statuses, counts, exit codes; the closing sentence of long verbs."""

import json
import random
import tracemalloc

import pytest

from gpunode.checks import Finding, Identity, RunningStack, State, Status
from gpunode.errors import Exit
from gpunode.judging.report import CompactReports, NodeReport, Report, exit_code, judged, report, unreachable
from gpunode.report.console import as_text
from gpunode.report.outcomes import ProvisionedNode, ProvisionOutcome, closing


def node(*statuses: str, host: str = "node", simulated: bool = False) -> NodeReport:
    findings = [
        Finding(check="a.check", status=Status(status), component="node", message=f"it is {status}")
        for status in statuses
    ]
    return judged(host, Identity(simulated=simulated, stack=RunningStack(), gpus=()), findings, 1.5)


def document(*nodes: NodeReport) -> Report:
    return report(
        nodes, level="quick", version="0", started_at="2026-11-20T12:00:00Z", finished_at="2026-11-20T12:00:01Z"
    )


@pytest.mark.parametrize(
    ("statuses", "status", "code", "strict_code"),
    [
        (["pass"], "pass", 0, 0),
        (["pass", "skip"], "pass", 0, 0),
        (["pass", "note"], "pass", 0, 0),
        (["note", "skip"], "pass", 0, 0),
        (["note", "warn"], "warn", 0, 1),
        (["pass", "warn"], "warn", 0, 1),
        (["pass", "error", "warn"], "error", 3, 3),
        (["pass", "error", "fail"], "fail", 1, 1),
        (["skip", "skip"], "skip", 3, 3),
        ([], "error", 3, 3),
    ],
)
def test_status_and_exit_code(statuses: list[str], status: str, code: int, strict_code: int) -> None:
    report = document(node(*statuses))
    assert (report.status.value, report.nodes[0].status.value) == (status, status)
    assert exit_code(report) == code
    assert exit_code(report, strict=True) == strict_code


def test_no_node_is_never_good() -> None:
    assert exit_code(document()) is Exit.UNDETERMINED


@pytest.mark.parametrize(
    ("others", "status", "code"), [(["pass"], "error", 3), (["fail"], "fail", 1), (["warn"], "error", 3)]
)
def test_a_node_out_of_reach_beside_others(others: list[str], status: str, code: int) -> None:
    report = document(node(*others), unreachable("far", "no route to host", 2.0))
    assert (report.status.value, exit_code(report)) == (status, code)


def test_a_node_out_of_reach_is_one_finding_and_nothing_is_claimed_of_it() -> None:
    far = unreachable("far", "no route to host", 2.0)
    assert [(finding.check, finding.status.value, finding.message) for finding in far.findings] == [
        ("node.reachable", "error", "no route to host")
    ]
    assert far.simulated is None
    assert far.stack == RunningStack()


def test_counts_and_keys_of_the_document() -> None:
    content = json.loads(document(node("pass", "skip"), node("fail", simulated=True)).to_json())
    assert content["counts"] == {"pass": 1, "warn": 0, "fail": 1, "skip": 1, "error": 0, "note": 0, "observed": 0}
    assert content["schema"] == "gpunode.report/1"
    assert [item["simulated"] for item in content["nodes"]] == [False, True]
    assert content["fleet"] == {"outliers": None, "inconsistencies": None, "since": None}


def about(check: str, status: str, component: str, state: str = "none", observed: str | None = None) -> Finding:
    return Finding(
        check=check,
        status=Status(status),
        component=component,
        message="so",
        recommended_state=State(state),
        observed=observed,
    )


def with_findings(*findings: Finding) -> NodeReport:
    return judged("node", Identity(simulated=False, stack=RunningStack(), gpus=()), findings, None)


def test_a_node_is_rolled_up_by_category() -> None:
    judged = with_findings(
        about("host.time", "pass", "node"),
        about("gpu.ecc-uncorrected", "fail", "gpu3", "drain"),
        about("gpu.remapped-rows", "warn", "gpu3", "observe"),
        about("gpu.remapped-rows", "pass", "gpu2"),
        about("gpu.clocks", "warn", "gpu1", "observe"),
        about("gpu.xid", "error", "node"),
    )
    assert judged.recommended_state is State.DRAIN
    assert [
        (category.category, category.status.value, category.checks, category.components)
        for category in judged.categories
    ] == [
        ("gpu", "error", ("gpu.clocks", "gpu.xid"), ("gpu1", "node")),
        ("memory", "fail", ("gpu.ecc-uncorrected", "gpu.remapped-rows"), ("gpu3",)),
        ("host", "pass", (), ()),
    ]


def test_what_is_observed_only_counts_for_nothing() -> None:
    judged = with_findings(
        about("host.time", "pass", "node"),
        about("gpu.ecc-uncorrected", "fail", "gpu3", "drain", observed="known, until 2026-12-31"),
    )
    assert (judged.status, judged.recommended_state) == (Status.PASS, State.NONE)
    assert [category.category for category in judged.categories] == ["host"]
    whole = document(judged)
    assert exit_code(whole, strict=True) is Exit.GOOD
    assert (whole.counts.fail, whole.counts.observed, whole.counts.pass_) == (0, 1, 1)
    # With nothing else, nothing was judged.
    assert exit_code(document(with_findings(judged.findings[1]))) is Exit.UNDETERMINED


HOSTILE = ('\n "nodes": []', "a\nb", "\x1b[31m", "\u2028", '"', "\\", "gpu")


def varied(seed: int, host: str) -> NodeReport:
    """A report with findings that others have too, and with some of its own."""
    draw = random.Random(seed)  # noqa: S311
    findings = [
        Finding(
            check=draw.choice(("gpu.present", "fabric.state", "a.check", "b.check")),
            status=draw.choice(list(Status)),
            component=draw.choice(("node", "gpu0")),
            message=draw.choice(HOSTILE),
            expected=draw.choice((None, 1, 1.0, True, "1")),
            measured=draw.choice((None, 0, 0.0, False, draw.random())),
            observed=draw.choice((None, None, "muted by a rule")),
        )
        for _ in range(draw.randrange(12))
    ]
    return judged(host, Identity(simulated=draw.random() < 0.5, stack=RunningStack(), gpus=()), findings, None)


@pytest.mark.parametrize("nodes", [0, 1, 2, 60])
def test_the_parts_of_a_document_and_compact_reports_change_nothing(nodes: int) -> None:
    whole = document(*(varied(seed, f"gpu-{seed}") for seed in range(nodes)))
    assert whole.to_json() == whole.model_dump_json(by_alias=True, indent=1) + "\n"
    full, bare = CompactReports(findings=True), CompactReports(findings=False)
    assert document(*map(full.compact, whole.nodes)).to_json() == whole.to_json()
    assert as_text(document(*map(bare.compact, whole.nodes))) == as_text(whole)


def test_reports_on_equal_nodes_take_little_memory() -> None:
    text = judged("n", Identity(simulated=False, stack=RunningStack(), gpus=()), [
        Finding(check=f"a.check-{number}", status=Status.PASS, component="node", message="m" * 200, measured=0.5)
        for number in range(100)
    ], None).model_dump_json(by_alias=True)  # fmt: skip
    tracemalloc.start()
    try:
        compact = CompactReports(findings=True)
        kept = [compact.compact(NodeReport.model_validate_json(text)) for _ in range(100)]
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(kept) == 100
    assert size < 1 << 20


def outcome(*became: str, check: bool = False, code: int = 0) -> ProvisionOutcome:
    nodes = tuple(
        ProvisionedNode.model_validate({"host": f"n{n}", "status": status}) for n, status in enumerate(became)
    )
    return ProvisionOutcome.model_validate({"check": check, "exit_code": code, "seconds": 61.4, "nodes": nodes})


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (outcome("changed"), "1 node: 1 changed (61 s); next: NEXT"),
        (outcome("unchanged", "unchanged"), "2 nodes: 2 unchanged (61 s); next: NEXT"),
        (outcome("changed", "unchanged", check=True), "2 nodes: 1 unchanged, 1 would change (61 s); next: AGAIN"),
        (outcome("failed", "unreachable", "changed", code=3), "3 nodes: 1 changed, 1 failed, 1 unreachable (61 s)"),
    ],
)
def test_provision_counts_its_nodes(done: ProvisionOutcome, message: str) -> None:
    assert closing(done, "AGAIN", "NEXT") == message
