"""The report for people: worst first, one line for a node that is well."""

import io
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gpunode.checks import RunningStack, Status
from gpunode.names import fold
from gpunode.report.folding import Folded, of_nodes
from gpunode.report.model import WORST_FIRST, Counts, NodeReport, Report, count
from gpunode.text import listed, printable

STYLE = {
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.WARN: "yellow",
    Status.PASS: "green",
    Status.SKIP: "dim",
}
QUIET = (Status.PASS, Status.SKIP)


class PlainConsole(Console):
    """A console that shows text as it is: no markup, no guessed highlights."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Leave it to the verb how to end where the reader left; rich would exit with 1."""
        raise BrokenPipeError

    def show(self, text: Text, indent: int = 0) -> None:
        """One line: folded to a terminal's width, whole elsewhere."""
        if self.is_terminal:
            self.print(Padding(text, (0, 0, 0, indent)), overflow="fold")
        else:
            self.print(Text(" " * indent) + text, soft_wrap=True)


def write(document: Report, stream: TextIO, *, verbose: bool = False) -> None:
    """Write the report. On a terminal lines are folded to its width; in a file or a pipe they stay whole, so that
    one can search them. ``verbose`` shows passed and skipped checks too.

    One node is told with its findings below it. Of several, the findings come first, each with the nodes that have it,
    then a line for each node; the worst is first everywhere.
    """
    writer = _Writer(PlainConsole(stream), verbose=verbose)
    if len(document.nodes) == 1:
        writer.one(document.nodes[0])
    else:
        writer.many(document)
    writer.end(document)


def as_text(document: Report, *, verbose: bool = False) -> str:
    """The report as it is written to a file: without colours, lines whole."""
    stream = io.StringIO()
    write(document, stream, verbose=verbose)
    return stream.getvalue()


class _Writer:
    def __init__(self, console: PlainConsole, *, verbose: bool) -> None:
        self.line = console.show
        self.wanted = frozenset(Status) if verbose else frozenset(Status) - set(QUIET)
        self.verbose = verbose

    def one(self, node: NodeReport) -> None:
        shown = of_nodes([node], self.wanted)
        self.head(node)
        stack = printable(stack_in_words(node.stack, len(node.gpus)))
        if shown and stack:
            self.line(Text(stack, "dim"), 6)
        for folded in shown:
            self.finding(folded, 2)

    def many(self, document: Report) -> None:
        for folded in of_nodes(document.nodes, self.wanted):
            self.finding(folded, 0, on=folded.hosts)
        for node in sorted(document.nodes, key=lambda node: (WORST_FIRST.index(node.status), node.host)):
            self.head(node)
            stack = printable(stack_in_words(node.stack, len(node.gpus)))
            if self.verbose and stack:
                self.line(Text(stack, "dim"), 6)

    def head(self, node: NodeReport) -> None:
        head = Text()
        head.append(node.status.value.upper().ljust(6), STYLE[node.status])
        head.append(printable(node.host), "bold")
        if node.simulated:
            head.append("  SIMULATED", "bold yellow")
        head.append(f"  {in_words(count(node.findings))}")
        self.line(head)

    def finding(self, folded: Folded, indent: int, on: tuple[str, ...] = ()) -> None:
        told = folded.told
        text = Text()
        text.append(told.status.value.ljust(6), STYLE[told.status])
        text.append(listed(told.checks, most=len(told.checks) if self.verbose else 3), "bold")
        if set(told.components) != {"node"}:
            text.append(f" [{printable(fold(told.components))}]")
        text.append(f": {printable(told.message)}")
        self.line(text, indent)
        if on:
            number = f" ({len(on)} nodes)" if len(on) > 1 else ""
            self.line(Text(f"on: {printable(fold(on))}{number}"), indent + 6)
        if told.observed:
            self.line(Text(f"observed only, does not affect the result: {printable(told.observed)}", "dim"), indent + 6)
        if told.source and told.status not in QUIET:
            self.line(Text(f"expected by: {printable(told.source)}", "dim"), indent + 6)
        if told.remedy:
            self.line(Text(f"to do: {printable(told.remedy)}", "dim"), indent + 6)

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


def in_words(counts: Counts) -> str:
    """``1 failed, 2 not determined, 9 passed, 3 skipped``: what is none is left out."""
    words = (
        (counts.fail, "failed"),
        (counts.error, "not determined"),
        (counts.warn, "warned"),
        (counts.pass_, "passed"),
        (counts.skip, "skipped"),
        (counts.observed, "observed only"),
    )
    return ", ".join(f"{number} {word}" for number, word in words if number) or "no check was run"


def stack_in_words(stack: RunningStack, gpus: int) -> str:
    """One line on what runs on the node; empty where nothing is known of it."""
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
