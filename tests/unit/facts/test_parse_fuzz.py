"""Every parser on damaged text: an answer in JSON or a ParseError, nothing that the text does not have, linear time."""

import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import KINDS, decoded, parsed

SAMPLES = {path.name: decoded(path.read_bytes()) for path in sorted((Path(__file__).parent / "samples").glob("*.txt"))}
CUTS = effort(40, 1_000_000)
"""At how many places of its text a sample is cut, or at every one."""
HEADS = effort(20, 1_000_000)
"""Of how many lines a sample begins without those before, or of every one."""
DAMAGES = effort(24, 80)
"""How often a sample is damaged; each eighth in the same way."""
WHOLE = [(name, kind) for name in SAMPLES for kind in KINDS if name.split(".", maxsplit=1)[0] == kind]

DERIVED = {
    "index",
    "ranks",
    "nodes",
    "gpus_per_node",
    "wrong",
    "wrong_total",
    "volatile_corrected",
    "volatile_uncorrected",
    "aggregate_corrected",
    "aggregate_uncorrected",
    "volatile_sram_uncorrected",
    "aggregate_sram_uncorrected",
    "gb_per_s",
    "host_to_device_gb_per_s",
    "device_to_host_gb_per_s",
    "device_to_device_gb_per_s",
}
"""Numbers that are counted, summed or converted."""

GROWING = {
    "messages",
    "complete",
    "ok",
    "overall",
    "status",
    "errors",
    "all_inactive",
    "wrong_total",
    "max_busbw_gb_per_s",
    "ranks",
    "nodes",
    "gpus_per_node",
    "datatype",
    "min",
    "max",
    "pass",
    "columns",
    "sizes",
    "host_to_device_gb_per_s",
    "device_to_host_gb_per_s",
    "device_to_device_gb_per_s",
}
"""What may rightly differ between a text and its beginning."""

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\d+(?:\.\d+)?")


TRIED: Counter[str] = Counter()
"""How many texts were given to each parser."""


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    """Print how many texts were tried in what time; ``pytest -s`` shows it."""
    start = time.perf_counter()
    yield
    print(f"\n{TRIED.total()} texts for {len(TRIED)} kinds in {time.perf_counter() - start:.1f} s")


def answer(kind: str, text: str) -> dict[str, Any] | None:
    """The answer after a round through JSON, None where the text is refused; any other exception fails the test."""
    TRIED[kind] += 1
    refusal = None
    document = None
    try:
        document = parsed(kind, text)
    except ParseError as err:
        refusal = str(err)
    if refusal is not None:
        assert "\n" not in refusal
        assert refusal.startswith("expected ")
        return None
    answer: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return answer


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """All scalars with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def name_of(path: tuple[str | int, ...]) -> str:
    return next((str(step) for step in reversed(path) if isinstance(step, str)), "")


def numbers_in(text: str) -> set[float]:
    numbers = set()
    for word in _NUMBER.findall(text):
        numbers.add(float(int(word, 16)) if word.lower().startswith("0x") else float(word))
        numbers.add(abs(float(int(word, 16)) if word.lower().startswith("0x") else float(word)))
    return numbers


def assert_numbers_are_in(text: str, document: dict[str, Any]) -> None:
    """Every number of the answer stands in the text, but for those that are counted, summed or converted."""
    known = numbers_in(text)
    for path, value in leaves(document):
        if isinstance(value, int | float) and not isinstance(value, bool) and name_of(path) not in DERIVED:
            assert abs(float(value)) in known, (path, value)


def assert_reports_no_more(part: dict[str, Any], whole: dict[str, Any], cut_line: str) -> None:
    """What the beginning of a text answers is what the whole text answers, but for the values of a line that is cut."""
    everything = dict(leaves(whole))
    for path, value in leaves(part):
        if value is None or value == "" or any(step in GROWING for step in path):
            continue
        full = everything.get(path)
        if cut_line and full is not None and str(full).startswith(str(value).removesuffix(".0")):
            continue
        if "correctable" in cut_line.lower() and "ecc" in path:
            continue
        if cut_line and str(value) in cut_line and (isinstance(value, str) or name_of(path).startswith("column_")):
            continue
        assert value == full, (path, value, full)


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_sample_is_read(name: str, kind: str) -> None:
    document = answer(kind, SAMPLES[name])
    assert document is not None
    assert_numbers_are_in(SAMPLES[name], document)


def test_every_kind_has_a_sample() -> None:
    without = set(KINDS) - {kind for _, kind in WHOLE}
    assert not without, f"tests/unit/facts/samples has no KIND.NAME.txt of {sorted(without)}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLES)
def test_other_kinds(name: str, kind: str) -> None:
    """One tool's output is not read as another tool's, but where they share their lines."""
    sample_kind = name.split(".", maxsplit=1)[0]
    document = answer(kind, SAMPLES[name])
    shared = {sample_kind, kind} == {"nvidia-smi-xml", "nvidia-smi-q"}
    if kind != sample_kind and not shared and document is not None:
        assert "error" in document or document == {"events": []}, document


def some(places: range, most: int, seed: str) -> list[int]:
    """Return as many of the places, the same ones in each run."""
    return random.Random(seed).sample(places, min(most, len(places)))  # noqa: S311


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_cut_anywhere(name: str, kind: str) -> None:
    text = SAMPLES[name]
    whole = answer(kind, text)
    assert whole is not None
    for end in some(range(len(text)), CUTS, name):
        part = answer(kind, text[:end])
        if part is not None and "error" not in part:
            assert_reports_no_more(part, whole, cut_line=text[:end].rpartition("\n")[2])


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_head_cut_off(name: str, kind: str) -> None:
    lines = SAMPLES[name].splitlines(keepends=True)
    for start in some(range(1, len(lines)), HEADS, name):
        text = "".join(lines[start:])
        document = answer(kind, text)
        if document is not None:
            assert_numbers_are_in(text, document)


def damaged(text: str, seed: int) -> str:
    """One of: shuffled, duplicated, interleaved or dropped lines, changed bytes, foreign line ends, all upper case."""
    chance = random.Random(seed)  # noqa: S311
    lines = text.splitlines(keepends=True)
    choice = seed % 8
    if choice == 0:
        chance.shuffle(lines)
    elif choice == 1:
        lines = [line for line in lines for _ in range(chance.choice((1, 1, 2, 3)))]
    elif choice == 2:
        lines = [line for pair in itertools.zip_longest(lines, lines, fillvalue="") for line in pair]
    elif choice == 3:
        lines = [line for line in lines if chance.random() > 0.2]
    elif choice == 4:
        data = bytearray(text.encode())
        for _ in range(20):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return decoded(bytes(data))
    elif choice == 5:
        return text.replace("\n", "\r\n")
    elif choice == 6:
        return text.upper()
    else:
        lines = [line.rstrip("\n") + chance.choice(("", " ", "\n", "\n\n", "\0\n")) for line in lines]
    return "".join(lines)


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_damaged(name: str, kind: str) -> None:
    for seed in range(DAMAGES):
        text = damaged(SAMPLES[name], seed)
        document = answer(kind, text)
        if document is not None and seed % 8 in {0, 1, 2, 3, 5}:
            assert_numbers_are_in(text, document)


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_line_ends_of_other_systems(name: str, kind: str) -> None:
    assert answer(kind, SAMPLES[name].replace("\n", "\r\n")) == answer(kind, SAMPLES[name])


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_twice_in_one_text(name: str, kind: str) -> None:
    """Two outputs in one text are not one machine with twice as many GPUs."""
    once = answer(kind, SAMPLES[name])
    twice = answer(kind, SAMPLES[name] + SAMPLES[name])
    assert once is not None
    if twice is not None and kind.startswith("nvidia-smi") and "error" not in twice and "gpus" in once:
        assert len(twice["gpus"]) == len(once["gpus"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        " \t\n\n",
        "\0" * 5000,
        "N/A",
        "{}",
        "[]",
        '{"nvbandwidth": {"testcases": [1]}}',
        '{"DCGM Diagnostic": {"test_categories": [[]]}}',
        '{"lscpu": 5}',
        "<nvidia_smi_log></nvidia_smi_log>",
        "<a><b></a>",
        "[" * 100_000,
        '{"DCGM Diagnostic":' + "[" * 100_000,
        "<a>" * 100_000,
        bytes(range(256)).decode("latin-1") * 20,
        "bash: nvidia-smi: command not found",
        "Architektur: x86_64\nCPU(s): 8",
    ],
)
def test_rubbish(kind: str, text: str) -> None:
    assert answer(kind, text) is None


@settings(max_examples=effort(60, 300), deadline=None)
@given(data=st.binary(max_size=600), kind=st.sampled_from(sorted(KINDS)))
def test_binary_rubbish(data: bytes, kind: str) -> None:
    answer(kind, decoded(data))


@settings(max_examples=effort(80, 500), deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.text(max_size=12)), min_size=1, max_size=6),
)
def test_edited(name: str, edits: list[tuple[float, int, str]]) -> None:
    text = SAMPLES[name]
    for position, length, insert in edits:
        start = int(position * len(text))
        text = text[:start] + insert + text[start + length :]
    answer(name.split(".", maxsplit=1)[0], text)


def seconds(kind: str, text: str) -> float:
    """Return the processor's seconds: what the machine does beside us does not count."""
    start = time.process_time()
    answer(kind, text)
    return time.process_time() - start


def enlarged(name: str) -> list[tuple[str, str]]:
    """Texts that are long in one way each, at the size 1; the test makes them larger."""
    text = SAMPLES[name]
    lines = [line for line in text.splitlines() if line.strip()]
    return [
        ("the text", text),
        ("its first line", f"{lines[0]}\n"),
        ("its last line", f"{lines[-1]}\n"),
        ("a word", "a"),
    ]


@pytest.mark.parametrize(("name", "kind"), WHOLE)
def test_linear_time(name: str, kind: str) -> None:
    """Eight times as much text takes about eight times as long: compared in one run, with room for a busy machine."""
    for label, unit in enlarged(name):
        small = unit * max(1, 30_000 // len(unit))
        large = small * 8
        small_seconds = seconds(kind, small)
        large_seconds = seconds(kind, large)
        limit = max(small_seconds * 8 * 4, 0.25)
        assert large_seconds < limit or seconds(kind, large) < limit, (label, small_seconds, large_seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_one_line_of_ten_megabytes(kind: str) -> None:
    name = next(name for name, sample_kind in WHOLE if sample_kind == kind)
    line = SAMPLES[name].replace("\n", " ")
    text = line * (10_000_000 // len(line))
    assert seconds(kind, text) < 10
