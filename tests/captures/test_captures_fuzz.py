"""The recorded outputs damaged: cut, shuffled, doubled, interleaved."""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from captured import FOLDER, each
from effort import effort
from test_captures import CAPTURES, PARSED

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import KINDS, decoded, parsed

CUTS = effort(6, 40)
"""At how many places a recording is cut."""
OTHERS = effort(4_000, 30_000)
"""Characters of a recording that the parsers of other tools get."""
TRIED: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    """Print how many texts were tried in what time; ``pytest -s`` shows it."""
    start = time.perf_counter()
    yield
    print(f"\n{len(TRIED)} damaged captures, {sum(TRIED)} bytes in {time.perf_counter() - start:.1f} s")


def text_of(name: str) -> str:
    return decoded((FOLDER / name).read_bytes())


def tried(kind: str, text: str) -> dict[str, Any] | None:
    """The answer as JSON, None where the text is refused; any other exception fails the test."""
    TRIED.append(len(text))
    try:
        document = parsed(kind, text)
    except ParseError:
        return None
    answer: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return answer


@pytest.mark.parametrize("name", each(PARSED))
def test_cut(name: str) -> None:
    """A GPU that was not cut reads as in the whole text."""
    kind = PARSED[name]["kind"]
    text = text_of(name)
    whole = tried(kind, text)
    assert whole is not None
    places = random.Random(name).sample(range(len(text)), min(CUTS, len(text)))  # noqa: S311
    for end in places:
        part = tried(kind, text[:end])
        if part and "gpus" in part and kind in {"nvidia-smi-xml", "nvidia-smi-q", "nvidia-smi-table"}:
            for gpu, full in zip(part["gpus"][:-1], whole["gpus"], strict=False):
                assert gpu == full


@pytest.mark.parametrize("name", each(PARSED))
def test_lines_in_disorder(name: str) -> None:
    kind = PARSED[name]["kind"]
    lines = text_of(name).splitlines(keepends=True)
    chance = random.Random(name)  # noqa: S311
    shuffled = chance.sample(lines, len(lines))
    tried(kind, "".join(shuffled))
    tried(kind, "".join(lines + lines))
    tried(kind, "".join(line for line in lines for _ in range(chance.choice((0, 1, 1, 2)))))


@pytest.mark.parametrize("name", each(CAPTURES))
def test_as_every_other_kind(name: str) -> None:
    """No parser stumbles over another tool's output."""
    text = text_of(name)[:OTHERS]
    for kind in KINDS:
        tried(kind, text)


@pytest.mark.captures(*PARSED)
def test_two_captures_interleaved() -> None:
    chance = random.Random(0)  # noqa: S311
    names = list(PARSED)
    for name in names:
        first, second = (text_of(capture).splitlines(keepends=True)[:2000] for capture in (name, chance.choice(names)))
        tried(PARSED[name]["kind"], "".join(line for pair in zip(first, second, strict=False) for line in pair))
