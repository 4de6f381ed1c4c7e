"""The table of verbs: what it lists is there, and nothing that is there is left out."""

import importlib
from pathlib import Path

import click
import pytest

import gpunode.cli
from gpunode.cli import VERBS, run


def test_every_module_with_a_command_is_a_verb() -> None:
    folder = Path(gpunode.cli.__file__).parent
    modules = {path.stem for path in folder.glob("[a-z]*.py")}
    verbs = {
        name
        for name in modules
        if isinstance(getattr(importlib.import_module(f"gpunode.cli.{name}"), "command", None), click.Command)
    }
    assert verbs == set(VERBS)


@pytest.mark.parametrize("verb", list(VERBS))
def test_help_of_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"Usage: gpunode {verb}")
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
