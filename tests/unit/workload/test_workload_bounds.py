"""Answers that do not come from an engine: bodies without end, packed bodies, and frames of four gigabytes."""

import gzip
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpunode.workload import container, engine
from gpunode.workload.output import BoundedOutput
from gpunode.workload.transport import LaunchFailure


class Way:
    """A way to a server that answers every request in one manner."""

    as_root = (False,)
    user = "u"

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.answer = answer
        self.received = b""

    def engine(self, *, root: bool) -> Any:  # noqa: ARG002
        local_end, remote_end = socket.socketpair()

        def serve() -> None:
            with remote_end:
                self.received += remote_end.recv(65536)
                try:
                    self.answer(remote_end)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        return SimpleNamespace(sock=local_end, complaint=lambda: "", close=local_end.close)


def head(**headers: object) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{lines}\r\n".encode()


def endless(sock: socket.socket) -> None:
    sock.sendall(head(Content_Length=1 << 32))
    while True:
        sock.sendall(b" " * 65536)


def packed(sock: socket.socket) -> None:
    body = gzip.compress(b" " * (256 << 20), 1)
    sock.sendall(head(Content_Length=len(body), Content_Encoding="gzip") + body)


@pytest.mark.parametrize(("answer", "reason"), [(endless, "more than 16 MiB"), (packed, "Expecting value")])
def test_a_body_is_bounded_and_never_unpacked(answer: Callable[[socket.socket], None], reason: str) -> None:
    way: Any = Way(answer)
    with pytest.raises(LaunchFailure, match=reason), engine.connected(way, time.monotonic() + 30):
        pass
    assert b"Accept-Encoding: identity" in way.received


def test_a_frame_of_four_gigabytes_is_a_flood() -> None:
    local_end, remote_end = socket.socketpair()

    def flood() -> None:
        with remote_end:
            remote_end.sendall(struct.pack(">BxxxL", 1, 2**32 - 1))
            try:
                while True:
                    remote_end.sendall(b"x" * 65536)
            except OSError:
                return

    threading.Thread(target=flood, daemon=True).start()
    job: Any = SimpleNamespace(program=SimpleNamespace(stdin=b""), limit_s=5)
    with pytest.raises(LaunchFailure, match="more than 4 MiB on stdout"):
        container._listen(local_end, job, time.monotonic() + 30, BoundedOutput())


def test_frames_come_whole_however_they_are_cut() -> None:
    local_end, remote_end = socket.socketpair()
    data = struct.pack(">BxxxL", 1, 17) + b'{"record": "a.b"}' + struct.pack(">BxxxL", 1, 1) + b"\n"

    def drip() -> None:
        with remote_end:
            for byte in data:
                remote_end.sendall(bytes([byte]))

    threading.Thread(target=drip, daemon=True).start()
    output = BoundedOutput()
    job: Any = SimpleNamespace(program=SimpleNamespace(stdin=b""), limit_s=5)
    container._listen(local_end, job, time.monotonic() + 30, output)
    assert output.records == [{"record": "a.b"}]
