"""Folders of saved bundles: all of them, in order, one in memory at a time."""

import json
import tracemalloc
from pathlib import Path

import pytest

from gpunode.cli.replay import read_bundles
from gpunode.errors import UsageError

MIB = 1 << 20


def write_bundle(path: Path, size: int = 0) -> None:
    """A bundle whose host is the file's name, with a file of ``size`` bytes in it."""
    document = {
        "schema": "gpunode.bundle/1",
        "host": path.stem,
        "collected_at": "2026-11-20T00:00:00Z",
        "commands": {},
        "files": {"/big": "x" * size},
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def test_files_and_folders_in_the_order_given(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for name in ("gpu-2", "gpu-1"):
        write_bundle(folder / f"{name}.json")
    (folder / "notes.txt").write_text("not read")
    write_bundle(tmp_path / "single.json")
    hosts = [bundle.host for bundle in read_bundles([str(tmp_path / "single.json"), str(folder)])]
    assert hosts == ["single", "gpu-1", "gpu-2"]


def test_nothing_to_read_is_said_before_the_first_is_read(tmp_path: Path) -> None:
    write_bundle(tmp_path / "good.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no bundle"):
        read_bundles([str(tmp_path / "good.json"), str(tmp_path / "empty")])


def test_memory_does_not_grow_with_the_number_of_bundles(tmp_path: Path) -> None:
    for number in range(100):
        write_bundle(tmp_path / f"gpu-{number:03d}.json", MIB)
    tracemalloc.start()
    try:
        names = [bundle.host for bundle in read_bundles([str(tmp_path)])]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(names) == 100
    assert peak < 10 * MIB
