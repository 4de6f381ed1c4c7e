"""``gpunode advise``: what pays on a node for training, with the node's own numbers."""

import json
import sys

import click
from rich.text import Text

from gpunode.cli import selection as selection_
from gpunode.cli.node_facts import facts_of
from gpunode.cli.options import REPLAY
from gpunode.cli.selection import Selection, refuse_asking
from gpunode.errors import Exit
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.node_figures import NodeFigure, as_json
from gpunode.judging.node_figures import figures as node_figures
from gpunode.report.console import PlainConsole
from gpunode.report.table import table_lines
from gpunode.text import printable, printable_json
from gpunode.tuning.advice import STEPS, AdviceDocument, NodeAdvice, advise


@click.command("advise")
@selection_.options
@REPLAY
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
@click.option("--figures", is_flag=True, help="Print only the table: this node, the guides' figure, the limit.")
@click.option("-v", "--verbose", is_flag=True, help="Also show the source of each advice.")
def command(*, selection: Selection, replay: bool, form: str, figures: bool, verbose: bool) -> int:
    """Print what pays for training on a node: HOST, hosts of an inventory (-i), a bundle (--replay), or this machine.

    In the order of docs/training-guide.md, each advice with a number of this node or its source. Figures are those in
    the bundle of a validate; a figure that is missing is printed with the command that measures it. Changes nothing.
    Exit codes: 0 printed, 2 wrong usage, 3 a node could not be reached or has no GPU.

    \b
    Examples:
      gpunode advise root@gpu-01
      gpunode validate -i inventory/hosts.yml --level deep --save runs/today
      gpunode advise --replay runs/today
      gpunode advise --replay runs/today --figures
    """
    if replay:
        refuse_asking("--replay contacts no node")
    missed = list[str]()
    tables = dict[str, list[NodeFigure]]()
    with Evaluator() as evaluator:
        found = list[NodeAdvice]()
        for node in facts_of(selection, evaluator, missed, replay=replay):
            if node.gpus_on_bus:
                found.append(advise(node))
                tables[node.host] = node_figures(node) if figures else []
            else:
                missed.append(f"{node.host}: {node.gap('pci') or 'no NVIDIA GPU on the PCI bus'}: no advice for it")
    for line in missed:
        click.echo(printable(line), err=True)
    if figures:
        _show_figures(tables, form)
    elif form == "json":
        click.echo(printable_json(AdviceDocument(nodes=tuple(found)).model_dump_json(by_alias=True, indent=1)))
    else:
        for one in found:
            _show(one, verbose=verbose)
    return Exit.UNDETERMINED if missed or not found else Exit.GOOD


def _show_figures(tables: dict[str, list[NodeFigure]], form: str) -> None:
    if form == "json":
        click.echo(printable_json(json.dumps({host: as_json(rows) for host, rows in tables.items()}, indent=1)))
        return
    for host, rows in tables.items():
        click.echo(printable(host))
        cells = [(row.figure, row.node or f"not measured: {row.missing}", row.guide, row.limit) for row in rows]
        for line in table_lines(("figure", "this node", "guide", "limit"), cells):
            click.echo(printable(line))


def _show(node: NodeAdvice, *, verbose: bool) -> None:
    console = PlainConsole(sys.stdout)
    simulated = " (simulated)" if node.simulated else ""
    console.show(Text(printable(f"{node.host}: {node.gpus}{simulated}"), "bold"))
    for number, (step, title) in enumerate(STEPS.items(), start=1):
        advice = [one for one in node.advice if one.step == step]
        if advice:
            console.show(Text(f"{number}. {title}", "bold"), 2)
        for one in advice:
            console.show(Text(printable(f"{one.title}: {one.advice}")), 4)
            for figure in one.numbers:
                console.show(Text(printable(figure)), 8)
            if one.missing:
                console.show(Text(printable(f"not measured here: {one.missing}")), 8)
            if one.source and (verbose or not one.numbers):
                console.show(Text(printable(f"source: {one.source}"), "dim"), 8)
