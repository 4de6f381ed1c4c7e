"""The command line: one module per verb, loaded when it is called."""

import importlib
import os
import sys
from collections.abc import Sequence

import click

from gpunode import __version__
from gpunode.cli.nearest import unknown
from gpunode.errors import Exit, GpunodeError, UsageError

VERBS = {
    "plan": "Resolve a matched stack and explain it",
    "provision": "Run the site playbook on an inventory",
    "validate": "Judge nodes: this machine, hosts of an inventory, or saved bundles",
    "collect": "Write bundles and judge nothing",
    "checks": "List the checks: what each needs, means, and how to mend what it finds",
    "env": "The tuned environment and docker run arguments of a node, each value with its reason",
    "parse": "Turn one raw tool output into JSON",
    "catalog": "The facts: GPUs, drivers, packages and their sources",
    "lab": "Simulated GPU nodes in containers, to try and to test without a GPU",
    "schema": "Print the JSON Schema of a format",
}


class Verbs(click.Group):
    """Finds a verb's module (``gpunode.cli.VERB``) by name and loads no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"gpunode.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Call the verb. Where the reader of our output left, end as the shell shows it: 128 + SIGPIPE.

        Click would end with 1, which says that a check failed.
        """
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # What Python would still flush at its end must go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UsageError(unknown("verb", args[0], VERBS))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gpunode")
def root() -> None:
    """Provision GPU servers with a matched stack, and prove that they work."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 good, 1 failed, 2 wrong usage, 3 could not be determined."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        result = root.main(list(argv) if argv is not None else None, prog_name="gpunode", standalone_mode=False)
    except GpunodeError as err:
        click.echo(f"gpunode: {err}", err=True)
        return err.exit_code
    except click.exceptions.NoArgsIsHelpError as err:
        click.echo(err.format_message(), err=True)
        return Exit.USAGE
    except click.ClickException as err:
        context = getattr(err, "ctx", None)
        verb = context.command_path if context else "gpunode"
        click.echo(f"{verb}: {' '.join(err.format_message().split())} ({verb} --help)", err=True)
        return Exit.USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("gpunode: interrupted", err=True)
        return 130
    return result if isinstance(result, int) else Exit.GOOD
