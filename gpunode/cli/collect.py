"""``gpunode collect``: write bundles without judging them."""

from pathlib import Path

import click

from gpunode.cli import selection as selection_
from gpunode.cli.selection import Selection
from gpunode.cli.writing import folder_for_bundles, save_bundle
from gpunode.errors import Exit
from gpunode.judging.evaluator import Evaluator
from gpunode.names import fold
from gpunode.text import printable


@click.command("collect")
@selection_.options
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="Directory for the bundles, as DIR/HOST.json.",
)
@click.option("-v", "--verbose", is_flag=True, help="Print each node as it answers.")
def command(*, selection: Selection, save: Path, verbose: bool) -> int:
    """Collect a bundle from each node: HOSTs, hosts of an inventory (-i), or this machine.

    A bundle contains the raw data that gpunode reads on a node; gpunode validate --replay evaluates it on any machine.
    Exit codes: 0 all collected, 2 wrong usage, 3 a node could not be reached or its bundle not be saved.

    \b
    Examples:
      gpunode collect -i inventory/hosts.yml --save bundles/
      gpunode collect 'root@gpu-[01-16]' --save bundles/
    """
    folder = folder_for_bundles(save)
    written, missed, unsaved = 0, list[str](), list[str]()
    with Evaluator() as evaluator:
        for answer, document in evaluator.documents_of_fleet(selection.collect()):
            if document is None:
                missed.append(answer.host)
                click.echo(printable(f"{answer.host}: {answer.reason}"), err=True)
                continue
            reason = save_bundle(folder, answer.host, document)
            if reason is None:
                written += 1
            else:
                unsaved.append(answer.host)
                click.echo(printable(f"{answer.host}: bundle not saved: {reason}"), err=True)
            if answer.unchecked is not None:
                click.echo(printable(f"{answer.host}: host key not verified: {answer.unchecked}"), err=True)
            if verbose:
                click.echo(printable(f"{answer.host}: collected in {answer.seconds:.1f} s"), err=True)
    names = f": {fold(missed)}" if missed else ""
    lost = f", {len(unsaved)} not saved: {fold(unsaved)}" if unsaved else ""
    click.echo(printable(f"{written} collected into {folder}, {len(missed)} unreachable{names}{lost}"), err=True)
    return Exit.UNDETERMINED if missed or unsaved or not written else Exit.GOOD
