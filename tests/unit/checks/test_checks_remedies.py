"""Every `gpunode …` command that a check names is one that the command line accepts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpunode.catalog import load
from gpunode.checks import registry
from gpunode.cli import VERBS
from gpunode.cli.root import answer, root
from gpunode.errors import GpunodeError

REPOSITORY = Path(__file__).parents[3]
COMMAND = re.compile(rf"\bgpunode(?: (?:{'|'.join(VERBS)}))(?= |[.,;:)]|$)(?P<rest>[^.,;:)`']*)")
VALUES = {"INVENTORY": "gpu-01,", "HOST": "gpu-01", "VERSION": "13.0", "IMAGE": "pytorch"}


def texts() -> Iterator[str]:
    """What a check can print: its description, its messages, the actions of the catalog's Xids."""
    for check in registry:
        yield from (check.means, check.remedy)
    for path in sorted((REPOSITORY / "gpunode/checks").glob("*.py")):
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
    yield from (row.action for row in load().xids.values())


def commands(text: str) -> Iterator[str]:
    """Verb, options with their value, known words in capitals; of catalog two more words."""
    for match in COMMAND.finditer(text):
        words, rest = match[0].removesuffix(match["rest"]).split(), match["rest"].split()
        if words[1] == "catalog":
            words, rest = words + rest[:2], rest[2:]
        while rest and (rest[0].startswith("-") or rest[0] in VALUES or words[-1].startswith("-")):
            words.append(rest.pop(0))
        yield " ".join(words)


NAMED = sorted({command for text in texts() for command in commands(text)})


def accepted(command: str) -> str | None:
    """What the command line objects to; None where it accepts the command. Commands that read the catalog are run."""
    words = [VALUES.get(word, word) for word in command.split()[1:]]
    if words[0] == "catalog":
        return None if answer(words) == 0 else "it fails"
    try:
        verb = root.get_command(click.Context(root), words[0])
        assert verb is not None
        context = verb.make_context(words[0], words[1:])
    except (click.ClickException, GpunodeError) as error:
        return str(error)
    return "plan takes hosts behind -i only" if words[0] == "plan" and not context.params["inventories"] else None


@pytest.mark.parametrize("command", NAMED)
def test_a_command_of_a_remedy_is_accepted(command: str) -> None:
    assert accepted(command) is None


def test_commands_are_found() -> None:
    assert {"gpunode catalog list gpus", "gpunode plan -i INVENTORY --cuda VERSION"} <= set(NAMED)


@pytest.mark.parametrize(
    "command",
    ["gpunode catalog gpus", "gpunode catalog show cudnn", "gpunode plan HOST", "gpunode env --formt json"],
)
def test_a_command_that_is_none_is_refused(command: str) -> None:
    assert list(commands(f"Try {command}.")) == [command]
    assert accepted(command)
