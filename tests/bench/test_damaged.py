"""Damaged input: mutated texts through every parser, a mutated bundle through every check.

No traceback, no check that breaks, no pass that the intact text did not have. ``GPUNODE_BENCH=all`` runs 100,000 texts
and 2,000 bundles; without it a fixed sample. The intact texts are the bench's machines' and, where the folder is there,
the recorded outputs that are fetched (tests/captured.py).
"""

import json
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from bench_machines import MACHINES, document
from captured import FOLDER, there
from effort import effort
from test_bench import by_check, judged

sys.path.append(str(Path(__file__).parents[1] / "captures"))

from test_captures import PARSED

from gpunode.checks import Status
from gpunode.facts.errors import ParseError
from gpunode.facts.gpu import parse_peer_access
from gpunode.facts.parsers.kinds import decoded, parsed

WHOLE = os.environ.get("GPUNODE_BENCH") == "all"
TEXTS, BUNDLES = (100_000, 2_000) if WHOLE else (effort(500, 1_500), effort(20, 50))
LONGEST = 60_000
OF_BUNDLE = {
    "nvidia-smi-xml": "nvidia-smi-xml",
    "nvidia-smi-topo": "nvidia-smi-topo",
    "nvidia-smi-nvlink": "nvidia-smi-nvlink",
}
WORDS = (
    "N/A",
    "[Unknown Error]",
    "GPU is lost",
    "-1",
    "0",
    "99999999999999999999",
    "None",
    "\N{SNOWMAN}",
    "\x00",
    "",
    "nan",
    "<",
    ":",
    "\t",
)


def sources() -> list[tuple[str, str]]:
    """Parser and intact text."""
    texts = [(kind, document(name)["commands"][key]["stdout"]) for name in MACHINES for key, kind in OF_BUNDLE.items()]
    texts += [("peer-access", document(name)["commands"]["nvidia-smi-p2p"]["stdout"]) for name in MACHINES]
    texts += [(row["kind"], decoded((FOLDER / name).read_bytes())) for name, row in PARSED.items() if there(name)]
    return [(kind, text) for kind, text in texts if text and len(text) < LONGEST]


def mutated(text: str, chance: random.Random) -> str:
    """One to three small damages: of a character, a word, a line, or the end."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        end = min(len(text), at + chance.choice((1, 1, 2, 8, 40)))
        kind = chance.randrange(5)
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = text[:at] + text[end:]
        elif kind == 2:
            text = text[:at] + chance.choice(WORDS) + text[end:]
        elif kind == 3:
            lines = text.split("\n")
            first, other = chance.randrange(len(lines)), chance.randrange(len(lines))
            lines[first], lines[other] = lines[other], lines[first]
            text = "\n".join(lines)
        else:
            text = text[:end] + text[at:]
    return text


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    return sources()


@pytest.mark.parametrize("seed", range(10))
def test_mutated_texts_are_answered_or_refused(texts: list[tuple[str, str]], seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    for _ in range(TEXTS // 10):
        kind, text = chance.choice(texts)
        damaged = mutated(text, chance)
        with suppress(ParseError):
            answer = parse_peer_access(damaged).model_dump() if kind == "peer-access" else parsed(kind, damaged)
            json.dumps(answer, allow_nan=False)


def damaged(chance: random.Random) -> Iterator[tuple[str, str]]:
    """Machine, and its bundle as JSON with one command or one file damaged, at times also without another command."""
    names = list(MACHINES)
    while True:
        name = chance.choice(names)
        bundle = deepcopy(document(name))
        if chance.random() < 0.2:
            del bundle["commands"][chance.choice(sorted(bundle["commands"]))]
        if chance.random() < 0.6:
            command = bundle["commands"][chance.choice(sorted(bundle["commands"]))]
            command["stdout"] = mutated(command["stdout"], chance)
            if chance.random() < 0.3:
                command["rc"] = chance.choice((1, 2, 8, 9, 14, 15, 124, 126, 134, 139, 255))
        else:
            path = chance.choice(sorted(path for path, text in bundle["files"].items() if text))
            bundle["files"][path] = mutated(bundle["files"][path], chance)
        yield name, json.dumps(bundle)


@cache
def internal_names() -> re.Pattern[str]:
    """The probe's names of commands (``nvidia-smi-xml``) that are no program's: messages show the command line."""
    commands = [(key, run) for name in MACHINES for key, run in document(name)["commands"].items()]
    names = {key for key, run in commands if "-" in key and key not in " ".join(run["argv"])}
    return re.compile(rf"(?<![\w/.-])(?:{'|'.join(sorted(map(re.escape, names)))})(?![\w/.-])")


@cache
def intact(name: str) -> Mapping[str, Status]:
    return by_check(judged(document(name)))


@pytest.mark.parametrize("seed", range(10))
def test_a_mutated_bundle_breaks_no_check_and_mends_none(seed: int) -> None:
    bundles = damaged(random.Random(seed))  # noqa: S311
    for _ in range(BUNDLES // 10):
        name, text = next(bundles)
        before = intact(name)
        findings = judged(json.loads(text))
        assert not [finding for finding in findings if "failed to run" in finding.message]
        assert not [finding.message for finding in findings if internal_names().search(finding.message)]
        mended = [
            check
            for check, status in by_check(findings).items()
            if status is Status.PASS and before[check] is not Status.PASS
        ]
        assert mended == []
