"""gpunode stage: copies are compared, an ended run continues, what does not fit is refused or evicts others."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gpunode.cli import run
from gpunode.staging import copying
from gpunode.staging.copying import PART, CopyRun, FilePiece, PieceJournal, listing
from gpunode.staging.shelf import FOLDER, StagedCopy, StagingFolder, in_use

BIG = 300_000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE", 1 << 16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "big").write_bytes(os.urandom(BIG))
    for number in range(40):
        (folder / "a" / "b" / f"{number}").write_text(f"sample {number}")
    (folder / "empty").touch()
    (folder / "a" / "link").symlink_to("b/1")
    (folder / "big").chmod(0o640)
    return folder


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def content(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def stage(*words: object) -> int:
    return run(["stage", *map(str, words)])


def aged(shelf: Path, name: str, hours: float) -> None:
    """Let a copy be unused for some hours."""
    path = shelf / FOLDER / f"{name}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "used_at": time.time() - 3600 * hours}))


def test_a_data_set_is_copied_and_the_path_printed(
    source: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage(source, shelf) == 0
    assert capsys.readouterr().out == f"{shelf / 'set'}\n"
    assert content(shelf / "set") == content(source)
    assert len(content(source)) > 40
    old, new = (source / "big").stat(), (shelf / "set" / "big").stat()
    assert (old.st_mtime_ns, old.st_mode, old.st_uid) == (new.st_mtime_ns, new.st_mode, new.st_uid)
    assert (shelf / "set" / "a" / "link").is_symlink()


def test_a_second_run_copies_nothing_and_counts_as_use(
    source: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage(source, shelf)
    aged(shelf, "set", 5)
    inode = (shelf / "set" / "big").stat().st_ino
    assert stage(source, shelf) == 0
    assert "nothing to copy" in capsys.readouterr().err
    assert (shelf / "set" / "big").stat().st_ino == inode
    (copy,) = StagingFolder(shelf).copies()
    assert time.time() - copy.used_at < 60


def test_changes_of_the_source_are_followed(source: Path, shelf: Path) -> None:
    stage(source, shelf)
    (source / "a" / "b" / "3").unlink()
    (source / "a" / "b" / "4").write_text("other")
    (source / "a" / "link").unlink()
    (source / "new").mkdir()
    (source / "new" / "one").write_text("1")
    (source / "big").write_bytes(os.urandom(BIG - 1))
    assert stage(source, shelf) == 0
    assert content(shelf / "set") == content(source)


def test_an_ended_run_continues_with_the_pieces_that_are_missing(
    source: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends in the middle of a large file; the second one reads only the rest of it."""
    real, written = CopyRun._write, list[FilePiece]()

    def some(self: CopyRun, piece: FilePiece) -> str:
        if len(written) == 3:
            raise OSError("the server is down")
        written.append(piece)
        return real(self, piece)

    monkeypatch.setattr(CopyRun, "_write", some)
    assert stage(source, shelf, "--jobs", "1") == 1
    assert not (shelf / "set" / "big").exists()
    assert not StagingFolder(shelf).copies()[0].complete
    with (shelf / FOLDER / "set.pieces").open("ab") as stream:
        stream.write(b'["big", 12')  # torn by a crash
    again = list[FilePiece]()

    def again_written(self: CopyRun, piece: FilePiece) -> str:
        again.append(piece)
        return real(self, piece)

    monkeypatch.setattr(CopyRun, "_write", again_written)
    assert stage(source, shelf) == 0
    assert content(shelf / "set") == content(source)
    assert len(written) == 3
    assert not {(piece.file.path, piece.at) for piece in written} & {(piece.file.path, piece.at) for piece in again}
    assert not list((shelf / "set").rglob(f"*{copying.PART}"))


def test_kill_9_loses_no_verified_piece(source: Path, shelf: Path) -> None:
    slow = (
        "import sys, time\nfrom gpunode.cli import main\nfrom gpunode.staging import copying\n"
        "copying.PIECE = 1 << 16\nreal = copying.CopyRun._write\n"
        "def write(self, piece):\n    time.sleep(0.2)\n    return real(self, piece)\n"
        "copying.CopyRun._write = write\ncopying.BATCH_FILES = 1\nmain(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "stage", source, shelf, "--jobs", "1"], start_new_session=True
    )
    journal = shelf / FOLDER / "set.pieces"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
        time.sleep(0.05)
    process.kill()
    process.wait(10)
    kept = journal.read_bytes().splitlines()
    assert len(kept) > 2
    assert stage(source, shelf) == 0
    assert content(shelf / "set") == content(source)
    assert set(kept) <= set(journal.read_bytes().splitlines())


def test_a_disk_that_returns_other_data_is_named(
    source: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.pwrite
    with monkeypatch.context() as disk:
        disk.setattr(
            os, "pwrite", lambda number, data, at: real(number, bytes(data).replace(b"sample 7", b"sample 8"), at)
        )
        assert stage(source, shelf) == 1
    assert "a/b/7: the disk returns other data" in capsys.readouterr().err
    assert not (shelf / "set" / "a" / "b" / "7").exists()
    assert stage(source, shelf) == 0
    assert content(shelf / "set") == content(source)


def test_verify_repairs_what_changed_on_the_disk_under_the_same_time(source: Path, shelf: Path) -> None:
    stage(source, shelf)
    path = shelf / "set" / "big"
    status, data = path.stat(), bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert stage(source, shelf) == 0
    assert content(shelf / "set") != content(source)  # by size and time it is the same
    assert stage(source, shelf, "--verify") == 0
    assert content(shelf / "set") == content(source)


@pytest.mark.parametrize("change", ["shrinks", "grows", "vanishes"])
def test_a_file_that_changes_while_it_is_copied_is_named(
    source: Path,
    shelf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    real = CopyRun._write

    def write(self: CopyRun, piece: FilePiece) -> str:
        if (piece.file.path, piece.at) == ("big", 1 << 16):
            path = source / "big"
            if change == "vanishes":
                path.unlink()
            else:
                os.truncate(path, {"shrinks": 70_000, "grows": BIG + 1}[change])
        return real(self, piece)

    monkeypatch.setattr(CopyRun, "_write", write)
    assert stage(source, shelf, "--jobs", "1") == 1
    assert "not copied: big: " in capsys.readouterr().err
    assert not (shelf / "set" / "big").exists()
    assert (shelf / "set" / "a" / "b" / "1").read_text() == "sample 1"


# --- room


@pytest.fixture
def three(tmp_path: Path, shelf: Path) -> Path:
    """Copies of three sets of 100 kB; the first was not used for the longest time."""
    for number, name in enumerate(("one", "two", "three")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(os.urandom(100_000))
        assert stage(tmp_path / name, shelf) == 0
        aged(shelf, name, 10 - number)
    return shelf


def names(shelf: Path) -> set[str]:
    folders = {path.name for path in shelf.iterdir()} - {FOLDER}
    assert folders == {copy.name for copy in StagingFolder(shelf).copies()}
    return folders


def test_the_least_recently_used_copy_leaves_first(source: Path, three: Path) -> None:
    assert stage(source, three, "--limit", "520KB") == 0
    assert names(three) == {"two", "three", "set"}
    assert not list((three / FOLDER).glob("one*json")) + list((three / FOLDER).glob("one*pieces"))


def test_a_copy_in_use_stays(source: Path, three: Path) -> None:
    with (three / "one" / "data").open("rb"):
        assert stage(source, three, "--limit", "520KB") == 0
    assert names(three) == {"one", "three", "set"}


def test_a_copy_that_was_used_a_moment_ago_stays(source: Path, three: Path) -> None:
    aged(three, "one", 0.1)
    aged(three, "two", 0.2)
    assert stage(source, three, "--limit", "520KB") == 0
    assert names(three) == {"one", "two", "set"}


@pytest.mark.parametrize("limit", ["200KB", "350KB"])
def test_what_cannot_fit_is_refused_and_nothing_is_removed(
    source: Path, three: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    for name in ("one", "two", "three"):
        aged(three, name, 0.1)
    assert stage(source, three, "--limit", limit) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "--limit" in line]) == 1
    assert names(three) == {"one", "two", "three"}


def test_a_full_disk_evicts_too(source: Path, three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingFolder, "free", lambda _: 250_000)
    assert stage(source, three) == 0
    assert names(three) == {"two", "three", "set"}


def test_a_mount_of_a_container_is_use(tmp_path: Path) -> None:
    """A container has the file under another name; the place in the file system is the same."""
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    for number, (root, files) in enumerate((("/disk/one", ()), ("/disk", ("/data/two/x",)), ("/else", ()))):
        process = tmp_path / "proc" / str(number + 1)
        (process / "fd").mkdir(parents=True)
        (process / "mountinfo").write_text(f"22 1 8:1 {root} /data rw - ext4 /dev/sda1 rw\n")
        for descriptor, file in enumerate(files):
            (process / "fd" / str(descriptor)).symlink_to(file)
    (tmp_path / "proc" / "self").mkdir()
    (tmp_path / "proc" / "self" / "mountinfo").write_text(f"22 1 8:1 /disk {tmp_path} rw - ext4 /dev/sda1 rw\n")
    assert in_use(folders, tmp_path / "proc") == {folders[0], folders[1]}


# --- wrong usage


def test_refusals_are_one_line(source: Path, shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "x").symlink_to(tmp_path / "outside")
    (shelf / "taken").mkdir(parents=True)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for words, text in (
        ((tmp_path / "nowhere", shelf), "cannot be read"),
        ((tmp_path / "empty", shelf), "no files"),
        ((tmp_path / "linked", shelf), "outside the data set"),
        ((source, shelf, "--name", "taken"), "did not create it"),
        ((source, shelf, "--name", "../x"), "not a valid name"),
        ((source, source / "a"), "one lies in the other"),
        ((source, tmp_path / "open"), "other users can write"),
        ((source, source / "big"), "one lies in the other"),
        ((source, tmp_path / "set2" / "x" / "y"), "cannot be written"),
        ((source,), "expected SRC and DST"),
        (("--list", source), "no copies"),
    ):
        assert stage(*words) == 2, words
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1, err
        assert text in err[0]


def test_a_source_that_is_an_incomplete_copy_is_refused(
    source: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part of ``x`` and a file with the name of that part would be one file in the copy."""
    (source / "a" / "x").write_bytes(b"1" * 10)
    (source / "a" / f"x{PART}").write_bytes(b"2" * 10)
    assert stage(source, shelf) == 2
    assert "a/x.gpunode-part: a file of an incomplete copy" in capsys.readouterr().err
    assert not (shelf / "set").exists()


def test_loops_of_links_end_and_broken_ones_are_named(
    source: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "a" / "loop").symlink_to("..")
    (source / "a" / "self").symlink_to("self")
    (source / "broken").symlink_to("/nowhere/at/all")
    os.mkfifo(source / "pipe")
    assert stage(source, shelf) == 0
    assert "left out" in (err := capsys.readouterr().err)
    assert "broken" in err
    assert "pipe" in err
    assert (shelf / "set" / "a" / "loop").is_symlink()


def test_a_complete_copy_is_used_while_the_server_is_down(
    source: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage(source, shelf)
    source.rename(source.with_name("away"))
    assert stage(source, shelf) == 0
    assert "is complete and used" in capsys.readouterr().err


def test_two_runs_of_one_set_follow_each_other(source: Path, shelf: Path) -> None:
    codes = list[int]()
    argv = [sys.executable, "-m", "gpunode", "stage", "-q", str(source), str(shelf)]

    def start() -> None:
        codes.append(
            subprocess.run(argv, timeout=60, check=False, capture_output=True, start_new_session=True).returncode
        )

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert codes == [0, 0, 0]
    assert content(shelf / "set") == content(source)


def test_another_run_creates_the_folder_first(source: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def late(*words: Any, **named: Any) -> None:
        mkdir(*words, **named)
        if words[0] == shelf.name:
            mkdir(*words, **named)

    monkeypatch.setattr(os, "mkdir", late)
    assert stage(source, shelf) == 0
    assert content(shelf / "set") == content(source)


def test_a_source_that_hangs_ends_the_run(
    source: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CopyRun, "_write", lambda *_: time.sleep(30))
    began = time.monotonic()
    assert stage(source, shelf, "--stall", "1") == 3
    assert time.monotonic() - began < 10
    assert "nothing was read or written" in capsys.readouterr().err


def test_another_runs_lock_is_waited_for_within_a_limit(source: Path, shelf: Path) -> None:
    folder = StagingFolder(shelf)
    folder.open()
    with folder.lock("set", 1, print):
        assert stage(source, shelf, "--wait", "0") == 3


def test_names_that_are_no_utf_8_are_copied(source: Path, shelf: Path) -> None:
    (source / os.fsdecode(b"caf\xe9\n")).write_text("x")
    assert stage(source, shelf) == 0
    assert stage(source, shelf) == 0
    assert content(shelf / "set") == content(source)


def test_the_list_is_a_table_and_json(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert stage("--list", three, "--format", "json") == 0
    rows = [StagedCopy.model_validate(row) for row in json.loads(capsys.readouterr().out)]
    assert [copy.name for copy in rows] == ["one", "two", "three"]
    assert {copy.bytes for copy in rows} == {100_000}
    assert stage("--list", three) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_set_of_too_many_files_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MOST_FILES", 20)
    with pytest.raises(Exception, match="shards"):
        listing(source)


def test_a_journal_of_another_size_counts_for_nothing(tmp_path: Path, source: Path) -> None:
    journal = PieceJournal(tmp_path / "pieces")
    (tmp_path / "pieces").write_text('["big", 5, 6, 0, "x"]\nnonsense\n')
    work = CopyRun(source, tmp_path / "target", listing(source), journal)
    assert work.missing_bytes() == listing(source).bytes
