"""The report as workflow commands of GitHub Actions, which shows them as annotations of the run.

Format: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands. GitHub shows at most 10
errors, 10 warnings and 10 notices of a step (https://github.com/actions/toolkit/pull/734, read 2026-11-23): findings
that are alike are one annotation, and the last one counts those that it shows no more.
"""

from collections.abc import Iterator

from gpunode.checks import Status
from gpunode.judging.report import Report
from gpunode.names import fold
from gpunode.report.folding import page_of
from gpunode.report.summary import Block, blocks, duration, to_drain, verdict, where
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


def as_text(document: Report, *, verbose: bool) -> str:
    """Return the commands, a line each; notes only with ``verbose``. The verdict is the first notice."""
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
    lines = list(_lines(block))
    return f"{listed(block.checks)}{f' on {names}' if names else ''}", lines


def _lines(block: Block) -> Iterator[str]:
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
