"""The table of verbs: what it lists is there, and nothing that is there is left out."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import gpunode.cli
from gpunode.cli import VERBS, run
from gpunode.cli.verbs import COMMANDS, command_of


def test_every_module_with_a_command_is_a_verb() -> None:
    folder = Path(gpunode.cli.__file__).parent
    modules = {path.stem for path in folder.glob("[a-z]*.py")}
    commands = {
        (name, attribute)
        for name in modules
        for attribute, command in vars(importlib.import_module(f"gpunode.cli.{name}")).items()
        if isinstance(command, click.Command) and (attribute == "command" or attribute.endswith("_command"))
    }
    assert commands == set(COMMANDS.values())
    assert set(COMMANDS) == set(VERBS)


@pytest.mark.parametrize("verb", list(VERBS))
def test_help_of_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"Usage: gpunode {verb}")
    assert '" "' not in " ".join(shown.out.split()), "two strings joined within a docstring"
    assert shown.err == ""


def test_the_list_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert not [verb for verb in VERBS if f"  {verb} " not in shown]


@pytest.mark.parametrize("arguments", [[], ["-x"]])
def test_no_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))


def test_every_verb_takes_v() -> None:
    without = [
        " ".join(path)
        for verb in VERBS
        for path, command in commands(command_of(verb), (verb,))
        if not any("-v" in param.opts for param in command.params)
    ]
    assert without == []
