"""Limits by the machine's shape, marks by the measurement, the verdict on a figure; figures of programs' output."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpunode.catalog import Catalog
from gpunode.expectations import (
    METRICS,
    Figure,
    MarkRules,
    Shape,
    Where,
    assess,
    limit_of,
    marks_of,
    of_platform,
    tools,
)
from gpunode.expectations.limits import COLLECTIVES, unit_of
from gpunode.facts.models.outputs import NcclTests, Nvbandwidth
from gpunode.facts.parsers.kinds import KINDS

CATALOG = Catalog()
GIB = 2**30
GROSS = MarkRules(gross=0.4, gross_origin="policy")


def shape(platform: str) -> Shape:
    return of_platform(CATALOG, CATALOG.platforms[platform])


def model(gpu: str, count: int = 2, **fields: object) -> Shape:
    return replace(Shape(CATALOG.gpus[gpu], count), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("platform", "metric", "where", "value"),
    [
        # Lanes x rate x 128/130 x 256/280: 63.0 GB/s of Gen5 x16 carry 57.6.
        ("hgx-h100-8", "host_to_device", Where(), 57.6),
        ("hgx-a100-8", "device_to_host", Where(), 28.8),
        ("t4-1", "host_to_device", Where(), 14.4),
        ("hgx-h100-8", "peer_to_peer", Where(0, 5), 450),
        ("hgx-h100-4", "peer_to_peer", Where(0, 3), 150),
        ("l40s-4", "peer_to_peer", Where(0, 1), 28.8),
        ("hgx-b200-8", "all_reduce_busbw", Where(), 900),
        ("gb200-nvl72-tray-4", "all_reduce_busbw", Where(), 900),
        ("hgx-a100-4", "all_reduce_busbw", Where(), 300),
        ("t4-4", "all_gather_busbw", Where(), 14.4),
        ("dgx-h100-8", "all_reduce_busbw", Where(ranks=16, nodes=2), 400),
        ("hgx-h200-8", "memory_triad", Where(), 4800),
        ("hgx-a100-8", "gemm_bf16", Where(clock_mhz=1410), 312),
        ("hgx-a100-8", "gemm_tf32", Where(clock_mhz=705), 78),
        ("hgx-h100-8", "gemm_fp8", Where(clock_mhz=1830), 1978),
        ("hgx-h100-8", "gemm_bf16", Where(clock_mhz=1980), 1070),
    ],
)
def test_the_limit_follows_from_the_machine(platform: str, metric: str, where: Where, value: float) -> None:
    limit = limit_of(metric, shape(platform), where)
    assert limit is not None
    assert limit.value == pytest.approx(value, rel=0.002)


@pytest.mark.parametrize(
    ("platform", "metric", "where"),
    [
        ("gh200-1", "host_to_device", Where()),  # its processor is linked by C2C, not by the PCIe that it shows
        ("t4-1", "gemm_bf16", Where(clock_mhz=1590)),  # no such tensor cores
        ("hgx-a100-8", "gemm_fp8", Where(clock_mhz=1410)),
        ("hgx-a100-8", "gemm_fp64", Where(clock_mhz=1410)),  # the catalog has no peak for it
        ("t4-1", "all_reduce_busbw", Where()),  # a single GPU
        ("hgx-h100-8", "all_reduce_busbw", Where(ranks=16, nodes=2)),  # a board has no network of its own
        ("a100-pcie-4", "all_reduce_busbw", Where()),  # whether bridges join the cards is not in the catalog
        ("aws-g5-xlarge", "host_to_device", Where()),  # nothing but its name is known
    ],
)
def test_no_limit_is_guessed(platform: str, metric: str, where: Where) -> None:
    assert limit_of(metric, shape(platform), where) is None


def test_the_links_of_the_node_decide_what_a_pair_and_a_ring_carry() -> None:
    bridged = model("a100-pcie-80gb", 4, links={(0, 1): 12, (2, 3): 12, (0, 2): 0, (0, 3): 0, (1, 2): 0, (1, 3): 0})
    pair, apart = limit_of("peer_to_peer", bridged, Where(1, 0)), limit_of("peer_to_peer", bridged, Where(1, 2))
    ring = limit_of("all_reduce_busbw", bridged, Where())
    assert pair is not None
    assert apart is not None
    assert ring is not None
    assert (pair.path, apart.path, ring.path) == ("nvlink", "pcie", "pcie")
    assert (round(pair.value), round(apart.value), round(ring.value)) == (300, 29, 29)
    of_two = limit_of("all_reduce_busbw", replace(bridged, count=2, links={(0, 1): 12}), Where())
    assert of_two is not None
    assert (of_two.path, of_two.value) == ("nvlink", 300)


CUBE = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1, (2, 6): 2, (3, 7): 2}
CUBE |= {(4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1}


def test_a_node_with_unknown_gpus_has_no_limit_and_breaks_nothing() -> None:
    unknown = Shape(None, 0, links={})
    for metric in METRICS:
        where = Where(0, 1 if metric == "peer_to_peer" else None, ranks=8)
        assessment = assess(Figure(metric, 1.0, where, 16 * GIB), unknown, CATALOG, GROSS)
        assert (assessment.grade, assessment.limit) == ("unknown", None), metric


def test_a_cube_of_eight_carries_a_ring_and_islands_do_not() -> None:
    pairs = [(first, second) for first in range(8) for second in range(first + 1, 8)]
    cube = model("v100-sxm2-32gb", 8, links={pair: CUBE.get(pair, 0) for pair in pairs})
    ring = limit_of("all_reduce_busbw", cube, Where())
    assert ring is not None
    assert (ring.path, ring.value) == ("nvlink", 150)
    islands = model("h200-nvl", 8, links={pair: 6 * (pair[0] // 4 == pair[1] // 4) for pair in pairs})
    apart = limit_of("all_reduce_busbw", islands, Where())
    assert apart is not None
    assert apart.path == "pcie"


def test_the_slowest_pcie_link_limits_a_ring() -> None:
    cards = model("l40s", 4, links=dict.fromkeys([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 0))
    narrow = replace(cards, pcie={2: (4, 8)})
    whole, half = limit_of("all_reduce_busbw", cards, Where()), limit_of("all_reduce_busbw", narrow, Where())
    assert whole is not None
    assert half is not None
    assert half.value == pytest.approx(whole.value / 2)
    limit = limit_of("host_to_device", narrow, Where(2))
    assert limit is not None
    assert limit.what.startswith("PCIe 4.0 x8")


@pytest.mark.parametrize(
    ("value", "size", "grade", "row"),
    [
        (465, 16 * GIB, "good", "all-reduce-8xh100-sxm"),
        (455, 16 * GIB, "bad", "all-reduce-8xh100-sxm"),
        # Half of the size of the pass mark reaches nearly as much, less of it is worth a warning.
        (455, 8 * GIB, "good", "all-reduce-8xh100-sxm"),
        (449, 8 * GIB, "bad", "all-reduce-8xh100-sxm"),
        (449, 2 * GIB, "low", "all-reduce-8xh100-sxm"),
        # Of smaller messages the mark has no figure; the catalog's general one for eight GPUs has no size.
        (120, GIB // 2, "good", "all-reduce-any-8"),
        (90, GIB // 2, "bad", "all-reduce-any-8"),
    ],
)
def test_the_message_size_decides_which_mark_holds(value: float, size: int, grade: str, row: str) -> None:
    assessment = assess(Figure("all_reduce_busbw", value, Where(), size), shape("hgx-h100-8"), CATALOG, GROSS)
    assert (assessment.grade, assessment.mark is not None and row in assessment.mark.origin) == (grade, True)


def test_a_ring_is_not_held_to_the_figure_of_the_switch() -> None:
    eight = shape("hgx-h200-8")
    ring = Figure("all_reduce_busbw", 367, Where(), 16 * GIB, algorithm="ring")
    assert assess(replace(ring, algorithm=None), eight, CATALOG, GROSS).grade == "bad"
    assessment = assess(ring, eight, CATALOG, GROSS)
    assert (assessment.grade, "all-reduce-8xh200-sxm-ring-measured" in (assessment.origin or "")) == ("good", True)


def test_other_numbers_of_gpus_and_other_collectives_have_no_pass_mark_of_eight() -> None:
    eight = shape("hgx-h100-8")
    for figure in (
        Figure("all_reduce_busbw", 330, Where(ranks=4), 16 * GIB),
        Figure("all_gather_busbw", 330, Where(), 16 * GIB),
    ):
        assessment = assess(figure, eight, CATALOG, GROSS)
        assert (assessment.grade, "busbw-nvswitch" in (assessment.origin or "")) == ("good", True)
        assert assess(replace(figure, value=300), eight, CATALOG, GROSS).grade == "low"
        assert assess(replace(figure, value=170), eight, CATALOG, GROSS).grade == "bad"


def test_what_is_unsure_warns_alone() -> None:
    nvl = shape("azure-nc80adis-h100-v5")
    joined = replace(nvl, links={(0, 1): 18})
    assessment = assess(Figure("peer_to_peer", 100, Where(0, 1), GIB), joined, CATALOG, GROSS)
    assert assessment.grade == "low"
    assert assessment.mark is not None
    assert assessment.mark.value == pytest.approx(382.5)
    unclocked = assess(Figure("gemm_bf16", 90), shape("l40s-4"), CATALOG, GROSS)
    assert (unclocked.grade, unclocked.limit is not None and unclocked.limit.sure) == ("low", False)


def test_a_gpu_at_a_third_of_its_speed_fails_without_a_pass_mark() -> None:
    cards = shape("l40s-4")
    at_clock = Where(clock_mhz=2520)
    assert assess(Figure("gemm_bf16", 300, at_clock), cards, CATALOG, GROSS).grade == "good"
    assert assess(Figure("gemm_bf16", 120, at_clock), cards, CATALOG, GROSS).grade == "bad"
    assert assess(Figure("gemm_bf16", 120, at_clock), cards, CATALOG, MarkRules()).grade == "low"
    # Held back by its power limit it is as fast as its clock allows.
    assert assess(Figure("gemm_bf16", 120, Where(clock_mhz=1000)), cards, CATALOG, GROSS).grade == "good"


def test_the_site_replaces_the_catalog_and_the_baseline_adds_to_it() -> None:
    figure, eight = Figure("host_to_device", 40, Where(), GIB), shape("hgx-h100-8")
    assert assess(figure, eight, CATALOG, GROSS).grade == "bad"
    site = replace(GROSS, site={"host_to_device": 35.0}, site_origin="site.yml")
    assessment = assess(figure, eight, CATALOG, site)
    assert (assessment.grade, assessment.origin) == ("good", "site.yml")
    for baseline, grade in ((41.0, "good"), (43.0, "low"), (46.0, "bad")):
        later = assess(figure, eight, CATALOG, replace(site, baseline=baseline, baseline_origin="last run"))
        assert (later.grade, later.origin) == (grade, "site.yml" if grade == "good" and baseline < 38 else "last run")


def test_no_mark_is_above_what_the_machine_can_do() -> None:
    """An H100 in a slot of Gen4 is held to the share of that slot, not to the figure of Gen5."""
    slot = replace(shape("hgx-h100-8"), pcie={0: (4, 16)})
    assert assess(Figure("host_to_device", 26, Where(), GIB), slot, CATALOG, GROSS).grade == "good"
    assessment = assess(Figure("host_to_device", 20, Where(), GIB), slot, CATALOG, GROSS)
    assert (assessment.grade, "copy-pcie" in (assessment.origin or "")) == ("low", True)


def test_without_any_mark_the_figure_is_of_unknown_worth() -> None:
    assessment = assess(Figure("gemm_fp64", 30.0), shape("hgx-h100-8"), CATALOG, GROSS)
    assert (assessment.grade, assessment.limit, assessment.mark, assessment.ratio) == ("unknown", None, None, None)
    assert str(assessment) == "30 TFLOPS"


def test_a_verdict_in_words() -> None:
    assessment = assess(Figure("host_to_device", 41.2, Where(), GIB), shape("hgx-h100-8"), CATALOG, GROSS)
    assert str(assessment) == "41.2 GB/s, 72% of 57.6 (PCIe 5.0 x16 without packet headers), expected at least 48"


def test_every_row_of_the_catalog_is_a_mark_of_some_figure() -> None:
    rows = {kind.row for kind in METRICS.values()}
    assert {row.metric for row in CATALOG.expectations.values()} <= rows
    groups = {kind.group for kind in METRICS.values()}
    assert {band.metric for band in CATALOG.bands.values()} == groups - {
        "storage",
        "network",
    }  # of a directory no limit is known
    for row in CATALOG.expectations.values():
        assert row.unit == unit_of(next(name for name, kind in METRICS.items() if kind.row == row.metric))
    # Of one node, and over several.
    assert 2 * len(COLLECTIVES) == sum(kind.group == "busbw" for kind in METRICS.values())


@pytest.mark.parametrize("name", Catalog().platforms)
def test_no_mark_of_a_platform_is_above_its_limit(name: str) -> None:
    """A mark that no healthy machine can reach would fail all of them; NVLS may exceed what a ring carries."""
    shape = of_platform(CATALOG, CATALOG.platforms[name])
    for metric in METRICS:
        where = Where(0, 1) if metric == "peer_to_peer" else Where()
        limit = limit_of(metric, shape, where)
        marks = marks_of(Figure(metric, 0.0, where, 2**34), shape, CATALOG, MarkRules(gross=0.4))
        if limit is None or not limit.sure:
            continue
        allowed = 1.1 if metric.endswith("_busbw") else 1.0
        assert [mark for mark in marks if mark.fails and mark.value > limit.value * allowed] == [], metric


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
