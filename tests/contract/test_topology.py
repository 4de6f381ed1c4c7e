"""Parts and links of a node, as reports carry them for drawings."""

import json
from collections import Counter
from collections.abc import Callable

import pytest
from bundles import Document, guest, hgx, hgx_4, hgx_b200, hgx_measured, pcie_4, without_gpu

from gpunode.checks import Identity, described
from gpunode.facts import facts_from_bundle
from gpunode.judging.report import CompactReports, NodeReport, judged
from gpunode.probe.bundle import Bundle


def identity(document: Document) -> Identity:
    return described(facts_from_bundle(Bundle.model_validate_json(json.dumps(document))))


@pytest.mark.parametrize(
    ("document", "kinds", "nvlinks"),
    [
        (hgx, {"gpu": 8, "nvswitch": 4, "nic": 8}, 18),
        (hgx_b200, {"gpu": 8, "nic": 12}, 18),
        (hgx_4, {"gpu": 4, "nic": 4}, 18),
        (pcie_4, {"gpu": 4}, 0),
        (guest, {"gpu": 1}, 0),
        (without_gpu, {}, 0),
    ],
)
def test_every_part_is_there_with_its_path(
    document: Callable[[], Document], kinds: dict[str, int], nvlinks: int
) -> None:
    layout = identity(document()).layout
    assert layout is not None
    assert Counter(part.kind for part in layout.parts) == kinds
    bridges = {bridge.slot for bridge in layout.bridges}
    for part in layout.parts:
        assert set(part.bridges) <= bridges
        if part.kind == "gpu":
            assert [link.state for link in part.nvlinks] == ["active"] * nvlinks
    assert all(len(row) == len(layout.labels) for row in layout.connections)
    assert sum(label.startswith("gpu") for label in layout.labels) == kinds.get("gpu", 0)


def test_the_speed_of_an_idle_gpu_does_not_make_equal_nodes_different() -> None:
    document = pcie_4()
    before = identity(document).layout
    link = "/sys/bus/pci/devices/0000:b8:00.0/current_link_speed"
    assert document["files"][link] != "2.5 GT/s PCIe"
    document["files"][link] = "2.5 GT/s PCIe"
    assert identity(document).layout == before
    document["files"]["/sys/bus/pci/devices/0000:b8:00.0/current_link_width"] = "8"
    assert identity(document).layout != before


def test_measured_matrices_are_kept_by_gpu_and_simulated_ones_are_not() -> None:
    assert identity(hgx()).matrices == ()
    matrices = {matrix.title: matrix for matrix in identity(hgx_measured()).matrices}
    assert {matrix.origin for matrix in matrices.values()} == {"copy.peer", "tools.nvbandwidth"}
    for matrix in matrices.values():
        assert len(matrix.labels) == len(matrix.rows) == 8
        assert all(
            (cell is None) is (row == column)
            for row, cells in enumerate(matrix.rows)
            for column, cell in enumerate(cells)
        )
    assert matrices["GPU to GPU, one direction"].labels[:2] == ("gpu0", "gpu1")
    simulated = hgx_measured() | {"simulated": True}
    assert identity(simulated).matrices == ()


def test_a_report_keeps_them_and_equal_nodes_share_one() -> None:
    compact = CompactReports(findings=True)
    nodes = [compact.compact(judged(host, identity(hgx()), (), 1.0)) for host in ("a", "b")]
    assert nodes[0].layout is nodes[1].layout is not None
    text = nodes[0].model_dump_json(by_alias=True)
    assert NodeReport.model_validate_json(text) == nodes[0]
