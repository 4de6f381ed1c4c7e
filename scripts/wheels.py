"""Wheels of a lock file, kept by their hashes between builds of images.

Each wheel is one run of pip, and is kept once it is whole: a build that was cut continues with the wheel it was at, and
another build uses what both have. pip's own cache does not do that where a registry forbids to store its answers.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpunode.errors import UndeterminedError, UsageError

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpunode" / "wheels"
QUIET_S = 300
"""A run of pip that writes no byte for this long is ended. Above the 180 s that slow sites set as pip's own timeout."""
LONGEST_S = 3600
"""The longest run of pip: 1 GB, the largest wheel of the locks, at 300 kB/s."""
ATTEMPTS = 3
KEPT_DAYS = 30
_FINAL = re.compile(r"No matching distribution|DO NOT MATCH THE HASHES|Hashes are required|Invalid requirement")
"""What another attempt does not change."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pin:
    """One wheel of a lock file, as written there, and the hashes that it may have."""

    requirement: str
    lines: str
    hashes: frozenset[str]


def pins(lock: Path) -> list[Pin]:
    """Return what a lock file names. Raises UsageError for a line without version or hash."""
    text = re.sub(r"(?m)^\s*#.*\n", "", lock.read_text(encoding="utf-8"))
    wheels = []
    for lines in re.split(r"\n(?=\S)", text.strip()):
        hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", lines))
        if not hashes or "==" not in lines:
            raise UsageError(f"{lock}: {lines.split()[0]}: expected NAME==VERSION with --hash=sha256:…")
        wheels.append(Pin(lines.split()[0], lines, hashes))
    return wheels


def gather(lock: Path, python: str, indexes: Sequence[Sequence[str]] = ((),), say: Say = lambda _: None) -> list[Path]:
    """Return the wheels of a lock for that version of Python; download those that are not kept yet.

    ``indexes`` are options of pip that are tried in order. Raises UndeterminedError with the wheel and pip's reason.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = {_sha256(path): path for path in sorted(CACHE.glob("*.whl"))}
    needed = pins(lock)
    used = {}
    for pin in needed:
        digest = next((digest for digest in sorted(pin.hashes) if digest in kept), None)
        if digest is None:
            say(f"downloading {pin.requirement}")
            digest, kept_path = _download(pin, python, indexes)
            kept[digest] = kept_path
        os.utime(kept[digest])
        used[digest] = kept[digest]
    oldest = time.time() - KEPT_DAYS * 86400
    for digest, path in kept.items():
        if digest not in used and path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
    for folder in CACHE.glob(".download-*"):
        with suppress(FileNotFoundError):  # a download of another build that ends
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
    return list(used.values())


def install(
    lock: Path, site: Path, python: str, indexes: Sequence[Sequence[str]] = ((),), say: Say = lambda _: None
) -> None:
    """Install the wheels of a lock in a folder: each with its hash, nothing beside them, nothing compiled."""
    with tempfile.TemporaryDirectory(prefix="gpunode-wheels-", dir=site.parent) as folder:
        links = Path(folder, "links")
        links.mkdir()
        for path in gather(lock, python, indexes, say):
            (links / path.name).symlink_to(path)
        words = ["--no-compile", "--no-index", "--find-links", str(links), "--target", str(site)]
        _pip("install", [*words, "--python-version", python, "--requirement", str(lock)], Path(folder), lock.name)


def _download(pin: Pin, python: str, indexes: Sequence[Sequence[str]]) -> tuple[str, Path]:
    error = UndeterminedError("")
    for attempt in range(ATTEMPTS):
        for index in indexes:
            with tempfile.TemporaryDirectory(prefix=".download-", dir=CACHE) as folder:
                lock, target = Path(folder, "lock.txt"), Path(folder, "wheels")
                lock.write_text(f"{pin.lines}\n", encoding="utf-8")
                words = ["--python-version", python, "--dest", str(target), "--requirement", str(lock), *index]
                try:
                    _pip("download", words, Path(folder), pin.requirement)
                except UndeterminedError as err:
                    error = err
                    continue
                (wheel,) = target.iterdir()
                return _sha256(wheel), wheel.replace(CACHE / wheel.name)
        if _FINAL.search(str(error)):
            break
        time.sleep(attempt)
    raise error


def _pip(verb: str, words: Sequence[str], folder: Path, subject: str) -> None:
    """Run pip with its temporary files in the folder; it is ended when nothing in there grows any more."""
    command = [sys.executable, "-I", "-m", "pip", verb, "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += [*words, "--quiet", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
        )
        try:
            ended = _while_it_writes(process, folder)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    if ended is not None:
        raise UndeterminedError(f"{subject} could not be installed: {ended}")
    if process.returncode:
        errors = [line for line in lines if line.startswith("ERROR") or "HASHES" in line] or lines[-1:]
        raise UndeterminedError(f"{subject} could not be installed: {' '.join(errors)[:400]}")


def _while_it_writes(process: "subprocess.Popen[bytes]", folder: Path) -> str | None:
    """Wait for the end of pip; return why it is not waited for any longer, or None."""
    started = changed = time.monotonic()
    size = -1
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            return None
        now = time.monotonic()
        written = _bytes_below(folder)
        if written != size:
            size, changed = written, now
        if now - changed > QUIET_S:
            return f"pip has written nothing for {QUIET_S} s"
        if now - started > LONGEST_S:
            return f"pip did not end within {LONGEST_S} s"


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                total += Path(root, name).lstat().st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
