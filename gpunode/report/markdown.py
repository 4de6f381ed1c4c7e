"""The report as Markdown (GitHub's dialect), for a ticket, a comment or a job's summary."""

import re
from collections.abc import Iterator

from gpunode.checks import Status
from gpunode.history.outliers import Outlier
from gpunode.judging.report import Report, in_words
from gpunode.names import fold
from gpunode.report.comparison import as_markdown
from gpunode.report.summary import SHOWN, Block, blocks, duration, node_groups, per_check, to_drain, verdict, where
from gpunode.text import counted, printable

_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>&|~$!]")
_REFERENCE = re.compile(r"([@#])(?=\w)|(:)(?=//)")
_STARTS = re.compile(r"^(\s*)([-+=]|\d+[.)])")
NO_BREAK = "&#8203;"
"""A character without width: neither a mention, nor a link to an issue, nor an address."""


def as_text(document: Report, *, verbose: bool) -> str:
    """Return the report: verdict, nodes, findings, remedies. ``verbose`` shows each finding, and what passed."""
    return "\n".join(_lines(document, verbose=verbose)).rstrip("\n") + "\n"


def _lines(document: Report, *, verbose: bool) -> Iterator[str]:
    taken = duration(document)
    yield from (f"## {escaped(f'GPU nodes: {verdict(document)}')}", "")
    about = [f"level {document.level}", in_words(document.counts), taken, escaped(document.started_at)]
    yield from (f"gpunode {escaped(document.gpunode_version)}, {', '.join(part for part in about if part)}", "")
    groups = node_groups(document.nodes)
    if groups:
        yield from ("| nodes | GPUs | driver | result |", "|---|---|---|---|")
        for group in groups:
            result = f"**{group.verdict}**{', SIMULATED' if group.simulated else ''}"
            yield f"| {escaped(fold(group.hosts))} | {escaped(group.gpus)} | {escaped(group.driver)} | {result} |"
        yield ""
    all_blocks = blocks(document.nodes, tuple(Status) if verbose else SHOWN, exact=verbose)
    if all_blocks:
        yield from ("| status | check | where | finding |", "|---|---|---|---|")
        for block in all_blocks:
            yield from _rows(block, several=len(document.nodes) > 1)
        yield ""
    repairs = [line for block in all_blocks for line in _fix(block)]
    if repairs:
        yield from ("### To do", "", *repairs, "")
    yield from _rest(document, verbose=verbose)


def _rows(block: Block, *, several: bool) -> Iterator[str]:
    for folded in block.findings:
        group = folded.group
        name = group.status.value.upper() if block.status in SHOWN and not block.observed else group.status.value
        texts = [group.message]
        texts += [f"observed only: {group.observed}"] if group.observed else []
        texts += [f"expected by: {group.source}"] if group.source and block.status in SHOWN else []
        checks = ", ".join(f"`{check}`" for check in group.checks)
        yield f"| {name} | {checks} | {escaped(where((folded,), hosts=several))} | {escaped('; '.join(texts))} |"


def _fix(block: Block) -> Iterator[str]:
    fix = block.fix
    if not (fix.text or fix.command) or block.status not in SHOWN:
        return
    yield f"- `{block.checks[0]}` on {escaped(fold(block.hosts))}: {escaped(fix.text)}".rstrip(": ")
    if fix.command:
        yield from ("", "  ```console", f"  {fix.command}", "  ```", "")
    if fix.then:
        yield f"  Then {escaped(fix.then)}."


def _rest(document: Report, *, verbose: bool) -> Iterator[str]:
    drain = to_drain(document.nodes)
    if drain:
        yield from (f"**Drain:** {escaped(drain)}", "")
    notes = {} if verbose else per_check(document.nodes, Status.NOTE)
    if notes:
        listed = ", ".join(f"`{check}` on {counted(number, 'node')}" for check, number in notes.items())
        yield from (f"Notes: {listed}", "")
    fleet = document.fleet
    for row in (*(fleet.outliers or ()), *(fleet.inconsistencies or ())):
        outlier = Outlier.model_validate(row)
        names = fold(outlier.hosts) if outlier.hosts else outlier.group
        yield f"- {escaped(names)} differs: {escaped(outlier.text)}"
    if fleet.since is not None:
        from gpunode.history.compare import Comparison  # noqa: PLC0415 (only with --since)

        yield from ("", as_markdown(Comparison.model_validate(fleet.since)))


def escaped(text: str) -> str:
    """Return text on one line that Markdown shows as it is: no markup, no mention of a person, no link."""
    plain = _SPECIAL.sub(lambda match: f"\\{match[0]}", printable(text))
    plain = _REFERENCE.sub(lambda match: f"{match[0]}{NO_BREAK}", plain)
    return _STARTS.sub(lambda match: f"{match[1]}\\{match[2]}" if match[2] in "-+=" else match[0], plain)
