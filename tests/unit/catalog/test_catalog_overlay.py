"""A user's own file over ours, and the text that catalog files are."""

import os
import re
from pathlib import Path

import pytest

from gpunode.catalog import load
from gpunode.catalog.read import merge

NEXT = (Path(__file__).parent / "test_catalog_update.py").read_text("utf-8")
DOCS = re.findall(
    r"```yaml\n(.*?)```", (Path(__file__).parents[3] / "docs" / "catalog.md").read_text("utf-8"), re.DOTALL
)


def overlay(tmp_path: Path, text: str, name: str = "site.yml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_fields_replace_and_mappings_merge_key_by_key(tmp_path: Path) -> None:
    path = overlay(
        tmp_path,
        "branches: {580: {note: ours, points: {580.200.01: 2026-10-01}}}\n"
        "gpus: {t4: {aliases: [Turing card], pcie: {width: 8}}}\n",
    )
    catalog, shipped = load([path]), load()
    assert catalog.branch(580).note == "ours"
    assert catalog.branch(580).latest == "580.200.01"
    assert set(shipped.branch(580).points) < set(catalog.branch(580).points)
    assert catalog.branch(580).type == "LTSB"
    t4 = catalog.gpu("t4")
    assert t4.aliases == ("Turing card",)
    assert t4.pcie is not None
    assert (t4.pcie.gen, t4.pcie.width) == (3, 8)
    assert catalog.find_gpu("turing-card").gpu == t4
    assert shipped.gpu("t4").aliases == ("T4",)


def test_a_new_gpu_is_one_row(tmp_path: Path) -> None:
    path = overlay(
        tmp_path,
        "defaults: {all: {date: 2026-11-01}}\n"
        "gpus: {x200: {name: X200, pci: [10de:ffff], architecture: blackwell, compute_capability: 10.0, "
        "first_branch: 620}}\n",
    )
    gpu = load([path]).find_gpu("x200").gpu
    assert gpu is not None
    assert gpu.modules == "open"
    assert gpu.source == ("site",)
    assert gpu.date == "2026-11-01"
    assert gpu.market == "datacenter"


def test_a_new_board_and_a_server_around_it(tmp_path: Path) -> None:
    path = overlay(
        tmp_path,
        "defaults: {all: {date: 2026-11-01}}\n"
        "platforms:\n"
        "  our-board:\n"
        "    {name: Our board, kind: board, gpus: {h100-sxm5-80gb: 8}, nvswitches: 4, services: [fabric-manager]}\n"
        "  our-server: {name: Our server, kind: server, board: our-board, nics: 4}\n",
    )
    server = load([path]).platform("our-server")
    assert server.services == ("fabric-manager",)
    assert server.gpu_count == 8
    assert server.nics == 4


def test_later_files_lie_over_earlier_ones(tmp_path: Path) -> None:
    first = overlay(tmp_path, "gpus: {t4: {note: first, power_w: 65}}", "first.yml")
    second = overlay(tmp_path, "gpus: {t4: {note: second}}", "second.yml")
    t4 = load([first, second]).gpu("t4")
    assert (t4.note, t4.power_w) == ("second", 65)
    assert load([second, first]).gpu("t4").note == "first"


def test_null_makes_a_field_unknown(tmp_path: Path) -> None:
    assert load([overlay(tmp_path, "gpus: {t4: {memory_mib: null}}")]).gpu("t4").memory_mib is None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = overlay(tmp_path, "gpus: {t4: {note: one}}")
    assert load([path]).gpu("t4").note == "one"
    overlay(tmp_path, "gpus: {t4: {note: two}}")
    os.utime(path, ns=(1, 1))
    assert load([path]).gpu("t4").note == "two"


def test_scalars_are_text_unless_a_model_has_another_type(tmp_path: Path) -> None:
    path = overlay(
        tmp_path,
        "defaults: {all: {date: 2026-11-01}}\n"
        "toolkits: {13.10.0: {label: 13.10, branch: 620}}\n"
        "gpus: {t4: {note: yes}}\n",
    )
    catalog = load([path])
    assert catalog.toolkit("13.10").id == "13.10.0"
    assert catalog.toolkit("13.10").label == "13.10"
    assert catalog.gpu("t4").note == "yes"


def test_an_anchor_is_followed(tmp_path: Path) -> None:
    catalog = load([overlay(tmp_path, "gpus: {t4: {pcie: &x4 {gen: 3, width: 4}}, l4: {pcie: *x4}}")])
    for name in ("t4", "l4"):
        pcie = catalog.gpu(name).pcie
        assert pcie is not None
        assert pcie.width == 4


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_a_newer_row_comes_first_where_the_order_is_by_version(tmp_path: Path) -> None:
    path = overlay(
        tmp_path,
        "defaults: {all: {date: 2026-11-01}}\n"
        "branches: {630: {released: 2026-10-30, eol_computed: 2027-10, native_cuda: 14.0, points: {630.10: null}}}\n"
        "container_toolkit: {1.3.0: {repository: x, key: y}, 1.21.0: {repository: x, key: y}}\n",
    )
    catalog = load([path])
    assert {"630", "620", "615"} <= catalog.branches.keys()
    assert list(catalog.branches) == sorted(catalog.branches, key=numbers, reverse=True)
    assert list(catalog.container_toolkit) == ["1.21.0", "1.20.1", "1.3.0"]
    assert {"13.5.0", "13.4.2"} <= catalog.toolkits.keys()
    assert list(catalog.toolkits) == sorted(catalog.toolkits, key=numbers, reverse=True)
    assert list(catalog.toolkits)[-1] == "9.1.85"


@pytest.mark.parametrize("block", DOCS, ids=range(len(DOCS)))
def test_what_the_docs_show_is_sound(tmp_path: Path, block: str) -> None:
    whole = block if "defaults:" in block else f"defaults: {{all: {{date: 2026-11-20}}}}\n{block}"
    catalog = load([overlay(tmp_path, whole)])
    assert catalog is not load()
    colliding = [
        name for name in {*catalog.branches, *catalog.toolkits} - {*load().branches, *load().toolkits} if name in NEXT
    ]
    assert not colliding, f"tests of catalog_update add {colliding}: whoever carries out the recipe breaks them"


def test_merge_keeps_what_is_not_named() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}) == {"a": {"b": 1, "c": 3}, "d": [2]}
    assert merge({"a": 1}, None) is None
