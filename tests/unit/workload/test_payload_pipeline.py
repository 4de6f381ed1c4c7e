"""The input pipeline on directories of every kind: what is read, what is proven, and which limit is named."""

import errno
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gpunode.checks.performance_steps import limit_of
from gpunode.facts.models.measured import InputValues
from gpunode.workload.payload import pagecache, pipeline, storage
from gpunode.workload.payload.isolate import SkipPart, Trouble

MIB = 2**20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files with a loop, a broken link, a pipe and an empty file among them, all on the disk."""
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    for number in range(6):
        with (folder / "deep" / f"{number}.bin").open("wb") as file:
            file.write(os.urandom(MIB // 4))
            os.fsync(file.fileno())
    (folder / "deep" / "loop").symlink_to(folder)
    (folder / "linked.bin").symlink_to(folder / "deep" / "0.bin")
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "empty").touch()
    return folder


def run(folder: Path | str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(pipeline, "_module", lambda _: None)
    return pipeline.run(None if folder is None else str(folder), None, 0, 0.05)


def test_everything_odd_is_counted_and_nothing_is_changed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.lstat().st_mtime_ns for path in data.rglob("*")}
    values = InputValues.model_validate(run(data, monkeypatch))
    assert (values.files, values.broken_links, values.other, values.walk_complete) == (7, 1, 3, True)
    assert (values.kind, values.no_loader) == ("files", "PyTorch is not in the image")
    assert {row.state for row in values.reads} >= {"hot"}
    assert {path: path.lstat().st_mtime_ns for path in data.rglob("*")} == before


def test_cold_is_proven_or_is_not_reported(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(map(str, data.glob("deep/*.bin")))
    kept = storage.file_system_of(data) == "tmpfs"
    pipeline.read(files, 1, 5)
    assert pagecache.resident(files) == (1.0, "nowait" if not kept else pagecache.resident(files)[1])
    pagecache.drop(files)
    share, method = pagecache.resident(files)
    assert share is not None
    assert kept or (share < pipeline.MOST_LEFT and method == "mincore")
    # A user who may not write a file gets 1 from mincore for each of its pages.
    monkeypatch.setattr(pagecache, "_by_mincore", lambda _: 1.0)
    assert kept or pagecache.resident(files) == (0.0, "nowait")
    monkeypatch.setattr(pagecache, "_by_nowait", lambda _: None)
    values = InputValues.model_validate(run(data, monkeypatch))
    assert (values.proof, {row.state for row in values.reads}) == (None, {"hot"})


def test_a_walk_through_millions_ends_and_reports_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MOST_ENTRIES", 5)
    contents = pipeline.walk(str(data))
    assert (contents["walk_complete"], contents["files"] < 6) == (False, True)
    monkeypatch.setattr(pipeline, "MOST_ENTRIES", 10**9)
    assert pipeline.walk(str(data), seconds=-1)["walk_complete"] is False
    monkeypatch.setattr(pipeline, "MOST_FILES", 2)
    (row,) = pipeline.walk(str(data))["chosen"].values()
    assert (row[0], len(row[2])) == (7, 2)


def test_a_file_that_shrinks_or_vanishes_is_counted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(map(str, data.glob("deep/*.bin")))
    real = os.fstat

    def as_before(file: int) -> Any:
        status = real(file)
        return os.stat_result((*status[:6], status.st_size + 10, *status[7:10]))

    monkeypatch.setattr("os.fstat", as_before)
    _, done, failed, shrunk = pipeline.read([*files, str(data / "gone"), str(data / "pipe")], 2, 5)
    assert (done, failed, shrunk) == ([], 2, len(files))


def test_a_slow_mount_has_fewer_files_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [(str(tmp_path / str(number)), 10) for number in range(500)]
    clock = iter([0.0, 8 * 0.0001, 0.0, 8 * 0.1])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert len(pipeline.affordable(listed)[0]) == 500
    assert len(pipeline.affordable(listed)[0]) == pipeline.LEAST_FILES


def test_directories_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SkipPart, match="--data DIR"):
        run(None, monkeypatch)
    with pytest.raises(Trouble, match="is not a directory here"):
        run(tmp_path / "absent", monkeypatch)
    with pytest.raises(Trouble, match="has no files to read"):
        run(tmp_path, monkeypatch)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SkipPart, match="no pyarrow"):
        run(tmp_path, monkeypatch)
    (tmp_path / "b.tar").write_bytes(b"x" * 9999)
    with pytest.raises(Trouble, match="is readable as tar"):
        run(tmp_path, monkeypatch)

    def refuse(_: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(Trouble, match=r"cannot be read: Permission denied \(uid"):
        run(tmp_path, monkeypatch)


def test_shards_have_their_images_as_samples(tmp_path: Path) -> None:
    image = tmp_path / "0.jpg"
    image.write_bytes(b"\xff\xd8\xff" + bytes(100))
    (tmp_path / "0.cls").write_text("7")
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for name in ("0.jpg", "0.cls"):
            shard.add(tmp_path / name, name)
    samples = pipeline.FileSamples("tar", None)
    assert list(samples.raw(str(tmp_path / "a.tar"))) == [image.read_bytes()]
    samples._decode = lambda data: data[1000]  # type: ignore[assignment, return-value]
    assert (samples.decoded(image.read_bytes()), samples.unusable) == (None, 1)


def planted(**changes: Any) -> InputValues:
    """A fast directory of images in which nothing is slow, except what the changes slow down."""
    quick = {"read_s": 1e-4, "decode_s": 1e-4, "other_s": 1.1e-4}
    cold = {**quick, **changes.pop("cold", {})}
    hot = {**quick, **changes.pop("hot", {})}
    usual = {
        "directory": "/data",
        "filesystem": "xfs",
        "remote": False,
        "files": 9,
        "bytes": 9 * 10**6,
        "gpus": 1,
        "walk_complete": True,
        "kind": "images",
        "read_files": 9,
        "read_bytes": 9 * 10**6,
        "sample_bytes": 1e5,
        "cpus": 8,
        "proof": "mincore",
        "cold_resident": 0.0,
        "hot_resident": 1.0,
        "reads": [{"state": state, "threads": 16, "gb_per_s": 20.0, "files_per_s": 1e4} for state in ("cold", "hot")],
        "steps": [{"state": "cold", **cold}, {"state": "hot", **hot}],
    }
    return InputValues.model_validate(usual | changes)


SLOW_OPENS = [{"state": "hot", "threads": 1, "gb_per_s": 0.002, "files_per_s": 115.0}]
SLOW_DISK = [{"state": "cold", "threads": 16, "gb_per_s": 0.5, "files_per_s": 500.0}]


@pytest.mark.parametrize(
    ("values", "cold", "hot"),
    [
        (planted(cold={"read_s": 5e-3}), "disk", "Python"),
        (planted(cold={"read_s": 5e-3}, remote=True), "network", "Python"),
        (planted(cold={"read_s": 2e-4}, reads=SLOW_DISK), "disk", "Python"),
        (planted(cold={"decode_s": 4e-3}, hot={"decode_s": 4e-3}), "decoding", "decoding"),
        (planted(cold={"other_s": 4e-3}, hot={"other_s": 4e-3}), "Python", "Python"),
        (planted(cold={"read_s": 9e-3}, hot={"read_s": 9e-3}), "Python", "Python"),
        (planted(cold={"read_s": 9e-3}, hot={"read_s": 9e-3}, kind="parquet"), "decoding", "decoding"),
        (planted(cold={"read_s": 9e-3}, hot={"read_s": 9e-3}, remote=True, hot_resident=0.0), "network", "network"),
        # What is in memory is opened at the server all the same; a packed shard is opened once.
        (planted(cold={"read_s": 9e-3}, hot={"read_s": 9e-3}, remote=True, reads=SLOW_OPENS), "network", "network"),
        (
            planted(cold={"read_s": 9e-3}, hot={"read_s": 9e-3}, remote=True, reads=SLOW_OPENS, kind="tar"),
            "Python",
            "Python",
        ),
        (planted(cold={"read_s": 9e-3}, hot={"read_s": 9e-3}, reads=SLOW_OPENS), "Python", "Python"),
        (planted(steps=[]), None, None),
    ],
)
def test_the_planted_limit_is_the_named_one(values: InputValues, cold: str | None, hot: str | None) -> None:
    assert (limit_of(values, "cold")[0], limit_of(values, "hot")[0]) == (cold, hot)
