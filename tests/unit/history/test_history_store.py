"""The store: nothing that was saved is lost, and nothing that goes wrong there is more than one line."""

import fcntl
import gzip
import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from effort import effort
from snapshots import good, raw

from gpunode.checks import Finding, Status
from gpunode.cli import run as cli
from gpunode.errors import UsageError
from gpunode.history import store
from gpunode.history.runs import Recorder
from gpunode.history.snapshot import Snapshot
from gpunode.history.store import FILE, History, HistoryError, HistoryLimits

FAIL = Finding(check="gpu.count", status=Status.FAIL, component="gpu1", message="m" * 5000)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "history"))
    return tmp_path / "history"


def node(host: str = "gpu-01", **changes: object) -> Snapshot:
    return good().model_copy(update={"host": host, **changes})


def save(*nodes: Snapshot, at: str = "2026-11-20T09:00:00Z", findings: tuple[Finding, ...] = ()) -> int:
    with Recorder("validate", "quick", at) as recorder:
        for each in nodes:
            recorder.node(each, "pass", findings)
        recorder.finish("pass", at)
        return recorder.run


def test_a_run_comes_back_as_it_was(folder: Path) -> None:
    number = save(node(), node("gpu-02"), findings=(FAIL,))
    with History(folder) as history:
        assert list(history.snapshots(number)) == [node(), node("gpu-02")]
        assert [run.id for run in history.runs()] == [number]
        findings = history.findings(number)
        assert [(finding.host, finding.check, finding.component) for finding in findings] == [
            ("gpu-01", "gpu.count", "gpu1"),
            ("gpu-02", "gpu.count", "gpu1"),
        ]
        assert len(findings[0].message) == store.MOST_MESSAGE
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_does_not_change_is_stored_once(folder: Path) -> None:
    for day in range(1, 6):
        save(node(collected_at=f"2026-11-{day:02d}", idle_temperatures_c={"gpu": 30.0 + day}))
    with sqlite3.connect(folder / FILE) as db:
        assert db.execute("SELECT count(*) FROM documents").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM nodes").fetchone() == (5,)


def test_10_000_findings_are_cut(folder: Path) -> None:
    number = save(node(), findings=(FAIL,) * 10_000)
    with History(folder) as history:
        assert len(history.findings(number)) == store.MOST_FINDINGS


def test_runs_by_name_number_and_date_whatever_the_clock_was(folder: Path) -> None:
    numbers = [save(node(), at=f"2026-11-{day:02d}T09:00:00Z") for day in (10, 20, 5)]
    with History(folder) as history:
        assert [run.id for run in history.runs()] == numbers
        assert history.find("last").id == numbers[2]
        assert history.find(str(numbers[0])).id == numbers[0]
        assert history.find("2026-11-20").id == numbers[2]
        assert history.find("2026-11-20T10:00:00").id == numbers[2]
        for unknown in ("999", "2026-11-01", "lastt", "99999999999999999999"):
            with pytest.raises(UsageError, match=unknown):
                history.find(unknown)


def test_an_interrupted_run_is_kept_and_is_not_the_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(node())
    recorder = Recorder("validate", "quick", "2026-11-21T09:00:00Z")
    recorder.node(node("gpu-02"), "pass")
    recorder.__exit__(KeyboardInterrupt, None, None)
    with History(folder) as history:
        assert history.find("last").id == first
        assert [node.host for node in history.snapshots(first + 1)] == ["gpu-02"]
    assert cli(["history", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "interrupted"


def test_a_newer_schema_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(node())
    with sqlite3.connect(folder / FILE) as db:
        db.execute(f"PRAGMA user_version = {store.VERSION + 1}")
    db.close()
    before = (folder / FILE).read_bytes()
    save(node())
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "newer gpunode" in shown
    assert (folder / FILE).read_bytes() == before
    assert cli(["history", "list"]) == 3


def test_a_damaged_file_is_moved_aside_and_nothing_else_is_lost(folder: Path) -> None:
    chance = random.Random(35)  # noqa: S311
    save(*(node(f"gpu-{number:02d}") for number in range(20)), findings=(FAIL,))
    whole = (folder / FILE).read_bytes()
    bundle = folder / "bundles" / "x" / "gpu-01.json.gz"
    bundle.parent.mkdir(parents=True)
    bundle.write_bytes(gzip.compress(b"{}"))
    moved, messages = 0, list[str]()
    for _ in range(effort(12, 300)):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 3, 100))):
            start = chance.randrange(len(damaged))
            length = chance.choice((1, 16, 4096))
            damaged[start : start + length] = chance.randbytes(len(damaged[start : start + length]))
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        for path in folder.glob(f"{FILE}*"):
            path.unlink()
        (folder / FILE).write_bytes(damaged)
        try:
            with History(folder) as history:
                for run in history.runs():
                    list(history.snapshots(run.id))
                    history.findings(run.id)
        except HistoryError as err:
            messages.append(str(err))
        save(node())
        moved += bool(list(folder.glob(f"{FILE}.damaged-*")))
        if not (folder / FILE).exists():
            save(node())  # it was noticed in the middle of that run: this one begins a new file
        with History(folder) as history:
            history.runs()
    assert moved > 3
    assert messages
    assert not [line for line in messages if "\n" in line]
    assert gzip.decompress(bundle.read_bytes()) == b"{}"


def test_a_full_disk_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(node())
    with Recorder("validate", "quick", "2026-11-21T09:00:00Z") as recorder:
        assert recorder.history is not None
        recorder.history._db.execute("PRAGMA max_page_count = 1")
        for number in range(200):
            recorder.node(node(f"gpu-{number}", platform=os.urandom(4000).hex()), "pass")
        recorder.finish("pass", "2026-11-21T09:00:00Z")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "full" in shown
    with History(folder) as history:
        assert history.find("last").id == first


@pytest.mark.parametrize("case", ["file in place of the folder", "read-only", "HOME is not set", "switched off"])
def test_no_history_is_at_most_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = 1
    if case == "file in place of the folder":
        (tmp_path / "file").touch()
        monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "file" / "history"))
    elif case == "read-only":
        monkeypatch.setenv("GPUNODE_HISTORY", "/proc/self/history")
    elif case == "switched off":
        monkeypatch.setenv("GPUNODE_HISTORY", "off")
        lines = 0
    else:
        for name in ("GPUNODE_HISTORY", "HOME", "XDG_STATE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert save(node()) == 0
    assert capsys.readouterr().err.count("\n") == lines


@pytest.mark.parametrize(
    ("variables", "user", "expected"),
    [
        ({"XDG_STATE_HOME": "/x"}, 0, "/x/gpunode/history"),
        ({"HOME": "/home/a"}, 0, "/var/lib/gpunode/history"),
        ({"HOME": "/home/a"}, 1000, "/home/a/.local/state/gpunode/history"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "relative"}, 1000, "/home/a/.local/state/gpunode/history"),
    ],
)
def test_the_default_folder(
    variables: dict[str, str], user: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPUNODE_HISTORY", "HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert str(store.default_folder()) == expected


def test_two_controllers_write_at_once(folder: Path) -> None:
    save(node())
    numbers: list[int] = []

    def controller(name: int) -> None:
        numbers.extend(save(node(f"gpu-{name}-{number}")) for number in range(8))

    threads = [threading.Thread(target=controller, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with History(folder) as history:
        assert len(set(numbers)) == 24
        assert [run.nodes for run in history.runs()] == [1] * 25
        assert all(run.finished_at for run in history.runs())


def test_a_kill_while_it_is_written_loses_no_earlier_run(folder: Path) -> None:
    chance = random.Random(9)  # noqa: S311
    complete = {save(node())}
    for _ in range(effort(6, 50)):
        pid = os.fork()
        if pid == 0:
            for _ in range(1000):
                save(*(node(f"gpu-{number}", platform=os.urandom(20).hex()) for number in range(3)))
            os._exit(0)
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with History(folder) as history:
            runs = history.runs()
            assert complete <= {run.id for run in runs if run.finished_at is not None}
            complete |= {run.id for run in runs if run.finished_at is not None}
            assert all(len(list(history.snapshots(run.id))) in (1, 3) for run in runs[-3:] if run.finished_at)
        complete.add(save(node()))
    with sqlite3.connect(folder / FILE) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_prune_by_age_size_and_host(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(node(), at="2020-01-01T09:00:00Z")
    with History(folder) as history:
        assert history.runs()[0].started_at.startswith("2020"), "the only run stays, whatever its age"
    save(node(), node("gpu-02"), at="2026-11-20T09:00:00Z")
    save(node(), node("gpu-02"), at="2026-11-21T09:00:00Z")
    with History(folder) as history:
        assert [run.started_at[:4] for run in history.runs()] == ["2026", "2026"]
    assert cli(["history", "prune", "--days", "100000", "--host", "gpu-02"]) == 0
    with History(folder, write=True) as history:
        assert history.hosts() == ["gpu-01"]
        history.save_bundle(history.runs()[0].name, "gpu-01", os.urandom(2 << 20))
        history.save_bundle(history.runs()[1].name, "gpu-01", os.urandom(2 << 20))
        assert history.prune(HistoryLimits(days=100_000, bundles_mib=3))[1] == 1
        assert not history.bundle_path(history.runs()[0], "gpu-01").exists()
        assert history.bundle_path(history.runs()[1], "gpu-01").exists()
        history.prune(HistoryLimits(days=100_000, mib=0))
        assert len(history.runs()) == 1
    assert cli(["history", "prune", "--host", "gpu-99"]) == 2
    capsys.readouterr()


def bundle_of(folder: Path, run: int, host: str, content: bytes | None = None) -> Path:
    """The bundle of a node in a run, or other bytes in its place."""
    with History(folder, write=True) as history:
        history.save_bundle(history.name_of(run), host, raw(host=host).encode())
        path = history.bundle_path(history.name_of(run), host)
    if content is not None:
        path.write_bytes(content)
    return path


def interrupted(*nodes: Snapshot, at: str) -> int:
    recorder = Recorder("validate", "quick", at)
    for each in nodes:
        recorder.node(each, "pass")
    recorder.__exit__(KeyboardInterrupt, None, None)
    return recorder.run


def test_prune_of_a_host_leaves_nothing_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [save(node(), node("gpu-02"), at=f"2026-11-2{day}T09:00:00Z") for day in (0, 1)]
    lost = interrupted(at="2026-11-22T09:00:00Z")
    removed = [bundle_of(folder, run, "gpu-02") for run in runs] + [bundle_of(folder, lost, "gpu-03")]
    kept = [bundle_of(folder, run, "gpu-01") for run in runs]
    assert cli(["history", "prune", "--host", "gpu-02", "--host", "gpu-03"]) == 0
    assert "the bundles of 3 runs" in capsys.readouterr().err
    assert [path.exists() for path in (*removed, *kept)] == [False] * 3 + [True] * 2
    assert not [path for path in folder.rglob("*") if "gpu-02" in path.name or "gpu-03" in path.name]
    assert cli(["history", "prune", "--host", "gpu-03"]) == 2


@pytest.mark.parametrize("limits", [HistoryLimits(days=1), HistoryLimits(days=100_000, mib=0)])
def test_prune_keeps_the_last_complete_run_and_what_may_be_in_progress(folder: Path, limits: HistoryLimits) -> None:
    save(node(), at="2020-01-01T09:00:00Z")
    last = save(node(), at="2020-01-02T09:00:00Z")
    later = interrupted(node(), at="2020-01-03T09:00:00Z")
    with History(folder, write=True) as history:
        history.prune(limits)
        assert [run.id for run in history.runs()] == [last, later]
        assert history.find("last").id == last
    newest = save(node(), at="2020-01-04T09:00:00Z")
    with Recorder(store.FABRIC, "standard", "2020-01-05T09:00:00Z") as recorder:
        recorder.finish("pass", "2020-01-05T09:00:00Z")
    with History(folder, write=True) as history:
        history.prune(limits)
        assert [run.id for run in history.runs()] == [newest, recorder.run]
        assert history.find("last").id == newest


def test_a_damaged_bundle_costs_no_other_its_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(7)  # noqa: S311
    whole = gzip.compress(raw().encode())
    damages = [
        b"",
        gzip.compress(b""),
        gzip.compress(b"{}"),
        gzip.compress(b"\xff"),
        whole[: len(whole) // 2],
        b"x" * 99,
    ]
    for _ in range(effort(30, 2000)):
        changed = bytearray(whole)
        for _ in range(chance.choice((1, 20))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        damages.append(bytes(changed))
    hosts = [f"damaged-{number}" for number in range(len(damages))]
    run = save(*(node(host) for host in ("a-good", "none", *hosts, "z-good")))
    for host in ("a-good", "z-good"):
        bundle_of(folder, run, host)
    for host, damage in zip(hosts, damages, strict=True):
        bundle_of(folder, run, host, damage)
    assert cli(["history", "export", "last", "--bundles", str(tmp_path / "out")]) == 3
    written = {path.stem for path in (tmp_path / "out").iterdir()}
    assert {"a-good", "z-good"} <= written <= {"a-good", "z-good", *hosts}
    shown = capsys.readouterr().err
    assert "no bundle of none is kept" in shown
    assert "can be read" in shown
    # A changed byte of gzip's head (name, time, system) changes nothing that is in it.
    assert len(written) < 2 + len(hosts) / 2


def test_a_bundle_that_cannot_be_written_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle_of(folder, save(node()), "gpu-01")
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    before = bundle_of(folder, 1, "gpu-01").read_bytes()
    assert synced, "it is on the disk before it has its name"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        bundle_of(folder, 1, "gpu-01")
    assert (path.read_bytes(), [file.name for file in path.parent.iterdir()]) == (before, [path.name])


def test_a_lock_that_is_held_is_waited_for_within_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(node())
    monkeypatch.setattr(store, "WAIT_S", 0.2)
    with (folder / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begun = time.monotonic()
        with pytest.raises(HistoryError, match="lock"):
            History(folder, write=True)
        assert time.monotonic() - begun < 10
        threading.Timer(0.1, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        monkeypatch.setattr(store, "WAIT_S", 20)
        History(folder, write=True).close()


@pytest.mark.parametrize("text", ["²", "٣", "1²", "9" * 5000])
def test_a_name_that_only_looks_like_a_number_is_no_run(folder: Path, text: str) -> None:
    save(node())
    assert cli(["history", "show", text]) == 2


@pytest.mark.parametrize(
    ("kind", "network"), [("ext4", False), ("nfs4", True), ("fuse.sshfs", True), ("lustre", True), ("tmpfs", False)]
)
def test_no_write_ahead_log_on_a_network_file_system(
    kind: str, network: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"1 0 0:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / {tmp_path} rw shared:1 - {kind} server:/x rw\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: table)
    assert store.on_network(tmp_path / "history") is network


def test_what_changed_on_a_node_and_its_trends(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = good().gpus[0]
    path = f"smi.document.gpus[{gpu.uuid}].remapped_rows.uncorrectable"
    for day in range(1, 8):
        counters = {**good().counters, path: 2.0 * day}
        gpus = good().gpus if day < 5 else good().gpus[1:]
        save(node(counters=counters, gpus=gpus), at=f"2026-11-{day:02d}T09:00:00Z")
    assert cli(["history", "show", "gpu-01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    gone = [line for line in lines if "removed" in line]
    assert len(gone) == 1
    assert gone[0].startswith("run 5 of 2026-11-05T09:00:00Z: worse")
    assert f"serial {gpu.serial}" in gone[0]
    assert f"trend: {gpu.uuid}: 12 more remapped rows uncorrectable in 6 days (7 points)" in lines
    assert cli(["history", "trends"]) == 0
    assert capsys.readouterr().out.count("12 more remapped rows") == 1
    assert cli(["history", "show", "gpu-77"]) == 2


def test_export_of_a_run_and_its_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder("collect", "quick", "2026-11-20T09:00:00Z") as recorder:
        recorder.bundle("gpu-01", raw().encode())
        recorder.node(node(), "pass")
        recorder.node(node("gpu-02"), "pass")
        recorder.finish("pass", "2026-11-20T09:00:01Z")
    assert cli(["history", "export", "last", "--output", str(tmp_path / "run.json")]) == 0
    assert '"gpunode.run/1"' in (tmp_path / "run.json").read_text()
    assert cli(["history", "export", "last", "--bundles", str(tmp_path / "out")]) == 3
    assert "gpu-02" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu-01.json"]
