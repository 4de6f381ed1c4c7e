"""Recorded logs of bandwidth programs against what their machines should reach: figures.yml has each verdict.

Healthy machines pass, known slow or faulty ones do not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from captured import FOLDER, each, in_folder

from gpunode.catalog import Catalog
from gpunode.checks.measurements import GROSS
from gpunode.expectations import Assessment, Figure, MarkRules, Shape, assess, of_platform, tools
from gpunode.expectations.limits import Where
from gpunode.facts.models.outputs import BandwidthTest, NcclTests, Nvbandwidth, P2pBandwidth
from gpunode.facts.parsers.kinds import KINDS, decoded

HERE = Path(__file__).resolve().parent
CATALOG = Catalog()
LOGS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "figures.yml").read_text(encoding="utf-8"))
KIND = {"nccl": "nccl-tests", "nvbandwidth": "nvbandwidth", "bandwidth": "bandwidth-test"}
UNKNOWN_MACHINE = {
    "nccl/aws-batch-tagged-output-noheader.log",
    "nccl/azure-gb300-72gpu-allreduce-truncated-doc.log",
    "nccl/deepops-roce-k8s-old-error-col.log",
    "nccl/dstack-nebius-2node-16gpu-nohash-newcols.log",
    "nvbandwidth/dcgm-verboseFullOutput.json",
    "nvbandwidth/dcgm-verboseFullOutputWithErrors.json",
}
"""Logs of an unknown machine: neither text nor source names it."""
ORDER = ("bad", "low", "good", "unknown")
RULES = MarkRules(gross=GROSS.default, gross_origin=GROSS.name)


def shape_of(log: dict[str, Any]) -> Shape:
    if "platform" in log:
        return of_platform(CATALOG, CATALOG.platforms[log["platform"]])
    match = CATALOG.gpu_by_pci(log["gpu"])
    assert match is not None
    return Shape(match.gpu, log["count"])


def of_p2p_bandwidth(answer: P2pBandwidth) -> Iterator[Figure]:
    """One figure for each ordered pair of GPUs, with peer access where the GPUs have it; a copy is of 160 MB."""
    matrix = answer.unidirectional_gb_per_s or answer.unidirectional_no_p2p_gb_per_s or ()
    for first, row in enumerate(matrix):
        for second, cell in enumerate(row):
            if first != second and cell is not None:
                yield Figure("peer_to_peer", cell, Where(first, second), 160_000_000)


def of_bandwidth_test(answer: BandwidthTest) -> Iterator[Figure | tools.ToolTrouble]:
    """The figures of the largest size."""
    if answer.passed is False:
        yield tools.ToolTrouble("bad", "bandwidthTest reports FAIL")
    for direction in ("host_to_device", "device_to_host", "device_to_device"):
        if rows := [row for row in answer.sizes if row.direction == direction]:
            largest = max(rows, key=lambda row: row.size_bytes)
            metric = "on_device" if direction == "device_to_device" else direction
            yield Figure(metric, largest.gb_per_s, Where(), largest.size_bytes)


def judged(name: str, log: dict[str, Any]) -> list[Assessment | tools.ToolTrouble]:
    kind = "p2p-bandwidth" if "p2p" in name else KIND[name.partition("/")[0]]
    answer = KINDS[kind](decoded((FOLDER / name).read_bytes()))
    figures: Iterator[Figure | tools.ToolTrouble]
    match answer:
        case NcclTests():
            figures = tools.of_nccl_tests(answer, log.get("collective"), log.get("nodes"))
        case Nvbandwidth():
            figures = tools.of_nvbandwidth(answer)
        case BandwidthTest():
            figures = of_bandwidth_test(answer)
        case P2pBandwidth():
            figures = of_p2p_bandwidth(answer)
        case _:
            pytest.fail(f"no figures of {kind}")
    shape = shape_of(log)
    return [assess(figure, shape, CATALOG, RULES) if isinstance(figure, Figure) else figure for figure in figures]


@pytest.mark.parametrize("name", each(LOGS))
def test_the_verdict_on_a_recorded_log(name: str) -> None:
    assessments = judged(name, LOGS[name])
    assert assessments
    print([str(assessment) for assessment in assessments][:8])
    assert min((assessment.grade for assessment in assessments), key=ORDER.index) == LOGS[name]["verdict"]
    assert ("why" in LOGS[name]) == (LOGS[name]["verdict"] != "good")


@pytest.mark.parametrize("name", each(name for name in LOGS if LOGS[name]["verdict"] == "good"))
def test_a_good_log_has_figures_and_each_has_an_origin(name: str) -> None:
    assessments = judged(name, LOGS[name])
    assert all(
        isinstance(assessment, Assessment) and assessment.origin and assessment.grade == "good"
        for assessment in assessments
    )


@pytest.mark.parametrize("name", each(name for name in LOGS if LOGS[name]["verdict"] == "good"))
def test_at_a_third_of_its_speed_the_same_machine_is_not_good(name: str) -> None:
    shape = shape_of(LOGS[name])
    for assessment in judged(name, LOGS[name]):
        assert isinstance(assessment, Assessment)
        third = Figure(
            assessment.figure.metric,
            assessment.figure.value / 3,
            assessment.figure.where,
            assessment.figure.message_bytes,
        )
        sure = assessment.limit is not None and assessment.limit.sure
        assert assess(third, shape, CATALOG, RULES).grade in (("bad",) if sure else ("bad", "low"))


def test_every_log_of_the_manifest_is_judged_or_its_machine_is_unknown() -> None:
    assert set(in_folder("nccl", "nvbandwidth", "bandwidth")) == set(LOGS) | UNKNOWN_MACHINE
    assert not set(LOGS) & UNKNOWN_MACHINE
