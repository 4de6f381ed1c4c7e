"""A registry of images on this machine, with Debian's docker-registry."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def _running(argv: Sequence[str | Path]) -> Iterator[None]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
        assert process.poll() is None, f"{argv[0]} ended with {process.returncode}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Yield HOST:PORT of an empty registry on the loopback interface, which engines use without TLS."""
    if shutil.which("docker-registry") is None:
        # scripts/needs.py installs it for the tier, where this skip would count as a failure.
        pytest.skip("no docker-registry: apt-get install docker-registry")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    config = folder / "registry.yml"
    config.write_text(CONFIG.format(folder=folder / "registry", port=port))
    with _running(["docker-registry", "serve", config]):
        deadline = time.monotonic() + 30
        while not _answers(port):
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
