"""``gpunode config show``: the values of options, and where each came from."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click

from gpunode.cli.options import VERBOSE_ACCEPTED, format_option
from gpunode.cli.settings import NAME, SHARED, options_of, origin_of, read_settings, variables
from gpunode.cli.streams import table_lines
from gpunode.cli.verbs import VERBS, command_of
from gpunode.errors import Exit, UsageError
from gpunode.text import printable, unknown

SECRET = frozenset({"extra-vars"})
"""Options that may have passwords in them: their value is not printed."""


@dataclass(frozen=True)
class Value:
    """The value of an option."""

    verb: str
    option: str
    value: str | int | float | bool | list[str] | None
    origin: str
    variable: str
    """The variable of the environment that sets it."""


@click.group("config")
@VERBOSE_ACCEPTED
def command() -> None:
    """Show configuration: options can be set in a file, beside the inventory or in a folder above, and by variables.

    \b
    # gpunode.toml, or [tool.gpunode] of pyproject.toml; ~/.config/gpunode/gpunode.toml for all sites of a user
    inventory = "hosts.yml"      # for all verbs; relative to this file
    timeout = 300
    [validate]                   # for one verb; [lab.up] for gpunode lab up
    level = "quick"
    skip = ["host.time"]
    """


@command.command("show")
@click.argument("verb", required=False)
@click.option("--all", "everything", is_flag=True, help="Also options that have their default.")
@click.option("-i", "--inventory", metavar="INVENTORY", help="Inventory; the file is beside it or in the folder above.")
@format_option("table", "json")
@VERBOSE_ACCEPTED
def show(*, verb: str | None, everything: bool, inventory: str | None, form: str) -> int:
    """Show options that are set, for all verbs or for one, with the file or variable that sets each.

    Command line, GPUNODE_VERB_OPTION, GPUNODE_OPTION, the site's gpunode.toml, the user's, Ansible's
    inventory, default: the first that has a value decides. Example: gpunode config show validate --all
    """
    if verb is not None and verb not in VERBS:
        raise UsageError(unknown("verb", verb, VERBS))
    words = ["-i", inventory] if inventory else []
    settings = read_settings(words)
    names = [verb] if verb else list(VERBS)
    values = [value for name in names for value in values_of(name, words) if everything or value.origin != "default"]
    if form == "json":
        document = {"files": [str(file.path) for file in settings.files], "options": [asdict(each) for each in values]}
        click.echo(json.dumps(document, indent=1))
        return Exit.GOOD
    for file in settings.files:
        click.echo(printable(f"# {file.path}"))
    rows = [(each.verb, f"--{each.option}", _shown(each.value), each.origin) for each in values]
    if rows:
        for line in table_lines(("VERB", "OPTION", "VALUE", "ORIGIN"), rows):
            click.echo(printable(line))
    else:
        where = f"no {NAME}, no variable: all options have their defaults"
        click.echo(f"{where} ({', '.join(SHARED[:3])} … for all verbs: gpunode config --help)")
    return Exit.GOOD


def values_of(name: str, words: list[str]) -> Iterator[Value]:
    """Yield the options of a verb and of its subcommands."""
    from gpunode.cli.root import root, with_common  # noqa: PLC0415 (root loads this module by name)

    command = with_common(command_of(name))
    parent = click.Context(root, info_name="gpunode", resilient_parsing=True)
    read_settings(words).apply(parent, name, command)
    yield from _values(command, name, parent)


def _values(command: click.Command, name: str, parent: click.Context) -> Iterator[Value]:
    context = command.make_context(name, [], parent, resilient_parsing=True)
    path = context.command_path.split()[1:]
    for option, param in options_of(command):
        origin = origin_of(context, param)
        value = context.params.get(param.name or "", param.get_default(context) if origin is None else True)
        if origin is not None and option in SECRET:
            value = "(not printed)"
        yield Value(" ".join(path), option, _plain(value), origin or "default", variables(path, option)[0])
    if isinstance(command, click.Group):
        for each, sub in command.commands.items():
            yield from _values(sub, each, context)


def _plain(value: object) -> str | int | float | bool | list[str] | None:
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
