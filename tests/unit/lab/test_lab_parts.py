"""Node names, ports, archives, and the lock between processes."""

import io
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Sequence

import pytest

from gpunode.errors import UndeterminedError
from gpunode.lab import node
from gpunode.lab.engine import locked
from gpunode.lab.lab import _new_names
from gpunode.lab.node import NewNode, Ports, greeting
from gpunode.lab.recipe import SYSTEMS, Entry, tar_of


@pytest.mark.parametrize(
    ("missing", "existing", "new"),
    [
        (2, [], ["deb12-1", "deb12-2"]),
        (0, ["deb12-1", "deb12-2"], []),
        (-1, ["deb12-1", "deb12-2"], []),
        (2, ["deb12-2"], ["deb12-1", "deb12-3"]),
        (1, ["deb13-1", "deb13-2", "deb12-1-1"], ["deb12-1"]),
    ],
)
def test_names_fill_gaps(missing: int, existing: Sequence[str], new: list[str]) -> None:
    assert _new_names("deb12", missing, existing) == new


def test_ports_skip_what_is_used_and_what_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        bound = other.getsockname()[1]
        monkeypatch.setattr(node, "PORTS", range(bound - 1, bound + 1))
        with pytest.raises(UndeterminedError, match="no free port"):
            Ports({bound - 1}).take()


def test_a_port_is_given_out_once() -> None:
    ports = Ports(set())
    assert len({ports.take() for _ in range(5)}) == 5


def test_who_logs_in_reads_what_is_simulated() -> None:
    plain = greeting("one", NewNode("deb12-1", 22000), SYSTEMS["debian-12"])
    assert "simulated" not in plain
    assert "a container with debian-12" in plain
    alike = greeting("one", NewNode("t4-1-1", 22000, "t4-1"), SYSTEMS["ubuntu-24.04"])
    assert "Debian's packages under the name of ubuntu-24.04" in alike
    assert "simulated: no GPU is behind" in alike


def test_archives_keep_mode_owner_and_folders() -> None:
    data = tar_of([Entry("home/u/.ssh", None, 0o700, 1000, 100), Entry("home/u/.ssh/key", "ü\n", 0o600, 1000, 100)])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        folder, file = archive.getmembers()
        stream = archive.extractfile(file)
        assert stream is not None
        assert stream.read().decode() == "ü\n"
    assert (folder.isdir(), folder.mode, folder.uid, folder.gid) == (True, 0o700, 1000, 100)
    assert (file.isfile(), file.mode, file.uid, file.gid) == (True, 0o600, 1000, 100)


def test_a_lock_is_held_against_other_processes_and_freed_when_they_die() -> None:
    name = f"test-{os.getpid()}"
    code = f"""
import sys
from gpunode.lab.engine import locked
with locked({name!r}, 5, print):
    print("locked", flush=True)
    sys.stdin.read()
"""
    output: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UndeterminedError, match=f"works on {name}"), locked(name, 0.3, output.append):
            pytest.fail("the lock is another's")
        other.kill()
        other.wait(timeout=10)
    with locked(name, 5, output.append):
        assert output == [f"{name}: waiting for another gpunode lab command"]
