"""``gpunode man``: man pages; ``gpunode completion``: the script with which a shell completes gpunode's words."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

import gpunode
from gpunode.cli.options import VERBOSE_ACCEPTED
from gpunode.cli.verbs import VERBS
from gpunode.errors import Exit, UsageError
from gpunode.text import is_whole, unknown
from gpunode.whole import write_whole

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
def command(words: tuple[str, ...], save: Path | None) -> int:
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
