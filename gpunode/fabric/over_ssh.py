"""Ranks over connections to nodes: each node is probed, takes its part in the run, and gets a report."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpunode.checks import Finding, Status, identify
from gpunode.errors import UsageError
from gpunode.fabric.preflight import finding
from gpunode.fabric.records import UNKNOWN, ExpectedOfNodes
from gpunode.fabric.run import END_S, STEP_S, FabricRequest, FabricRun
from gpunode.fabric.verdict import FabricVerdict, verdict_of
from gpunode.facts import NodeFacts
from gpunode.fleet import Collected, Node, Target, Then
from gpunode.isolation import Exceeded
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.report import NodeReport, judged, unreachable
from gpunode.probe import Answer
from gpunode.workload.run import NodeTransport, Progress


@dataclass
class FabricWork:
    """Work of ``fleet.collect`` on each node after its probe: its part of the run."""

    run: FabricRun
    limit_s: float
    facts_of: Callable[[Answer], NodeFacts]
    facts: dict[str, NodeFacts]
    progress: Progress = field(default=lambda *_: None)

    def __call__(self, node: Node, answer: Answer, deadline: float) -> list[dict[str, Any]]:
        """Take part; the results are in the run."""
        name = node.target.name
        try:
            facts = self.facts[name] = self.facts_of(answer)
            transport = NodeTransport(node, deadline - END_S)
            self.run.member(name, transport, facts, lambda text: self.progress(name, text), deadline - END_S)
        except (UsageError, Exceeded) as err:
            self.run.add(name, finding("nodes.node", Status.ERROR, "node", str(err)))
        finally:
            self.run.leave(name)
        return []

    def failed(self, reason: str) -> list[dict[str, Any]]:
        """Return the reason as a record, for the node's report."""
        return [{"record": "fabric.failed", "error": reason}]


def over_ssh(
    targets: Sequence[Target],
    request: FabricRequest,
    expects: ExpectedOfNodes,
    *,
    timeout_s: float,
    collect: Callable[[Callable[[Progress], Then]], Iterable[Collected]],
) -> tuple[FabricVerdict, list[NodeReport]]:
    """Run the ranks over connections to nodes; return the verdict and the reports on the nodes.

    ``timeout_s`` is the limit of the connection and of the probe. ``collect`` collects from all targets at the same
    time, because they wait for each other, and does what it gets on each of them after its probe.
    """
    names = [target.name for target in targets]
    request = replace(request, racks={target.name: target.rack for target in targets if target.rack})
    began = time.monotonic()
    facts: dict[str, NodeFacts] = {}
    run = FabricRun(request, names, timeout_s)
    image_s = request.image_limit_s if request.in_container else 0.0
    limit_s = request.run_limit_s + image_s + timeout_s + 4 * STEP_S + END_S
    collected: dict[str, Collected] = {}
    with Evaluator() as evaluator:

        def then(progress: Progress) -> FabricWork:
            return FabricWork(run, limit_s, evaluator.facts, facts, progress)

        for answer in collect(then):
            collected[answer.host] = answer
            run.leave(answer.host)
    result = run.end()
    verdict = FabricVerdict()
    minutes = (time.monotonic() - began) / 60
    if result.nodes:
        verdict = verdict_of(
            result.records,
            nodes=result.nodes,
            engine="ssh",
            backend=result.backend,
            ranks=result.ranks,
            minutes=minutes,
            facts=facts,
            rank_names=result.rank_names,
            expects=expects.of(result.nodes),
        )
    for name, reason in result.failures.items():
        verdict.add([name], finding("nodes.ranks", Status.ERROR, "node", f"its ranks did not finish: {reason}"))
    reports = []
    for target in sorted(targets, key=lambda target: target.name):
        findings = [*result.findings.get(target.name, ()), *verdict.findings.get(target.name, ())]
        explained = any(each.status in (Status.FAIL, Status.ERROR) for each in findings)
        if target.name not in result.nodes and not explained:
            text = "not run: fewer than two nodes were left after the tests before the ranks"
            findings.append(finding("nodes.links", Status.ERROR, "node", text))
        reports.append(_node_report(target, collected.get(target.name), facts.get(target.name), findings))
    return verdict, reports


def _node_report(
    target: Target, collected: Collected | None, facts: NodeFacts | None, findings: list[Finding]
) -> NodeReport:
    if collected is None or collected.answer is None:
        return unreachable(target.name, (collected and collected.reason) or "no answer", None)
    lost = [str(record["error"]) for record in collected.answer.records if record.get("record") == "fabric.failed"]
    findings = findings + [finding("nodes.node", Status.ERROR, "node", reason) for reason in lost]
    if facts is None:
        return judged(target.name, UNKNOWN, findings, collected.seconds)
    return judged(target.name, identify(facts), findings, collected.seconds)
