"""``gpunode collect``: write bundles without judging them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click

from gpunode.cli import selection as selection_
from gpunode.cli.on_node import SCRIPT, ProbeRun
from gpunode.cli.options import FORMAT, SAVE, history_option, quiet, verbose_option
from gpunode.cli.selection import Selection, refuse_asking
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.history.runs import Recorder
from gpunode.history.snapshot import Snapshot, snapshot_of
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.saved import folder_for_bundles, save_bundle
from gpunode.names import fold
from gpunode.probe.bundle import Bundle
from gpunode.report.outcomes import CollectedNode, CollectOutcome
from gpunode.text import now, printable


@click.command("collect")
@selection_.options
@SAVE
@click.option(
    "--on-node", is_flag=True, help="This machine without Ansible and SSH, as a job of srun, clush or Kubernetes."
)
@click.option("--print-probe", is_flag=True, help="Print the probe, for python3 -I - on a node without gpunode.")
@history_option(default=True)
@verbose_option("Print each node as it answers.")
@FORMAT
def collect_command(  # noqa: PLR0913
    *,
    selection: Selection,
    save: Path | None,
    on_node: bool,
    print_probe: bool,
    history: bool,
    verbose: bool,
    form: str,
) -> int:
    """Collect a bundle from each node: HOSTs, hosts of an inventory (-i), or this machine.

    A bundle contains the raw data that gpunode reads on a node; gpunode validate --replay evaluates it on any machine.
    Exit codes: 0 all collected, 2 wrong usage, 3 a node could not be reached or its bundle not be saved.

    \b
    Examples:
      gpunode collect -i inventory/hosts.yml --save bundles/
      gpunode collect 'root@gpu-[01-16]' --save bundles/
      srun -N 40 gpunode collect --on-node --save /shared/bundles
      gpunode collect --print-probe > probe.py
    """
    if print_probe:
        click.echo(SCRIPT.read_text(encoding="utf-8"), nl=False)
        return Exit.GOOD
    if save is None:
        raise UsageError("--save DIR is missing: the directory for the bundles")
    folder = folder_for_bundles(save)
    if on_node:
        refuse_asking("--on-node reads this machine", but=("timeout_s",))
        if selection.hosts:
            raise UsageError(f"{selection.hosts[0]}: --on-node reads this machine only; without it, SSH is used")
        if form != "console":
            raise UsageError(f"--format {form} lists nodes that this verb contacts: leave it out with --on-node")
        return collected_here(folder, selection.timeout_s)
    with Recorder("collect", "quick", now(), wanted=history) as recorder, Evaluator() as evaluator:
        nodes = list(_collected(selection, folder, recorder, evaluator, verbose=verbose and not quiet()))
        missed, unsaved = (
            [node.host for node in nodes if node.status == status] for status in ("unreachable", "unsaved")
        )
        written = len(nodes) - len(missed) - len(unsaved)
        recorder.finish("collected" if not missed else "error", now())
    code = Exit.UNDETERMINED if missed or unsaved or not written else Exit.GOOD
    if form == "json":
        click.echo(CollectOutcome(folder=str(folder), exit_code=code, nodes=tuple(nodes)).text())
    names = f": {fold(missed)}" if missed else ""
    lost = f", {len(unsaved)} not saved: {fold(unsaved)}" if unsaved else ""
    if missed or unsaved or not quiet():
        click.echo(printable(f"{written} collected into {folder}, {len(missed)} unreachable{names}{lost}"), err=True)
    return code


def _collected(
    selection: Selection, folder: Path, recorder: Recorder, evaluator: Evaluator, *, verbose: bool
) -> Iterator[CollectedNode]:
    """Save the bundle of each node as it answers, and yield what became of it."""
    derive = snapshot_of if recorder.history is not None else None
    for answer, document, snapshot in evaluator.documents_of_fleet(selection.collect(), Snapshot, derive):
        if document is None:
            click.echo(printable(f"{answer.host}: {answer.reason}"), err=True)
            yield CollectedNode(host=answer.host, status="unreachable", reason=printable(str(answer.reason)))
            continue
        recorder.bundle(answer.host, document)
        if snapshot is not None:
            recorder.node(snapshot.model_copy(update={"host": answer.host}), "collected")
        reason = save_bundle(folder, answer.host, document)
        if reason is not None:
            click.echo(printable(f"{answer.host}: bundle not saved: {reason}"), err=True)
        if answer.unchecked is not None:
            click.echo(printable(f"{answer.host}: host key not verified: {answer.unchecked}"), err=True)
        if verbose:
            click.echo(printable(f"{answer.host}: collected in {answer.seconds:.1f} s"), err=True)
        status: Literal["collected", "unsaved"] = "collected" if reason is None else "unsaved"
        seconds = round(answer.seconds, 1) if answer.seconds is not None else None
        yield CollectedNode(host=answer.host, status=status, reason=reason, seconds=seconds)


def collected_here(folder: Path, timeout_s: float) -> int:
    """Write the bundle of this machine as DIR/HOST.json: complete, or not at all."""
    begun = time.monotonic()
    look = ProbeRun(begun + 0.9 * timeout_s, begun + timeout_s)
    try:
        answer = look.answer()
    finally:
        look.end()
    if not answer:
        raise UndeterminedError(f"the probe did not end within {timeout_s:g} s: raise --timeout")
    bundle = Bundle.from_json(answer, "the probe's answer")
    reason = save_bundle(folder, bundle.host, bundle.to_json().encode())
    if reason is not None:
        raise UndeterminedError(f"{bundle.host}: bundle not saved: {reason}")
    if not quiet():
        click.echo(printable(f"{bundle.host}: collected into {folder} in {time.monotonic() - begun:.1f} s"), err=True)
    return Exit.GOOD
