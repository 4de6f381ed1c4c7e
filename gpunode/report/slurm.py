"""The verdict on one node as a line for Slurm."""

from gpunode.checks import State, Status
from gpunode.checks.registry import NOT_RUN
from gpunode.judging.report import AFFECTED, WORST_FIRST, NodeReport, Report, counting
from gpunode.report import formats
from gpunode.report.folding import cause_rank
from gpunode.text import printable

REASON_MOST = 200
"""Characters of a reason: sinfo shows it in one line."""


def written(document: Report, form: str, *, verbose: bool) -> str:
    """Return the report in the format of ``--format``."""
    if form == "slurm":
        return slurm_line(document.nodes[0]) + "\n"
    return "".join(formats.parts(form, document, verbose=verbose))


def slurm_line(node: NodeReport) -> str:
    """Return ``STATE: REASON``: drain, observe or none according to the findings, or unknown.

    One line without quotes, so that a script can pass it to scontrol unchanged.
    """
    statuses = [finding.status for finding in counting(node.findings)]
    left = sum(finding.message.startswith(NOT_RUN) for finding in node.findings)
    if node.status in (Status.PASS, Status.SKIP):
        counts = f"{statuses.count(Status.PASS)} passed, {statuses.count(Status.SKIP)} skipped"
        state = "none" if node.status is Status.PASS else "unknown"
        return f"{state}: {counts}{f', {left} not run' if left else ''}"
    known = node.status is not Status.ERROR or node.recommended_state is State.DRAIN
    state = node.recommended_state.value if known else "unknown"
    bad = [
        finding
        for finding in counting(node.findings)
        if finding.status in AFFECTED and (known or finding.status is Status.ERROR)
    ]
    bad.sort(
        key=lambda finding: (
            finding.recommended_state is not node.recommended_state,
            WORST_FIRST.index(finding.status),
            cause_rank((finding.check,)),
        )
    )
    first, more = bad[0], len(bad) - 1
    where = "" if first.component == "node" else f" {first.component}"
    rest = f" (and {more} more)" if more else ""
    text = printable(f"{first.check}{where}: {first.message}").replace('"', "'").replace("\\", "/")
    return f"{state}: {text[: REASON_MOST - len(rest)]}{rest}"
