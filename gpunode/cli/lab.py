"""``gpunode lab``: simulated GPU nodes on this machine."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from gpunode.cli.options import FORMAT, VERBOSE_ACCEPTED, output_option, verbose_option
from gpunode.cli.streams import table_lines
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.lab import Lab
from gpunode.lab.engine import connect
from gpunode.lab.hardware import names as hardware_names
from gpunode.lab.image import remove_images
from gpunode.lab.recipe import SYSTEMS
from gpunode.lab.repositories import FAULTS as VENDOR_FAULTS
from gpunode.lab.state import LabState
from gpunode.lab.workload_image import kind_named, write_workload_image
from gpunode.report.outcomes import LabOutcome, LabPart

_name = click.option("--name", default="default", show_default=True, metavar="LAB", help="The lab's name.")


def _print(line: str) -> None:
    click.echo(f"lab: {line}", err=True)


def _interrupt(*_: object) -> NoReturn:
    """End as on Ctrl-C, so that incomplete work is removed."""
    raise KeyboardInterrupt


def _end_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _existing(file: Path, name: str) -> Path:
    if not file.exists():
        raise UsageError(f"lab {name} does not exist ({file} is missing): gpunode lab up --name {name}")
    return file


@click.group()
@VERBOSE_ACCEPTED
def lab_command() -> None:
    """Manage simulated GPU nodes in containers: systemd, sshd and apt are real, GPUs and their drivers are not.

    \b
    gpunode lab up --hardware l40s-4
    gpunode provision -i "$(gpunode lab inventory --path)"
    gpunode validate -i "$(gpunode lab inventory --path)" --level quick
    gpunode lab down
    """


@lab_command.command()
@VERBOSE_ACCEPTED
@click.option(
    "-n", "count", type=int, default=1, show_default=True, metavar="N", help="Number of nodes of this system."
)
@click.option("--os", "system", default="debian-12", show_default=True, help=f"One of {', '.join(SYSTEMS)}.")
@click.option(
    "--hardware",
    multiple=True,
    metavar="NAME",
    help=f"Simulated hardware of the nodes (repeatable: N of each): {', '.join(hardware_names())}.",
)
@click.option(
    "--mirror", metavar="URL", help="Debian mirror for the image.  [default: the mirror of this machine's apt]"
)
@click.option(
    "--force", is_flag=True, help="Start even on a machine with the NVIDIA driver: nodes could access its GPUs."
)
@_name
def up(*, count: int, system: str, hardware: tuple[str, ...], mirror: str | None, force: bool, name: str) -> int:  # noqa: PLR0913
    """Start nodes; existing ones are kept. Example: gpunode lab up --hardware l40s-4"""
    _end_on_signals()
    started = time.monotonic()
    lab = Lab(name, progress=_print)
    nodes = lab.up(count, system, hardware, mirror=mirror, force=force)
    spent = time.monotonic() - started
    _print(f"lab {name} is up after {spent:.0f} s, {len(nodes)} in all; inventory {lab.inventory_path}")
    return Exit.GOOD


@lab_command.command()
@VERBOSE_ACCEPTED
@_name
@click.option("--images", is_flag=True, help="Also remove images that no other lab uses.")
def down(name: str, images: bool) -> int:
    """Remove a lab. Example: gpunode lab down"""
    removed = Lab(name).down()
    if images:
        removed += remove_images(connect())
    for title in removed:
        _print(f"removed {title}")
    if not removed:
        _print(f"lab {name}: nothing to remove")
    return Exit.GOOD


@lab_command.command()
@VERBOSE_ACCEPTED
@_name
@FORMAT
def status(name: str, form: str) -> int:
    """List a lab's nodes, its vendor repository and their faults; exit 1 if one does not run.

    Example: gpunode lab status
    """
    lab = Lab(name)
    nodes = lab.nodes()
    if not nodes:
        raise UsageError(f"lab {name} has no nodes: gpunode lab up --name {name}")
    vendor = lab.vendor() if lab.has_vendor() else None
    running = all(node.running for node in nodes) and (vendor is None or vendor.running)
    code = Exit.GOOD if running else Exit.FAILED
    parts = [
        LabPart(
            name=node.name,
            os=node.os,
            hardware=node.hardware,
            state=str(node.container.status),
            address=f"{node.address}:{node.port}",
            faults=tuple(map(str, node.faults())) if node.hardware and node.running else (),
        )
        for node in nodes
    ]
    repository = None
    if vendor is not None:
        faults = tuple(map(str, vendor.faults())) if vendor.running else ()
        state = str(vendor.container.status)
        repository = LabPart(name="vendor", os=None, hardware=None, state=state, address=vendor.url, faults=faults)
    if form == "json":
        inventory = str(lab.inventory_path)
        outcome = LabOutcome(lab=name, inventory=inventory, exit_code=code, nodes=tuple(parts), vendor=repository)
        click.echo(outcome.text())
        return code
    parts += [repository] if repository is not None else []
    rows = [(part.name, part.os or "-", part.hardware or "-", part.state, part.address) for part in parts]
    _table(("NODE", "OS", "HARDWARE", "STATE", "ADDRESS"), rows)
    for part in parts:
        for each in part.faults:
            click.echo(f"{part.name} has a fault: {each}")
    return code


@lab_command.command()
@VERBOSE_ACCEPTED
@_name
@click.argument("node")
@click.argument("words", nargs=-1, metavar="[COMPONENT] [FAULT] [KEY=VALUE]...")
@click.option("--heal", is_flag=True, help="Remove the fault, or all faults if none is named.")
@click.option("--list", "listed", is_flag=True, help="List active and available faults.")
def fault(name: str, node: str, words: tuple[str, ...], heal: bool, listed: bool) -> int:
    """Inject a fault into simulated hardware or the vendor repository (NODE vendor), or remove it.

    Example: gpunode lab fault hgx-h100-8-1 gpu3 pcie-narrow width=4
    """
    if heal and listed:
        raise UsageError("--heal and --list cannot be combined")
    if listed and words:
        raise UsageError(f"--list shows all faults: leave out {' '.join(words)}")
    if not words and not heal:
        listed = True
    lab = Lab(name)
    if node == "vendor":
        return _vendor_fault(lab, words, heal=heal, listed=listed)
    target = lab.node(node)
    if listed:
        for each in target.faults():
            click.echo(f"set: {each}")
        _table(("OF", "FAULT", "WHAT", "DETAILS"), target.fault_kinds())
    elif heal:
        _healed(node, target.heal_words(words))
    else:
        _print(f"{node}: {target.fault_words(words)}")
    return Exit.GOOD


def _vendor_fault(lab: Lab, words: tuple[str, ...], *, heal: bool, listed: bool) -> int:
    vendor = lab.vendor()
    if heal and len(words) > 1:
        raise UsageError(f"{' '.join(words)}: expected one fault of the vendor repository, or none for all")
    if listed:
        for each in vendor.faults():
            click.echo(f"set: {each}")
        _table(("FAULT", "WHAT"), list(VENDOR_FAULTS.items()))
    elif heal:
        _healed("vendor", [f"healed {each}" for each in vendor.heal(words[0] if words else None)])
    else:
        vendor.fault(words[0], *words[1:])
        _print(f"vendor: set {' '.join(words)}")
    return Exit.GOOD


def _healed(node: str, lines: list[str]) -> None:
    for line in lines or ["nothing to heal"]:
        _print(f"{node}: {line}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in table_lines(columns, rows):
        click.echo(line)


@lab_command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_name
@verbose_option("Print what ssh does.")
@click.argument("node")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[CMD]...")
def ssh(name: str, verbose: bool, node: str, argv: tuple[str, ...]) -> NoReturn:
    """Log in to a node as admin or run a command there; the exit code is that of ssh.

    Example: gpunode lab ssh deb12-1
    """
    config = _existing(LabState.of(name).ssh_config, name)
    if f"Host {node}\n" not in config.read_text(encoding="utf-8"):
        Lab(name).node(node)  # raises UsageError with the existing nodes
    try:
        command_line = argv[1:] if argv[:1] == ("--",) else argv
        options = ["-F", str(config), *(["-v"] if verbose else [])]
        os.execvp("ssh", ["ssh", *options, node, *(("--", *command_line) if command_line else ())])  # noqa: S606
    except FileNotFoundError:
        raise UndeterminedError("ssh is missing: apt-get install openssh-client") from None


@lab_command.command()
@VERBOSE_ACCEPTED
@_name
@click.option("--path", is_flag=True, help="Print only the path of the file.")
def inventory(name: str, path: bool) -> int:
    """Print a lab's Ansible inventory. Example: ansible all -i $(gpunode lab inventory --path) -m ping"""
    file = _existing(LabState.of(name).inventory, name)
    click.echo(file if path else file.read_text(encoding="utf-8"), nl=path)
    return Exit.GOOD


@lab_command.command()
@VERBOSE_ACCEPTED
@click.argument("kind", metavar="KIND")
@output_option("Output file.", required=True)
def image(kind: str, output: Path) -> int:
    """Write a container image for the workload in nodes (validate --image-file FILE).

    KIND is torch (Python with PyTorch for the CPU) or, to see what validate makes of them, python, bare, hangs, floods.

    Example: gpunode lab image torch --output torch.tar
    """
    _end_on_signals()
    kind_named(kind)
    if not output.absolute().parent.is_dir() or output.is_dir():
        raise UsageError(f"--output {output}: expected a file in an existing directory")
    write_workload_image(connect(), kind, output, _print)
    return Exit.GOOD
