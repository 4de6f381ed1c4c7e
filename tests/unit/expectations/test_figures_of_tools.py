"""What the programs' output reports of a machine: one figure for each measurement, and each fault by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunode.expectations import Figure, Shape, tools
from gpunode.expectations.limits import Where
from gpunode.facts.models.outputs import NcclTests, Nvbandwidth
from gpunode.facts.parsers.kinds import KINDS

SAMPLES = Path(__file__).resolve().parents[1] / "facts" / "samples"


def figures(sample: str, *edits: tuple[str, str], **log: Any) -> Iterator[Figure | tools.ToolTrouble]:
    """The figures of a sample, after its text was edited."""
    text = (SAMPLES / f"{sample}.txt").read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    answer = KINDS[sample.partition(".")[0]](text)
    match answer:
        case NcclTests():
            return tools.of_nccl_tests(answer, **log)
        case Nvbandwidth():
            return tools.of_nvbandwidth(answer, **log)
    pytest.fail(f"no figures of {type(answer).__name__}")


CONCLUDED = "Collective test concluded: all_reduce_perf"
BARE, TAGGED = "nccl-tests.bare", "nccl-tests.tagged"
RANK_1 = "[1,0]<stdout>:#   Rank  1 Pid     73 on worker-b device  0 [0x10] A100-SXM4-80GB\n"


@pytest.mark.parametrize(
    ("sample", "edits", "log", "expected"),
    [
        (BARE, (), {}, [Figure("all_reduce_busbw", 42.43, Where(ranks=None, nodes=1), 2097152)]),
        (BARE, (), {"nodes": 4}, [Figure("all_reduce_busbw", 42.43, Where(ranks=None, nodes=4), 2097152)]),
        (BARE, (("23.55       0", "23.55       3"),), {}, ["bad: all_reduce: 3 values wrong"]),
        (BARE, (("values : 0 OK", "values : 2 FAILED"),), {}, ["bad: all_reduce: 2 values wrong"]),
        (BARE, ((CONCLUDED, ""),), {}, ["unknown: the log does not name the collective"]),
        (
            BARE,
            (("all_reduce_perf", "hypercube_perf"),),
            {},
            ["unknown: no expected value for the collective hypercube"],
        ),
        (BARE, (("32.785", "32.785 FAILED"),), {}, ["bad: all_reduce failed"]),
        (TAGGED, (), {"collective": "alltoall"}, [Figure("all_to_all_busbw", 0.08, Where(ranks=2, nodes=2), 16)]),
        (TAGGED, ((RANK_1, ""),), {}, ["unknown: only one GPU took part: its bandwidth is not that of a collective"]),
        (
            "nccl-tests.old",
            (),
            {},
            [
                Figure("all_to_all_busbw", 0.1, Where(ranks=2, nodes=1), 32),
                "bad: all_gather did not finish: box: Test NCCL failure common.cu:891 'unhandled cuda error'",
            ],
        ),
        (
            "nvbandwidth.json",
            (),
            {"message_bytes": 7},
            [Figure("host_to_device", 55.12, Where(0), 7), "bad: host_to_device_memcpy_sm ended with error"],
        ),
        ("nvbandwidth.waived", (), {"message_bytes": 7}, [Figure("host_to_device", 13.57, Where(0), 7)]),
        (
            "nvbandwidth.text",
            (),
            {"message_bytes": 7},
            [
                Figure("host_to_device", 24.97, Where(0), 7),
                Figure("host_to_device", 25.03, Where(1), 7),
                Figure("peer_to_peer", 17.25, Where(0, 1), 7),
                Figure("peer_to_peer", 17.5, Where(1, 0), 7),
            ],
        ),
    ],
)
def test_each_measurement_is_a_figure_and_each_fault_is_named(
    sample: str, edits: tuple[tuple[str, str], ...], log: dict[str, Any], expected: list[Figure | str]
) -> None:
    readings = [
        reading if isinstance(reading, Figure) else f"{reading.grade}: {reading.message}"
        for reading in figures(sample, *edits, **log)
    ]
    assert readings == expected


def test_without_a_description_of_its_links_a_machine_has_unknown_ones() -> None:
    assert Shape(None, 2).links_between(0, 1) is None
