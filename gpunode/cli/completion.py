"""``gpunode completion``: the script with which a shell completes gpunode's words."""

import click
from click.shell_completion import get_completion_class

from gpunode.cli.options import VERBOSE_ACCEPTED
from gpunode.errors import Exit, UsageError

VARIABLE = "_GPUNODE_COMPLETE"
"""The variable with which the script calls gpunode; click reads it."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@VERBOSE_ACCEPTED
def command(shell: str) -> int:
    """Print the script with which bash, zsh or fish completes verbs, options, checks, hosts and GPUs.

    \b
    Examples:
      eval "$(gpunode completion bash)"                                                # in ~/.bashrc
      gpunode completion bash > ~/.local/share/bash-completion/completions/gpunode     # or once, as a file
      gpunode completion zsh > ~/.zfunc/_gpunode                                       # a folder of $fpath
      gpunode completion fish > ~/.config/fish/completions/gpunode.fish
    """
    from gpunode.cli.root import root  # noqa: PLC0415 (root loads this module by name)

    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"{shell}: this version of click has no completion for it")
    click.echo(found(root, {}, "gpunode", VARIABLE).source(), nl=False)
    return Exit.GOOD
