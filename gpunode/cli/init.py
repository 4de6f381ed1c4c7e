"""``gpunode init``: a folder with an inventory and its settings, from an example and a first look at the hosts."""

import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from gpunode.catalog import Catalog, load
from gpunode.cli.options import (
    ASK_BECOME_PASS,
    INVENTORY,
    LIMIT,
    PARALLEL,
    QUIET,
    TIMEOUT,
    VERBOSE_ACCEPTED,
    quiet,
)
from gpunode.cli.selection import Selection
from gpunode.cli.settings import NAME
from gpunode.content import collection_root
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.text import counted, listed, printable, unknown
from gpunode.variables import Variables

Tree = dict[str, Any]
GROUP = "gpu_nodes"
SECRET = re.compile(r"(?i)pass|secret|token|private_key$|vault")
"""Names of variables that are not copied from an inventory."""
NOT_COPIED = frozenset({"gpunode_stack", "gpunode_expect"})
"""Variables that follow from the nodes."""
INFERENCE = frozenset({"t4", "l4", "a2", "a10", "a10g", "a16", "a30", "l40s", "l40"})
PIPELINES = {"github": ".github/workflows/gpu-nodes.yml", "gitlab": ".gitlab-ci.yml"}
"""Service, to the place of its pipeline in a site's folder."""
MOLECULE = {
    "config.yml": ".config/molecule/config.yml",
    **{name: f"molecule/nodes/{name}" for name in ("create.yml", "destroy.yml", "verify.yml")},
    **{name: f"molecule/default/{name}" for name in ("molecule.yml", "converge.yml")},
}
"""File of inventory/molecule, to its place in a site's folder."""
CONFIGURATION = """# Options of gpunode in this folder: gpunode config --help.
inventory = "hosts.yml"
"""
HEAD = "# Written by gpunode init. An ordinary Ansible inventory: edit it.\n"


@dataclass(frozen=True)
class Host:
    """A host of the new inventory."""

    name: str
    variables: Variables
    group: str = ""
    expect: tuple[tuple[str, Any], ...] = ()
    """What the first look found, as ``gpunode_expect`` has it."""
    models: tuple[str, ...] = ()


@click.command("init")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.argument("hosts", metavar="[HOST]...", nargs=-1)
@click.option(
    "--example", metavar="NAME", help="Settings of this example.  [default: the one for the GPUs that are found]"
)
@click.option("--list", "listing", is_flag=True, help="List the examples.")
@click.option(
    "--ci",
    type=click.Choice(list(PIPELINES)),
    help="Also write a pipeline that lints, plans and provisions a lab node, and a Molecule scenario.",
)
@click.option("--molecule", is_flag=True, help="Also write a Molecule scenario with a lab node.")
@click.option("--no-look", is_flag=True, help="Contact no host.")
@INVENTORY
@LIMIT
@PARALLEL
@TIMEOUT
@ASK_BECOME_PASS
@QUIET
@VERBOSE_ACCEPTED
def init_command(  # noqa: PLR0913
    *,
    folder: Path | None,
    hosts: tuple[str, ...],
    example: str | None,
    listing: bool,
    ci: str | None,
    molecule: bool,
    no_look: bool,
    inventories: tuple[str, ...],
    limit: str | None,
    parallel: int,
    timeout_s: float,
    ask_become_pass: bool,
) -> int:
    """Write a folder with an inventory: HOSTs, or the hosts of an inventory (-i), and the settings of an example.

    A first look, which only reads, groups the hosts by their GPUs, and sets how many GPUs each must have. Without
    arguments, on a terminal, gpunode asks. Exit codes: 0 written, 2 wrong usage, 3 a host could not be read.

    \b
    Examples:
      gpunode init site gpu-01 gpu-02
      gpunode init site 'admin@gpu-[01-16]' --example hgx-slurm
      gpunode init site -i old/hosts.yml
      gpunode init --list
    """
    known = examples()
    if listing:
        for name, title in known.items():
            click.echo(f"{name:<14}{title}")
        return Exit.GOOD
    if folder is None:
        folder, hosts, example = _ask(known)
    if example is not None and example not in known:
        raise UsageError(f"--example: {unknown('example', example, known)}")
    _must_be_new(folder)
    selection = Selection(hosts, inventories, limit, parallel, timeout_s, ask_become_pass)
    site_hosts = _hosts(selection)
    if site_hosts and not no_look:
        site_hosts = _looked_at(selection, site_hosts)
    chosen = example or _example_for(site_hosts)
    _write(folder, chosen, site_hosts, _further_files(ci, molecule=molecule))
    if not quiet():
        _report(folder, chosen, site_hosts)
    return Exit.GOOD


def examples() -> dict[str, str]:
    """Return the examples with their titles."""
    folders = sorted(path.parent for path in (collection_root() / "inventory" / "examples").glob("*/hosts.yml"))
    if not folders:
        raise UsageError("the examples are missing: reinstall gpunode")
    return {folder.name: _settings(folder).splitlines()[1].removeprefix("# ") for folder in folders}


def _settings(folder: Path) -> str:
    return (folder / "group_vars" / f"{GROUP}.yml").read_text(encoding="utf-8")


def _ask(known: Mapping[str, str]) -> tuple[Path, tuple[str, ...], str | None]:
    """Return the answers of a user at a terminal: folder, hosts, example."""
    if not sys.stdin.isatty():
        raise UsageError("the folder is missing: gpunode init DIR [HOST]... (gpunode init --list: examples)")
    folder = click.prompt("Folder", default="site", err=True)
    hosts = click.prompt("Hosts, as ssh knows them, separated by blanks (none: an example's)", default="", err=True)
    for name, title in known.items():
        click.echo(f"  {name:<14}{title}", err=True)
    of_hosts = "by the hosts' GPUs" if hosts else "development"
    example = click.prompt("Example", default=of_hosts, err=True)
    return Path(folder), tuple(hosts.split()), None if example == of_hosts else example


def _must_be_new(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(f"{folder} exists: choose another folder, or remove it")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"{folder}: directory {folder.absolute().parent} does not exist")


def _hosts(selection: Selection) -> list[Host]:
    """Return the hosts that were named, with the variables that connect to them."""
    if selection.hosts and selection.inventories:
        raise UsageError(f"{selection.hosts[0]}: hosts and -i cannot be combined")
    if selection.inventories:
        from gpunode.fleet import inventory  # noqa: PLC0415 (slow to load)

        read = inventory.read(selection.inventories, selection.limit)
        left_out = sorted({name for variables in read.hosts.values() for name in variables if _stays(name, variables)})
        if left_out:
            click.echo(printable(f"gpunode: not copied, set them again: {listed(left_out)}"), err=True)
        return [
            Host(name, {key: value for key, value in variables.items() if not _leave_out(key, value)})
            for name, variables in read.hosts.items()
        ]
    from gpunode.fleet.ssh_config import split_destination  # noqa: PLC0415 (slow to load)
    from gpunode.names import expand_all  # noqa: PLC0415 (the same)

    hosts = []
    for text in expand_all(selection.hosts):
        user, name, port = split_destination(text)
        local = "local" if text == "localhost" else None
        variables = {"ansible_connection": local, "ansible_user": user, "ansible_port": port}
        hosts.append(Host(name, {key: value for key, value in variables.items() if value is not None}))
    return hosts


def _stays(name: str, variables: Variables) -> bool:
    return name not in NOT_COPIED and _leave_out(name, variables[name])


def _leave_out(name: str, value: Any) -> bool:
    """Return whether a variable is a secret, or follows from the node."""
    secret = SECRET.search(name) is not None and not name.endswith("_file")
    return name in NOT_COPIED or secret or (isinstance(value, Mapping) and "__ansible_vault" in value)


def _looked_at(selection: Selection, hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts with what one look at each found. Raises UndeterminedError if one could not be read."""
    from gpunode.judging.evaluator import Evaluator  # noqa: PLC0415 (slow to load)
    from gpunode.stack import picture_from_facts  # noqa: PLC0415 (the same)

    catalog, pictures, missed = load(), {}, []
    targets = selection.targets()
    names = {target.name: host.name for target, host in zip(targets, hosts, strict=True)}
    with Evaluator() as evaluator:
        for answer in evaluator.facts_of_fleet(selection.collect(targets=targets)):
            if answer.facts is None:
                missed.append(f"{answer.host}: {answer.reason}")
            else:
                pictures[names.get(answer.host, answer.host)] = picture_from_facts(answer.facts, catalog)
    if missed:
        for line in missed[1:]:
            click.echo(printable(line), err=True)
        raise UndeterminedError(f"{missed[0]} (--no-look writes the folder without a look at the hosts)")
    return [_described(host, pictures[host.name], catalog) for host in hosts]


def _described(host: Host, picture: Any, catalog: Catalog) -> Host:
    """Return a host with the group of its GPUs, and the number and model that it must have."""
    groups = [group for group in picture.gpus if group.models]
    total = sum(group.count or 0 for group in groups)
    expect: Tree = {"gpus": total + len(picture.unknown_gpus)}
    models = tuple(dict.fromkeys(model for group in groups for model in group.models))
    if len(groups) == 1 and len(models) == 1:
        expect["model"] = catalog.gpus[models[0]].name
    if picture.unknown_gpus:
        group = "unknown_gpus"
    else:
        group = re.sub(r"\W", "_", "_".join([*models[:1], f"x{total}"])) if models else "without_gpu"
    return Host(host.name, host.variables, group, tuple(expect.items()), models)


def _example_for(hosts: Iterable[Host]) -> str:
    """Return the example for the GPUs of most hosts."""
    votes: defaultdict[str, int] = defaultdict(int)
    for host in hosts:
        total = dict(host.expect).get("gpus", 0)
        if not host.models:
            continue
        if any("sxm" in model for model in host.models) and total >= 8:
            votes["hgx-slurm"] += 1
        elif any(model in INFERENCE for model in host.models):
            votes["inference" if total > 1 else "development"] += 1
        else:
            votes["research" if total > 1 else "development"] += 1
    return max(votes, key=lambda name: (votes[name], name)) if votes else "development"


def _further_files(ci: str | None, *, molecule: bool) -> dict[str, str]:
    """Return the files beside an example: path below ``inventory`` of the collection -> path in the site's folder."""
    files = {f"ci/{ci}.yml": PIPELINES[ci]} if ci is not None else {}
    if ci is not None or molecule:
        files |= {f"molecule/{name}": path for name, path in MOLECULE.items()}
    return files


def _write(folder: Path, example: str, hosts: Sequence[Host], further: Mapping[str, str]) -> None:
    """Write the folder completely or not at all."""
    source = collection_root() / "inventory" / "examples" / example
    beside = folder.absolute().with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        shutil.copytree(source, beside)
        if hosts:
            (beside / "hosts.yml").write_text(inventory_text(hosts), encoding="utf-8")
            settings = re.sub(r"(?m)^(kernel_tuning_fleet_size:) .*$", rf"\1 {len(hosts)}", _settings(source))
            (beside / "group_vars" / f"{GROUP}.yml").write_text(settings, encoding="utf-8")
        (beside / NAME).write_text(CONFIGURATION, encoding="utf-8")
        for name, path in further.items():
            (beside / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(collection_root() / "inventory" / name, beside / path)
        beside.rename(folder)
    except OSError as err:
        raise UsageError(f"{folder}: cannot be written: {err.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def inventory_text(hosts: Sequence[Host]) -> str:
    """Return the inventory: hosts by group, and what all of a group have in common once."""
    by_group: defaultdict[str, list[Host]] = defaultdict(list)
    for host in hosts:
        by_group[host.group].append(host)
    shared = _in_common(hosts)
    body: Tree = {}
    children = {name: _members(members, shared) for name, members in sorted(by_group.items()) if name}
    if children:
        body["children"] = children
    if by_group.get(""):
        body |= _members(by_group[""], shared)
    if shared:
        body["vars"] = {**body.get("vars", {}), **shared}
    return "---\n" + HEAD + yaml.safe_dump({GROUP: body}, sort_keys=False, width=110)


def _members(hosts: Sequence[Host], shared: Variables) -> Tree:
    members = {
        host.name: {key: value for key, value in host.variables.items() if key not in shared} or None for host in hosts
    }
    expect = dict(hosts[0].expect)
    if all(dict(host.expect) == expect for host in hosts):
        return {"hosts": members, **({"vars": {"gpunode_expect": expect}} if expect else {})}
    return {"hosts": {host.name: {**(members[host.name] or {}), "gpunode_expect": dict(host.expect)} for host in hosts}}


def _in_common(hosts: Sequence[Host]) -> Tree:
    first = hosts[0].variables
    if len(hosts) == 1:
        return {key: value for key, value in first.items() if key not in ("ansible_host", "ansible_port")}
    return {key: value for key, value in first.items() if all(host.variables.get(key) == value for host in hosts)}


def _report(folder: Path, example: str, hosts: Sequence[Host]) -> None:
    by_group: defaultdict[str, list[str]] = defaultdict(list)
    for host in hosts:
        by_group[host.group].append(host.name)
    for group, names in sorted(by_group.items()):
        click.echo(printable(f"{group or GROUP}: {listed(names)}"), err=True)
    contents = (
        counted(len(hosts), "host") if hosts else "the example's hosts, which do not exist: replace them in hosts.yml"
    )
    click.echo(printable(f"wrote {folder}: {contents}; settings of the example {example}"), err=True)
    file = folder / "hosts.yml"
    click.echo(printable(f"next: gpunode plan -i {file}; gpunode provision -i {file} --check --diff"), err=True)
