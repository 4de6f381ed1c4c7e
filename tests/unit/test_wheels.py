"""Wheels of a lock: downloaded once, by their hashes, and no longer waited for than they arrive."""

import hashlib
import os
import sys
import time
import zipfile
from pathlib import Path

import pytest
import wheels

from gpunode.errors import UndeterminedError, UsageError

PYTHON = "3.11"
STUCK = """\
#!{python}
import os, pathlib, sys, time
pathlib.Path(os.environ["TMPDIR"], "begun").write_text("half a wheel")
time.sleep(60)
"""


def wheel(folder: Path, name: str, content: str = "") -> str:
    """Make a wheel; return its lines in a lock."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"content = {content!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip knows in place of a registry."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def lock_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "lock.txt"
    path.write_text("# a comment\n" + "".join(lines))
    return path


def test_a_build_that_was_cut_continues_and_another_build_downloads_nothing(index: Path, tmp_path: Path) -> None:
    first, second = wheel(index, "one"), wheel(index, "two")
    away = tmp_path / "two.whl"
    (index / "two-1.0-py3-none-any.whl").rename(away)
    lock, printed = lock_of(tmp_path, first, second), list[str]()
    with pytest.raises(UndeterminedError, match=r"two==1\.0 could not be installed"):
        wheels.install(lock, tmp_path / "site", PYTHON, say=printed.append)
    away.rename(index / "two-1.0-py3-none-any.whl")
    (index / "one-1.0-py3-none-any.whl").unlink()
    wheels.install(lock, tmp_path / "site", PYTHON, say=printed.append)
    (index / "two-1.0-py3-none-any.whl").unlink()
    wheels.install(lock, tmp_path / "another", PYTHON, say=printed.append)
    assert printed == ["downloading one==1.0", "downloading two==1.0", "downloading two==1.0"]
    assert {path.name for path in (tmp_path / "another").glob("*.py")} == {"one.py", "two.py"}
    assert not list(wheels.CACHE.glob(".*"))


def test_another_content_is_refused_at_once(index: Path, tmp_path: Path) -> None:
    lines = wheel(index, "one")
    wheel(index, "one", "something else")
    started = time.monotonic()
    with pytest.raises(UndeterminedError, match="DO NOT MATCH THE HASHES"):
        wheels.install(lock_of(tmp_path, lines), tmp_path / "site", PYTHON)
    assert time.monotonic() - started < 60
    assert list(wheels.CACHE.glob("*.whl")) == []


def test_a_damaged_wheel_in_the_cache_is_downloaded_again(index: Path, tmp_path: Path) -> None:
    lock = lock_of(tmp_path, wheel(index, "one"))
    (kept,) = wheels.gather(lock, PYTHON)
    kept.write_bytes(b"half")
    (again,) = wheels.gather(lock, PYTHON)
    assert again == kept
    assert zipfile.is_zipfile(kept)


def test_what_no_lock_used_for_long_is_removed(index: Path, tmp_path: Path) -> None:
    (old,) = wheels.gather(lock_of(tmp_path, wheel(index, "old")), PYTHON)
    (young,) = wheels.gather(lock_of(tmp_path, wheel(index, "young")), PYTHON)
    long_ago = time.time() - (wheels.KEPT_DAYS + 1) * 86400
    os.utime(old, (long_ago, long_ago))
    wheels.gather(lock_of(tmp_path, wheel(index, "one")), PYTHON)
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize("limit", ["QUIET_S", "LONGEST_S"])
def test_a_pip_that_gets_no_further_is_ended(
    limit: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "python"
    stuck.write_text(STUCK.format(python=sys.executable))
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(wheels, limit, 2)
    monkeypatch.setattr(wheels, "ATTEMPTS", 1)
    started = time.monotonic()
    with pytest.raises(UndeterminedError, match=r"pip (has written nothing for|did not end within) 2 s"):
        wheels.gather(lock_of(tmp_path, wheel(index, "one")), PYTHON)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("line", ["one\n", "one==1.0\n", "one>=1 \\\n    --hash=sha256:" + "0" * 64 + "\n"])
def test_a_line_without_version_or_hash_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one"):
        wheels.pins(lock_of(tmp_path, line))
