"""``gpunode upgrade``: a fleet's driver, by canary and waves. ``gpunode rollback``: back to the release before."""

from pathlib import Path
from typing import Any

import click

from gpunode.catalog import load
from gpunode.change.journal import Journal, runs
from gpunode.change.states import ChangeState
from gpunode.cli.plan import driver_request
from gpunode.cli.upgrade_run import ChangeGoal, ChangeOptions, change_fleet, change_options, runs_folder
from gpunode.cli.upgrade_text import printable_lines
from gpunode.errors import Exit, UsageError
from gpunode.names import fold
from gpunode.stack import Request


@click.command("upgrade")
@click.option("--to", metavar="REQUEST", help="Driver, as in gpunode plan --driver.  [default: the inventory's]")
@click.option(
    "--rollback/--no-rollback",
    default=True,
    help="Reinstall the earlier release on a node that failed.  [default: rollback]",
)
@change_options
def command(to: str | None, **values: Any) -> int:
    """Install a driver on many nodes by canary and waves, and return only nodes that are as good as before.

    Prints the plan first. Each wave is prepared while its nodes work (packages are downloaded and verified), drained,
    changed by playbooks/site.yml, rebooted where that is due, compared with its state before, and returned. A node that
    is worse gets its earlier release again, or stays drained with the reason. After Ctrl-C or a crash the same command
    continues. Nodes with the same gpunode_failure_domain change together. Exit codes: 0 all nodes returned, 1 a node
    failed, 2 wrong usage, 3 a node could not be reached or planned.

    \b
    Examples:
      gpunode upgrade -i inventory/hosts.yml --to 595 --scheduler slurm --dry-run
      gpunode upgrade -i inventory/hosts.yml --to 595 --scheduler slurm --canary 1 --waves 10%,25%
    """
    request = Request(driver=driver_request(to, load(), "--to"))
    return change_fleet(ChangeOptions(**values), ChangeGoal(f"--to {to}", request))


TITLE = "--run "
"""Begin of the part of the command that names the run, in its journal."""


def changed_by(journal: Journal) -> dict[str, str]:
    """Return the nodes that a run changed, each with its release before."""
    return {
        name: node.before
        for name, node in journal.record.nodes.items()
        if node.before is not None and node.began("change") and node.state is not ChangeState.ROLLED_BACK
    }


def goes_back(journal: Journal) -> str:
    """Return the run that a run of ``gpunode rollback`` takes back; empty for one of ``gpunode upgrade``."""
    return next((word.removeprefix(TITLE) for word in journal.record.command if word.startswith(TITLE)), "")


def kept_runs(folder: Path) -> list[Journal]:
    """Return the runs of ``gpunode upgrade`` that can be taken back, the latest first."""
    return [one for one in runs(folder) if not goes_back(one) and changed_by(one)]


def chosen(folder: Path, run_id: str | None) -> Journal:
    """Return the run to take back. Raises UsageError."""
    begun = {goes_back(one) for one in runs(folder) if one.record.finished_at is None} - {""}
    found = kept_runs(folder)
    # The nodes that its run held belong to an unfinished rollback.
    found += [one for one in runs(folder) if one.record.run in begun - {one.record.run for one in found}]
    if not found:
        raise UsageError(f"{folder}: no run of gpunode upgrade changed a node: there is nothing to take back")
    for journal in found:
        if journal.record.run == run_id or (run_id is None and (journal.record.run in begun or not begun)):
            return journal
    raise UsageError(f"--run {run_id}: not a run that changed a node; gpunode rollback --list lists those")


def _list_runs(context: click.Context, _: click.Parameter, listing: bool) -> None:
    """Print the runs that can be taken back, and end."""
    if not listing:
        return
    lines = []
    for journal in kept_runs(runs_folder()):
        by_release: dict[str, list[str]] = {}
        for name, release in changed_by(journal).items():
            by_release.setdefault(release, []).append(name)
        whats = [f"{fold(names)} back to {release}" for release, names in by_release.items()]
        lines.append(f"{journal.record.run}  {journal.record.started_at}  {'; '.join(whats)}")
    click.echo(printable_lines(lines) if lines else "no run changed a node")
    context.exit(Exit.GOOD)


@click.command("rollback")
@click.option(
    "--run", "run_id", metavar="RUN", help="Run of gpunode upgrade.  [default: the latest that changed a node]"
)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_runs,
    help="List the runs that can be taken back, and exit.",
)
@change_options
def rollback_command(run_id: str | None, **values: Any) -> int:
    """Install the driver again that nodes had before a run of gpunode upgrade.

    The nodes go the same way as in an upgrade: prepared while they work, drained, changed, rebooted, proven to be as
    good as before that run, returned; by canary and waves. A node that fails stays drained with the reason. Exit codes:
    0 all nodes returned, 1 a node failed, 2 wrong usage, 3 a node could not be reached or planned.

    \b
    Examples:
      gpunode rollback --list
      gpunode rollback -i inventory/hosts.yml --scheduler slurm --dry-run
      gpunode rollback -i inventory/hosts.yml --scheduler slurm --limit gpu-7
    """
    journal = chosen(runs_folder(), run_id)
    requests = {name: Request(driver=release) for name, release in changed_by(journal).items()}
    goal = ChangeGoal(f"{TITLE}{journal.record.run}", of_host=requests, kept=journal.folder)
    return change_fleet(ChangeOptions(**values, rollback=False), goal)
