"""GPUs that are known from ``pci.ids`` alone."""

from datetime import date
from pathlib import Path

import pytest

from gpunode.catalog import Catalog, load, pci_ids
from gpunode.catalog.pci_ids import PciGpu, parse
from gpunode.errors import UsageError
from gpunode.stack import GpuGroup, NodePicture, Request, Stack, resolve

LINES = """\
# a few lines of pci.ids 2026.10.24, in their order
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t1db2  GV100GL [not NVIDIA's]
10de  NVIDIA Corporation
\t0fb8  GP108 High Definition Audio Controller
\t119a  GK104M [GeForce GTX 860M]
\t1392  GM107M [GeForce GTX 860M]
\t\t1028 066a  GeForce GPU
\t1af1  GA100 [A100 NVSwitch]
\t1db2  GV100GL [Tesla V100 DGXS 16GB]
\t22d1  GB20B PCI bridge
\t2c09  GB203 [GeForce RTX 5070]
\t2f04  GB205 [GeForce RTX 5070]
\t3000  GR100 [Reserved Dev ID A]
\t3002  GR100
10df  Emulex Corporation
\t2f05  GB205 [not NVIDIA's]
"""
CHIPS = {
    chip: {"architecture": architecture, "compute_capability": capability}
    for chip, architecture, capability in (
        ("gk104", "kepler", "3.0"),
        ("gm107", "maxwell", "5.0"),
        ("gv100", "volta", "7.0"),
        ("gb203", "blackwell", "12.0"),
        ("gb205", "blackwell", "12.0"),
    )
}


def test_gpus_of_nvidia_are_read_and_nothing_else() -> None:
    assert list(parse(LINES.splitlines(keepends=True))) == [
        PciGpu("119a", "gk104", "GeForce GTX 860M"),
        PciGpu("1392", "gm107", "GeForce GTX 860M"),
        PciGpu("1db2", "gv100", "Tesla V100 DGXS 16GB"),
        PciGpu("2c09", "gb203", "GeForce RTX 5070"),
        PciGpu("2f04", "gb205", "GeForce RTX 5070"),
        PciGpu("3002", "gr100", ""),
    ]


def test_one_product_is_one_row_and_one_name_of_two_chips_a_family() -> None:
    rows = pci_ids.rows(parse(LINES.splitlines()), CHIPS, {}, "2026-10-24")
    assert rows["geforce-rtx-5070"]["pci"] == ["10de:2c09", "10de:2f04"]
    assert rows["geforce-rtx-5070"]["aliases"] == ["RTX 5070"]
    assert [rows[f"geforce-gtx-860m-{chip}"]["architecture"] for chip in ("gk104", "gm107")] == ["kepler", "maxwell"]
    assert rows["geforce-gtx-860m-gm107"]["families"] == ["GeForce GTX 860M", "GTX 860M"]
    assert rows["tesla-v100-dgxs-16gb"]["memory_gb"] == "16"
    assert not any("10de:3002" in row["pci"] for row in rows.values())  # its chip is not in CHIPS


def test_a_written_row_keeps_its_ids_and_its_names() -> None:
    written = {"mine": {"name": "GeForce RTX 5070", "pci": "10DE:2c09"}}
    rows = pci_ids.rows(parse(LINES.splitlines()), CHIPS, written, "2026-10-24")
    assert rows["geforce-rtx-5070-10de-2f04"]["pci"] == ["10de:2f04"]
    assert "aliases" not in rows["geforce-rtx-5070-10de-2f04"]


def test_a_hostile_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pci_ids, "MOST_LINES", 10)
    assert len(list(parse(["10de  NVIDIA\n", *["\t1db2  GV100GL [Tesla]\n"] * 50]))) == 10
    long = next(iter(parse(["10de  NVIDIA\n", f"\t1db2  GV100GL [{'x' * 5000}]\n"])))
    assert len(long.name) == pci_ids.LONGEST_NAME


def test_every_listed_gpu_is_found_once_with_its_chip() -> None:
    catalog = load()
    listed = pci_ids.table()
    assert len({gpu.device for gpu in listed}) == len(listed) > 700
    for gpu in listed:
        match = catalog.gpu_by_pci(gpu.device)
        assert match is not None, gpu
        for model in match.gpus:
            assert model.compute_capability == catalog.chips[gpu.chip].compute_capability, gpu
            assert model.architecture == catalog.chips[gpu.chip].architecture, gpu
            assert catalog.gpu(model.id) == model


def test_the_chip_decides_where_nothing_else_is_known() -> None:
    """A V100 of a DGX Station was once decided with the open modules of 595."""
    catalog = load()
    gpu = catalog.find_gpu("10de:1db2").gpu
    assert gpu is not None
    assert (gpu.known_from, gpu.modules, gpu.last_branch) == ("pci.ids", "proprietary", 580)
    node = NodePicture(os="ubuntu-22.04", arch="x86_64", gpus=(GpuGroup(label="V100", models=(gpu.id,)),))
    stack = resolve(Request(), node, catalog, date(2026, 11, 22))
    assert isinstance(stack, Stack)
    assert (stack.driver.branch, stack.module.flavour) == (580, "proprietary")


def test_guesses_are_marked_and_facts_of_the_chip_are_not() -> None:
    for gpu in load().gpus.values():
        if gpu.known_from == "pci.ids":
            assert not gpu.sure("market"), gpu.id
            assert not gpu.sure("form"), gpu.id
            assert gpu.fabric == "none" or not gpu.sure("fabric"), gpu.id
            assert gpu.sure("last_branch"), gpu.id
            assert gpu.sure("compute_capability") == (gpu.architecture != "rubin" and "gb112" not in gpu.id), gpu.id
            assert gpu.min_driver is None


def test_a_described_model_is_found_without_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread() -> list[PciGpu]:
        raise AssertionError("the list was read")

    monkeypatch.setattr(pci_ids, "table", unread)
    catalog = Catalog()
    gpu = catalog.find_gpu("H100 SXM").gpu
    assert gpu is not None
    assert catalog.gpu(gpu.id) == gpu
    assert catalog.gpu_by_pci("10de:2330") is not None
    assert catalog.gpu_by_product_name("NVIDIA H200") is not None
    with pytest.raises(AssertionError, match="was read"):
        catalog.find_gpu("RTX 5090")


def test_an_overlay_changes_a_listed_row_or_takes_its_place(tmp_path: Path) -> None:
    changed = tmp_path / "changed.yml"
    changed.write_text("gpus: {geforce-rtx-5090: {memory_gb: 32}}\n", encoding="utf-8")
    gpu = load([changed]).find_gpu("RTX 5090").gpu
    assert gpu is not None
    assert (gpu.memory_gb, gpu.pci) == (32, ("10de:2b85",))
    replacing = tmp_path / "own.yml"
    replacing.write_text(
        "gpus: {ours: {name: Our 5090, pci: [10de:2b85], architecture: blackwell, compute_capability: 12.0,"
        " min_driver: 570.86.16, date: 2026-11-01}}\n",
        encoding="utf-8",
    )
    match = load([replacing]).gpu_by_pci("10de:2b85")
    assert match is not None
    assert [model.id for model in match.gpus] == ["ours"]


@pytest.mark.parametrize("row", ["[]", "text", "null", "{architecture: null}", "{compute_capability: [1]}"])
def test_a_broken_chip_is_a_line_of_the_linter(row: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yml"
    path.write_text(f"chips: {{gk104: {row}}}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"site\.yml"):
        load([path])


def test_nothing_is_guessed_for_an_id_that_nobody_lists() -> None:
    assert load().gpu_by_pci("10de:fffe") is None
    with pytest.raises(UsageError, match="10de:fffe"):
        load().find_gpu("10de:fffe")
