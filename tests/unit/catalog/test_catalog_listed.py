"""The catalog has for each GPU and branch which releases list it, as the READMEs of NVIDIA's open modules do."""

from collections.abc import Mapping

import pytest
from evidence import boards
from packaging.version import Version

from gpunode.catalog import load, open_modules
from gpunode.catalog.driver_rules import first_listed, listed_late, unread

CATALOG = load()
BOARDS = boards()
NOT_A_TAG = "535.309.01"
"""Read from the driver's own README in Debian's package nvidia-driver; beside the tags' it lists CMP cards."""


def of_tags(firsts: Mapping[int, str | None]) -> dict[int, str | None]:
    return {branch: None if release == NOT_A_TAG else release for branch, release in firsts.items()}


def test_each_board_is_listed_from_the_release_of_the_evidence() -> None:
    assert len(BOARDS) > 800
    branches = {branch for firsts in BOARDS.values() for branch in firsts}
    models = 0
    for key, firsts in BOARDS.items():
        expected = {branch: firsts.get(branch) for branch in branches}
        assert of_tags(open_modules.table().listing(open_modules.table().listed[key]).first) == expected, key
        device, _, board = key.partition(":")
        match = CATALOG.gpu_by_pci(device, board or None)
        for gpu in match.gpus if match else ():
            models += 1
            assert of_tags(gpu.later_boards.get(board, gpu.first_listed)) == expected or len(gpu.pci) > 1, key
            for branch, first in firsts.items():
                earliest = gpu.first_listed[branch]
                assert earliest is not None, key
                assert Version(earliest) <= Version(first), key
    assert models > 800


def test_the_file_is_what_its_own_writer_makes() -> None:
    table = open_modules.table()
    again = open_modules.parse(open_modules.tsv(table.listed, table.releases, "a day"))
    assert (again.releases, dict(again.listed)) == (table.releases, dict(table.listed))


@pytest.mark.parametrize(
    ("name", "lists", "does_not"),
    [
        ("H20-3e", "535.216.03 550.127.08 565.77 570.86.15", "535.216.01 550.127.05 555.58.02 560.35.03 565.57.01"),
        ("H200 SXM", "550.90.07 555.42.06 555.52.04 560.28.03", "550.78 555.42.02 535.288.01 545.29.06 535.309.01"),
        ("GH200 96GB", "535.129.03 545.29.02 550.40.07", "535.113.01 545.23.08"),
        ("L2", "535.154.05 550.40.07 610.57.04", "535.146.02 545.29.06"),
        ("L20", "535.154.05 550.40.07 535.309.01", "535.146.02 545.29.06 525.147.05"),
        ("RTX 4090 D", "535.154.05 550.40.07", "535.146.02 545.29.06"),
        ("RTX PRO 4500", "570.169 575.64 580.65.06", "570.158.01 575.57.08"),
        ("RTX 6000D", "580.82.07 590.44.01", "580.76.05"),
        ("GB10", "580.119.02 590.48.01 595.45.04", "580.105.08 590.44.01"),
        ("H20 NVL16", "580.82.07", "580.76.05"),
        ("A10G", "515.48.07 525.53 580.65.06", ""),
        ("A800-SXM4-80GB", "515.86.01 525.53 535.43.02", "515.76 520.61.05"),
        ("A800-SXM4-40GB", "535.104.05 545.23.06", "535.98 530.41.03"),
        ("H800 PCIe", "525.105.17 530.41.03 535.43.02", "525.89.02 530.30.02 520.61.05"),
        ("RTX 3080 12GB", "515.48.07 550.40.07", ""),
        ("T4", "418.39 470.256.02 535.309.01 550.163.01", ""),
    ],
)
def test_a_release_lists_a_gpu_or_not_branch_by_branch(name: str, lists: str, does_not: str) -> None:
    gpu = CATALOG.find_gpu(name).gpu
    assert gpu is not None
    for version, listed in [*((v, True) for v in lists.split()), *((v, False) for v in does_not.split())]:
        bound = first_listed(gpu, open_modules.branch_of(version), Version(version))
        assert (bound is None) == listed, (version, bound)
        assert bound is None or bound.sure
        assert unread(gpu, open_modules.branch_of(version), Version(version)) is None


def test_what_no_list_was_read_of_is_open() -> None:
    nvl16 = CATALOG.find_gpu("H20 NVL16").gpu
    assert nvl16 is not None
    assert unread(nvl16, 570, Version("570.211.01")) is None
    assert unread(nvl16, 570, Version("570.999.01")) == "570.211.01"
    assert first_listed(nvl16, 570, Version("570.999.01")) is None
    assert nvl16.first_listed_on(610) == "from the start"


def test_a_later_release_or_another_board_may_be_left_out() -> None:
    rtx, l20 = CATALOG.find_gpu("RTX 4090 D").gpu, CATALOG.find_gpu("L20").gpu
    assert rtx is not None
    assert l20 is not None
    assert list(listed_late(rtx, 535, Version("535.154.05"))) == []
    assert list(listed_late(rtx, 535, Version("535.183.01"))) != []
    assert any("10de:1990" in text for text in listed_late(l20, 550, Version("550.54.14")))
    assert list(listed_late(l20, 550, Version("550.90.07"))) == []
