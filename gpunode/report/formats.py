"""The formats of a report, and the line for Slurm."""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module

from gpunode.checks import State, Status
from gpunode.checks.registry import NOT_RUN
from gpunode.judging.report import AFFECTED, WORST_FIRST, NodeReport, Report, counting
from gpunode.report.fleet import cause_rank
from gpunode.text import printable, printable_json

WRITERS = {
    "console": ("gpunode.report.console", "as_text"),
    "junit": ("gpunode.report.cases", "as_junit"),
    "html": ("gpunode.report.html", "as_text"),
    "ctrf": ("gpunode.report.cases", "as_ctrf"),
    "markdown": ("gpunode.report.github", "as_markdown"),
    "github": ("gpunode.report.github", "as_commands"),
    "prometheus": ("gpunode.report.prometheus", "as_text"),
}
"""Format -> module and function of a report, those of ``SHORT`` with ``verbose``; a module is loaded when its format is
asked for, since libraries are slow to load."""
NAMES = (*WRITERS, "json")
SHORT = frozenset({"console", "markdown", "github"})
"""Formats that leave out what passed unless the report is to be verbose; the others have everything."""
NOT_FOR_TERMINALS = frozenset({"html"})


def parts(name: str, document: Report, *, verbose: bool) -> Iterator[str]:
    """Yield the report in a format of ``NAMES``; JSON of thousands of nodes is never whole in memory."""
    if name == "json":
        yield from (printable_json(part) for part in document.json_parts())
    else:
        options = {"verbose": verbose} if name in SHORT else {}
        module, function = WRITERS[name]
        yield getattr(import_module(module), function)(document, **options)


def show(name: str, document: Report, *, verbose: bool) -> None:
    """Write the report to stdout, with the terminal's colours and width where the format has any."""
    if name == "console":
        from gpunode.report.console import write  # noqa: PLC0415 (slow to load)

        write(document, sys.stdout, verbose=verbose)
        return
    for part in parts(name, document, verbose=verbose):
        sys.stdout.write(_encodable(name, part))


def _encodable(name: str, text: str) -> str:
    """Return text that the encoding of stdout can represent: other characters are the format's escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        if name == "json":
            return re.sub(r"[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], text)
        if name == "html":  # a page states its encoding: one that is not UTF-8 must be ASCII
            return text.encode("ascii", "xmlcharrefreplace").decode("ascii")
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


REASON_MOST = 200
"""Characters of a reason: sinfo shows it in one line."""


def written(document: Report, form: str, *, verbose: bool) -> str:
    """Return the report in the format of ``--format``."""
    if form == "slurm":
        return slurm_line(document.nodes[0]) + "\n"
    return "".join(parts(form, document, verbose=verbose))


def slurm_line(node: NodeReport) -> str:
    """Return the verdict on one node for Slurm, ``STATE: REASON``: drain, observe or none by the findings, or unknown.

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
