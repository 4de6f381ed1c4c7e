"""``gpunode compare``: what differs between two runs."""

from pathlib import Path

import click

from gpunode.errors import Exit, UndeterminedError
from gpunode.history.compare import compare_runs
from gpunode.history.runs import side_of
from gpunode.report.comparison import as_markdown, as_text
from gpunode.text import printable_json
from gpunode.whole import must_not_be_redirected, write_whole

FORMATS = ("text", "json", "markdown")


@click.command("compare")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="Format.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="File to write.  [default: stdout]")
@click.option("-v", "--verbose", is_flag=True, hidden=True, help="Accepted, without effect.")
def command(*, before: str, after: str, form: str, output: Path | None, verbose: bool) -> int:  # noqa: ARG001
    """Compare two runs, node by node: GPUs, links, versions, settings, verdicts, figures beyond their noise.

    A and B are bundles, folders of bundles, reports (--format json), or runs of the history: last, a number, a date.
    Values that vary on an unchanged node are not compared. Exit codes: 0 nothing is worse, 1 something is worse, 2
    wrong usage, 3 no node could be compared.

    \b
    Examples:
      gpunode compare monday/ tuesday/
      gpunode compare 2026-11-01 last --format markdown
    """
    if output is not None:
        must_not_be_redirected(output, "--output")
    one, other = side_of(before), side_of(after)
    comparison = compare_runs(one.nodes, other.nodes, (one.origin, other.origin))
    if form == "json":
        text = printable_json(comparison.to_json())
    else:
        text = as_markdown(comparison) if form == "markdown" else as_text(comparison)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)
    if not comparison.nodes and not comparison.not_reached:
        raise UndeterminedError(f"{before} and {after} have no node in common: nothing was compared")
    return Exit.FAILED if comparison.worse or comparison.not_reached else Exit.GOOD
