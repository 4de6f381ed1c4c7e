"""The report for people at a terminal: nodes, findings with their remedy, verdict; worst first."""

import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gpunode.checks import RunningStack, Status
from gpunode.checks.identity import PairMatrix
from gpunode.history.compare import Comparison
from gpunode.history.outliers import Outlier
from gpunode.judging.report import FabricReport, Fleet, Report, in_words
from gpunode.names import fold
from gpunode.report.comparison import as_text as as_text_of_comparison
from gpunode.report.fleet import FoldedFinding, page_of
from gpunode.report.summary import (
    SHOWN,
    Block,
    NodeGroup,
    blocks,
    duration,
    node_groups,
    per_check,
    to_drain,
    verdict,
    where,
)
from gpunode.text import counted, listed, printable

STYLE = {
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.WARN: "yellow",
    Status.NOTE: "cyan",
    Status.PASS: "green",
    Status.SKIP: "dim",
}
QUIET = (Status.NOTE, Status.PASS, Status.SKIP)
WIDTH = 80
"""Columns in a pipe or a file."""
DOCS = "GPUNODE_DOCS_URL"
"""Environment variable: where the site of the documentation is, for links to the pages of checks."""
INDENT = 6
MOST_BLOCKS = 8
"""Findings beyond which those that differ only in figures are one line, and warnings of a fleet are listed by check."""
MOST_ALIKE = 3
"""Findings that differ only in figures: up to this number each is shown, of more the first."""
MOST_NOTES = 4
MOST_OUTLIERS = 3


class PlainConsole(Console):
    """A console that prints text unchanged: no markup, no guessed highlights."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Leave the exit status to the command if the reader closed the pipe; rich would exit with 1."""
        raise BrokenPipeError

    def show(self, text: Text, indent: int = 0) -> None:
        """Print one line: folded to a terminal's width, whole elsewhere."""
        if self.is_terminal:
            self.print(Padding(text, (0, 0, 0, indent)), overflow="fold")
        else:
            self.whole(text, indent)

    def whole(self, text: Text, indent: int = 0) -> None:
        """Print one line that is never folded: a command stays one line in the clipboard."""
        self.print(Text(" " * indent) + text, soft_wrap=True)

    def link(self, text: Text, check: str) -> None:
        """Make the id of a check in a text a link to its page, on a terminal that has colours, if the site is known.

        rich writes links (OSC 8) only where it writes colours: without colours the text is plain.
        """
        base = os.environ.get(DOCS, "")
        if re.match(r"(https?|file)://[^\s\x00-\x1f\x7f]+$", base) and not self.no_color:
            start = text.plain.find(check)
            if start >= 0:
                text.stylize(f"link {base.rstrip('/')}/checks/{check}.html", start, start + len(check))

    def sign(self, text: str, plain: str) -> str:
        """Return a sign, or its plain equal if the stream's encoding lacks it."""
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return plain
        return text


def write(document: Report, stream: TextIO, *, verbose: bool = False) -> None:
    """Write the report: the nodes, the findings, the verdict.

    A line has the terminal's width, or 80 columns elsewhere. What does not fit moves to a line of its own: on a
    terminal it is folded there, elsewhere it stays whole, so that it can be searched. Commands are never folded.
    ``verbose`` shows each finding, notes, passed and skipped checks too.
    """
    writer = _Writer(PlainConsole(stream), document, verbose=verbose)
    writer.head()
    writer.findings()
    writer.fleet(document.fleet)
    writer.fabric()
    writer.end()


def as_text(document: Report, *, verbose: bool = False) -> str:
    """Return the report as written to a file: without colours, texts whole."""
    stream = io.StringIO()
    write(document, stream, verbose=verbose)
    return stream.getvalue()


class _Writer:
    def __init__(self, console: PlainConsole, document: Report, *, verbose: bool) -> None:
        self.console = console
        self.line = console.show
        self.width = console.width if console.is_terminal else WIDTH
        self.document = document
        self.nodes = document.nodes
        self.verbose = verbose

    def head(self) -> None:
        """Write the nodes, those that are alike on one line."""
        groups = node_groups(self.nodes)
        if not groups:
            return
        simulated = {group.simulated for group in groups if group.gpus != "not reached"}
        label = Text(counted(len(self.nodes), "node"))
        if simulated == {True}:
            label.append(f" {self.console.sign('·', '-')} ").append("SIMULATED", "bold yellow")
        rows = [self._row(group, mixed=len(simulated) > 1) for group in groups]
        widths = [max(cell_len(row[column].plain) for row in rows) for column in range(len(rows[0]))]
        left = cell_len(label.plain) + 5
        if left + sum(widths) + 2 * (len(widths) - 1) > self.width:
            self.line(label)
            left, label = 2, Text()
        for group, row in zip(groups, rows, strict=True):
            text = label + Text(" " * (left - cell_len(label.plain)))
            for cell, width in zip(row, widths, strict=True):
                text.append_text(cell).append(" " * (width - cell_len(cell.plain) + 2))
            label = Text()
            if self._too_long(group):
                text.append(fold(group.hosts), "bold")
            text.rstrip()
            self.line(text)
            if self.verbose:
                self._software(group)

    def _row(self, group: NodeGroup, *, mixed: bool) -> list[Text]:
        names = counted(len(group.hosts), "node") if self._too_long(group) else fold(group.hosts)
        row = [
            Text(names, "bold"),
            Text(group.gpus),
            Text(group.driver),
            Text(group.verdict, STYLE[group.status]),
        ]
        return [*row, Text("SIMULATED" if group.simulated else "", "bold yellow")] if mixed else row

    def _too_long(self, group: NodeGroup) -> bool:
        """Return True if the names are at the end of the line: they would leave no room for the other columns."""
        return cell_len(fold(group.hosts)) > self.width // 3

    def _software(self, group: NodeGroup) -> None:
        hosts = set(group.hosts)
        nodes = [node for node in self.nodes if printable(node.host) in hosts]
        for stack in dict.fromkeys(printable(stack_in_words(node.stack, len(node.gpus))) for node in nodes):
            if stack:
                self.line(Text(stack, "dim"), 4)

    def findings(self) -> None:
        statuses = tuple(Status) if self.verbose else SHOWN
        all_blocks = blocks(self.nodes, statuses, exact=self.verbose)
        short = not self.verbose and len(self.nodes) > 1 and len(all_blocks) > MOST_BLOCKS
        shown = [block for block in all_blocks if not (short and block.status is Status.WARN)]
        alike = 1 if sum(len(block.findings) for block in shown) > MOST_BLOCKS else MOST_ALIKE
        for block in shown:
            self._block(block, alike)
        if short:
            self._by_check(Status.WARN, most=MOST_BLOCKS)
        if not self.verbose:
            self._by_check(Status.NOTE, most=MOST_NOTES)

    def _block(self, block: Block, alike: int) -> None:
        if len(block.findings) > alike:
            self._finding(block, block.findings, f" (and {len(block.findings) - 1} like it: -v)")
        else:
            for folded in block.findings:
                self._finding(block, (folded,), "")
        if block.observed:
            line = f"observed only, does not affect the result: {printable(block.observed)}"
            self.line(Text(line, "dim"), INDENT)
        if block.source and (block.measured or self.verbose) and block.status not in QUIET:
            self.line(Text(f"expected by: {printable(block.source)}", "dim"), INDENT)
        fix = block.fix
        word = Text("fix  ", "bold")
        if fix.text:
            self.line(word + Text(fix.text), INDENT)
            word = Text("     ")
        if fix.command:
            self.console.whole(word + Text(fix.command), INDENT)
        if fix.then:
            self.line(Text(f"then {fix.then}"), INDENT)
        if self.verbose and block.status in SHOWN:
            self.console.whole(Text(f"page {page_of(block.checks[0])}", "dim"), INDENT)

    def _finding(self, block: Block, findings: Sequence[FoldedFinding], more: str) -> None:
        group = findings[0].group
        head = Text()
        name = group.status.value.upper() if group.status in SHOWN and not block.observed else group.status.value
        head.append(name.ljust(INDENT), STYLE[group.status])
        checks = Text(listed(group.checks, most=len(group.checks) if self.verbose else 3), "bold")
        for check in group.checks:
            self.console.link(checks, check)
        head.append_text(checks)
        location = where(findings, hosts=len(self.nodes) > 1)
        if location:
            head.append(f"  {location}")
        message = f"{printable(group.message)}{more}"
        if cell_len(head.plain) + 2 + cell_len(message) <= self.width:
            self.line(head + Text(f"  {message}"))
            return
        self.line(head)
        self.line(Text(message), INDENT)

    def _by_check(self, status: Status, most: int) -> None:
        """Write the checks with such findings on one line."""
        numbers = per_check(self.nodes, status)
        if not numbers:
            return
        several = len(self.nodes) > 1
        names = [f"{check} on {counted(number, 'node')}" if several else check for check, number in numbers.items()]
        text = Text(status.value.ljust(INDENT), STYLE[status])
        self.line(text + Text(f"{printable(listed(names, most=most))} (details: -v)"))

    def fleet(self, fleet: Fleet) -> None:
        """Write how nodes differ from most others, and from the earlier run."""
        lines = self._differences(fleet)
        most = len(lines) if self.verbose else MOST_OUTLIERS
        for names, text in lines[:most]:
            self.line(Text("differs", "yellow") + Text(f"  {printable(names)}: ", "bold") + Text(printable(text)))
        if lines[most:]:
            self.line(Text(f"differs  {counted(len(lines) - most, 'more group')} of nodes (details: -v)", "yellow"))
        if fleet.since is not None:
            for line in as_text_of_comparison(Comparison.model_validate(fleet.since)).splitlines():
                self.line(Text(line))

    def fabric(self) -> None:
        """Write what the nodes measured together."""
        if self.document.fabric is not None:
            for line in fabric_lines(self.document.fabric, verbose=self.verbose):
                self.console.whole(Text(line))

    def _differences(self, fleet: Fleet) -> list[tuple[str, str]]:
        """Return nodes with their differences; of nodes that failed, which are shown already, only with -v."""
        bad = {node.host for node in self.nodes if node.status in (Status.FAIL, Status.ERROR)}
        texts: dict[str, list[str]] = {}
        for row in (*(fleet.outliers or ()), *(fleet.inconsistencies or ())):
            outlier = Outlier.model_validate(row)
            if self.verbose or not outlier.hosts or not bad.issuperset(outlier.hosts):
                texts.setdefault(fold(outlier.hosts) if outlier.hosts else outlier.group, []).append(outlier.text)
        if self.verbose:
            return [(names, text) for names, lines in texts.items() for text in lines]
        more = {names: f" (and {len(lines) - 1} more: -v)" if lines[1:] else "" for names, lines in texts.items()}
        return [(names, f"{lines[0]}{more[names]}") for names, lines in texts.items()]

    def end(self) -> None:
        for line in dict.fromkeys(line for node in self.nodes if node.policy for line in node.policy.expired):
            self.line(Text(f"policy: {printable(line)}", "yellow"))
        status = self.document.status
        taken = duration(self.document)
        result = Text(f"{verdict(self.document)}{f' ({taken})' if taken else ''}", f"bold {STYLE[status].split()[-1]}")
        if self.nodes and (len(self.nodes) == 1 or self.verbose or self.document.counts.observed):
            result.append(f"; checks: {in_words(self.document.counts)}", "not bold dim")
        drain = to_drain(self.nodes)
        room = self.width - cell_len(result.plain) - cell_len(f"drain {drain}")
        if drain and room >= 2:
            result.append(f"{' ' * room}drain {drain}", "bold")
        self.line(result)
        if drain and room < 2:
            self.line(Text(f"drain {drain}", "bold"))
        first = next(iter(blocks(self.nodes, SHOWN)), None)
        if first is not None:
            self.console.whole(Text(f"about a check: {page_of(first.checks[0])}", "dim"))


def stack_in_words(stack: RunningStack, gpus: int) -> str:
    """Return one line on the node's software; empty if nothing is known."""
    driver = stack.driver or stack.driver_packages
    flavour = f" {stack.driver_flavour}" if stack.driver_flavour else ""
    origin = f" from {stack.driver_origin}" if stack.driver_origin else ""
    loaded = "" if stack.driver or driver is None else ", not loaded"
    parts = (
        stack.os,
        f"kernel {stack.kernel}" if stack.kernel else None,
        f"driver {driver}{flavour}{origin}{loaded}" if driver else None,
        f"CUDA {stack.cuda}" if stack.cuda else None,
        f"{gpus} GPU{'' if gpus == 1 else 's'}" if gpus else None,
    )
    return "; ".join(part for part in parts if part)


SLOW = {"nccl": 2 / 3}
SLOW_ELSEWHERE = 1 / 4
"""Share of the usual rate below which a pair is shown: that of the search, by backend."""
WIDEST = 16
"""Nodes of a matrix that fits on a terminal."""
MOST_LINES = 12


def fabric_lines(fabric: FabricReport, *, verbose: bool) -> Iterator[str]:
    """Yield what several nodes measured together: the run, slow pairs folded; ``verbose``: the matrix of few nodes."""
    number = len(fabric.matrix.labels) if fabric.matrix is not None else 0
    nodes = f"{counted(number, 'node')}, " if number else ""
    cost = f"{counted(fabric.rounds, 'round')} of exchanges, {fabric.minutes:g} min in all"
    usual = "" if fabric.usual_gb_per_s is None else f"; a good pair {_rate(fabric.usual_gb_per_s)}"
    ranks = counted(fabric.ranks, "rank")
    yield f"fabric  {nodes}{ranks} of {printable(fabric.backend)} by {fabric.engine}: {cost}{usual}"
    if fabric.nccl is not None:
        yield f"        {printable(fabric.nccl)}"
    for figure in fabric.collectives:
        size = f"{figure.size_bytes / 2**20:.4g} MiB"
        yield f"        {figure.name} of {size}: {_rate(figure.busbw_gb_per_s)} bus bandwidth, {figure.time_us:.4g} us"
    if fabric.matrix is None:
        return
    if fabric.usual_gb_per_s is not None:
        yield from _slow_pairs(fabric.matrix, SLOW.get(fabric.backend, SLOW_ELSEWHERE) * fabric.usual_gb_per_s)
    if verbose and number <= WIDEST:
        yield from _table(fabric.matrix)


def _rate(value: float) -> str:
    return f"{value:.3g} GB/s"


def _slow_pairs(matrix: PairMatrix, least: float) -> Iterator[str]:
    """Yield a line for each node with slow pairs, those with most of them first; a pair is shown once."""
    slow = {
        name: {other: rate for other, rate in zip(matrix.labels, row, strict=True) if rate is not None and rate < least}
        for name, row in zip(matrix.labels, matrix.rows, strict=True)
    }
    shown: set[str] = set()
    rows = []
    for name in sorted(slow, key=lambda node: (-len(slow[node]), node)):
        partners = {other: rate for other, rate in slow[name].items() if other not in shown}
        shown.add(name)
        if partners:
            low, high = min(partners.values()), max(partners.values())
            rates = _rate(low) if high < 1.1 * low else f"{low:.3g} to {_rate(high)}"
            rows.append(f"        {printable(name)} - {printable(fold(partners))}: {rates if high else 'failed'}")
    yield from rows[:MOST_LINES]
    if len(rows) > MOST_LINES:
        yield f"        and {len(rows) - MOST_LINES} more nodes with slow pairs: --format json"


def _table(matrix: PairMatrix) -> Iterator[str]:
    """Yield the matrix as a table; ``.``: the pair was not tried."""
    labels = [printable(label) for label in matrix.labels]
    cells = [["." if rate is None else f"{rate:.3g}" for rate in row] for row in matrix.rows]
    width = max(len(text) for text in (*labels, *(cell for row in cells for cell in row))) + 1
    yield f"        {'GB/s'.ljust(width)}{''.join(label.rjust(width) for label in labels)}"
    for label, row in zip(labels, cells, strict=True):
        yield f"        {label.ljust(width)}{''.join(cell.rjust(width) for cell in row)}"
