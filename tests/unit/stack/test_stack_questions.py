"""What ``gpunode plan`` must answer to the questions in ``questions.tsv``, each with the source of its answer.

The answers come from recorded facts (lists of GPUs per release, indexes of repositories, release notes), not from the
resolver. Forms: ``refused RULE``, ``decided BRANCH``, ``warned RULE``, ``package NAME``, ``without NAME``,
``toolkit X.Y``, ``newest X.Y``, ``cuda SUPPORT``, ``pytorch VERSION CUDA``, ``tensorflow VERSION``, ``rdma VALUE``,
``offers CHANGE``.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import index
from stack_samples import CATALOG, TODAY, group

from gpunode.stack import NodePicture, Request, Stack, resolve
from gpunode.stack.assemble import assemble
from gpunode.stack.candidates import candidates
from gpunode.stack.model import Conflict
from gpunode.stack.question import Question
from gpunode.stack.resolve import first_case
from gpunode.stack.rules import CandidateCase, rules

ROWS = [
    tuple(line.split("\t"))
    for line in (Path(__file__).parent / "questions.tsv").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
NODE = {"--os": "os", "--arch": "arch", "--kernel": "kernel", "--platform": "platform"}


def asked(text: str) -> Question:
    """The question that a command line asks."""
    words = shlex.split(text)
    options = list(zip(words[::2], words[1::2], strict=True))
    count = next((int(value) for name, value in options if name == "--count"), None)
    gpus = tuple(group(value, count) for name, value in options if name == "--gpu")
    node: dict[str, Any] = {NODE[name]: value for name, value in options if name in NODE}
    settings: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in options
        if name not in (*NODE, "--gpu", "--count")
    }
    return Question(Request(**settings), NodePicture(gpus=gpus, **node), CATALOG, TODAY)


def refusing(question: Question) -> set[str]:
    """The rules that refuse a candidate, or the question itself."""
    rule_ids = {rule for rule, verdict in rules.objections(question) if verdict.refuses}
    for candidate in candidates(question):
        rule_ids |= {rule for rule, verdict in rules.verdicts(CandidateCase(question, candidate)) if verdict.refuses}
    return {rule.split("-")[0] for rule in rule_ids}


def _frameworks(stack: Stack, name: str) -> list[str | None]:
    part = stack.frameworks
    return [getattr(part, name, None), getattr(part, f"{name}_cuda", None)]


HOLDS: dict[str, Callable[[Stack, list[str]], bool]] = {
    "decided": lambda stack, words: str(stack.driver.branch) == words[0],
    "warned": lambda stack, words: any(warning.rule.startswith(words[0]) for warning in stack.warnings),
    "package": lambda stack, words: words[0] in [package.name for package in stack.packages],
    "without": lambda stack, words: words[0] not in [package.name for package in stack.packages],
    "toolkit": lambda stack, words: stack.toolkit is not None and stack.toolkit.version == words[0],
    "newest": lambda stack, words: stack.cuda.newest == words[0],
    "cuda": lambda stack, words: stack.cuda.support == words[0],
    "pytorch": lambda stack, words: _frameworks(stack, "pytorch") == words,
    "tensorflow": lambda stack, words: str(_frameworks(stack, "tensorflow")[0]).lower() == words[0],
    "rdma": lambda stack, words: str(stack.gpudirect_rdma).lower() == words[0],
}


@pytest.mark.parametrize(("question", "answer", "source"), ROWS, ids=[row[0] + ": " + row[1] for row in ROWS])
def test_the_answer_is_the_recorded_one(question: str, answer: str, source: str) -> None:
    kind, *words = answer.split()
    parsed = asked(question)
    case = first_case(parsed)
    if kind == "refused":
        assert case is None, f"accepted: {case and case.candidate.version}; against it: {source}"
        assert words[0] in refusing(parsed)
    elif kind == "offers":
        conflict = resolve(parsed.request, parsed.node, CATALOG, TODAY)
        assert isinstance(conflict, Conflict)
        assert " ".join(words) in [change for offer in conflict.offers for change in offer.change]
    else:
        assert case is not None, f"refused by {refusing(parsed)}; for it: {source}"
        assert HOLDS[kind](assemble(case), words), assemble(case).to_json()


def test_the_table_is_whole() -> None:
    kinds = Counter(row[1].split()[0] for row in ROWS)
    assert len(ROWS) >= 200
    assert kinds["refused"] >= 80
    assert kinds["decided"] >= 80
    assert all(row[2] for row in ROWS)
    known = {word for row in ROWS for word in row[2].split(", ") if " " not in word}
    assert known <= set(CATALOG.sources)


DIRECTORIES = {
    ("ubuntu-22.04", "nvidia"): "ubuntu2204",
    ("ubuntu-24.04", "nvidia"): "ubuntu2404",
    ("ubuntu-26.04", "nvidia"): "ubuntu2604",
    ("debian-12", "nvidia"): "debian12",
    ("debian-13", "nvidia"): "debian13",
    ("rhel-9", "nvidia"): "rhel9",
    ("rhel-10", "nvidia"): "rhel10",
    ("ubuntu-22.04", "ubuntu"): "ubuntu-archive-jammy",
    ("ubuntu-24.04", "ubuntu"): "ubuntu-archive-noble",
    ("ubuntu-26.04", "ubuntu"): "ubuntu-archive-resolute",
}


def recorded(known: dict[str, Any], server: bool) -> tuple[set[int], set[str]]:
    """Branches and toolkits of which a recorded index has a package with its version."""
    branches, toolkits = set(), set()
    for name, package in known["packages"].items():
        if not package.get("sure", True) or not package.get("versions"):
            continue
        toolkit = re.fullmatch(r"cuda-toolkit-(\d+)-(\d+)", name)
        if toolkit:
            toolkits.add(f"{toolkit[1]}.{toolkit[2]}")
        if not re.search(r"nvidia|cuda-drivers", name) or (server and "-server" not in name):
            continue
        matches = (re.match(r"(?:\d+:)?(\d{3})\.\d+", str(version)) for version in package["versions"])
        branches |= {int(match[1]) for match in matches if match}
    return branches, toolkits


@pytest.mark.parametrize("directory", DIRECTORIES, ids="-".join)
def test_the_table_agrees_with_the_recorded_indexes(directory: tuple[str, str]) -> None:
    """What an index records is never refused for the repository; below a first branch that is sure all is."""
    system, source = directory
    known = index(DIRECTORIES[directory])
    branches, toolkits = recorded(known, server=source == "ubuntu")
    answers: dict[tuple[str, str], set[str]] = {}
    for question, answer, _ in ROWS:
        words = shlex.split(question)
        options = dict(zip(words[::2], words[1::2], strict=True))
        if options.get("--os") != system or options.get("--source", "nvidia") != source or "--kernel" in options:
            continue
        for option in ("--driver", "--toolkit"):
            if option in options:
                answers.setdefault((option, options[option]), set()).add(" ".join(answer.split()[:2]))
    refused = {key for key, reported in answers.items() if reported & {"refused R15", "refused R24"}}
    assert answers
    assert not {("--driver", str(branch)) for branch in branches} & refused
    assert not {("--toolkit", toolkit) for toolkit in toolkits} & refused
    first = known["repository"].get("first_branch", {})
    if first.get("sure"):
        too_old = {key for key in answers if key[0] == "--driver" and int(key[1].split(".")[0]) < int(first["value"])}
        assert too_old
        assert too_old <= refused
