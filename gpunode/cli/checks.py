"""``gpunode checks``: the list of checks; ``gpunode monitoring``: what Prometheus and Grafana need, made of it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
from click.shell_completion import CompletionItem
from pydantic import BaseModel, ConfigDict, Field
from rich.text import Text

from gpunode.checks import Check, registry
from gpunode.checks.actions import command as run_role
from gpunode.checks.declared import load_packages
from gpunode.checks.pages import STATES, WHY, CheckPage, ExampleFinding, Maturity, evidence, pages
from gpunode.checks.registry import CheckDeclaration
from gpunode.checks.thresholds import NO_POLICY, Policy, Threshold
from gpunode.cli.options import (
    INVENTORY,
    LIMIT,
    VERBOSE_ACCEPTED,
    Duration,
    format_option,
    policy_option,
    verbose_option,
)
from gpunode.errors import Exit, UsageError
from gpunode.facts.node import FACTS, paths
from gpunode.judging.own_checks import try_file
from gpunode.judging.policy import read_policy, today
from gpunode.report import monitoring
from gpunode.report.console import PlainConsole
from gpunode.text import listed, printable, unknown


class ThresholdEntry(BaseModel):
    """One limit of a check."""

    model_config = ConfigDict(extra="forbid")

    name: str
    default: float | int
    unit: str
    means: str
    source: str
    by: dict[str, float | int]
    """Values of GPU models and architectures, by the ids of the catalog."""
    least: float | int
    most: float | int | None
    """The highest value that a policy may set."""
    policy: dict[str, float | int]
    """The policy's values, by model, architecture or ``default``; empty if it sets none."""


class CheckEntry(CheckDeclaration):
    """One check."""

    maturity: Maturity
    """simulated: proven on simulated data; recorded: on recordings of real machines; hardware: on a real GPU by us."""
    typical_seconds: float | None
    """For the commands that its data comes from, which checks share; None if they were not measured."""
    active: bool
    """It runs something on a GPU; a passive check reads existing state."""
    needs_root: bool
    thresholds: list[ThresholdEntry]
    origin: str | None
    """The package or file of a site's own check."""


class CheckList(BaseModel):
    """The document ``gpunode.checks/1``."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_name: Literal["gpunode.checks/1"] = Field("gpunode.checks/1", alias="schema")
    checks: list[CheckEntry]


def check_list(policy: Policy = NO_POLICY) -> CheckList:
    """Return all registered checks, ordered by id, with the limits of a policy."""
    return CheckList(checks=[_entry(check, policy) for check in registry])


def _entry(check: Check, policy: Policy) -> CheckEntry:
    derived = {
        "maturity": evidence().maturity(check.id),
        "typical_seconds": evidence().seconds.get(check.id),
        "active": check.active,
        "needs_root": check.needs_root,
        "thresholds": [threshold_entry(threshold, policy) for threshold in check.thresholds],
    }
    declared = {name: value for name, value in check if name in CheckEntry.model_fields}
    return CheckEntry(**(declared | derived))


def threshold_entry(threshold: Threshold, policy: Policy) -> ThresholdEntry:
    """Return a threshold in the document's form."""
    return ThresholdEntry(**vars(threshold), policy=policy.thresholds.get(threshold.name, {}))


class ChecksOrOne(click.Group):
    """Group that reads a word other than the name of a command as the id of a check."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return ids of checks, commands and options that begin so."""
        ids = [CompletionItem(check.id, help=check.category) for check in registry if check.id.startswith(incomplete)]
        return [*ids, *super().shell_complete(ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            return "page", page, args
        return super().resolve_command(ctx, args)


@click.group(
    "checks",
    cls=ChecksOrOne,
    invoke_without_command=True,
    subcommand_metavar="[ID | test FILE | facts [FACT]...]",
)
@format_option("table", "json")
@click.option("--thresholds", is_flag=True, help="List the limits instead of the checks.")
@policy_option("  Its limits and checks are shown too.")
@verbose_option("Also show the facts that each check needs.")
@click.pass_context
def checks_command(
    ctx: click.Context, /, *, form: str, thresholds: bool, policy_file: Path | None, verbose: bool
) -> int | None:
    """List the checks: id, level, requirements, meaning and remedy. With ID, print one check's page: meaning, reason,
    limits and their sources, an example, remedy.

    \b
    Examples:
      gpunode checks link.pcie-width
      gpunode checks --format json | jq -r '.checks[].id'
      gpunode checks --thresholds --policy site.yml
      gpunode checks test site-checks.yml
      gpunode checks facts memory
    """
    load_packages(registry)
    policy = read_policy(policy_file, today()) if policy_file else NO_POLICY
    ctx.obj = policy
    if ctx.invoked_subcommand is not None:
        return None
    document = check_list(policy)
    console = PlainConsole(sys.stdout)
    if form == "json":
        click.echo(json.dumps(document.model_dump(by_alias=True, mode="json"), indent=1))
    elif thresholds:
        _show_thresholds(document, console)
    else:
        _show_checks(document, console, verbose=verbose)
    return 0


@click.command("page", add_help_option=False)
@click.argument("check_id", metavar="ID")
@click.pass_obj
def page(policy: Policy, /, *, check_id: str) -> int:
    """Print the page of one check."""
    if check_id not in registry:
        raise UsageError(unknown("check", check_id, [check.id for check in registry]))
    _show_page(_entry(registry[check_id], policy), PlainConsole(sys.stdout))
    return 0


@checks_command.command("test")
@click.argument("file", type=click.Path(path_type=Path))
@verbose_option("Also show passed cases.")
def test(*, file: Path, verbose: bool) -> int:
    """Test own checks by the contract of gpunode's: each passes a bundle, finds its mutants, and is an error without
    its data. FILE holds the tests, and the checks where they are declared in YAML. Exit 1: a case failed.

    \b
    Example:
      gpunode checks test site-checks.yml
    """
    tried = list(try_file(file))
    for trial in tried if verbose else [trial for trial in tried if trial.problem is not None]:
        line = f"{'ok' if trial.problem is None else 'FAIL':5} {trial.check}: {trial.case}"
        click.echo(printable(line if trial.problem is None else f"{line}: {trial.problem}"))
    failed = [trial for trial in tried if trial.problem is not None]
    click.echo(f"{len(tried)} cases, {len(failed)} failed")
    return Exit.FAILED if failed else Exit.GOOD


@checks_command.command("facts")
@click.argument("names", metavar="[FACT]...", nargs=-1)
@VERBOSE_ACCEPTED
def facts(*, names: tuple[str, ...]) -> int:
    """List the facts of a node: the path of each value, as own checks name it, and its type.

    A value that could not be determined makes the check an error. Without FACT, all facts.

    \b
    Example:
      gpunode checks facts memory remote_mounts
    """
    for name in names:
        if name not in FACTS:
            raise UsageError(unknown("fact", name, FACTS))
    for path, kind in paths():
        name = re.split(r"[.\[]", path)[0]
        if name in names or not names:
            click.echo(f"{path}  {kind}{'  (root)' if FACTS[name].needs_root else ''}")
    return Exit.GOOD


def _show_checks(document: CheckList, console: PlainConsole, *, verbose: bool) -> None:
    for entry in document.checks:
        needs_gpu = "  needs a GPU" if entry.needs_gpu else ""
        origin = f"  of {printable(entry.origin)}" if entry.origin else ""
        console.show(Text.assemble((entry.id, "bold"), f"  {entry.level}{needs_gpu}{origin}"))
        console.show(Text(printable(entry.means)), 4)
        if verbose:
            console.show(Text(f"needs: {', '.join(entry.needs) or 'nothing'}", "dim"), 4)
            steps = ", ".join(map(str, entry.actions))
            console.show(Text(f"on a failure: {entry.state.value}; {steps}", "dim"), 4)
        console.show(Text(f"to do: {printable(entry.remedy)}", "dim"), 4)


def _show_page(entry: CheckEntry, console: PlainConsole) -> None:
    page = pages().get(entry.id, CheckPage())
    origin = f", of {printable(entry.origin)}" if entry.origin else ""
    kind = "runs something on a GPU" if entry.active else "only reads"
    console.show(
        Text.assemble(
            (entry.id, "bold"), f"  {entry.category}, about each {entry.scope}, level {entry.level}: {kind}{origin}"
        )
    )
    for title, lines in _sections(entry, page):
        if lines:
            console.show(Text(title, "bold"))
        for line in lines:
            if line.startswith("gpunode "):
                console.whole(Text(line), 2)
            else:
                console.show(Text(printable(line)), 2)


def _sections(entry: CheckEntry, page: CheckPage) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of a check's page."""
    yield "Meaning", [entry.means]
    threads = [f"Users report: {failure.failure} ({listed(failure.threads)})" for failure in page.reported]
    yield "Why it matters", [*([WHY[entry.category]] if entry.origin is None else []), STATES[entry.state], *threads]
    limits = []
    for limit in entry.thresholds:
        models = "".join(f", {model} {value:g}" for model, value in limit.by.items())
        limits.append(f"{limit.name}: {_number(limit.default)} {limit.unit}{models}. {limit.means}")
        limits.append(f"  source: {limit.source}")
        limits += [f"  policy: {_number(value)} ({key})" for key, value in limit.policy.items()]
    yield "Limits", limits
    yield "Example, on simulated data", _example(page.example)
    steps = f"actions: {', '.join(map(str, entry.actions))}; recommended state: {entry.state.value}"
    run = run_role(entry.actions)
    yield "Remedy", [entry.remedy, steps, *([run] if run else [])]
    where = [
        "bare metal only" if entry.bare_metal else "",
        f"for {', '.join(entry.architectures)}" if entry.architectures else "",
        "needs root" if entry.needs_root else "",
        f"needs the facts {', '.join(entry.needs)}" if entry.needs else "",
        f"proven on {PROVEN[entry.maturity]}",
    ]
    yield "Data", ["; ".join(text for text in where if text), f"gpunode validate --select {entry.id}"]


def _example(example: ExampleFinding | None) -> list[str]:
    if example is None:
        return []
    unit = f" {example.unit}" if example.unit else ""
    component = "" if example.component == "node" else f"{example.component}: "
    lines = [f"{example.status.value}  {component}{example.message}"]
    if example.expected is not None:
        lines.append(f"  expected {example.expected}{unit}, measured {example.measured}{unit}")
    return [*lines, *([f"  expected by: {example.source}"] if example.source else [])]


PROVEN: dict[Maturity, str] = {
    "simulated": "simulated data",
    "recorded": "recordings of real machines",
    "hardware": "a real GPU",
}


def _show_thresholds(document: CheckList, console: PlainConsole) -> None:
    """Print each limit once, though checks may share it."""
    entries = {entry.name: entry for check in document.checks for entry in check.thresholds}
    for name, entry in sorted(entries.items()):
        models = "".join(f", {model} {value:g}" for model, value in entry.by.items())
        value = f"  {_number(entry.default)} {entry.unit}{models}"
        line = Text.assemble((name, "bold"), printable(value))
        if entry.policy:
            set_to = ", ".join(f"{_number(value)} ({key})" for key, value in entry.policy.items())
            line.append(f"  policy: {set_to}", "yellow")
        console.show(line)
        console.show(Text(printable(entry.means)), 4)
        console.show(Text(f"source: {printable(entry.source)}", "dim"), 4)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _job_name(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[\w.:/-]{1,100}", value, re.ASCII):
        raise UsageError(f'--job: "{value}" is not a job name of letters, digits, and _ . : / - (example: gpu-nodes)')
    return value


JOB_OPTION = click.option(
    "--job",
    default=monitoring.JOB,
    show_default=True,
    callback=_job_name,
    metavar="NAME",
    help="Name of the scrape job in Prometheus.",
)


@click.group("monitoring")
@VERBOSE_ACCEPTED
def monitoring_command() -> None:
    """Print what Prometheus and Grafana need for the metrics of gpunode: generated from the checks and the inventory.

    The metrics are those of gpunode validate --format prometheus.
    """


@monitoring_command.command("rules")
@JOB_OPTION
@click.option(
    "--max-age",
    type=Duration(60),
    default="20m",
    show_default=True,
    metavar="DURATION",
    help="Age of a verdict from which on an alert is raised: a few intervals of the timer on the nodes.",
)
@VERBOSE_ACCEPTED
def rules_(*, job: str, max_age: float) -> int:
    """Print alerting rules for Prometheus: one for each check, and those on the verdict itself.

    Checks of a site's own packages are included.

    \b
    Example:
      gpunode monitoring rules > /etc/prometheus/rules/gpunode.yml
    """
    load_packages(registry)
    click.echo(monitoring.rules(registry, job=job, max_age_s=max_age), nl=False)
    return 0


@monitoring_command.command("dashboard")
@VERBOSE_ACCEPTED
def dashboard_() -> int:
    """Print a dashboard for Grafana, as JSON to import.

    \b
    Example:
      gpunode monitoring dashboard > gpunode.json
    """
    load_packages(registry)
    click.echo(monitoring.dashboard(registry), nl=False)
    return 0


@monitoring_command.command("scrape")
@INVENTORY
@LIMIT
@JOB_OPTION
@click.option(
    "--port", type=click.IntRange(1, 65535), default=monitoring.PORT, show_default=True, help="Port of node_exporter."
)
@VERBOSE_ACCEPTED
def scrape_(*, inventories: tuple[str, ...], limit: str | None, job: str, port: int) -> int:
    """Print a scrape configuration of an inventory's nodes, for an existing Prometheus.

    \b
    Example:
      gpunode monitoring scrape -i inventory/hosts.yml > /etc/prometheus/scrape/gpunode.yml
    """
    from gpunode import fleet  # noqa: PLC0415 (slow to load)

    if not inventories:
        raise UsageError("name the nodes: -i INVENTORY")
    targets = fleet.targets_from_inventory(inventories, limit)
    click.echo(monitoring.scrape({target.name: target.address for target in targets}, job=job, port=port), nl=False)
    return 0
