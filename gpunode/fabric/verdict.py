"""From the records of ranks on many nodes to findings of each node, and the matrix of the report. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pydantic import ValidationError

from gpunode.checks import Expectation, Finding, Status
from gpunode.checks.identity import PairMatrix
from gpunode.checks.measurements import judged, shape_of
from gpunode.expectations import Figure, Shape
from gpunode.fabric import nccl_view
from gpunode.fabric.model import CollectiveRates, FabricValues, SuspectValues
from gpunode.fabric.preflight import active_ports, finding
from gpunode.facts import NodeFacts
from gpunode.judging.report import CollectiveReport, FabricReport
from gpunode.names import fold
from gpunode.text import counted, one_line

PARTS = ("fabric.links", "nccl.", "ddp.")
"""Records of measurements; of a name, or of its first part."""
MOST_PARTS = 100
"""A run has ten."""
MOST_NODES = 256
"""Nodes of a matrix in a report; of more, the suspects' pairs are findings."""
REMEDIES = {
    "gpu": "Compare it with its siblings: gpunode validate --level deep; then power limit, clocks, heat.",
    "rank": "Swap its cable, then compare its NIC's port counters (ibqueryerrors, ethtool -S) and firmware.",
    "node": "Compare its NICs' link rates, MTU, PCIe width and GPUDirect RDMA with those of its partners: gpunode "
    "validate.",
    "rail": "Look at the switches of this rail: port rates, errors, firmware.",
    "rack": "Look at the uplinks of this rack's switches: ports that are down, errors, oversubscription.",
    "racks": "Look at the links between these racks' switches: ports that are down, errors, routing.",
    "between": "Look at the links between the racks: oversubscription, ports that are down, adaptive routing.",
    "link": "Look at the path between both: the switches' error counters and routing (ECMP), then the cables.",
    "stopped": "Look at the node's kernel log and at the process (py-spy dump, cuda-gdb); then run it again.",
}
CHECKS = {
    "gpu": "nodes.gpu",
    "rank": "nodes.nic",
    "node": "nodes.node",
    "rail": "nodes.rail",
    "rack": "nodes.racks",
    "racks": "nodes.racks",
    "between": "nodes.racks",
    "link": "nodes.link",
    "stopped": "nodes.stopped",
}


@dataclass
class FabricVerdict:
    """Findings by node, and the summary."""

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    report: FabricReport | None = None

    def add(self, names: Iterable[str], outcome: Finding) -> None:
        """Add a finding to nodes."""
        for name in names:
            self.findings.setdefault(name, []).append(outcome)


def verdict_of(  # noqa: PLR0913
    records: Sequence[Mapping[str, Any]],
    *,
    nodes: Sequence[str],
    engine: str,
    backend: str,
    ranks: int,
    minutes: float,
    facts: Mapping[str, NodeFacts] | None = None,
    rank_names: Sequence[str] = (),
    expects: Mapping[str, Expectation] | None = None,
) -> FabricVerdict:
    """Return the verdict on the records of one run; ``facts`` of the nodes, as far as they are known.

    ``rank_names``: the node of each rank, for ranks that ended before they shared it. ``expects``: the site's
    expectation by node, with the baseline of each.
    """
    verdict = FabricVerdict()
    links = None
    summary: str | None = None
    run = _Run(nodes, facts or {}, expects or {}, rank_names)
    collectives: list[CollectiveReport] = []
    parts = [record for record in records if str(record.get("record")).startswith(PARTS)]
    if len(parts) > MOST_PARTS:
        text = f"{len(parts)} records of measurements, the first {MOST_PARTS} are read"
        verdict.add(nodes[:1], finding("nodes.records", Status.ERROR, "node", text))
    for record in parts[:MOST_PARTS]:
        name = one_line(str(record["record"]), 60)
        try:
            if name == "fabric.links":
                links = FabricValues.model_validate({"backend": backend, "ranks": ranks, **values_of(record)})
                run = _Run(nodes, run.facts, run.expects, rank_names or [links.node_of(n) for n in range(links.ranks)])
                _links(verdict, links, record, run)
            elif name.startswith("nccl."):
                kind = name.partition(".")[2]
                collectives += _collective(verdict, kind, record, run)
                if kind == "all-reduce":
                    summary = nccl_view.summary(CollectiveRates.model_validate(values_of(record)))
            else:
                _training(verdict, name.partition(".")[2], record, nodes)
        except ValidationError as err:
            text = f"the record {name} is not readable: {one_line(err.errors()[0]['msg'], 200)}"
            verdict.add(nodes[:1], finding("nodes.records", Status.ERROR, "node", text))
    if links is None:
        why = finding("nodes.records", Status.ERROR, "node", "the ranks reported no exchanges between nodes")
        verdict.add(nodes, why)
    verdict.report = FabricReport(
        engine=engine,
        backend=backend,
        ranks=ranks,
        rounds=links.rounds if links else 0,
        minutes=round(minutes, 1),
        usual_gb_per_s=links.usual_gb_per_s if links else None,
        matrix=matrix_of(links) if links else None,
        collectives=tuple(collectives),
        nccl=summary,
    )
    return verdict


@dataclass(frozen=True)
class _Run:
    """What is known of the nodes of a run."""

    nodes: Sequence[str]
    facts: Mapping[str, NodeFacts]
    expects: Mapping[str, Expectation]
    rank_names: Sequence[str]

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self.rank_names[rank] if rank < len(self.rank_names) else self.nodes[0]

    def expect(self, node: str) -> Expectation:
        """Return what the site expects of a node."""
        return self.expects.get(node) or Expectation()


def values_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a record."""
    values = record.get("values")
    return values if isinstance(values, dict) else {}


def _reason(record: Mapping[str, Any]) -> str | None:
    """Return why a part has no result."""
    for key in ("error", "undetermined", "skipped"):
        if record.get(key):
            return one_line(str(record[key]), 400)
    return None


def matrix_of(links: FabricValues) -> PairMatrix | None:
    """Return the rates of the pairs of nodes; None for a fabric of too many."""
    size = len(links.names)
    if not 1 < size <= MOST_NODES:
        return None
    rows: list[list[float | None]] = [[None] * size for _ in range(size)]
    for row, column, rate in links.pairs:
        if row < size and column < size:
            rows[row][column] = rows[column][row] = 0.0 if rate is None else rate
    return PairMatrix(
        title="exchange",
        origin="fabric.links",
        labels=links.names,
        unit="GB/s",
        rows=tuple(tuple(row) for row in rows),
    )


def _links(
    verdict: FabricVerdict,
    links: FabricValues,
    record: Mapping[str, Any],
    run: _Run,
) -> None:
    nodes, rank_names = run.nodes, run.rank_names
    odd = {run.node_of(rank): one_line(version)[:80] for rank, version in links.odd_versions}
    for name, version in odd.items():
        text = f"its ranks have {version}, most have {one_line(links.versions or 'other versions')[:80]}"
        remedy = "Use one container image, or one Python environment, on all nodes."
        verdict.add([name], finding("nodes.versions", Status.WARN, "node", text, remedy))
    suspects: set[str] = set()
    ranks: dict[str, list[int]] = {}
    for rank in range(links.ranks):
        ranks.setdefault(links.node_of(rank), []).append(rank)
    for cause in links.causes:
        names, outcome = _of_cause(cause, links, ranks)
        suspects |= set(names)
        verdict.add(names, outcome)
    reason = _reason(record)
    if reason is not None:
        known = {rank for cause in links.causes for rank in cause.ranks if cause.kind == "stopped"}
        for rank in links.missing:
            if rank not in known:
                name = rank_names[rank] if rank < len(rank_names) else links.node_of(rank)
                suspects.add(name)
                text = f"rank {rank} stopped first: {reason}"
                outcome = finding(CHECKS["stopped"], Status.FAIL, "node", text, REMEDIES["stopped"])
                verdict.add([name], outcome)
        text = f"no verdict on the links: {reason}"
        verdict.add(
            [name for name in nodes if name not in suspects], finding("nodes.links", Status.ERROR, "node", text)
        )
        return
    usually = "" if links.usual_gb_per_s is None else f", usually at {links.usual_gb_per_s:.3g} GB/s"
    rates: dict[str, list[float | None]] = {}
    for *pair, rate in links.pairs:
        for name in {links.names[number] for number in pair if number < len(links.names)}:
            rates.setdefault(name, []).append(rate)
    for name in nodes:
        if name in suspects:
            continue
        if name not in rates:
            text = "no exchange with another node was tried: do all ranks run on one node, or have one host name?"
            verdict.add([name], finding("nodes.links", Status.ERROR, "node", text))
            continue
        text = f"exchanges with {counted(len(rates[name]), 'node')} in time{usually}"
        verdict.add([name], _exchange(links, [rate for rate in rates[name] if rate], text, name, run))


def _exchange(links: FabricValues, rates: list[float], text: str, name: str, run: _Run) -> Finding:
    """Return the finding of a node without a suspect, with the median rate of its exchanges as a figure."""
    passed = finding("nodes.links", Status.PASS, "node", text)
    if not rates:
        return passed
    facts = run.facts.get(name)
    shape = Shape(gpu=None, count=0) if facts is None else shape_of(facts)
    figure = Figure("fabric_exchange", median(rates), message_bytes=links.size_bytes)
    result = judged(figure, shape, run.expect(name), "node", label="median rate of its exchanges")
    update = {"measured": result.measured, "unit": result.unit, "figure": result.figure}
    if result.status in (Status.WARN, Status.FAIL):
        update |= {"status": result.status, "message": result.message, "expected": result.expected}
    return passed.model_copy(update=update)


def _of_cause(cause: SuspectValues, links: FabricValues, ranks: Mapping[str, list[int]]) -> tuple[list[str], Finding]:
    """Return the nodes of a cause, and its finding. ``ranks``: of each node."""
    names = sorted({links.node_of(rank) for rank in cause.ranks})
    node_ranks = ranks.get(names[0], []) if len(cause.ranks) == 1 else []
    component = f"rank {node_ranks.index(cause.ranks[0])}" if node_ranks and cause.ranks[0] in node_ranks else "node"
    how = "failed" if cause.share is None else f"reached {cause.share:.0%} of the usual rate"
    how += ", with wrong data" if cause.corrupt else ""
    how += "; small messages arrive, large ones do not: compare the MTU on the path" if cause.only_large else ""
    text = {
        "gpu": f"computes at {cause.share or 0:.0%} of the other ranks' rate, alone",
        "rank": f"its exchanges with {cause.partners} nodes {how}; these nodes are in time with others",
        "node": f"all its exchanges with {cause.partners} nodes {how}; these nodes are in time with others",
        "rail": f"exchanges on rail {cause.name} {how}, on all nodes; on the other rails they are in time",
        "rack": f"exchanges of rack {cause.name} with other racks {how}; within the rack they are in time",
        "racks": f"exchanges between the racks {cause.name} {how}; within each they are in time",
        "between": f"exchanges between racks {how}; within each they are in time",
        "link": f"exchanges between {fold(names)} {how}; both are in time with others",
        "stopped": f"rank {cause.ranks[0] if cause.ranks else '?'} stopped first: the others waited for it in vain",
    }.get(cause.kind, f"{one_line(cause.kind)} {how}")
    if cause.kind == "link" and len(links.names) == LONE_PAIR:
        text = f"exchanges between {fold(names)} {how}; a third node would show which of both it is"
    status = Status.FAIL if cause.confirmed or cause.share is None else Status.WARN
    message = text if cause.confirmed or status is Status.FAIL else f"{text}; not confirmed"
    return names, finding(
        CHECKS.get(cause.kind, "nodes.link"), status, component, message, REMEDIES.get(cause.kind, REMEDIES["link"])
    )


LONE_PAIR = 2


def _collective(
    verdict: FabricVerdict,
    name: str,
    record: Mapping[str, Any],
    run: _Run,
) -> list[CollectiveReport]:
    nodes = run.nodes
    reason = _reason(record)
    if reason is not None:
        status = Status.SKIP if record.get("skipped") else Status.ERROR
        verdict.add(nodes, finding("nodes.collectives", status, "node", f"{name}: {reason}"))
        return []
    rates = CollectiveRates.model_validate(values_of(record))
    wrong = sum(row.wrong for row in rates.rows)
    if wrong:
        text = f"{name}: {wrong} wrong elements over {rates.ranks} ranks"
        verdict.add(nodes, finding("nodes.collectives", Status.FAIL, "node", text, "Run it in halves of the nodes."))
    if name == "all-reduce" and rates.backend == "nccl":
        for node, outcome in nccl_view.view_findings(rates.views, run.node_of, run.facts, rates.connections):
            verdict.add([node], outcome)
        known = [run.facts[node] for node in nodes if node in run.facts]
        if not rates.views and "socket" in rates.kinds and any(map(active_ports, known)):
            text = "NCCL falls back to TCP (NET/Socket), and the nodes have active RDMA ports"
            remedy = nccl_view.REMEDIES["nodes.transport"]
            verdict.add(nodes, finding("nodes.transport", Status.FAIL, "node", text, remedy))
    shape = nccl_view.shape_together([run.facts[node] for node in nodes if node in run.facts])
    for node in nodes:
        rate = None if shape is None else nccl_view.rate_finding(name, rates, shape, run.expect(node))
        if rate is not None:
            verdict.add([node], rate)
    return [CollectiveReport(name=name, **row.model_dump()) for row in rates.rows[-1:]]


def _training(verdict: FabricVerdict, kind: str, record: Mapping[str, Any], nodes: Sequence[str]) -> None:
    reason = _reason(record)
    if reason is not None:
        status = Status.SKIP if record.get("skipped") else Status.ERROR
        verdict.add(nodes, finding("nodes.training", status, "node", f"{kind} training: {reason}"))
        return
    wrong = values_of(record).get("wrong")
    if wrong != 0:
        text = f"{kind} training: gradients of {one_line(str(wrong), 40)} parameters differ from those of one process"
        verdict.add(
            nodes, finding("nodes.training", Status.FAIL, "node", text, "Compare the nodes' GPUs: --level deep.")
        )
        return
    text = f"{kind} training: the gradients on all ranks are those of one process"
    verdict.add(nodes, finding("nodes.training", Status.PASS, "node", text))
