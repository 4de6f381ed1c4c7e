"""A real sshd on this machine's loopback, with keys and files of its own, as many as a test asks for."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet_sshd import Server, free_port, make_key

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

BUNDLE_SCRIPT = """
import json, socket
print(json.dumps({"schema": "gpunode.bundle/1", "host": socket.gethostname(), "collected_at": "2026-11-20T00:00:00Z",
                  "commands": {}, "files": {}}))
"""


def _wait_until_open(port: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        assert process.poll() is None, "sshd ended at once"
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("sshd does not listen")


@pytest.fixture
def start_sshd(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """``start_sshd("ForceCommand …")``: an sshd with these lines added to its configuration."""
    if SSHD is None:
        pytest.skip("no sshd on this machine: apt-get install openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    servers: list[Server] = []

    def start(*lines: str) -> Server:
        port = free_port()
        folder = tmp_path / f"sshd-{port}"
        folder.mkdir()
        make_key(folder / "host_key")
        make_key(folder / "identity")
        shutil.copy(folder / "identity.pub", folder / "authorized_keys")
        config = (
            f"Port {port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            f"PidFile {folder}/pid",
            *("UsePAM no", "StrictModes no", "MaxStartups 200", "PasswordAuthentication no", "PermitRootLogin yes"),
            *lines,
        )
        (folder / "sshd_config").write_text("\n".join(config) + "\n")
        process = subprocess.Popen(
            [str(SSHD), "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        server = Server(port, folder, process)
        servers.append(server)
        _wait_until_open(port, process)
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {server.host_key}\n")
        return server

    yield start
    for server in servers:
        os.killpg(server.process.pid, signal.SIGTERM)
        server.process.wait(10)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that only prints the user, for tests of the connection and not of the answer."""
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: BUNDLE_SCRIPT)
