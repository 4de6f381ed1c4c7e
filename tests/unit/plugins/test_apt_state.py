"""What preflight learns of the node's apt."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from apt_scripts import MODULE_UTILS, load
from programs import runs

state = load("apt_state")
COLLECTIONS = MODULE_UTILS.parents[1] / "collections"
# As the module node_state looks.
LOOK = """
import json, pathlib, signal, sys
from ansible_collections.gpunode.node.plugins.module_utils import apt_private, apt_state
for number in apt_private.SIGNALS:
    signal.signal(number, apt_private.leave_orderly)
apt_private.APT = apt_state.APT = pathlib.Path(sys.argv[1])
print(json.dumps(apt_state.collected()))
"""
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="this machine has no apt")


def test_holds_of_our_own_are_read_from_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "52gpunode-nvidia-driver"
    monkeypatch.setattr(state, "OWN_LIST", file)
    assert state.own_holds() == []
    file.write_text('Unattended-Upgrade::Package-Blacklist {\n  "^libcuda1$";\n  "^nvidia-firmware-580[.]95$";\n};\n')
    assert state.own_holds() == ["libcuda1", "nvidia-firmware-580.95"]


def test_the_holder_of_the_package_lock_is_reported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setattr(state, "LOCKS", (str(lock), str(tmp_path / "absent")))
    assert state.lock_holder() is None
    held = f"f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('', flush=True)"
    program = f"import fcntl, time; {held}; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            assert str(state.lock_holder()).endswith(f"(pid {holder.pid})")
        finally:
            holder.kill()
    assert state.lock_holder() is None


@pytest.mark.parametrize("opened", [True, False])
def test_a_lock_with_only_the_inode_of_a_package_lock_needs_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """On overlay the kernel's device differs; a user has any inode number, for instance by memfd_create."""
    lock, table = tmp_path / "lock", tmp_path / "locks"
    lock.touch()
    monkeypatch.setattr(state, "LOCKS", (str(lock),))
    monkeypatch.setattr(state, "LOCK_TABLE", table)
    table.write_text(f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:01:{lock.stat().st_ino} 0 EOF\n")
    with lock.open() if opened else (tmp_path / "other").open("w"):
        assert (state.lock_holder() is not None) is opened


def test_the_state_of_this_machine_is_a_document() -> None:
    document = state.collected()
    assert document is None or {"sources", "installed", "held", "own_holds"} <= document.keys()


@pytest.mark.parametrize(
    ("older", "options"),
    [
        ((), ()),
        (("pkgcache.bin",), ("-o", "Dir::Cache::pkgcache=")),
        (("pkgcache.bin", "srcpkgcache.bin"), state.NO_CACHE),
        (("srcpkgcache.bin",), ()),
    ],
)
def test_only_fresh_caches_of_apt_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """apt rewrites an outdated one; that of the lists alone is not outdated by a hold or an installed package."""
    for name in ("status", "lists", "pkgcache.bin", "srcpkgcache.bin"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000, 1000 if name in older else 3000))
    os.utime(tmp_path / "lists", (2000, 2000) if "srcpkgcache.bin" in older else (500, 500))
    os.utime(tmp_path / "status", (2000, 2000))
    monkeypatch.setattr(state, "CACHE", tmp_path / "pkgcache.bin")
    monkeypatch.setattr(state, "LISTS_CACHE", tmp_path / "srcpkgcache.bin")
    monkeypatch.setattr(state, "LISTED", (str(tmp_path / "lists"), str(tmp_path / "absent")))
    monkeypatch.setattr(state, "CACHED", (str(tmp_path / "status"), *state.LISTED))
    assert state.read_only_options() == options
    (tmp_path / "pkgcache.bin").unlink()
    (tmp_path / "srcpkgcache.bin").unlink()
    assert state.read_only_options() == state.NO_CACHE


@needs_apt
@pytest.mark.parametrize("part", ["apt.conf.d", "preferences.d", "sources.list.d"])
def test_a_damaged_file_of_ours_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(state, "APT", tmp_path)
    for name in state.PARTS:
        (tmp_path / name).mkdir()
    (tmp_path / part / "50gpunode-docker.sources").write_text("damaged\n")
    foreign_file = tmp_path / "sources.list.d" / "theirs.sources"
    foreign_file.write_text("Types: deb\nURIs: http://a.invalid/b\nSuites: bookworm\nComponents: main\n")
    with state.passing_over_damaged({}):
        assert "Package files:" in state.output_or_empty(["apt-cache", *state.NO_CACHE, "policy"])
        assert [source["file"] for source in state.sources()] == [str(foreign_file)]


def start(tmp_path: Path, apt_config: str) -> "subprocess.Popen[str]":
    """A look at a node that has a file of ours, with this shell script in place of apt-config."""
    for name in ("apt/apt.conf.d", "apt/preferences.d", "apt/sources.list.d", "bin", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "apt/apt.conf.d/52gpunode-docker").write_text("")
    tool = tmp_path / "bin/apt-config"
    tool.write_text(f"#!/bin/sh\n{apt_config}\n")
    tool.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, "-c", LOOK, str(tmp_path / "apt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "TMPDIR": f"{tmp_path}/tmp",
            "PYTHONPATH": str(COLLECTIONS),
        },
    )


@needs_apt
def test_an_apt_that_cannot_run_is_reported_in_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, "echo apt-config: symbol lookup >&2; echo error >&2; exit 127")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert json.loads(output) == {"error": "apt-config: symbol lookup; error"}
    assert not list((tmp_path / "tmp").iterdir())


@needs_apt
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_look_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    # More than a pipe holds is written only once the look reads it: a signal while it still starts apt is too early.
    writes = f"head -c 100000 /dev/zero; echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid"
    process = start(tmp_path, f"{writes}; exec sleep 60")
    end = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert list((tmp_path / "tmp").iterdir())
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not list((tmp_path / "tmp").iterdir())
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while runs(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(child), "it is killed with its group"
