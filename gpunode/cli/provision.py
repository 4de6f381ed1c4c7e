"""``gpunode provision``: the site playbook on an inventory; and what ``gpunode plan -i`` shares with it."""

import hashlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import click

from gpunode.catalog import Catalog
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
from gpunode.cli.selection import ask_password, shown_progress
from gpunode.content import ansible_environment, ansible_program, collection_root
from gpunode.errors import Exit, UsageError
from gpunode.fleet import Collected, collect, inventory
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.locks import refuse_inventory
from gpunode.fleet.playbook import CALLBACKS, NODES_FILE, exit_code_of, option_words, playbook_of, run
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.history.store import HistoryError, state_folder
from gpunode.judging.evaluator import Evaluator
from gpunode.names import fold
from gpunode.provisioning.node_stack import REQUESTED, requested_by, with_request
from gpunode.provisioning.role import refuse_unknown_tags
from gpunode.report.outcomes import ProvisionedNode, ProvisionOutcome, closing
from gpunode.stack import LOCK_NAME, PlanHost, Request
from gpunode.stack.picture import host_of
from gpunode.text import listed, printable
from gpunode.variables import Variables, locations, refuse_extra_variables, refuse_missing_tasks, unread_variables
from gpunode.whole import make_private_folder, whole_file


class FleetPlanOptions(Protocol):
    """The options of the command line that are used here."""

    @property
    def inventories(self) -> tuple[str, ...]: ...
    @property
    def limit(self) -> str | None: ...
    @property
    def parallel(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def ask_become_pass(self) -> bool: ...


@dataclass(frozen=True)
class Answers:
    """Hosts in the order of their answers, and their inventory."""

    inventory: Inventory
    hosts: Iterable[PlanHost]


def of_inventory(options: FleetPlanOptions, evaluator: Evaluator, catalog: Catalog, request: Request) -> Answers:
    """Collect from the hosts of an inventory. Raises UsageError if it cannot be read.

    The variables of a host request its stack, as in ``gpunode provision``; ``request`` (the options) takes precedence.
    """
    inventory, config = read_with_settings(options.inventories, options.limit, SETTINGS)
    refuse_inventory(collection_root(), inventory)
    selected = targets(inventory, config)
    password = ask_password() if options.ask_become_pass else None

    def answers() -> Iterator[Collected]:
        with shown_progress([target.name for target in selected]) as update:
            for answer in collect(
                selected, parallel=options.parallel, timeout_s=options.timeout_s, become_password=password
            ):
                update(answer.host)
                yield answer

    def hosts() -> Iterator[PlanHost]:
        for node in evaluator.facts_of_fleet(answers()):
            if node.facts is None:
                yield PlanHost(node.host, None, node.reason)
            else:
                variables = inventory.hosts[node.host]
                host = host_of(node.host, node.facts, catalog, variables.get(LOCK_NAME))
                yield with_request(host, variables, request)

    return Answers(inventory, hosts())


NOT_REQUESTS: tuple[Any, ...] = (None, "", "auto", "keep", [])
MOST_BYTES = 1 << 16


def origin_lines(inventory: Inventory, extra: Variables) -> Iterator[str]:
    """Yield a line for hosts with the same request: what it is, and which file or option has it.

    ``extra``: the variables of ``-e``, which take precedence.
    """
    by_request: defaultdict[str, list[str]] = defaultdict(list)
    for host, variables in inventory.hosts.items():
        by_request[_request(inventory.sources, {**variables, **extra}, extra)].append(host)
    for text, hosts in by_request.items():
        yield printable(f"stack of {fold(hosts)}: {text}")


def _request(sources: Sequence[str], variables: Variables, extra: Variables) -> str:
    requested = {REQUESTED[name]: value for name, value in requested_by(variables).items() if value not in NOT_REQUESTS}
    parts = [f"{name}={value} ({_where(name, sources, extra)})" for name, value in requested.items()]
    lock = variables.get(LOCK_NAME)
    if lock:
        driver = lock.get("driver", {}).get("version") if isinstance(lock, Mapping) else None
        version = f" of driver {driver}" if driver else ""
        parts.append(f"lock{version} ({_where(LOCK_NAME, sources, extra)})")
    return ", ".join(parts) or "no request: an installed driver is kept, another node gets the preferred one"


def _where(name: str, sources: Sequence[str], extra: Variables) -> str:
    """Return the file that sets a variable, if it is one alone."""
    if name in extra:
        return "-e"
    files = list(locations(name, sources))
    if len(files) == 1:
        return files[0]
    return "inventory" if not files else f"one of {', '.join(files[:3])}"


def keep_unwritten(sources: Sequence[str], options: Sequence[str], at: str) -> None:
    """Save the options of a plan that was not written; without options, remove what an earlier plan saved.

    If the state folder cannot be written, only the reminder is lost.
    """
    with suppress(HistoryError, OSError):
        path = _path(sources)
        if not options:
            path.unlink(missing_ok=True)
            return
        make_private_folder(path.parent)
        with whole_file(path, private=True) as stream:
            stream.write(json.dumps({"at": at, "options": list(options)}).encode())


def unwritten(sources: Sequence[str]) -> str | None:
    """Return a reminder of a plan that was not written, once."""
    with suppress(HistoryError, OSError, ValueError, KeyError, TypeError):
        path = _path(sources)
        with path.open("rb") as stream:
            kept = json.loads(stream.read(MOST_BYTES))
        path.unlink()
        options = " ".join(map(str, kept["options"]))
        inventories = " ".join(f"-i {source}" for source in sources)
        return printable(
            f"the plan of {kept['at']} with {options} was not written, and this run does not follow it: "
            f"gpunode plan {inventories} {options} --write"
        )
    return None


def _path(sources: Sequence[str]) -> Path:
    names = json.dumps([str(Path(source).absolute()) for source in sources])
    return state_folder() / "plans" / f"{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"


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
def provision_command(**values: Any) -> int:
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
