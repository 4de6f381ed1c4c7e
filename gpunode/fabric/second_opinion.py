"""The output of nccl-tests over several nodes, beside the rate of our own collectives. Pure."""

import re

from gpunode.checks import Finding, Status
from gpunode.fabric.preflight import finding
from gpunode.facts.errors import ParseError
from gpunode.facts.models.outputs import NcclRun
from gpunode.facts.parsers import nccl_tests
from gpunode.judging.report import CollectiveReport, FabricReport
from gpunode.text import counted, last_line, one_line

CHECK = "nodes.nccl-tests"
AGREED = 0.8
"""Share of the greater rate that the other one reaches where both measured the same."""
NEAR = 2.0
"""Messages of sizes within this factor are compared."""
_HEAD = re.compile(r"nThread \d|\balgbw\b")


def has_nccl_tests(output: str) -> bool:
    """Return whether there is output of nccl-tests between the records of ranks."""
    return any(_HEAD.search(line) for line in _lines(output))


def opinion_of(output: str, report: FabricReport | None, failure: str | None = None) -> Finding:
    """Return the finding on nccl-tests' output; ``failure``: how the program that started them failed."""
    lines = _lines(output)
    try:
        runs = nccl_tests.parse("\n".join(lines)).runs
    except ParseError as err:
        if failure is not None:
            return finding(CHECK, Status.ERROR, "node", f"nccl-tests: {failure}")
        if last_line("\n".join(lines)):
            return finding(CHECK, Status.ERROR, "node", f"nccl-tests: {one_line(str(err))[:200]}")
        return finding(CHECK, Status.SKIP, "node", "nccl-tests are not installed on the nodes")
    several = [run for run in runs if (run.ranks or 0) > 1]
    if not several:
        if len(runs) > 1 or any(run.ranks == 1 for run in runs):
            text = "nccl-tests measured each process alone: they are built without MPI, or srun's --mpi differs from it"
            return finding(CHECK, Status.SKIP, "node", text, "Build them with MPI=1; srun --mpi=list")
        several = list(runs)
    return _verdict(several[0], report, failure)


def _lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if not line.lstrip().startswith("{")]


def _verdict(run: NcclRun, report: FabricReport | None, failure: str | None) -> Finding:
    name = f"nccl-tests {run.collective or ''}".strip() + (f" over {counted(run.ranks, 'rank')}" if run.ranks else "")
    wrong = run.out_of_bounds or run.wrong_total
    if wrong:
        text = f"{name}: {wrong} wrong elements"
        return finding(CHECK, Status.FAIL, "node", text, "Run it in halves of the nodes.")
    if not run.complete or not run.ok:
        why = next(iter(run.messages), None) or failure or "its output ended early"
        return finding(CHECK, Status.ERROR, "node", f"{name} did not finish: {one_line(why)[:200]}")
    collective = next((row for row in (report.collectives if report else ()) if row.name == "all-reduce"), None)
    busbw = None if collective is None else _at(run, collective)
    if collective is None or busbw is None:
        rate = "" if run.max_busbw_gb_per_s is None else f", {run.max_busbw_gb_per_s:.4g} GB/s at most"
        return finding(CHECK, Status.PASS, "node", f"{name}: no wrong element{rate}")
    both = f"{name}: {busbw:.4g} GB/s, gpunode measured {collective.busbw_gb_per_s:.4g} GB/s"
    agree = min(busbw, collective.busbw_gb_per_s) >= AGREED * max(busbw, collective.busbw_gb_per_s)
    remedy = "Run both again, on idle nodes; then compare NCCL's variables and versions of both."
    return finding(CHECK, Status.PASS if agree else Status.WARN, "node", both, None if agree else remedy)


def _at(run: NcclRun, collective: CollectiveReport) -> float | None:
    """Return nccl-tests' bus bandwidth for the message that is nearest to our own; None if none is near."""
    rates: dict[int, list[float]] = {}
    for row in run.rows:
        known = [
            placement.busbw_gb_per_s
            for placement in (row.out_of_place, row.in_place)
            if placement and placement.busbw_gb_per_s
        ]
        if known and max(row.size_bytes, collective.size_bytes) <= NEAR * min(row.size_bytes, collective.size_bytes):
            rates[row.size_bytes] = known
    nearest = min(rates, key=lambda size: abs(size - collective.size_bytes), default=None)
    return None if nearest is None else max(rates[nearest])
