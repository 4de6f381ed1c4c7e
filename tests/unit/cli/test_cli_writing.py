"""What verbs write: bundles are for their owner alone."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpunode.errors import UsageError
from gpunode.judging.saved import folder_for_bundles, save_bundle, write_bundle
from gpunode.whole import must_not_be_redirected, write_whole

BUNDLE = b"{}"


def mode(path: Path) -> int:
    """Its permissions."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_bundle_and_its_folder_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = folder_for_bundles(tmp_path / "of-today" / "bundles")
    assert (mode(folder), mode(folder.parent)) == (0o700, 0o700)
    assert mode(write_bundle(folder, "gpu-01", BUNDLE)) == 0o600


def test_a_bundle_that_cannot_be_written_is_a_reason_and_no_exception(tmp_path: Path) -> None:
    assert save_bundle(tmp_path, "gpu-01", BUNDLE) is None
    (tmp_path / "gpu-02.json").mkdir()
    reason = save_bundle(tmp_path, "gpu-02", BUNDLE)
    assert reason is not None
    assert str(tmp_path / "gpu-02.json") in reason


def test_also_one_that_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "gpu-01.json").write_text("{}")
    (tmp_path / "gpu-01.json").chmod(0o644)
    assert mode(write_bundle(folder_for_bundles(tmp_path), "gpu-01", BUNDLE)) == 0o600


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    assert mode(folder_for_bundles(tmp_path)) == 0o750


def test_a_report_is_not_for_its_owner_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "report.txt", "text\n")
    assert mode(tmp_path / "report.txt") == 0o666, "the umask decides, which is 0 here"


LONG = "x" * 300
"""No file system takes such a name."""


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda path: write_whole(path / LONG, ""), "/x+: cannot be written: File name too long"),
        (lambda path: folder_for_bundles(path / LONG), "--save /.*/x+: File name too long"),
        (lambda path: folder_for_bundles(path / "file"), "--save /.*/file is .*, not a directory"),
        (lambda path: must_not_be_redirected(path / LONG / "a", "--output"), "--output /.*/x+/a: File name too long"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path: Path, act: Callable[[Path], object], words: str) -> None:
    (tmp_path / "file").touch()
    if "--output" in words and os.geteuid() != 0:
        pytest.skip("only root is led away")
    with pytest.raises(UsageError, match=rf"^{words}$" if words[0] == "-" else rf"{words}$"):
        act(tmp_path)


def test_where_nothing_is_yet_nothing_redirects(tmp_path: Path) -> None:
    must_not_be_redirected(tmp_path / "report.json", "--output")
    must_not_be_redirected(tmp_path / "gone" / "report.json", "--output")
