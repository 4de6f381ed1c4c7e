"""What all verbs share: the table of verbs, patterns of checks, common options, exit codes, the progress line."""

import ast
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import click
import pytest
from click.shell_completion import ShellComplete
from hypothesis import given
from hypothesis import strategies as st

import gpunode.cli
from gpunode.checks import registry
from gpunode.cli import VERBS, run, selection
from gpunode.cli.fabric import validate_fabric
from gpunode.cli.on_node import validate_on_node
from gpunode.cli.root import expects_json, root, with_common
from gpunode.cli.selection import Shown, progress, shown_progress
from gpunode.cli.verbs import MODULES, command_of
from gpunode.errors import UsageError
from gpunode.judging.request import selected_checks
from gpunode.report.outcomes import ErrorDocument

IDS = sorted(check.id for check in registry)
BUNDLES = Path(__file__).parents[2] / "fixtures" / "bundles"


@given(st.text(alphabet="*?[]!adghiostu.-", min_size=1, max_size=6), st.booleans())
def test_a_pattern_selects_what_the_shell_would(pattern: str, skips: bool) -> None:
    expected = {name for name in IDS if fnmatchcase(name, pattern)}
    if skips:
        expected = set(IDS) - expected if expected else set()
    options = ([], [pattern]) if skips else ([pattern], [])
    if not expected:
        with pytest.raises(UsageError, match=r"--(select|skip)"):
            selected_checks(*options)
    else:
        assert selected_checks(*options) == expected


def test_patterns_and_ids_together() -> None:
    chosen = selected_checks(["host.*,gpu.count", "link.pcie-?????"], ["host.t*"])
    assert chosen == {name for name in IDS if name.startswith("host.") and not name.startswith("host.t")} | {
        "gpu.count",
        "link.pcie-speed",
        "link.pcie-width",
    }


@pytest.mark.parametrize("pattern", ["hst.*", "HOST.*", "host.[", "[!a-z]*"])
def test_a_pattern_without_a_check_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--skip: no check matches {pattern}; see gpunode checks")):
        selected_checks([], [pattern])


DIFFERENT = {
    "--arch": "plan: of one node; zipapp: of all machines that it is for",
    "--diff": "plan: of two files; provision: of files that change",
    "--fabric": "of validate, and of the command that it begins",
    "--format": "one, or with --output several reports",
    "--gpus": "env: a share of a node; profile: of this machine by index",
    "--inventory": "config: only where its file is",
    "--limit": "hosts; profile: time; stage: space",
    "--list": "examples, faults, copies, runs",
    "--name": "lab, copy",
    "--on-node": "of validate, and of the command that it begins; collect",
    "--os": "lab: one of its own; plan: any",
    "--output": "one, or with --format several reports",
    "--python": "fabric: a program; zipapp: versions",
    "--save": "bundles; shell: manual pages",
    "--verbose": "provision: counted; some verbs: accepted",
    "--force": "of GPUs, of nodes that failed, of a machine with GPUs",
    "--workload": "env: tuned for; validate: run",
}
"""Options with more than one declaration, and why."""


def test_an_option_of_several_verbs_is_declared_once() -> None:
    declared = Counter(
        str(word.value)
        for path in (Path(__file__).parents[3] / "gpunode" / "cli").glob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "click.option"
        for word in call.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    )
    assert {name.partition("/")[0] for name, number in declared.items() if number > 1} == set(DIFFERENT)


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command, str]]:
    yield context.command_path, command, command.get_help(context)
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands(each, click.Context(each, info_name=name, parent=context))


def all_commands() -> Iterator[tuple[str, click.Command, str]]:
    above = click.Context(root, info_name="gpunode")
    for name in VERBS:
        verb = root.get_command(above, name)
        assert verb is not None
        yield from commands(verb, click.Context(verb, info_name=name, parent=above))
    for mode in (validate_on_node, validate_fabric):
        yield f"gpunode validate: {mode.name}", mode, with_common(mode).get_help(above)


def test_every_verb_has_no_color_and_its_exit_codes_once() -> None:
    seen = {path: help_ for path, _, help_ in all_commands()}
    assert len(seen) > 25
    assert [path for path, help_ in seen.items() if help_.count("--no-color") != 1] == []
    assert [path for path, help_ in seen.items() if " ".join(help_.split()).count("Exit codes:") != 1] == []


def test_no_color_before_and_after_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--no-color", "schema"], ["schema", "--no-color"], ["catalog", "list", "--no-color"]):
        monkeypatch.setenv("NO_COLOR", "")
        assert run(arguments) == 0
        assert os.environ["NO_COLOR"] == "1"
    monkeypatch.setenv("NO_COLOR", "")
    assert run(["schema"]) == 0
    assert os.environ["NO_COLOR"] == ""


def test_q_prints_no_progress() -> None:
    verb = root.get_command(click.Context(root), "validate")
    assert verb is not None
    for arguments, silent in ((["-q", "--replay", "x"], True), (["--quiet"], True), (["--replay", "x"], False)):
        with verb.make_context("validate", list(arguments)), shown_progress(["a", "b"]) as shown:
            assert (type(shown) is Shown) is silent


REFUSED = [
    ["validate", "--format", "json", "--replay", "/nowhere"],
    ["validate", "--format", "json", "--no-such-option"],
    ["validate", "--format=json", "--select", "nothing.*"],
    ["checks", "gpu.coutn", "--format", "json"],
    ["checks", "--format", "json", "gpu.coutn"],
    ["plan", "--format", "json", "--gpu", "no such GPU", "--os", "ubuntu-24.04"],
    ["validate", "--format", "junit", "--output", "/nowhere/x", "--format", "json"],
    ["no-such-verb", "--format", "json"],
]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_an_error_is_a_document_where_json_was_expected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    document = ErrorDocument.model_validate(json.loads(out))
    assert err == document.message + "\n"
    assert document.exit_code == 2


def test_an_error_is_no_document_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for more in ([], ["--format", "junit"], ["--format", "json", "--output", str(tmp_path / "report.json")]):
        assert run(["validate", "--replay", "/nowhere", *more]) == 2
        assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_not_followed_by_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    run(["validate", "--format", "json", "--replay", str(next(BUNDLES.glob("*.json")))])
    assert json.loads(capsys.readouterr().out)["schema"] == "gpunode.report/1"


WORDS = ["--format", "json", "--format=json", "--format=junit", "console", "--output", "-", "x", "--output=x", "--"]


def test_json_is_expected_on_stdout_only_where_it_is_named() -> None:
    """Every command line of three of these words."""
    for words in product(WORDS, repeat=3):
        named = words[: words.index("--")] if "--" in words else words
        if expects_json(words):
            assert "json" in named or "--format=json" in named
        if not any(word.startswith("--output") for word in named):
            pairs = list(pairwise(named))
            assert expects_json(words) == ("--format=json" in named or ("--format", "json") in pairs), words


def completed(words: list[str], incomplete: str) -> list[str]:
    completions = ShellComplete(root, {}, "gpunode", "_GPUNODE_COMPLETE").get_completions(words, incomplete)
    return [item.value for item in completions]


def test_verbs_options_and_checks_are_completed() -> None:
    assert completed([], "") == list(VERBS)
    assert completed([], "va") == ["validate"]
    assert "--version" in completed([], "--")
    assert completed(["checks"], "") == [*IDS, "facts", "test"]
    assert completed(["checks"], "link.pcie-w") == ["link.pcie-width"]
    for option in ("--select", "--skip"):
        assert completed(["validate", option], "gpu.count,link.pcie-w") == ["gpu.count,link.pcie-width"]
        assert completed(["validate", option], "") == IDS
        assert completed(["validate", option], "nothing") == []
    assert completed(["validate", "--format"], "ju") == ["junit"]


def test_verbs_are_completed_without_loading_one() -> None:
    with mock.patch("importlib.import_module", side_effect=AssertionError):
        assert completed([], "che") == ["checks"]


def json_commands() -> Iterator[str]:
    """The verbs, and their subcommands, that have ``--format json``."""
    for path, command, _ in all_commands():
        for param in command.params:
            formats = param.type.choices if isinstance(param.type, click.Choice) else ()
            if isinstance(param, click.Option) and "--format" in param.opts and "json" in formats:
                yield path


ALWAYS_JSON = {"gpunode parse", "gpunode schema", "gpunode history export"}
"""What prints JSON without an option."""
WITHOUT = {
    "completion": "a text for a shell",
    "man": "pages for man",
    "zipapp": "writes a file",
    "init": "writes a folder",
    "evidence": "writes an archive with a MANIFEST.json",
    "monitoring": "files of Prometheus and Grafana; its dashboard is JSON",
}


def test_every_verb_prints_json_or_a_file_of_another_program() -> None:
    verbs = {path.split()[1] for path in [*json_commands(), *ALWAYS_JSON]}
    assert verbs.isdisjoint(WITHOUT)
    assert sorted(set(VERBS) - verbs - set(WITHOUT)) == [], "give them --format json, or a reason in WITHOUT"


@pytest.mark.parametrize("path", sorted({path for path in json_commands() if ":" not in path}))
def test_wrong_usage_of_every_verb_with_json_is_a_document(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--format", "json", "--no-such-option"], ["--no-such-option", "--format=json"]):
        assert run([*path.split()[1:], *words]) == 2
        out, err = capsys.readouterr()
        document = ErrorDocument.model_validate(json.loads(out))
        assert (document.exit_code, err) == (2, document.message + "\n")


def test_every_module_with_a_command_is_a_verb() -> None:
    folder = Path(gpunode.cli.__file__).parent
    modules = {path.stem for path in folder.glob("[a-z]*.py")}
    commands = {
        (name, attribute)
        for name in modules
        for attribute, command in vars(importlib.import_module(f"gpunode.cli.{name}")).items()
        if isinstance(command, click.Command) and (attribute == "command" or attribute.endswith("_command"))
    }
    assert commands == {(module, f"{verb}_command") for verb, module in MODULES.items()}
    assert set(MODULES) == set(VERBS)


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


def test_every_verb_takes_v() -> None:
    without = [
        path
        for verb in VERBS
        for path, command, _ in commands(command_of(verb), click.Context(command_of(verb), info_name=verb))
        if not any("-v" in param.opts for param in command.params)
    ]
    assert without == []


@pytest.mark.parametrize(
    ("waiting", "nodes", "line"),
    [
        ([f"gpu-{n:02d}" for n in range(1, 17)], 16, "collecting: 0 of 16 nodes"),
        (["gpu-03", "gpu-02", "gpu-09"], 16, "collecting: 13 of 16 nodes, waiting for gpu-[02-03,09]"),
        ([], 16, "collecting: 16 of 16 nodes"),
        (["localhost"], 1, "collecting: 0 of 1 nodes"),
    ],
)
def test_the_last_nodes_are_named(waiting: list[str], nodes: int, line: str) -> None:
    assert progress(waiting, nodes) == line


def test_in_a_pipe_lines_are_far_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(["gpu-1", "gpu-2"]) as shown:
        shown("gpu-1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(selection, "LINE_EVERY_S", 0.0)
    with shown_progress(["gpu-1", "gpu\x1b-2"], "evaluating") as shown:
        shown("gpu-1")
        shown.step("gpu\x1b-2", "pulling")
    assert capsys.readouterr().err.splitlines() == [
        "gpunode: evaluating: 1 of 2 nodes, waiting for gpu\\x1b-2",
        "gpunode: evaluating: 1 of 2 nodes, waiting for gpu\\x1b-2; gpu\\x1b-2: pulling",
    ]
