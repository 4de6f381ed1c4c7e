"""The store of runs: an SQLite file with runs, nodes, findings and snapshots, and compressed bundles beside it."""

import fcntl
import gzip
import hashlib
import json
import os
import pwd
import re
import shutil
import sqlite3
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from gpunode.checks import EarlierGpus, Finding, Status
from gpunode.errors import UndeterminedError, UsageError
from gpunode.frozen import invalid_field
from gpunode.history.snapshot import GOOD, FigureValue, Snapshot
from gpunode.text import is_whole, moment
from gpunode.whole import exists, make_private_folder, whole_file

VARIABLE = "GPUNODE_HISTORY"
FILE = "history.sqlite"
VERSION = 1
MOST_FINDINGS = 1000
"""Findings of one node that are kept, each with so many characters of its message."""
MOST_MESSAGE = 300
BATCH = 50
"""Nodes of one transaction."""
WAIT_S = 20
"""Time to wait for another writer."""
MEASURED = frozenset({"collected_at", "figures", "counters", "idle_temperatures_c"})
"""Fields of a snapshot that differ from run to run; the others are stored once while they are unchanged."""
FABRIC = "fabric"
"""Verb of the runs of nodes together: they have other checks than runs of each node by itself."""
NETWORK = re.compile(r"^(nfs|nfs4|cifs|smb3|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|fuse\..*|fuse)$")
"""File systems on which SQLite's write-ahead log does not work: https://www.sqlite.org/wal.html."""
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, verb TEXT NOT NULL, level TEXT NOT NULL,
        started_at TEXT NOT NULL, finished_at TEXT, status TEXT, version TEXT NOT NULL
    );
    CREATE TABLE documents (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, content BLOB NOT NULL);
    CREATE TABLE nodes (
        id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE, host TEXT NOT NULL,
        status TEXT NOT NULL, gpus INTEGER NOT NULL, model TEXT,
        document INTEGER NOT NULL REFERENCES documents (id), measured BLOB NOT NULL
    );
    CREATE INDEX nodes_of_run ON nodes (run, host);
    CREATE INDEX runs_of_host ON nodes (host, run);
    CREATE INDEX nodes_of_document ON nodes (document);
    CREATE TABLE findings (
        node INTEGER NOT NULL REFERENCES nodes (id) ON DELETE CASCADE, check_id TEXT NOT NULL, component TEXT NOT NULL,
        status TEXT NOT NULL, message TEXT NOT NULL
    );
    CREATE INDEX findings_of_node ON findings (node);
    """,
)
"""Statements that lead from each version of the schema to the next one; a released one is never changed."""
INSERT_NODE = "INSERT INTO nodes (run, host, status, gpus, model, document, measured) VALUES (?, ?, ?, ?, ?, ?, ?)"
Answer = TypeVar("Answer")


class HistoryError(UndeterminedError):
    """The history cannot be used; the message is one line."""


class DamagedRowError(ValueError):
    """A row has a value of another type."""


@dataclass(frozen=True)
class HistoryLimits:
    """HistoryLimits of what is kept."""

    days: float = 400
    mib: float = 512
    """Of the SQLite file."""
    bundles_mib: float = 1024


@dataclass(frozen=True)
class SavedRun:
    """One run."""

    id: int
    name: str
    verb: str
    level: str
    started_at: str
    finished_at: str | None
    """None: interrupted, or still in progress."""
    status: str | None
    version: str
    nodes: int

    @property
    def title(self) -> str:
        """Return ``run 12 of 2026-11-20T09:00:00Z``."""
        return f"run {self.id} of {self.started_at}"


@dataclass(frozen=True)
class StoredFinding:
    """A finding that neither passed nor was skipped."""

    host: str
    check: str
    component: str
    status: str
    message: str


def default_folder() -> Path | None:
    """Return the folder of the history: ``GPUNODE_HISTORY``, else below the user's state directory; None: switched off.

    Raises HistoryError.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named in ("", "off", "none") else Path(named)
    return state_folder() / "history"


def state_folder() -> Path:
    """Return the folder of what gpunode keeps on the controller, below the user's state directory. Raises HistoryError.

    Root has a folder of its own, so that sudo leaves no file of root in a home.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if Path(state).is_absolute():
        return Path(state) / "gpunode"
    if os.geteuid() == 0:
        return Path("/var/lib/gpunode")
    home = os.environ.get("HOME", "")
    if not Path(home).is_absolute():
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            raise HistoryError(f"the user has no home directory: set {VARIABLE}=DIR, or {VARIABLE}=off") from None
    return Path(home) / ".local" / "state" / "gpunode"


def history_folder() -> Path:
    """Return the folder of the history for a verb that reads it. Raises UsageError if there is none."""
    try:
        folder = default_folder()
    except HistoryError as err:
        raise UsageError(str(err)) from None
    if folder is None:
        raise UsageError(f"the history is switched off: {VARIABLE} is {os.environ.get(VARIABLE)!r}; set it to a folder")
    return folder


class History:
    """The store; use it as a context. ``write``: create the folder and the file as required.

    Raises HistoryError where it cannot be opened. A damaged file is moved aside: ``moved`` has its new path.
    """

    def __init__(self, folder: Path, *, write: bool = False) -> None:
        self.folder = folder
        self.moved: Path | None = None
        self._write = write
        self._path = folder / FILE
        try:
            if write:
                make_private_folder(folder)
            elif not self._path.exists():
                raise HistoryError(f"{folder}: no run was saved there yet")
            self._db = self._opened()
        except OSError as err:
            raise HistoryError(f"{folder}: {err.strerror or err}") from None

    def _opened(self) -> sqlite3.Connection:
        try:
            with self._locked():
                return self._connected()
        except (sqlite3.Error, UnicodeDecodeError) as err:
            if not damaged(err):
                raise HistoryError(f"{self._path}: {err}") from None
        self.move_aside()
        if not self._write:
            raise HistoryError(f"{self._path}: damaged, moved to {self.moved}: later runs begin a new history")
        try:
            with self._locked():
                return self._connected()
        except (sqlite3.Error, UnicodeDecodeError) as err:
            raise HistoryError(f"{self._path}: {err}") from None

    def _connected(self) -> sqlite3.Connection:
        db = self._plain() if self._write else self._read_only()
        try:
            version = _readable_version(db, self._path, migrates=self._write)
            if self._write:
                journal = "delete" if on_network(self.folder) else "wal"
                for pragma in ("auto_vacuum=incremental", f"journal_mode={journal}", "synchronous=normal"):
                    db.execute(f"PRAGMA {pragma}")
                db.execute("PRAGMA foreign_keys=on")
                _migrate(db, version)
            db.execute("SELECT count(*) FROM runs").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    def _plain(self) -> sqlite3.Connection:
        if not self._path.exists():
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        return sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)

    def _read_only(self) -> sqlite3.Connection:
        name = quote(str(self._path.absolute()))
        db = sqlite3.connect(f"file:{name}?mode=ro", uri=True, timeout=WAIT_S, isolation_level=None)
        try:
            db.execute("PRAGMA schema_version").fetchone()
        except sqlite3.OperationalError:
            # The log's index cannot be created in a folder that is read-only; nobody writes there then.
            db.close()
            db = sqlite3.connect(f"file:{name}?immutable=1", uri=True, isolation_level=None)
        return db

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock under which the file is created, migrated and moved."""
        if not self._write:
            yield
            return
        number = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(number)
            yield
        finally:
            os.close(number)

    def _wait_for(self, lock: int) -> None:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise HistoryError(f"{self.folder}: another process has held its lock for {WAIT_S} s") from None
            time.sleep(0.05)

    def move_aside(self) -> None:
        """Rename a damaged file with its log; the bundles stay."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        target = self._path.with_name(f"{FILE}.damaged-{stamp}-{uuid.uuid4().hex[:6]}")
        try:
            self._path.rename(target)
            for suffix in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    Path(f"{self._path}{suffix}").rename(f"{target}{suffix}")
        except OSError as err:
            raise HistoryError(f"{self._path}: damaged, and cannot be moved aside: {err.strerror}") from None
        self.moved = target

    def _do(self, work: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Return the result of ``work`` on the file. Raises HistoryError."""
        try:
            return work(self._db)
        except (sqlite3.Error, zlib.error, ValueError) as err:
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.rollback()
            if damaged(err):
                self.close()
                self.move_aside()
                raise HistoryError(f"{self._path}: damaged ({err}), moved to {self.moved}") from None
            raise HistoryError(f"{self._path}: {err}") from None

    def _change(self, work: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Return the result of ``work`` in one transaction."""

        def whole(db: sqlite3.Connection) -> Answer:
            db.execute("BEGIN IMMEDIATE")
            answer = work(db)
            db.execute("COMMIT")
            return answer

        return self._do(whole)

    def begin(self, verb: str, level: str, started_at: str, version: str) -> int:
        """Add a run without nodes; return its number."""
        row = (uuid.uuid4().hex, verb, level, started_at, version)
        statement = "INSERT INTO runs (name, verb, level, started_at, version) VALUES (?, ?, ?, ?, ?)"
        return self._change(lambda db: int(db.execute(statement, row).lastrowid or 0))

    def add(self, run: int, nodes: Sequence[tuple[Snapshot, str, Sequence[Finding]]]) -> None:
        """Add nodes with their status and findings to a run, in one transaction."""

        def write(db: sqlite3.Connection) -> None:
            for snapshot, status, findings in nodes:
                document, measured = packed(snapshot)
                row = (run, snapshot.host, status, len(snapshot.gpus), snapshot.model, _kept(db, document), measured)
                node = db.execute(INSERT_NODE, row).lastrowid
                bad = [finding for finding in findings if finding.status not in GOOD and finding.observed is None]
                rows = (
                    (node, finding.check, finding.component, finding.status.value, finding.message[:MOST_MESSAGE])
                    for finding in bad
                )
                db.executemany("INSERT INTO findings VALUES (?, ?, ?, ?, ?)", list(rows)[:MOST_FINDINGS])

        self._change(write)

    def finish(self, run: int, status: str, finished_at: str, level: str) -> None:
        """Mark a run as complete."""
        row = (status, finished_at, level, run)
        self._change(lambda db: db.execute("UPDATE runs SET status = ?, finished_at = ?, level = ? WHERE id = ?", row))

    def runs(self) -> list[SavedRun]:
        """Return all runs in the order in which they were saved, whatever the clock was."""
        statement = """
            SELECT id, name, verb, level, started_at, finished_at, status, version,
                   (SELECT count(*) FROM nodes WHERE run = runs.id) FROM runs ORDER BY id
        """

        def read(db: sqlite3.Connection) -> list[SavedRun]:
            rows = db.execute(statement).fetchall()
            if not all(isinstance(row[0], int) and all(isinstance(text, str) for text in row[1:5]) for row in rows):
                raise DamagedRowError("a run has a value of another type")
            return [SavedRun(*row) for row in rows]

        return self._do(read)

    def _complete(self) -> dict[int, SavedRun]:
        """Return the complete runs by number."""
        return {run.id: run for run in self.runs() if run.finished_at is not None}

    def name_of(self, run: int) -> str:
        """Return the name of a run, by which its bundles are kept."""
        return self._do(lambda db: str(db.execute("SELECT name FROM runs WHERE id = ?", (run,)).fetchone()[0]))

    def find(self, text: str) -> SavedRun:
        """Return the run that a text names: ``last``, a number, or a date: the last run that began by then.

        Interrupted runs, and those of nodes together (``validate --fabric``), are found by their number only. Raises
        UsageError.
        """
        runs = self.runs()
        complete = [run for run in runs if run.finished_at is not None and run.verb != FABRIC]
        if is_whole(text):
            chosen = [run for run in runs if run.id == int(text)]
        elif text == "last":
            chosen = complete
        else:
            until = moment(text)
            if until is None:
                raise UsageError(f"{text}: expected last, a run's number, a date as 2026-11-20, or a file")
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                until += timedelta(days=1)
            chosen = [run for run in complete if (began := moment(run.started_at)) is not None and began < until]
        if not chosen:
            known = f"runs {runs[0].id} to {runs[-1].id}" if runs else "no run"
            raise UsageError(f"{text}: no such complete run; the history {self.folder} has {known}")
        return chosen[-1]

    def snapshots(self, run: int, host: str | None = None) -> Iterator[Snapshot]:
        """Yield the nodes of a run in the order of their names, one at a time."""
        statement = """
            SELECT content, measured FROM nodes JOIN documents ON documents.id = document
            WHERE run = ?1 AND (?2 IS NULL OR host = ?2) ORDER BY host
        """
        yield from self._each(statement, (run, host), lambda row: unpacked(*row))

    def of_host(self, host: str) -> Iterator[tuple[SavedRun, Snapshot]]:
        """Yield the complete runs of a node, the earliest first."""
        runs = self._complete()
        statement = """
            SELECT run, content, measured FROM nodes JOIN documents ON documents.id = document
            WHERE host = ? ORDER BY run
        """
        for number, snapshot in self._each(statement, (host,), lambda row: (row[0], unpacked(*row[1:]))):
            if number in runs:
                yield runs[number], snapshot

    def settled_gpus(self, hosts: Iterable[str]) -> dict[str, EarlierGpus]:
        """Return the GPUs of each node in its last run in which none was missing, as far as there is one."""
        settled = {}
        runs = self._complete()
        statement = """
            SELECT run, content, measured FROM nodes JOIN documents ON documents.id = document
            WHERE host = ? ORDER BY run DESC
        """
        for host in hosts:
            for number, node in self._each(statement, (host,), lambda row: (row[0], unpacked(*row[1:]))):
                verdict = node.verdicts.get("gpu.present")
                if number in runs and node.gpus_on_bus and (verdict is None or verdict.status is not Status.FAIL):
                    settled[host] = EarlierGpus(runs[number].title, node.gpus_on_bus, node.gpu_model)
                    break
        return settled

    def measured(self, host: str | None = None) -> Iterator[tuple[str, str, Snapshot]]:
        """Yield node, time and measured values of every node in every complete run, by node and in their order."""
        statement = """
            SELECT host, started_at, measured, nodes.run FROM nodes JOIN runs ON runs.id = run
            WHERE finished_at IS NOT NULL AND (?1 IS NULL OR host = ?1) ORDER BY host, run
        """

        def read(row: tuple[Any, ...]) -> tuple[str, str, Snapshot]:
            return row[0], row[1], _measured(row[0], _json(row[2]))

        yield from self._each(statement, (host,), read)

    def hosts_of(self, run: int) -> list[str]:
        """Return the names of the nodes of a run."""
        statement = "SELECT host FROM nodes WHERE run = ? ORDER BY host"
        return self._do(lambda db: [row[0] for row in db.execute(statement, (run,))])

    def hosts(self) -> list[str]:
        """Return the names of all nodes."""
        return self._do(lambda db: [row[0] for row in db.execute("SELECT DISTINCT host FROM nodes ORDER BY host")])

    def findings(self, run: int) -> list[StoredFinding]:
        """Return the findings of a run that neither passed nor were skipped."""
        statement = """
            SELECT host, check_id, component, findings.status, message
            FROM findings JOIN nodes ON nodes.id = node WHERE run = ? ORDER BY host, check_id, component
        """
        return self._do(lambda db: [StoredFinding(*row) for row in db.execute(statement, (run,))])

    def _each(
        self, statement: str, values: tuple[Any, ...], read: Callable[[tuple[Any, ...]], Answer]
    ) -> Iterator[Answer]:
        rows = self._do(lambda db: db.execute(statement, values))

        def following(_: sqlite3.Connection) -> tuple[Answer] | None:
            row = rows.fetchone()
            return None if row is None else (read(row),)

        while (answer := self._do(following)) is not None:
            yield answer[0]

    def bundle_path(self, run: SavedRun | str, host: str) -> Path:
        """Return the path of a node's bundle, which may have been removed."""
        name = run if isinstance(run, str) else run.name
        return self.folder / "bundles" / name / f"{quote(host, safe='@+,=')}.json.gz"

    def save_bundle(self, run: str, host: str, text: bytes) -> None:
        """Write a compressed bundle. Raises OSError."""
        path = self.bundle_path(run, host)
        make_private_folder(path.parent)
        with whole_file(path, private=True) as stream:
            stream.write(gzip.compress(text, 5))

    def bundles_of(self, host: str) -> list[Path]:
        """Return the bundles of a node, also those of interrupted runs that have nothing else of it."""
        folders = (self.folder / "bundles").glob("*")
        return [path for folder in folders if exists(path := self.bundle_path(folder.name, host))]

    def prune(self, limits: HistoryLimits, *, hosts: Sequence[str] = ()) -> tuple[int, int]:
        """Remove what exceeds the limits, the oldest first, and all of the named hosts; return runs and bundles' runs.

        The last complete run stays, with those since then, which may be in progress; so does the last of ``FABRIC``.
        """
        removed = self._forget(hosts) if hosts else 0
        bundles = [path for host in hosts for path in self.bundles_of(host)]
        for path in bundles:
            path.unlink(missing_ok=True)
        oldest = datetime.now(UTC) - timedelta(days=limits.days)
        runs = self.runs()
        complete = {run.verb == FABRIC: run.id for run in runs if run.finished_at is not None}
        last = max(complete.values(), default=runs[-1].id if runs else 0)
        for run in runs:
            if run.id in complete.values() or run.id >= last:
                continue
            began = moment(run.started_at)
            if (began is not None and began < oldest) or self._size_mib() > limits.mib:
                self._remove(run)
                removed += 1
                if removed % 10 == 0:
                    self._vacuum()
        if removed:
            self._vacuum()
        return removed, len({path.parent for path in bundles}) + self._prune_bundles(limits)

    def _remove(self, run: SavedRun) -> None:
        self._change(lambda db: db.execute("DELETE FROM runs WHERE id = ?", (run.id,)))

    def _forget(self, hosts: Sequence[str]) -> int:
        def forget(db: sqlite3.Connection) -> int:
            number = sum(db.execute("DELETE FROM nodes WHERE host = ?", (host,)).rowcount for host in hosts)
            db.execute("DELETE FROM runs WHERE finished_at IS NOT NULL AND id NOT IN (SELECT run FROM nodes)")
            return number

        return self._change(forget)

    def _size_mib(self) -> float:
        def used(db: sqlite3.Connection) -> float:
            pages, free, size = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
            )
            return float((pages - free) * size) / (1 << 20)

        return self._do(used)

    def _vacuum(self) -> None:
        def vacuum(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM documents WHERE id NOT IN (SELECT document FROM nodes)")
            db.execute("PRAGMA incremental_vacuum").fetchall()

        self._do(vacuum)

    def _prune_bundles(self, limits: HistoryLimits) -> int:
        """Remove folders of bundles without a run that are a day old, and the oldest beyond the limit."""
        known = {run.name: run.id for run in self.runs()}
        removed, left = 0, []
        for folder in (self.folder / "bundles").glob("*"):
            with suppress(OSError):
                old = datetime.now(UTC).timestamp() - folder.stat().st_mtime > 86_400
                size = sum(path.stat().st_size for path in folder.iterdir())
                if folder.name not in known and old:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
                else:
                    left.append((known.get(folder.name, 1 << 62), size, folder))
        total = sum(size for _, size, _ in left)
        for _, size, folder in sorted(left, key=lambda row: row[0])[:-1]:
            if total <= limits.bundles_mib * (1 << 20):
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            removed += 1
        return removed

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _readable_version(db: sqlite3.Connection, path: Path, *, migrates: bool) -> int:
    """Return the version of a file's schema; raise HistoryError for one that this version cannot use."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise HistoryError(
            f"{path}: written by a newer gpunode (schema {version}, this one reads up to {VERSION}): "
            f"upgrade gpunode, or set {VARIABLE} to another folder"
        )
    if version < VERSION and not migrates:
        raise HistoryError(f"{path}: has an earlier schema ({version}): the next run that is saved migrates it")
    return int(version)


def _migrate(db: sqlite3.Connection, version: int) -> None:
    for number in range(version, VERSION):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in MIGRATIONS[number].split(";\n"):
                if statement.strip():
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {number + 1}")
        except BaseException:
            db.rollback()
            raise
        db.execute("COMMIT")


def damaged(err: Exception) -> bool:
    """Return whether an error means that the file's content is damaged, not that it cannot be read or written now."""
    # Text of a damaged page, also in SQLite's own messages, is not UTF-8.
    if isinstance(err, zlib.error | UnicodeDecodeError | DamagedRowError):
        return True
    if isinstance(err, sqlite3.DatabaseError):
        code = getattr(err, "sqlite_errorcode", 0) & 0xFF
        return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such table" in str(err)
    return False


def packed(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """Return a snapshot as two compressed documents: what identifies the node, and what was measured."""
    document = snapshot.model_dump(mode="json", exclude_defaults=True)
    measured = {key: document.pop(key) for key in list(document) if key in MEASURED}
    return _compressed(document), _compressed(measured)


def unpacked(document: bytes, measured: bytes) -> Snapshot:
    """Return the snapshot of two documents. Raises zlib.error and ValueError."""
    try:
        return Snapshot.model_validate(_json(document) | _json(measured))
    except ValidationError as err:
        field, why = invalid_field(err, "snapshot")
        raise ValueError(f"a saved node cannot be read: {field}: {why}") from None


def _measured(host: str, values: dict[str, Any]) -> Snapshot:
    """Return a snapshot with measured values only; the many counters are not validated again."""
    figures = tuple(FigureValue.model_validate(figure) for figure in values.get("figures", ()))
    counters, temperatures = values.get("counters", {}), values.get("idle_temperatures_c", {})
    return Snapshot.model_construct(
        host=host, level="quick", figures=figures, counters=counters, idle_temperatures_c=temperatures
    )


def _compressed(document: Any) -> bytes:
    return zlib.compress(json.dumps(document, separators=(",", ":"), sort_keys=True).encode(), 6)


def _json(content: bytes) -> Any:
    return json.loads(zlib.decompress(content))


def _kept(db: sqlite3.Connection, content: bytes) -> int:
    """Return the id of a document, which is stored once."""
    digest = hashlib.sha256(content).digest()
    row = db.execute("SELECT id FROM documents WHERE digest = ?", (digest,)).fetchone()
    if row is not None:
        return int(row[0])
    return int(db.execute("INSERT INTO documents (digest, content) VALUES (?, ?)", (digest, content)).lastrowid or 0)


def on_network(folder: Path) -> bool:
    """Return whether a folder is on a network file system, by the longest mount point above it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        real = str(folder.resolve())
    except OSError:
        return True
    best, kind = "", ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = mount.split(" ")[4].replace("\\040", " ")
        above = point in ("/", real) or real.startswith(f"{point}/")
        if above and len(point) >= len(best):
            best, kind = point, rest.split(" ")[0]
    return bool(NETWORK.match(kind))
