"""Reference of the command line: ``gpunode config`` (values of options), ``man``, ``completion``, ``schema``."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

import gpunode
from gpunode.cli.options import VERBOSE_ACCEPTED, format_option
from gpunode.cli.settings import NAME, SHARED, options_of, origin_of, read_settings, variables
from gpunode.cli.streams import table_lines
from gpunode.cli.verbs import VERBS, command_of
from gpunode.errors import Exit, UsageError
from gpunode.text import is_whole, printable, unknown
from gpunode.whole import write_whole

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
def config_command() -> None:
    """Show configuration: options can be set in a file, beside the inventory or in a folder above, and by variables.

    \b
    # gpunode.toml, or [tool.gpunode] of pyproject.toml; ~/.config/gpunode/gpunode.toml for all sites of a user
    inventory = "hosts.yml"      # for all verbs; relative to this file
    timeout = 300
    [validate]                   # for one verb; [lab.up] for gpunode lab up
    level = "quick"
    skip = ["host.time"]
    """


@config_command.command("show")
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


ENVIRONMENT = """\
Each option has an environment variable: GPUNODE_, the verb and the option in capitals (GPUNODE_VALIDATE_LEVEL=quick), \
and gpunode.toml can set it; gpunode config show prints each value and its origin."""
EPOCH = "SOURCE_DATE_EPOCH"
ROFF = str.maketrans({"\\": "\\e", "-": "\\-", "`": "\\(ga", "~": "\\(ti", "^": "\\(ha"})
"""Characters that roff would print as others."""
VIEWER_LIMIT_S = 30.0


@click.command("man")
@click.argument("words", nargs=-1, metavar="[VERB]...")
@click.option(
    "--save", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write all pages to a directory."
)
@VERBOSE_ACCEPTED
def man_command(words: tuple[str, ...], save: Path | None) -> int:
    """Show the man page of gpunode or of a verb; --save writes all of them.

    In a pipe the page is printed in the format of man(7).

    \b
    Examples:
      gpunode man validate
      gpunode man --save ~/.local/share/man/man1      # then: man gpunode-validate
    """
    from gpunode.cli.root import root  # noqa: PLC0415 (root loads this module by name)

    context = click.Context(root, info_name="gpunode", **root.context_settings)
    if save is not None:
        if words:
            raise UsageError(f"--save writes all pages: leave out {' '.join(words)}")
        save.mkdir(parents=True, exist_ok=True)
        pages = dict(_all_pages(context))
        for name, text in pages.items():
            write_whole(save / f"{name}.1", text)
        click.echo(f"{len(pages)} pages in {save}", err=True)
        return Exit.GOOD
    for word in words:
        group = context.command
        known = group.list_commands(context) if isinstance(group, click.Group) else []
        subcommand = group.get_command(context, word) if isinstance(group, click.Group) else None
        if subcommand is None:
            raise UsageError(unknown("verb", word, known or list(VERBS)))
        context = click.Context(subcommand, info_name=word, parent=context)
    _show(page(context))
    return Exit.GOOD


def _show(text: str) -> None:
    viewer = shutil.which("man")
    if viewer is None or not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from gpunode.fleet import process  # noqa: PLC0415 (slow to load; each new shell runs gpunode completion)

    width = str(shutil.get_terminal_size().columns)
    done = process.run([viewer, "-l", "-"], timeout_s=VIEWER_LIMIT_S, stdin=text, env={**os.environ, "MANWIDTH": width})
    click.echo_via_pager(done.stdout or text)


def _all_pages(context: click.Context) -> Iterator[tuple[str, str]]:
    yield context.command_path.replace(" ", "-"), page(context)
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            subcommand = context.command.get_command(context, name)
            if subcommand is not None and not subcommand.hidden:
                yield from _all_pages(click.Context(subcommand, info_name=name, parent=context))


def page(context: click.Context) -> str:
    """Return a command's man page. Its date is SOURCE_DATE_EPOCH's, or absent."""

    name, command = context.command_path.replace(" ", "-"), context.command
    text = command.help or ""
    summary = VERBS.get(command.name or "") if context.parent and not context.parent.parent else None
    lines = [
        f'.TH "{name.upper()}" 1 "{_date()}" "gpunode {gpunode.__version__}" "gpunode"',
        ".SH NAME",
        f"{_escaped(name)} \\- {_escaped(summary or command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        f".B {_escaped(context.command_path)}",
        _escaped(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(text),
        ".SH OPTIONS",
        *_options(context),
    ]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS"]
        for each in command.list_commands(context):
            short = VERBS.get(each) if context.parent is None else None
            subcommand = None if short else command.get_command(context, each)
            lines += [".TP", f".BR {_escaped(name)}\\-{_escaped(each)} (1)"]
            lines += [_escaped(short or (subcommand.get_short_help_str(200) if subcommand else ""))]
    lines += _paragraphs(command.epilog or "")
    lines += [".SH ENVIRONMENT", *_paragraphs(ENVIRONMENT)]
    if context.parent is not None:
        lines += [".SH SEE ALSO", f".BR {_escaped(context.parent.command_path.replace(' ', '-'))} (1)"]
    return "\n".join(lines) + "\n"


def _date() -> str:
    from datetime import UTC, datetime  # noqa: PLC0415 (only for a build with a date)

    epoch = os.environ.get(EPOCH, "")
    return datetime.fromtimestamp(int(epoch), UTC).date().isoformat() if is_whole(epoch) else ""


def _options(context: click.Context) -> Iterator[str]:
    for param in context.command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            yield ".TP"
            yield f"\\fB{_escaped(record[0])}\\fP"
            yield _escaped(" ".join(record[1].split()))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a help text; a paragraph that begins with ``\\b`` keeps its lines."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if not part.strip():
            continue
        yield ".PP"
        if part.lstrip().startswith("\b"):
            yield ".nf"
            yield from (_escaped(line.removeprefix("    ")) for line in part.replace("\b", "").strip("\n").split("\n"))
            yield ".fi"
        else:
            yield _escaped(" ".join(part.split()))


def _escaped(text: str) -> str:
    """Return text for roff: no character of it is a command."""
    text = text.translate(ROFF)
    return f"\\&{text}" if text.startswith((".", "'")) else text


VARIABLE = "_GPUNODE_COMPLETE"
"""The variable with which the script calls gpunode; click reads it."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@VERBOSE_ACCEPTED
def completion_command(shell: str) -> int:
    """Print the script with which bash, zsh or fish completes verbs, options, checks, hosts and GPUs.

    \b
    Examples:
      eval "$(gpunode completion bash)"                                                # in ~/.bashrc
      gpunode completion bash > ~/.local/share/bash-completion/completions/gpunode     # or once, as a file
      gpunode completion zsh > ~/.zfunc/_gpunode                                       # a folder of $fpath
      gpunode completion fish > ~/.config/fish/completions/gpunode.fish
    """
    from gpunode.cli.root import root  # noqa: PLC0415 (root loads this module by name)

    completion = get_completion_class(shell)
    if completion is None:
        raise UsageError(f"{shell}: this version of click has no completion for it")
    click.echo(completion(root, {}, "gpunode", VARIABLE).source(), nl=False)
    return Exit.GOOD


DOCUMENTS = {
    "advice": ("gpunode.tuning.advice", "AdviceDocument"),
    "bundle": ("gpunode.probe.bundle", "Bundle"),
    "change": ("gpunode.change.journal", "RunRecord"),
    "checks": ("gpunode.cli.checks", "CheckList"),
    "collect": ("gpunode.report.outcomes", "CollectOutcome"),
    "comparison": ("gpunode.history.compare", "Comparison"),
    "env": ("gpunode.tuning", "Tunings"),
    "error": ("gpunode.report.outcomes", "ErrorDocument"),
    "explain": ("gpunode.report.outcomes", "ExplainOutcome"),
    "lab": ("gpunode.report.outcomes", "LabOutcome"),
    "plan": ("gpunode.stack", "Plan"),
    "profile": ("gpunode.profiling.patterns", "ProfileDocument"),
    "provision": ("gpunode.report.outcomes", "ProvisionOutcome"),
    "record": ("gpunode.facts.models.workload", "Record"),
    "report": ("gpunode.judging.report", "Report"),
    "run": ("gpunode.cli.history", "RunExport"),
    "stack": ("gpunode.stack", "Stack"),
    "top": ("gpunode.top.model", "TopDocument"),
}
"""Format -> module and model of a document, loaded when its schema is asked for: together they are slow to load."""


def format_names() -> list[str]:
    """Return the formats that have a schema: of documents, and of the answers of each parser."""
    from gpunode.facts.parsers.kinds import ANSWERS  # noqa: PLC0415 (parsers of many tools)

    return [*DOCUMENTS, *(f"parse-{kind}" for kind in ANSWERS)]


def schema_of(name: str) -> str:
    """Return the published schema of a format, from its model or the union of a parser's answers.

    ``tests/contract/schemas.sha256`` has the hash of each, so that no format changes unnoticed.
    """
    from pydantic import TypeAdapter  # noqa: PLC0415 (slow to load)

    from gpunode.facts.models.workload import Record  # noqa: PLC0415 (the same)
    from gpunode.facts.parsers.kinds import ANSWERS  # noqa: PLC0415 (the same)

    module, attribute = DOCUMENTS.get(name, ("", ""))
    model: Any = getattr(import_module(module), attribute) if module else ANSWERS[name.removeprefix("parse-")]
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"gpunode.{name}/1",
        **TypeAdapter(model).json_schema(by_alias=True, mode="serialization"),
    }
    if name == "bundle":
        # The probe, which has the bundle's model, does not import facts; the published schema describes the results.
        record = Record.model_json_schema(by_alias=True, mode="serialization", ref_template="#/$defs/{model}")
        schema["$defs"] |= record.pop("$defs")
        schema["$defs"]["Record"] = record
        schema["properties"]["results"]["items"] = {"$ref": "#/$defs/Record"}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


@click.command("schema")
@click.argument("name", required=False)
@VERBOSE_ACCEPTED
def schema_command(*, name: str | None) -> int:
    """Print the JSON Schema of a format; without NAME, the names.

    \b
    Example:
      gpunode schema report > report.schema.json
    """
    names = format_names()
    if name is None:
        click.echo("\n".join(names))
        return 0
    if name not in names:
        raise UsageError(unknown("format", name, names))
    click.echo(schema_of(name), nl=False)
    return 0
