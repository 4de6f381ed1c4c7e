"""No verdict fails on a figure of the catalog that is marked unsure.

Every mutant that fails by the catalog is judged again, with all rows of the catalog marked unsure by an overlay: once
the whole rows, once each of their fields.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mutants_driver
import mutants_gpu
import mutants_host
import mutants_links
import mutants_measured
import mutants_workload
import pytest
from bundles import Mutant, apply

from gpunode.catalog import Catalog, Row, load
from gpunode.catalog.read import read
from gpunode.checks import Finding, Status, gpus, nvlink, registry
from gpunode.facts import facts_from_bundle
from gpunode.facts.models.smi import NvlinkLink, SmiGpu
from gpunode.probe.bundle import Bundle

TABLES = (mutants_driver, mutants_gpu, mutants_links, mutants_host, mutants_workload, mutants_measured)
FAILING = [mutant for table in TABLES for mutant in table.MUTANTS if mutant.becomes is Status.FAIL]
SECTIONS = (
    *("architectures", "gpus", "platforms", "xids", "cuda_majors", "forward_compat", "branches", "cudnn", "nccl"),
    *("expectations", "bands"),
)
OBSERVED = {
    "container.cuda: the image's is above the driver's, and it has no PyTorch": "nvidia-smi reports the driver's CUDA",
    "container.cuda: PyTorch's is above the driver's, and so it finds no GPU": "nvidia-smi reports the driver's CUDA",
    "container.forward-compat: not with this GPU": "CUDA itself refuses",
    "container.toolkit: one of four packages of another version": "the packages differ from each other",
    "container.toolkit: one of four packages half installed": "dpkg reports it",
    "fabric.manager: not active": "NVSwitches are on the bus",
    "fabric.manager: not installed": "NVSwitches are on the bus",
}
"""Mutants that fail by what the node reports, with the catalog only named beside it; and on what."""
NO_ROWS = ("catalog (origins.yml)", "catalog (sources.yml")
"""Sources without rows that could be unsure: packages of a publisher, figures of a document."""


def failures(mutant: Mutant) -> list[Finding]:
    """What the mutant's check fails on by the catalog."""
    document = apply(mutant.base(), mutant.edits)
    facts = facts_from_bundle(Bundle.from_json(json.dumps(document), "a test's bundle"))
    return [
        finding
        for finding in registry[mutant.check].findings(facts, mutant.expect)
        if finding.status is Status.FAIL
        and (finding.source or "").startswith("catalog")
        and not (finding.source or "").startswith(NO_ROWS)
    ]


@cache
def by_the_catalog() -> tuple[Mutant, ...]:
    return tuple(mutant for mutant in FAILING if failures(mutant))


def overlay(kind: str) -> dict[str, dict[str, dict[str, object]]]:
    """Rows that mark what the catalog has as unsure: the whole row, or each of its fields."""

    def mark(row: Row) -> dict[str, object]:
        if kind == "row":
            return {"confidence": "unsure"}
        return {"unsure": dict.fromkeys(sorted(set(type(row).model_fields) - set(Row.model_fields)), "a test sets it")}

    return {name: {key: mark(row) for key, row in load().rows(name).items()} for name in SECTIONS}


@pytest.fixture(params=["row", "fields"])
def doubtful(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The catalog in doubt about all that it states."""
    by_the_catalog()
    path = tmp_path / "unsure.yml"
    path.write_text(json.dumps(overlay(request.param)), encoding="utf-8")
    doubted = Catalog([read(path)])
    monkeypatch.setattr("gpunode.catalog._load", lambda stamped: doubted)  # noqa: ARG005
    for cached in (gpus.match_of, gpus.match_of_name):
        cached.cache_clear()
    yield
    for cached in (gpus.match_of, gpus.match_of_name):
        cached.cache_clear()


def test_the_checks_that_compare_with_the_catalog_are_known() -> None:
    assert {mutant.check for mutant in by_the_catalog()} == {
        "container.cuda",
        "container.forward-compat",
        "container.toolkit",
        "driver.expected",
        "fabric.manager",
        "framework.cudnn-version",
        "framework.nccl-version",
        "gpu.memory-size",
        "gpu.xid",
        "link.topology",
        "nvlink.count",
        "nvlink.speed",
        "performance.clocks",
        "performance.collectives",
        "performance.host-copy",
        "performance.memory",
        "performance.nccl-tests",
        "performance.nvbandwidth",
        "performance.peer-copy",
    }


@pytest.mark.usefixtures("doubtful")
def test_nothing_fails_on_an_unsure_row() -> None:
    assert {f"{mutant.check}: {mutant.name}" for mutant in by_the_catalog() if failures(mutant)} == set(OBSERVED)


def test_a_count_of_nvlinks_that_is_not_sure_warns() -> None:
    """H100 NVL: its sources contradict each other on the number of links."""
    (row,) = load().find_gpu("h100-nvl").gpus
    assert not row.sure("nvlink")
    reported = SmiGpu(index=0, pci_bus_id="0000:1a:00.0", pci_device_id=row.pci[0], minor_number=0)
    gpu = gpus.SeenGpu(reported, None, gpus.match_of(row.pci[0], None))
    link = NvlinkLink(link=0, active=True, speed_gb_per_s=25.0)
    assert nvlink._count_of(nvlink.Linked(gpu, (link,), all_inactive=False)).status is Status.WARN
