"""A fleet of bundles by the command line: each of seven planted deviations is an outlier, and nothing else is one.

The bundles are copies of one measured node, each with its own host name, serial numbers and UUIDs.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundles import hgx_measured
from effort import effort

from gpunode.cli import run

NODES = effort(12, 200)
Document = dict[str, Any]
Edit = Callable[[Document], Document]


def replaced(old: str, new: str) -> Edit:
    """Edit the whole bundle's text."""

    def edit(document: Document) -> Document:
        text = json.dumps(document)
        assert old in text, old
        return dict(json.loads(text.replace(old, new)))

    return edit


def file(path: str, text: str) -> Edit:
    """Replace one file's text."""

    def edit(document: Document) -> Document:
        assert document["files"][path] not in (None, text)
        document["files"][path] = text
        return document

    return edit


def first_gpu(tag: str, text: str) -> Edit:
    """Replace one value of nvidia-smi's first GPU."""

    def edit(document: Document) -> Document:
        xml = document["commands"]["nvidia-smi-xml"]
        xml["stdout"], count = re.subn(f"(<{tag}>)[^<]*", rf"\g<1>{text}", xml["stdout"], count=1)
        assert count == 1
        return document

    return edit


def slow_gpu(document: Document) -> Document:
    (record,) = (part for part in document["results"] if (part["record"], part["component"]) == ("gemm.bf16", "cuda:2"))
    record["values"]["tflops"] *= 0.85
    return document


def without_adapter(document: Document) -> Document:
    """Remove mlx5_7: from the bus, from InfiniBand's devices and from the interfaces."""
    files = document["files"]
    (slot,) = re.findall(r"PCI_SLOT_NAME=(\S+)", files["/sys/class/infiniband/mlx5_7/device/uevent"])
    for folder, name in (("infiniband/", "mlx5_7"), ("net/", "ib7")):
        listing = f"/sys/class/{folder}"
        assert f"{name}\n" in files[listing]
        files[listing] = files[listing].replace(f"{name}\n", "")
    files["/sys/bus/pci/devices/"] = files["/sys/bus/pci/devices/"].replace(f"{slot}\n", "")
    gone = (f"/sys/bus/pci/devices/{slot}/", "/sys/class/infiniband/mlx5_7/", "/sys/class/net/ib7/")
    document["files"] = {path: text for path, text in files.items() if not path.startswith(gone)}
    return document


PLANTED: dict[int, tuple[str, Edit]] = {
    1: ("driver version", replaced("580.95.05", "580.82.07")),
    2: ("bf16 products", slow_gpu),
    3: ("pcie width current", first_gpu("current_link_width", "8x")),
    4: ("number of ", without_adapter),
    6: ("vbios version", first_gpu("vbios_version", "96.00.74.00.01")),
    8: ("sysctl vm.swappiness", file("/proc/sys/vm/swappiness", "60\n")),
    9: ("transparent hugepages", file("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")),
}


def fleet(folder: Path, planted: dict[int, tuple[str, Edit]]) -> Path:
    """Write the bundles, with the deviations in those nodes."""
    folder.mkdir()
    whole = hgx_measured()
    for number in range(NODES):
        document = planted[number][1](json.loads(json.dumps(whole))) if number in planted else whole
        text = json.dumps({**document, "host": f"gpu-{number:03d}"})
        text = re.sub(r"GPU-[0-9a-f]{3}(?=[0-9a-f]{5}-)", f"GPU-{number:03x}", text)
        text = re.sub(r"<serial>\d{3}", f"<serial>{number:03d}", text)
        (folder / f"{number}.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("planted", [{}, PLANTED], ids=["healthy", "seven deviations"])
def test_of_a_fleet_of_bundles_only_what_was_planted_is_an_outlier(
    planted: dict[int, tuple[str, Edit]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["validate", "--replay", str(fleet(tmp_path / "fleet", planted)), "--level", "deep", "--no-history"]
    run([*argv, "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert len(report["nodes"]) == NODES
    outliers = {tuple(outlier["hosts"]): outlier["what"] for outlier in report["fleet"]["outliers"]}
    assert len(outliers) == len(report["fleet"]["outliers"]), report["fleet"]["outliers"]
    assert sorted(outliers) == [(f"gpu-{number:03d}",) for number in planted], outliers
    for number, (subject, _) in planted.items():
        assert subject in outliers[f"gpu-{number:03d}",]
    assert not report["fleet"]["inconsistencies"]
