"""Accounts with locked passwords at a real sshd with ``UsePAM no``: their keys still log in, no password does.

The daemon runs in a mount namespace with user databases of the test; the user exists nowhere else.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import guard
from programs import run_program

USER, UID = "gpunode-ada", 54321


@pytest.fixture
def logs_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], bool]]:
    """Return whether the user logs in with a key, with this field in /etc/shadow."""
    if os.geteuid() != 0:
        pytest.skip("sshd with a user of its own needs root")
    # sshd requires that every folder above the keys belongs to root or the user, and that others cannot write to it.
    folder = Path("/run/gpunode-test-locked")
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in ("host", "key"):
        run_program(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], limit_s=60)
    shutil.copy(folder / "key.pub", home / ".ssh/authorized_keys")
    for path in (home, home / ".ssh", home / ".ssh/authorized_keys"):
        os.chown(path, UID, UID)
    for name, line in (("passwd", f"{USER}:x:{UID}:{UID}::{home}:/bin/sh"), ("group", f"{USER}:x:{UID}:")):
        text = Path(f"/etc/{name}").read_text(encoding="utf-8")
        (folder / name).write_text(f"{text}{line}\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile %h/.ssh/authorized_keys\nLogLevel VERBOSE\n"
    )
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    daemon: subprocess.Popen[bytes] | None = None

    def try_it(field: str) -> bool:
        nonlocal daemon
        shadow = folder / "shadow"
        shadow.write_text(f"{USER}:{field}:19000:0:99999:7:::\n")
        shadow.chmod(0o600)
        binds = " && ".join(f"mount --bind {folder}/{name} /etc/{name}" for name in ("passwd", "group", "shadow"))
        start = f"mkdir -p /run/sshd && {binds} && exec $(command -v sshd) -D -e -f {folder}/config"
        path = f"/usr/sbin:/sbin:{os.environ['PATH']}"
        daemon = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", start],
            env={"PATH": path},
            stderr=(folder / "log").open("wb"),
            start_new_session=True,
        )
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            if daemon.poll() is not None:
                pytest.skip(f"no sshd in a namespace here: {(folder / 'log').read_text()}")
            time.sleep(0.05)
        options = [f"-oUserKnownHostsFile={folder}/known", "-oBatchMode=yes", "-F/dev/null", "-oIdentitiesOnly=yes"]
        argv = ["ssh", *options, "-i", folder / "key", "-p", port, f"{USER}@127.0.0.1", "echo", "in"]
        done = run_program(argv, limit_s=60)
        daemon.kill()
        daemon.wait()
        return done.stdout == "in\n"

    yield try_it
    if daemon is not None and daemon.poll() is None:
        daemon.kill()
        daemon.wait()
    shutil.rmtree(folder, ignore_errors=True)


def test_keys_log_in_where_no_password_does(logs_in: Callable[[str], bool]) -> None:
    assert logs_in("$6$salt$hash")
    # What usermod --lock and Ansible's password_lock write: the judge refuses it.
    for field in ("!", "!$6$salt$hash"):
        assert not logs_in(field)
    for before in ("", "!", "$6$salt$hash", "!$6$salt$hash"):
        line = guard.without_passwords(f"{USER}:{before}:1".encode(), [USER]).decode()
        assert logs_in(line.split(":")[1]), before
    assert logs_in("*"), "what the role creates users with"
