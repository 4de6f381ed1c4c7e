"""What verbs write: bundles are for their owner alone."""

import os
import stat
from pathlib import Path

import pytest

from gpunode.cli.writing import folder_for_bundles, write_bundle
from gpunode.probe import Bundle

BUNDLE = Bundle(host="a", collected_at="2026-11-22T00:00:00Z", commands={}, files={})


def mode(path: Path) -> int:
    """Its permissions."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_bundle_and_its_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = folder_for_bundles(tmp_path / "bundles")
    assert mode(folder) == 0o700
    assert mode(write_bundle(folder, "gpu-01", BUNDLE)) == 0o600


def test_also_one_that_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "gpu-01.json").write_text("{}")
    (tmp_path / "gpu-01.json").chmod(0o644)
    assert mode(write_bundle(folder_for_bundles(tmp_path), "gpu-01", BUNDLE)) == 0o600


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    assert mode(folder_for_bundles(tmp_path)) == 0o750
