"""``--output`` on what is there already: special files, links, modes."""

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.whole import whole_file, write_whole

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
ROOT = os.geteuid() == 0


def validate_into(path: Path) -> int:
    return run(["validate", "--replay", str(BUNDLE), "--format", "json", "--output", str(path)])


def read_from_pipe(path: Path, write: Callable[[], object]) -> bytes:
    """What comes out of a FIFO while ``write`` runs; never blocks for good where nothing is written into it."""
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)
    kept = os.open(path, os.O_WRONLY)  # until it is closed, the reader sees no end
    chunks: list[bytes] = []
    with os.fdopen(end, "rb") as stream:
        reader = threading.Thread(target=lambda: chunks.append(stream.read()))
        reader.start()
        try:
            write()
        finally:
            os.close(kept)
            reader.join(timeout=10)
    return b"".join(chunks)


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    assert json.loads(read_from_pipe(pipe, lambda: validate_into(pipe)))["schema"] == "gpunode.report/1"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_to_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(pipe)
    assert read_from_pipe(pipe, lambda: write_whole(link, "text\n")) == b"text\n"
    assert link.is_symlink()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not ROOT, reason="only root makes devices")
def test_a_full_device_is_reported_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        full.open("wb").close()
    except PermissionError:
        pytest.skip("no devices may be made or opened here")
    assert validate_into(full) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert stat.S_ISCHR(full.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    target.chmod(mode)
    validate_into(target)
    assert json.loads(target.read_text())["schema"] == "gpunode.report/1"
    assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.mark.skipif(not ROOT, reason="only root gives files away")
def test_root_leaves_a_file_to_its_owner(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    os.chown(target, 1234, 1234)
    write_whole(target, "new")
    assert (target.read_text(), target.stat().st_uid) == ("new", 1234)


@pytest.mark.parametrize("present", [True, False])
def test_a_link_stays_and_leads_to_the_new_content(tmp_path: Path, present: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target, link = elsewhere / "report.json", tmp_path / "latest.json"
    link.symlink_to(target)
    if present:
        target.write_text("old")
    validate_into(link)
    assert link.is_symlink()
    assert json.loads(target.read_text())["schema"] == "gpunode.report/1"
    assert [path.name for path in elsewhere.iterdir()] == ["report.json"]


def test_a_link_into_no_folder_and_one_to_itself_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away, loop = tmp_path / "away", tmp_path / "loop"
    away.symlink_to(tmp_path / "gone" / "report.json")
    loop.symlink_to(loop)
    assert validate_into(away) == 2
    assert f"directory {tmp_path / 'gone'} does not exist" in capsys.readouterr().err
    assert validate_into(loop) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err


def test_the_other_name_of_stdout_is_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    validate_into(Path("/dev/stdout"))
    assert json.loads(capsys.readouterr().out)["schema"] == "gpunode.report/1"


def test_what_breaks_off_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")

    def write_half() -> None:
        with whole_file(target) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_is_not_accepted_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        write_whole(tmp_path, "text")


def test_a_page_is_not_written_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", "--replay", str(BUNDLE), "--format", "html"]) == 3
    assert capsys.readouterr().out.startswith("<!doctype html>")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["validate", "--replay", str(BUNDLE), "--format", "html"]) == 2
    ended = capsys.readouterr()
    assert ended.out == ""
    assert "--output FILE" in ended.err
