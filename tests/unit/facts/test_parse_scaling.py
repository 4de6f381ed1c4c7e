"""Twice the text takes about twice the time, in the shapes that once took four times; and listings end somewhere."""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import parsed
from gpunode.facts.parsers.values import MOST_GPUS

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
