"""All verbs, how their words are completed, and how each of them ends."""

import errno
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import gpunode
from gpunode.cli.options import NO_COLOR
from gpunode.cli.settings import FILES, configured_format, origin_of, read_settings
from gpunode.cli.streams import ReaderLeft, has_written
from gpunode.cli.verbs import TOPICS, VERBS, command_of
from gpunode.errors import Exit, GpunodeError, UndeterminedError, UsageError
from gpunode.text import printable, unknown
from gpunode.whole import make_private_folder, whole_file

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


Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_checks(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids of checks that complete the last one of a list ``ID[,ID]``."""
    from gpunode.checks import registry  # noqa: PLC0415 (the checks are slow to load)

    before, comma, last = incomplete.rpartition(",")
    return [
        CompletionItem(before + comma + check.id, help=check.category)
        for check in registry
        if check.id.startswith(last)
    ]


def complete_hosts(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return hosts and groups of the inventory (-i) that complete the last part of a pattern ``gpu-01,gpu-02``."""
    begun = re.match(r"(.*[,:][!&]?|[!&]?)([^,:]*)$", incomplete)
    before, last = (begun[1], begun[2]) if begun else ("", incomplete)
    names = _hosts_of(tuple(ctx.params.get("inventories") or ()))
    return [CompletionItem(before + name) for name in names if name.startswith(last)]


def complete_files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion of a file's name to the shell."""
    return [CompletionItem(incomplete, type="file")]


def _one_of(names: Callable[[], Iterable[str]]) -> Completer:
    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return complete


def _gpus() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (slow to load)

    return load().gpus


def _platforms() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (the same)

    return load().platforms


def _systems() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (the same)

    return load().systems


def _drivers() -> Iterable[str]:
    from gpunode.catalog import load  # noqa: PLC0415 (the same)
    from gpunode.stack.question import WORDS  # noqa: PLC0415 (the same)

    return [*WORDS, *load().branches]


def _hardware() -> Iterable[str]:
    from gpunode.lab.hardware import names  # noqa: PLC0415 (slow to load)

    return names()


def _lab_systems() -> Iterable[str]:
    from gpunode.lab.recipe import SYSTEMS  # noqa: PLC0415 (slow to load)

    return SYSTEMS


def _schemas() -> Iterable[str]:
    # By name, as the verbs are loaded.
    names: list[str] = import_module("gpunode.cli.reference").format_names()
    return names


def _parsers() -> Iterable[str]:
    from gpunode.facts.parsers.kinds import ANSWERS  # noqa: PLC0415 (slow to load)

    return ANSWERS


def _roles() -> Iterable[str]:
    from gpunode.content import collection_root  # noqa: PLC0415 (only needed here)
    from gpunode.provisioning.role import role_tags  # noqa: PLC0415 (slow to load)

    roles = sorted(path.parts[-3] for path in collection_root().glob("roles/*/meta/main.yml"))
    return [tag for role in roles for tag in role_tags(role)]


COMPLETERS: dict[tuple[str, str], Completer] = {
    ("", "limit"): complete_hosts,
    ("", "selected"): complete_checks,
    ("", "skipped"): complete_checks,
    ("", "gpus"): _one_of(_gpus),
    ("", "platform"): _one_of(_platforms),
    ("", "driver"): _one_of(_drivers),
    ("", "hardware"): _one_of(_hardware),
    ("plan", "system"): _one_of(_systems),
    ("up", "system"): _one_of(_lab_systems),
    ("schema", "name"): _one_of(_schemas),
    ("parse", "kind"): _one_of(_parsers),
    ("provision", "tags"): _one_of(_roles),
    ("provision", "skip_tags"): _one_of(_roles),
    ("env", "gpus"): _one_of(list),
}
"""By the name of a command (empty: any) and of a parameter."""


def add_completer(command: click.Command, param: click.Parameter) -> None:
    """Give a parameter its completion, unless its type has one."""
    if param._custom_shell_complete is not None or not isinstance(param.type, type(click.STRING)):
        return
    known = COMPLETERS.get((command.name or "", param.name or "")) or COMPLETERS.get(("", param.name or ""))
    if known is None and param.metavar in FILES:
        known = complete_files
    if known is not None:
        param._custom_shell_complete = known


def _hosts_of(inventories: tuple[str, ...]) -> list[str]:
    """Return hosts and groups of inventory files, from a cache if the files are unchanged. Nothing is run for a
    program: Tab must not query a cloud.
    """
    files = [Path(text) for text in inventories]
    with suppress(OSError, RuntimeError, ValueError, GpunodeError):
        if not files or not all(file.is_dir() or (file.is_file() and not os.access(file, os.X_OK)) for file in files):
            return []
        state = [[str(file.resolve()), *sorted(_stamps(file))] for file in files]
        kept = _cache_folder() / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}.json"
        if kept.is_file():
            return _names_in(json.loads(kept.read_text(encoding="utf-8")))
        from gpunode.fleet import inventory  # noqa: PLC0415 (slow to load)

        contents = inventory.read(inventories)
        names = sorted({*contents.hosts, *contents.groups})
        make_private_folder(kept.parent)
        with whole_file(kept, private=True) as stream:
            stream.write(json.dumps(names).encode())
        return names
    return []


def _names_in(content: Any) -> list[str]:
    return [str(name) for name in content] if isinstance(content, list) else []


def _stamps(file: Path) -> Iterable[str]:
    members = file.iterdir() if file.is_dir() else [file]
    return (f"{member.name} {member.stat().st_mtime_ns}" for member in members)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpunode" / "completion"
