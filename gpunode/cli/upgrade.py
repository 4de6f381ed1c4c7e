"""``gpunode upgrade``: a fleet's driver, by canary and waves."""

from typing import Any

import click

from gpunode.catalog import load
from gpunode.cli.plan import driver_request
from gpunode.cli.upgrade_run import ChangeGoal, ChangeOptions, change_fleet, change_options
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
