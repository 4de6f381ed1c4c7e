"""What a bundle's reader and the trees of nvidia-smi give, also where they look up what was sorted or remembered."""

import pytest

from gpunode.facts.bundle_reader import BundleReader
from gpunode.facts.parsers.smi_base import label_of
from gpunode.probe.bundle import Bundle

PATHS = [
    "/sys/block/",
    "/sys/block",
    "/sys/block0",
    "/sys/block/sda/size",
    "/sys/block/\U0010ffff/x",
    "/sys/blocks/a",
    "/a",
]


@pytest.mark.parametrize("folder", ["/sys/block/", "/sys/", "/", "/z/", "/sys/block/sda/size"])
def test_paths_below_a_folder(folder: str) -> None:
    bundle = Bundle(host="x", collected_at="2026-11-20T00:00:00Z", commands={}, files=dict.fromkeys(PATHS))
    reader = BundleReader(bundle)
    assert reader.under(folder) == tuple(sorted(path for path in PATHS if path.startswith(folder) and path != folder))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 5000])
def test_labels_of_any_length(length: int) -> None:
    name = ("SEC-DED " * 1000)[:length]
    assert label_of(name) == label_of(name) == name.lower().replace("-", "_").replace(" ", "_").strip("_")
