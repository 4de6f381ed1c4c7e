"""``gpunode monitoring``: alerting rules, a dashboard and a scrape configuration for the metrics of a report."""

import re

import click

from gpunode.checks import registry
from gpunode.checks.declared import load_packages
from gpunode.cli.options import INVENTORY, LIMIT, VERBOSE_ACCEPTED, Duration
from gpunode.errors import UsageError
from gpunode.report import monitoring


def _job(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[\w.:/-]{1,100}", value, re.ASCII):
        raise UsageError(f'--job: "{value}" is not a job name of letters, digits, and _ . : / - (example: gpu-nodes)')
    return value


JOB = click.option(
    "--job",
    default=monitoring.JOB,
    show_default=True,
    callback=_job,
    metavar="NAME",
    help="Name of the scrape job in Prometheus.",
)


@click.group("monitoring")
@VERBOSE_ACCEPTED
def command() -> None:
    """Print what Prometheus and Grafana need for the metrics of gpunode: generated from the checks and the inventory.

    The metrics are those of gpunode validate --format prometheus.
    """


@command.command("rules")
@JOB
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


@command.command("dashboard")
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


@command.command("scrape")
@INVENTORY
@LIMIT
@JOB
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
