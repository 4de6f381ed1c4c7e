"""The report as text: worst first, one line for a healthy node."""

import io
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gpunode.checks import RunningStack, Status
from gpunode.history.compare import Comparison
from gpunode.history.outliers import Outlier
from gpunode.judging.report import WORST_FIRST, Fleet, NodeReport, Report, count, in_words
from gpunode.names import fold
from gpunode.report.comparison import as_text as as_text_of_comparison
from gpunode.report.folding import FoldedFinding, of_nodes
from gpunode.text import listed, printable

STYLE = {
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.WARN: "yellow",
    Status.NOTE: "cyan",
    Status.PASS: "green",
    Status.SKIP: "dim",
}
QUIET = (Status.NOTE, Status.PASS, Status.SKIP)


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
            self.print(Text(" " * indent) + text, soft_wrap=True)


def write(document: Report, stream: TextIO, *, verbose: bool = False) -> None:
    """Write the report.

    On a terminal lines are folded to its width; in a file or a pipe they stay whole, so that they can be searched.
    ``verbose`` shows notes, passed and skipped checks too.

    One node is printed with its findings below it. For several nodes the findings come first, each with its nodes, then
    a line for each node; the worst is first everywhere.
    """
    writer = _Writer(PlainConsole(stream), verbose=verbose)
    if len(document.nodes) == 1:
        writer.one(document.nodes[0])
    else:
        writer.many(document)
    writer.fleet(document.fleet)
    writer.end(document)


def as_text(document: Report, *, verbose: bool = False) -> str:
    """Return the report as written to a file: without colours, lines whole."""
    stream = io.StringIO()
    write(document, stream, verbose=verbose)
    return stream.getvalue()


class _Writer:
    def __init__(self, console: PlainConsole, *, verbose: bool) -> None:
        self.line = console.show
        self.statuses = frozenset(Status) if verbose else frozenset(Status) - set(QUIET)
        self.verbose = verbose

    def one(self, node: NodeReport) -> None:
        shown = of_nodes([node], self.statuses)
        self.head(node)
        stack = printable(stack_in_words(node.stack, len(node.gpus)))
        if shown and stack:
            self.line(Text(stack, "dim"), 6)
        for folded in shown:
            self.finding(folded, 2)

    def many(self, document: Report) -> None:
        for folded in of_nodes(document.nodes, self.statuses):
            self.finding(folded, 0, on=folded.hosts)
        for node in sorted(document.nodes, key=lambda node: (WORST_FIRST.index(node.status), node.host)):
            self.head(node)
            stack = printable(stack_in_words(node.stack, len(node.gpus)))
            if self.verbose and stack:
                self.line(Text(stack, "dim"), 6)

    def fleet(self, fleet: Fleet) -> None:
        """Write how nodes differ from most others, and from the earlier run."""
        for found in (*(fleet.outliers or ()), *(fleet.inconsistencies or ())):
            outlier = Outlier.model_validate(found)
            text = Text("differs", "yellow")
            text.append(f"  {printable(fold(outlier.hosts) if outlier.hosts else outlier.group)}: ", "bold")
            text.append(printable(outlier.text))
            self.line(text)
        if fleet.since is not None:
            for line in as_text_of_comparison(Comparison.model_validate(fleet.since)).splitlines():
                self.line(Text(line))

    def head(self, node: NodeReport) -> None:
        head = Text()
        head.append(node.status.value.upper().ljust(6), STYLE[node.status])
        head.append(printable(node.host), "bold")
        if node.simulated:
            head.append("  SIMULATED", "bold yellow")
        head.append(f"  {in_words(count(node.findings))}")
        self.line(head)

    def finding(self, folded: FoldedFinding, indent: int, on: tuple[str, ...] = ()) -> None:
        group = folded.group
        text = Text()
        text.append(group.status.value.ljust(6), STYLE[group.status])
        text.append(listed(group.checks, most=len(group.checks) if self.verbose else 3), "bold")
        if set(group.components) != {"node"}:
            text.append(f" [{printable(fold(group.components))}]")
        text.append(f": {printable(group.message)}")
        self.line(text, indent)
        if on:
            number = f" ({len(on)} nodes)" if len(on) > 1 else ""
            self.line(Text(f"on: {printable(fold(on))}{number}"), indent + 6)
        if group.observed:
            self.line(
                Text(f"observed only, does not affect the result: {printable(group.observed)}", "dim"), indent + 6
            )
        if group.source and group.status not in QUIET:
            self.line(Text(f"expected by: {printable(group.source)}", "dim"), indent + 6)
        if group.remedy:
            self.line(Text(f"to do: {printable(group.remedy)}", "dim"), indent + 6)

    def end(self, document: Report) -> None:
        simulated = [node for node in document.nodes if node.simulated]
        for line in dict.fromkeys(line for node in document.nodes if node.policy for line in node.policy.expired):
            self.line(Text(f"policy: {printable(line)}", "yellow"))
        if len(document.nodes) > 1:
            tally = [
                f"{len([node for node in document.nodes if node.status is status])} {status.value}"
                for status in WORST_FIRST
                if any(node.status is status for node in document.nodes)
            ]
            self.line(Text(f"{len(document.nodes)} nodes: {', '.join(tally)}; {in_words(document.counts)}"))
        if not document.nodes:
            self.line(Text("no node was judged", STYLE[Status.ERROR]))
        if simulated:
            some = "The node is" if len(document.nodes) == 1 else f"{len(simulated)} of {len(document.nodes)} nodes are"
            self.line(Text(f"{some} simulated: the result does not apply to a real GPU.", "yellow"))


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
