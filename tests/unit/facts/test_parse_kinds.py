"""All kinds of output: answers to the samples that we wrote (samples/expected.yml); the time of parsers and its end."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from expected import changed, wrong

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import KINDS, decoded, parsed
from gpunode.facts.parsers.values import MOST_GPUS

HERE = Path(__file__).resolve().parent
SAMPLES = {path.stem: path for path in sorted((HERE / "samples").glob("*.txt"))}
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "samples" / "expected.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_value_is_read_and_another_is_noticed(name: str) -> None:
    answer = parsed(name.partition(".")[0], decoded(SAMPLES[name].read_bytes()))
    assert EXPECTED[name]
    assert wrong(answer, EXPECTED[name]) == []
    for path, value in EXPECTED[name].items():
        assert len(wrong(answer, {path: changed(value)})) == 1, path


def test_each_kind_has_three_samples_and_each_sample_is_judged() -> None:
    count = Counter(name.partition(".")[0] for name in SAMPLES)
    assert {kind: count[kind] for kind in KINDS if count[kind] < 3} == {}
    assert set(count) == set(KINDS)
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_parse_*.py"))
    assert [name for name in SAMPLES if name not in EXPECTED and name not in tests] == []
    assert set(EXPECTED) <= set(SAMPLES)


SHAPES: dict[str, tuple[str, Callable[[int], str]]] = {
    "lscpu, blanks in a value": ("lscpu", lambda n: f"Architecture: x{' ' * n}x\nCPU(s): 1\n"),
    "lscpu, lines of blanks": ("lscpu", lambda n: f"Architecture: x\n{' ' * n}x\nCPU(s): 1\n"),
    "numactl, a line of blanks": ("numactl", lambda n: f"available: 1 nodes (0)\n{' ' * n}x\n"),
    "nvbandwidth, a line of blanks": ("nvbandwidth", lambda n: f"Running a_b.\n{' ' * n}\n"),
    "bandwidth-test, blanks in a name": ("bandwidth-test", lambda n: f" Device 0: T{' ' * n}4\n"),
}


def seconds(kind: str, text: str) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        with suppress(ParseError):
            parsed(kind, text)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_text_takes_twice_the_time(shape: str) -> None:
    kind, text = SHAPES[shape]
    small, large = seconds(kind, text(7_000)), seconds(kind, text(14_000))
    assert large < max(3 * small, 0.05), (small, large)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("nvidia-smi-xml", "<nvidia_smi_log>" + "<gpu></gpu>" * 100_000 + "</nvidia_smi_log>"),
        ("nvidia-smi-xml", "<nvidia_smi_log><gpu>" + "<a/>" * 300_000 + "</gpu></nvidia_smi_log>"),
        ("nvidia-smi-list", "".join(f"GPU {n}: X (UUID: GPU-{n})\n" for n in range(9999))),
        (
            "nvidia-smi-q",
            "==============NVSMI LOG==============\n" + "".join(f"GPU 0000{n:04X}:00:00.0\n" for n in range(9999)),
        ),
    ],
)
def test_a_listing_of_more_gpus_than_a_node_has_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ParseError, match=f"more than {MOST_GPUS} GPUs"):
        parsed(kind, text)
