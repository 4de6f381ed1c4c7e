"""``gpunode upgrade``: a fleet's driver, by canary and waves. ``gpunode rollback``: back to the release before."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live
from rich.text import Text

from gpunode.catalog import load
from gpunode.change.journal import RunRecord, read
from gpunode.cli.options import (
    ASK_BECOME_PASS,
    EXTRA_VARS,
    FORKS,
    FORMAT,
    LIMIT,
    PARALLEL,
    TIMEOUT,
    VAULT_PASSWORD_FILE,
    Command,
    Seconds,
    image_option,
    inventory_option,
    verbose_option,
)
from gpunode.cli.selection import ask_password, shown_progress
from gpunode.cli.verbs import loading
from gpunode.errors import Exit, UsageError
from gpunode.names import fold
from gpunode.report.change import change_lines, counted_states, live_lines, plan_lines, report_lines
from gpunode.stack import Request
from gpunode.stack.option_values import driver_request
from gpunode.text import now, printable, printable_json

if TYPE_CHECKING:
    from gpunode.upgrade.command import ChangeGoal, ChangeOptions

WATCH_S = 2.0
"""Time between two looks of ``--watch`` at the journal."""
OPTIONS = (
    inventory_option(required=True),
    LIMIT,
    click.option(
        "--scheduler",
        required=True,
        metavar="KIND",
        help="What hands out work to the nodes: none, slurm, kubernetes, or command:PROGRAM.",
    ),
    click.option(
        "--canary",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Nodes, or failure domains, of the first wave.",
    ),
    click.option(
        "--waves", default="10%,25%", show_default=True, help="Sizes of the next waves; the last one repeats."
    ),
    click.option(
        "--max-failed", type=click.IntRange(min=0), default=0, show_default=True, help="Failed nodes that stop no wave."
    ),
    click.option(
        "--drain-wait",
        "drain_s",
        type=Seconds(1),
        default=3600,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait until a drained node is idle.",
    ),
    click.option(
        "--validate-wait",
        "validate_s",
        type=Seconds(0),
        default=600,
        show_default=True,
        metavar="SECONDS",
        help="How long a node may take after its reboot until it is as good as before: services still start.",
    ),
    click.option(
        "--measure",
        is_flag=True,
        help="Measure each node before and after, as validate at level standard: a slower one is not returned.",
    ),
    image_option("Container image for --measure.  [default: one of the catalog that both releases support]"),
    click.option(
        "--accept",
        metavar="NODES",
        help="Held nodes with hardware that was changed on purpose: what they are now is what they were before.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and change nothing."),
    click.option(
        "--power-cycle",
        metavar="PROGRAM",
        help="Power-cycle a node that does not come back, by PROGRAM NODE (a call of its BMC).  [default: never]",
    ),
    click.option("--pause", is_flag=True, help="Let the run of the same command stop before its next wave."),
    click.option("--abort", is_flag=True, help="As --pause, and finish the run: the nodes left keep their release."),
    click.option("--watch", is_flag=True, help="Show the nodes of the run of the same command by state until it ends."),
    EXTRA_VARS,
    VAULT_PASSWORD_FILE,
    FORKS,
    PARALLEL,
    TIMEOUT,
    ASK_BECOME_PASS,
    verbose_option("Also print the time line of each node."),
    FORMAT,
)


def change_options(command: Command) -> Command:
    """Add the options of every change of a fleet."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class ChangeOutput:
    """What the verb does with a change, and how it is shown."""

    dry_run: bool
    pause: bool
    abort: bool
    watch: bool
    ask_become_pass: bool
    verbose: bool
    form: str

    def refuse_pairs(self, options: "ChangeOptions") -> None:
        """Raise UsageError for options that have no effect together."""
        if options.image is not None and not options.measure:
            raise UsageError("--image is the image of --measure: add --measure")
        if self.form == "json" and (self.pause or self.abort or self.watch):
            raise UsageError("--format json is the document of a run: not together with --pause, --abort and --watch")

    def print(self, lines: Iterable[str]) -> None:
        """Print lines of the plan or the report: on stderr if stdout is for a document."""
        for line in lines:
            click.echo(printable(line), err=self.form == "json")

    def say(self, text: str, record: RunRecord) -> None:
        """Print a step of a run with the number of nodes in each state."""
        counts = " ".join(f"{number} {state}" for state, number in counted_states(record))
        click.echo(printable(f"gpunode: {time.strftime('%H:%M:%S')} {text} [{counts}]"), err=True)


def change(goal: "ChangeGoal", values: dict[str, Any]) -> int:
    """Make a change, begun here or continued, and print it; return the exit code.

    ``values``: of the options that every change has, by their names.
    """
    with loading():
        from gpunode.upgrade.command import ChangeCommand, ChangeOptions, wave_sizes  # noqa: PLC0415 (slow to load)
        from gpunode.upgrade.runs import in_progress  # noqa: PLC0415 (the same)

    output = ChangeOutput(**{field.name: values.pop(field.name) for field in fields(ChangeOutput)})
    options = ChangeOptions(**{**values, "waves": wave_sizes(values["waves"])})
    output.refuse_pairs(options)
    command = ChangeCommand(options, goal)
    if output.pause or output.abort:
        click.echo(command.stop(abort=output.abort))
        return Exit.GOOD
    if output.watch:
        return watch(command.unfinished("--watch").folder, partial(in_progress, command.folder))
    with loading():
        from gpunode.upgrade.run import change_fleet, exit_code_of  # noqa: PLC0415 (loads what judges and measures)

    with change_fleet(command, shown_progress, ask_password if output.ask_become_pass else None) as fleet:
        record, stopped = fleet.record, ""
        if fleet.planned is not None:
            stacks = fleet.planned.document
            output.print(plan_lines(record, stacks, options.drain_s, options.scheduler, fleet.earlier))
        else:
            output.print([f"continuing run {record.run} of {record.started_at}"])
            output.print(report_lines(record, verbose=True) if output.dry_run else ())
        if not output.dry_run and (record.nodes or fleet.planned is None):
            outcome = fleet.run(output.say)
            record, stopped = outcome.record, outcome.stopped
            output.print(report_lines(record, verbose=output.verbose))
            if outcome.not_measured:
                names = fold(outcome.not_measured)
                output.print([f"compared without figures, because their change had begun: {names}"])
            if stopped:
                output.say(f"stopped: {stopped}", record)
    if output.form == "json":
        click.echo(printable_json(record.model_dump_json(by_alias=True, indent=1)))
    return exit_code_of(record, stopped)


def watch(folder: Path, in_progress: Callable[[], bool]) -> int:
    """Show a run as its journal has it, on a terminal until no process is at work on it; return an exit code."""

    def text() -> str:
        return as_text(live_lines(read(folder).record, now()))

    if not sys.stdout.isatty():
        click.echo(text())
        return Exit.GOOD
    with Live(Text(text()), auto_refresh=False) as live:
        while in_progress():
            time.sleep(WATCH_S)
            live.update(Text(text()), refresh=True)
    return Exit.GOOD


def as_text(lines: Iterable[str]) -> str:
    """Return lines as one text for a terminal."""
    return "\n".join(map(printable, lines))


@click.command("upgrade")
@click.option("--to", metavar="REQUEST", help="Driver, as in gpunode plan --driver.  [default: the inventory's]")
@click.option(
    "--rollback/--no-rollback",
    default=True,
    help="Reinstall the earlier release on a node that failed.  [default: rollback]",
)
@change_options
def upgrade_command(to: str | None, **values: Any) -> int:
    """Install a driver on many nodes by canary and waves, and return only nodes that are as good as before.

    Prints the plan first. Each wave is prepared while its nodes work (packages are downloaded and verified), drained,
    changed by playbooks/site.yml, rebooted if pending, compared with its state before, and returned. A node that
    is worse gets its earlier release again, or stays drained with the reason. After Ctrl-C or a crash the same command
    continues. Nodes with the same gpunode_failure_domain change together. Exit codes: 0 all nodes returned, 1 a node
    failed or was not begun, 2 wrong usage, 3 a node could not be reached or planned.

    \b
    Examples:
      gpunode upgrade -i inventory/hosts.yml --to 595 --scheduler slurm --dry-run
      gpunode upgrade -i inventory/hosts.yml --to 595 --scheduler slurm --canary 1 --waves 10%,25%
    """
    from gpunode.upgrade.command import ChangeGoal  # noqa: PLC0415 (slow to load)

    request = Request(driver=driver_request(to, load(), "--to"))
    return change(ChangeGoal(f"--to {to}", request), values)


def _list_runs(context: click.Context, _: click.Parameter, listing: bool) -> None:
    """Print the runs that can be taken back, and end."""
    if listing:
        from gpunode.upgrade.runs import runs_folder, upgrades  # noqa: PLC0415 (slow to load)

        lines = change_lines(journal.record for journal in upgrades(runs_folder()))
        click.echo(as_text(lines) or "no run changed a node")
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
    0 all nodes returned, 1 a node failed or was not begun, 2 wrong usage, 3 a node could not be reached or planned.

    \b
    Examples:
      gpunode rollback --list
      gpunode rollback -i inventory/hosts.yml --scheduler slurm --dry-run
      gpunode rollback -i inventory/hosts.yml --scheduler slurm --limit gpu-7
    """
    from gpunode.upgrade.command import rollback_goal  # noqa: PLC0415 (slow to load)

    return change(rollback_goal(run_id), {**values, "rollback": False})
