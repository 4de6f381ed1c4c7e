"""``gpunode provision``: the site playbook on an inventory."""

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from gpunode.cli.options import (
    ASK_BECOME_PASS,
    EXTRA_VARS,
    FORKS,
    FORMAT,
    LIMIT,
    VAULT_PASSWORD_FILE,
    inventory_option,
    quiet,
)
from gpunode.cli.plan_fleet import origin_lines, unwritten
from gpunode.content import ansible_environment, ansible_program, collection_root
from gpunode.errors import Exit, UsageError
from gpunode.fleet import inventory
from gpunode.fleet.locks import refuse_inventory
from gpunode.fleet.playbook import CALLBACKS, NODES_FILE, exit_code_of, option_words, playbook_of, run
from gpunode.provisioning.role import refuse_unknown_tags
from gpunode.report.outcomes import ProvisionedNode, ProvisionOutcome, closing
from gpunode.text import listed, printable
from gpunode.variables import refuse_extra_variables, refuse_missing_tasks, unread_variables


@dataclass(frozen=True)
class ProvisionOptions:
    """The command line."""

    inventories: tuple[str, ...]
    limit: str | None
    tags: tuple[str, ...]
    skip_tags: tuple[str, ...]
    check: bool
    differences: bool
    extra_vars: tuple[str, ...]
    list_hosts: bool
    ask_become_pass: bool
    vault_files: tuple[str, ...]
    forks: int | None
    verbose: int
    form: str

    @property
    def vault(self) -> list[str]:
        """Return the arguments of Ansible's programs for the vaults."""
        return option_words({"--vault-password-file": self.vault_files})

    @property
    def playbook_arguments(self) -> list[str]:
        """Return the options as arguments of ansible-playbook."""
        valued = {
            "--inventory": self.inventories,
            "--limit": [self.limit] if self.limit is not None else [],
            "--tags": self.tags,
            "--skip-tags": self.skip_tags,
            "--extra-vars": self.extra_vars,
            "--forks": [self.forks] if self.forks is not None else [],
        }
        flags = {"--check": self.check, "--diff": self.differences, f"-{'v' * self.verbose}": self.verbose}
        return [*option_words(valued), *(flag for flag, enabled in flags.items() if enabled), *self.vault]


@click.command("provision", epilog="Example: gpunode provision -i inventory/hosts.yml --limit gpu1 --check --diff")
@inventory_option(required=True)
@LIMIT
@click.option("-t", "--tags", multiple=True, metavar="TAG[,TAG]", help="Run only tasks with these tags.")
@click.option("--skip-tags", multiple=True, metavar="TAG[,TAG]", help="Skip tasks with these tags.")
@click.option("-C", "--check", is_flag=True, help="Report what would change, without changing it.")
@click.option("-D", "--diff", "differences", is_flag=True, help="Show differences in changed files.")
@EXTRA_VARS
@click.option("--list-hosts", is_flag=True, help="Check options, inventory and variables, list the nodes and end.")
@ASK_BECOME_PASS
@VAULT_PASSWORD_FILE
@FORKS
@click.option("-v", "--verbose", count=True, help="Increase the verbosity of Ansible.  [repeatable]")
@FORMAT
def command(**values: Any) -> int:
    """Install and configure the GPU stack on the nodes of an inventory.

    Runs playbooks/site.yml with ansible-playbook and prints its output unchanged, on stderr each role as it begins, and
    at the end each failure with its nodes and its task; --check prints only what would
    change (all tasks: ANSIBLE_DISPLAY_OK_HOSTS=yes or -v). --format json prints Ansible's output on stderr, and on
    stdout what was changed on which node. Exit codes: 0 all done, 1 a
    task failed, 2 wrong usage, inventory, pattern or variable, 3 a node was unreachable.
    """
    options = ProvisionOptions(**values)
    root = collection_root()
    playbook = playbook_of(root, "site.yml")
    if options.list_hosts and options.form == "json":
        raise UsageError("--list-hosts prints names: not together with --format json")
    # Cheap checks come first: reading an inventory takes a second.
    refuse_unknown_tags(root, [*options.tags, *options.skip_tags])
    requests = refuse_extra_variables(root, options.extra_vars)
    read = inventory.read(options.inventories, options.limit, options.vault)
    refuse_inventory(root, read)
    refuse_missing_tasks(
        {host: {**variables, **requests} for host, variables in read.hosts.items()}, root, read.sources
    )
    if options.list_hosts:
        names = {*requests, *(name for variables in read.hosts.values() for name in variables)}
        if unread := unread_variables(names, root):
            click.echo(f"gpunode: no role reads {listed(unread)}: of other roles, or wrong names", err=True)
        click.echo("\n".join(read.hosts))
        return Exit.GOOD
    for line in origin_lines(read, requests):
        click.echo(f"gpunode: {line}", err=True)
    if (reminder := unwritten(read.sources)) is not None:
        click.echo(f"gpunode: {reminder}", err=True)
    argv = [ansible_program("ansible-playbook"), str(playbook), *options.playbook_arguments]
    password = None
    if options.ask_become_pass:
        password = click.prompt("sudo password", hide_input=True, err=True)
        argv += ["--become-password-file", "-"]
    env = ansible_environment()
    if env.get("ANSIBLE_CONFIG") != os.environ.get("ANSIBLE_CONFIG"):
        # The configuration is ours: another has its own list of callbacks.
        env.setdefault("ANSIBLE_CALLBACKS_ENABLED", CALLBACKS)
    if options.check and not options.verbose:
        # The planned changes should fit on one page.
        env.setdefault("ANSIBLE_DISPLAY_OK_HOSTS", "no")
    as_json = options.form == "json"
    if as_json:
        # Also with a configuration of the user's own: without the callback there is no document.
        env["ANSIBLE_CALLBACKS_ENABLED"] = CALLBACKS
    done = _outcome(argv, env, password, check=options.check, log=sys.stderr.buffer if as_json else None)
    if as_json:
        click.echo(done.text())
    if not quiet() and done.nodes:
        where = "".join(f" -i {shlex.quote(name)}" for name in options.inventories)
        click.echo(printable(closing(done, f"gpunode provision{where}", f"gpunode validate{where}")), err=True)
    return done.exit_code


def _outcome(
    argv: Sequence[str], env: dict[str, str], password: str | None, *, check: bool, log: BinaryIO | None
) -> ProvisionOutcome:
    """Run Ansible, and return what it did to each node: nothing where the callback is not enabled."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpunode-") as folder:
        file = Path(folder, "nodes.json")
        code = exit_code_of(run(argv, env | {NODES_FILE: str(file)}, password, log=log))
        nodes = json.loads(file.read_text(encoding="utf-8")) if file.exists() else ()
    return ProvisionOutcome(
        check=check,
        exit_code=code,
        seconds=round(time.monotonic() - began, 1),
        nodes=tuple(map(ProvisionedNode.model_validate, nodes)),
    )
