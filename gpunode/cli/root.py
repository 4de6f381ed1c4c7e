"""All verbs, and how each of them ends."""

import errno
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

import gpunode
from gpunode.cli.completing import add_completer
from gpunode.cli.options import NO_COLOR
from gpunode.cli.settings import configured_format, origin_of, read_settings
from gpunode.cli.streams import ReaderLeft, has_written
from gpunode.cli.verbs import TOPICS, VERBS, command_of
from gpunode.errors import Exit, GpunodeError, UndeterminedError, UsageError
from gpunode.text import printable, unknown

REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of the system on a path that was named."""
ON_NODE, FABRIC = "--on-node", "--fabric"
EXIT_CODES = "Exit codes: 0 good, 1 a check or step failed, 2 wrong usage, 3 could not be determined."


def with_common(command: click.Command) -> click.Command:
    """Add to a verb, and to its subcommands, what all of them have: ``--no-color``, and the exit codes in the help."""
    if NO_COLOR not in command.params:
        for param in command.params:
            add_completer(command, param)
        command.params.append(NO_COLOR)
        if "Exit codes:" not in (command.help or ""):
            command.epilog = "\n\n".join(filter(None, [command.epilog, EXIT_CODES]))
        for each in command.commands.values() if isinstance(command, click.Group) else ():
            with_common(each)
    return command


class Verbs(click.Group):
    """Group that finds a verb's module by name and loads no other."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return with_common(command_of(cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UsageError(unknown("verb", args[0], VERBS))
        if args[:1] == ["validate"] and ON_NODE in args:
            # A scheduler's prolog waits for it: only what it needs is loaded.
            from gpunode.cli.on_node import validate_on_node  # noqa: PLC0415

            return "validate", with_common(validate_on_node), args[1:]
        if args[:1] == ["validate"] and FABRIC in args:
            from gpunode.cli.fabric import validate_fabric  # noqa: PLC0415 (the workload's libraries are slow to load)

            resolved: tuple[str | None, click.Command | None, list[str]] = (
                "validate",
                with_common(validate_fabric),
                args[1:],
            )
        else:
            resolved = super().resolve_command(ctx, args)
        if resolved[0] is not None and resolved[1] is not None and ON_NODE not in args:
            # Not on a node: a job's folder and environment must not change what a prolog does.
            read_settings(args).apply(ctx, resolved[0], resolved[1])
        return resolved

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return verbs and options that begin so, without loading a verb."""
        verbs = [CompletionItem(name, help=text) for name, text in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))
        for topic, verbs in TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(name.ljust(width), text) for name, text in verbs.items()])


def _print_version(ctx: click.Context) -> None:
    click.echo(f"gpunode, version {gpunode.__version__}")
    ctx.exit()


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EXIT_CODES
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda ctx, _, requested: _print_version(ctx) if requested else None,
    help="Show the version and exit.",
)
def root() -> None:
    """Provision GPU servers with a matched stack and validate that they work."""


root.params.append(NO_COLOR)


def answer(argv: Sequence[str] | None) -> int:
    """Run the command line and return the exit code; if the reader of our output left, the shell's code for that."""
    try:
        result = root.main(list(argv) if argv is not None else None, prog_name="gpunode", standalone_mode=False)
        sys.stdout.flush()
    except ReaderLeft:
        return 128 + signal.SIGPIPE
    except GpunodeError as err:
        return refused(argv, f"gpunode: {err}", err.exit_code)
    except OSError as err:
        if err.errno not in REFUSED:
            raise
        return refused(argv, f"gpunode: {err.filename or 'a file'}: {err.strerror}")
    except click.exceptions.NoArgsIsHelpError as err:
        _print_error(err.format_message())
        return Exit.USAGE
    except click.ClickException as err:
        context = getattr(err, "ctx", None)
        verb = context.command_path if context else _verb(sys.argv[1:] if argv is None else argv)
        origin = (
            origin_of(context, err.param) if context and isinstance(err, click.BadParameter) and err.param else None
        )
        more = f"set by {origin}" if origin else _place_of(err) or f"{verb} --help"
        return refused(argv, f"{verb}: {' '.join(err.format_message().split())} ({more})")
    except (KeyboardInterrupt, click.Abort):
        _print_error("gpunode: interrupted")
        return 130
    return result if isinstance(result, int) else Exit.GOOD


def _place_of(err: click.ClickException) -> str:
    """Return the command line with an option that was put before the subcommand which has it; empty: none has it."""
    if not isinstance(err, click.NoSuchOption) or (context := err.ctx) is None:
        return ""
    if context.parent is None or not isinstance(context.command, click.Group):
        return ""
    for name, command in context.command.commands.items():
        if any(err.option_name in param.opts for param in command.params):
            return f"it follows the subcommand: {context.command_path} {name} {err.option_name}"
    return ""


def _verb(argv: Sequence[str]) -> str:
    """Return the verb if click lost it: for an option that lacks its value."""
    return " ".join(["gpunode", *(word for word in argv[:1] if word in VERBS)])


def refused(argv: Sequence[str] | None, line: str, code: Exit = Exit.USAGE) -> Exit:
    """Print why there is no result, as a document too if one of JSON was expected on stdout; return the exit code."""
    _print_error(printable(line))
    words = sys.argv[1:] if argv is None else argv
    chosen = any(word.partition("=")[0] == "--format" for word in words) or ON_NODE in words
    if expects_json(words) or (not chosen and configured_format(words) == "json"):
        document = {"schema": "gpunode.error/1", "message": printable(line), "exit_code": int(code)}
        with suppress(ReaderLeft, UndeterminedError):
            sys.stdout.flush()
            if not has_written(sys.stdout):
                click.echo(json.dumps(document, indent=1))
    return code


def expects_json(words: Sequence[str]) -> bool:
    """Return whether a command line has ``--format json`` without a file for it."""
    expected, latest = False, ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--":
            break
        name, mark, value = word.partition("=")
        value = value if mark else following
        if name == "--format":
            latest = value
            expected = expected or latest == "json"
        elif name == "--output" and latest == "json" and value not in ("-", "/dev/stdout"):
            expected = False
    return expected


def _print_error(line: str) -> None:
    # The exit code reports the result too.
    with suppress(ReaderLeft, UndeterminedError):
        click.echo(line, err=True)
