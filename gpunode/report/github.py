"""The report for GitHub: Markdown, and annotations of a workflow's run."""

import re
from collections.abc import Iterator

from gpunode.checks import Status
from gpunode.history.outliers import Outlier
from gpunode.judging.report import Report, in_words
from gpunode.names import fold
from gpunode.report.comparison import as_markdown as markdown_of_comparison
from gpunode.report.fleet import page_of
from gpunode.report.summary import SHOWN, Block, blocks, duration, node_groups, per_check, to_drain, verdict, where
from gpunode.text import counted, listed, printable

LEVELS = {
    "error": (Status.FAIL, Status.ERROR),
    "warning": (Status.WARN,),
    "notice": (Status.NOTE,),
}
MOST = 10
"""Annotations of one level that GitHub shows."""
MOST_CHARACTERS = 4000
"""Of one message."""


def as_commands(document: Report, *, verbose: bool) -> str:
    """Return the report as workflow commands of GitHub Actions, which shows them as annotations of the run.

    A line each; notes only with ``verbose``. The verdict is the first notice. Format:
    https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands. GitHub shows at most 10
    errors, 10 warnings and 10 notices of a step (https://github.com/actions/toolkit/pull/734, read 2026-11-23):
    findings that are alike are one annotation, and the last one counts those that it shows no more.
    """
    drain, taken = to_drain(document.nodes), duration(document)
    result = f"{verdict(document)}{f' ({taken})' if taken else ''}{f'; drain {drain}' if drain else ''}"
    # Without a node there is no finding, and no other annotation.
    lines = [_command("notice" if document.nodes else "error", "gpunode validate", [result])]
    for level, statuses in LEVELS.items():
        room = MOST - (level == "notice" or not document.nodes)
        chosen = [block for block in blocks(document.nodes, statuses) if verbose or level != "notice"]
        counting = [block for block in chosen if not block.observed]
        shown = counting if len(counting) <= room else counting[: room - 1]
        lines += [_command(level, *_texts(block, several=len(document.nodes) > 1)) for block in shown]
        if len(counting) > room:
            left = counting[room - 1 :]
            checks = sorted({check for block in left for check in block.checks})
            more = [f"{listed(checks, most=20)} on {fold(host for block in left for host in block.hosts)}"]
            lines.append(_command(level, f"{counted(len(left), 'more finding')}", more))
    return "".join(f"{line}\n" for line in lines)


def _texts(block: Block, *, several: bool) -> tuple[str, list[str]]:
    names = where(block.findings, hosts=several)
    lines = list(_annotation(block))
    return f"{listed(block.checks)}{f' on {names}' if names else ''}", lines


def _annotation(block: Block) -> Iterator[str]:
    yield block.findings[0].group.message
    if len(block.findings) > 1:
        yield f"and {len(block.findings) - 1} like it"
    yield from (text for text in (block.fix.text, block.fix.command) if text)
    if block.fix.then:
        yield f"then {block.fix.then}"
    yield f"about this check: {page_of(block.checks[0])}"


def _command(level: str, title: str, lines: list[str]) -> str:
    """Return a command; its characters with a meaning are encoded as GitHub's own toolkit does."""
    text = "\n".join(map(printable, lines))[:MOST_CHARACTERS]
    return f"::{level} title={_data(printable(title)[:250], more=':,')}::{_data(text)}"


def _data(text: str, more: str = "") -> str:
    plain = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for char in more:
        plain = plain.replace(char, f"%{ord(char):02X}")
    return plain


_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>&|~$!]")
_REFERENCE = re.compile(r"([@#])(?=\w)|(:)(?=//)")
_STARTS = re.compile(r"^(\s*)([-+=]|\d+[.)])")
NO_BREAK = "&#8203;"
"""A character without width: neither a mention, nor a link to an issue, nor an address."""


def as_markdown(document: Report, *, verbose: bool) -> str:
    """Return the report as Markdown (GitHub's dialect), for a ticket, a comment or a job's summary.

    It has the verdict, nodes, findings and remedies. ``verbose`` shows each finding, and what passed.
    """
    return "\n".join(_markdown(document, verbose=verbose)).rstrip("\n") + "\n"


def _markdown(document: Report, *, verbose: bool) -> Iterator[str]:
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

        yield from ("", markdown_of_comparison(Comparison.model_validate(fleet.since)))


def escaped(text: str) -> str:
    """Return text on one line that Markdown shows as it is: no markup, no mention of a person, no link."""
    plain = _SPECIAL.sub(lambda match: f"\\{match[0]}", printable(text))
    plain = _REFERENCE.sub(lambda match: f"{match[0]}{NO_BREAK}", plain)
    return _STARTS.sub(lambda match: f"{match[1]}\\{match[2]}" if match[2] in "-+=" else match[0], plain)
