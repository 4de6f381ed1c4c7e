"""Every `gpunode …` command that a message, a help text, a docstring or a page names is accepted by the program."""

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpunode.checks import registry
from gpunode.checks.actions import action
from gpunode.checks.actions import command as derived_command
from gpunode.checks.registry import CheckResult, Status
from gpunode.cli import VERBS
from gpunode.cli.fabric import validate_fabric
from gpunode.cli.on_node import validate_on_node
from gpunode.cli.root import root
from gpunode.errors import GpunodeError
from gpunode.provisioning.role import refuse_unknown_tags

REPOSITORY = Path(__file__).parents[3]
CODE = ("gpunode/**/*.py", "plugins/**/*.py", "scripts/*.py")
PAGES = ("docs/*.md", "README.md", "CONTRIBUTING.md", "SECURITY.md")
OTHERS = (
    "roles/**/*.yml",
    "roles/**/*.md",
    "playbooks/*.yml",
    "inventory/**/*.yml",
    "contrib/**/*",
    "gpunode/**/*.yml",
)
PROGRAM = "gpunode "
NAME = rf"{PROGRAM}(?:{'|'.join(VERBS)})"
INDENTED = re.compile(rf"(?m)^[ \t]+(?:\$ )?({NAME}(?= |$).*)")
FENCED = re.compile(r"(?ms)^[ \t]*```.*?^[ \t]*```")
IN_FENCE = re.compile(rf"(?m)^[ \t]*(?:\$ )?({NAME}(?= |$).*)")
QUOTED = re.compile(rf"`(?:\$ )?({NAME}(?=[ `\n])[^`]*)`")
PROSE = re.compile(rf"(?<![\w./`-]){NAME}(?= |[.,;:)]|$)(?P<rest>[^.,;:)`'\n]*)")
GROUPS = ("catalog", "lab")
NO_SUBCOMMAND = ("command", "VALUE")
"""Words that follow a group in a sentence about it."""


def strings(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, docstrings too; in place of what an f-string computes stands VALUE."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node) if part is not node}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def files(*patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from (path for path in sorted(REPOSITORY.glob(pattern)) if path.is_file())


def flags(verb: str) -> set[str]:
    """The options of a verb that take no value."""
    command = root.get_command(click.Context(root), verb)
    assert command is not None
    options = (param for param in command.params if isinstance(param, click.Option) and param.is_flag)
    return {name for option in options for name in option.opts}


def in_prose(text: str) -> Iterator[str]:
    """Verb, subcommand, options with their value, and words in capitals: what follows is the sentence's."""
    for match in PROSE.finditer(text):
        words, rest = match[0].removesuffix(match["rest"]).split(), match["rest"].split()
        if words[1] in GROUPS and rest[:1] not in [[word] for word in NO_SUBCOMMAND]:
            words, rest = words + rest[:1], rest[1:]
        valueless = flags(words[1])
        while rest and rest[0] not in NO_SUBCOMMAND:
            open_option = words[-1].startswith("-") and words[-1] not in valueless
            if not (open_option or rest[0].startswith("-") or rest[0].isupper()):
                break
            words.append(rest.pop(0))
        yield " ".join(words)


def written(text: str, line: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """The commands of a text; True with those that stand on a line of their own, ready to be copied."""
    text = text.replace("\\\n", " ")
    yield from ((" ".join(match[1].split()), False) for match in QUOTED.finditer(text))
    text = QUOTED.sub(" ", text)
    yield from ((match[1], True) for match in line.finditer(text))
    yield from ((command, False) for command in in_prose(line.sub(" ", text)))


def of_page(text: str) -> Iterator[tuple[str, bool]]:
    for match in FENCED.finditer(text):
        yield from ((line[1], True) for line in IN_FENCE.finditer(match[0].replace("\\\n", " ")))
    yield from written(FENCED.sub(" ", text), re.compile(r"(?!)"))


def named() -> dict[tuple[str, bool], str]:
    """Each command with one file that names it."""
    commands: dict[tuple[str, bool], str] = {}
    for path in files(*CODE):
        code = path.read_text(encoding="utf-8")
        for text in strings(ast.parse(code)) if PROGRAM in code else ():
            if PROGRAM in text:
                commands |= dict.fromkeys(written(text, INDENTED), str(path.relative_to(REPOSITORY)))
    for path in files(*PAGES):
        commands |= dict.fromkeys(of_page(path.read_text(encoding="utf-8")), str(path.relative_to(REPOSITORY)))
    for check in registry:
        derived = derived_command(check.actions)
        commands |= {(derived, True): check.id} if derived else {}
    for path in files("gpunode/checks/*.py"):
        for name in re.findall(r'"(run_role:[a-z_:]+)"', path.read_text(encoding="utf-8")):
            commands |= {(str(derived_command([action(name)])), True): str(path.relative_to(REPOSITORY))}
    for path in files(*OTHERS):
        text = path.read_text(encoding="utf-8", errors="replace")
        commands |= dict.fromkeys(written(text, re.compile(r"(?!)")), str(path.relative_to(REPOSITORY)))
    return commands


def refused(command: str, *, whole: bool = True) -> str | None:
    """What the command line objects to; None where it accepts the command.

    A command within a sentence (``whole`` False) may leave out what has to follow.
    """
    text = re.sub(r"\s(\||>|&&|;|2>|<).*$", "", command)
    words = shlex.split(re.sub(r"\[[^\]]*\]|…|\.\.\.$", "", text), comments=True)[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return _parsed(words)
    except click.exceptions.Exit:
        return None
    except (click.exceptions.NoArgsIsHelpError, click.MissingParameter) as error:
        return None if not whole else f"something is missing: {error.format_message()}"
    except click.exceptions.BadOptionUsage as error:
        return None if not whole and error.option_name == words[-1] else str(error)
    except click.ClickException as error:
        return error.format_message()
    except GpunodeError as error:
        return str(error)


def _parsed(words: list[str]) -> str | None:
    command, arguments = root.get_command(click.Context(root), words[0]), words[1:]
    if words[0] == "validate" and "--on-node" in arguments:
        command = validate_on_node
    elif words[0] == "validate" and "--fabric" in arguments:
        command = validate_fabric
    assert command is not None
    context = command.make_context(words[0], list(arguments))
    while isinstance(context.command, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, command, arguments = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, arguments, parent=context)
    if words[0] == "provision":
        # Ansible runs nothing for a tag that does not exist, and reports success.
        refuse_unknown_tags(REPOSITORY, context.params["tags"])
    if words[0] == "plan" and context.params["bundles"] and not context.params["replay"]:
        return "plan takes no hosts: -i, with --limit"
    return None


NAMED = named()


@pytest.mark.parametrize(("command", "whole"), NAMED)
def test_a_command_that_is_named_is_accepted(command: str, whole: bool) -> None:
    assert refused(command, whole=whole) is None, NAMED[command, whole]


def test_every_remedy_of_a_role_ends_with_its_command() -> None:
    """As text in reports; the actions of the JSON have role and tag."""
    of_roles = [check for check in registry if any(step.action == "run_role" for step in check.actions)]
    assert len(of_roles) > 25
    for check in of_roles:
        finding = check.finding(CheckResult(Status.FAIL, "it is broken"))
        assert "gpunode provision -i INVENTORY -l HOST -t " in str(finding.remedy), check.id
        assert check.finding(CheckResult(Status.PASS, "it works")).remedy is None
        assert "gpunode provision" not in str(check.finding(CheckResult(Status.ERROR, "unknown")).remedy)


def test_commands_are_found() -> None:
    assert len(NAMED) > 120
    assert sum(whole for _, whole in NAMED) > 50


@pytest.mark.parametrize(
    "command",
    [
        "gpunode plan --cuda 13.0 HOST",
        "gpunode catalog gpus",
        "gpunode env --formt json",
        "gpunode validate --level deepest gpu-01",
        "gpunode lab launch",
        "gpunode parse",
        "gpunode provision -i INVENTORY -l HOST -t nvidia_drivers",
    ],
)
def test_an_unknown_command_is_refused(command: str) -> None:
    assert ("gpunode " + command.split()[1]) in " ".join(name for name, _ in written(f"Try {command}.", INDENTED))
    assert list(of_page(f"```\n{command}\n```\n")) == [(command, True)]
    assert refused(command)
