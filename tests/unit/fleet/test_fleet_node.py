"""Further programs on a node after its login, and what follows its probe; over this machine, without an SSH server."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from gpunode.fleet import Answer, Collected, MissingProgram, Node, NodeFailure, Stream, Target, collect, local_target
from gpunode.fleet.connection import Abort

BUNDLE = (
    'print(\'{"schema": "gpunode.bundle/1", "host": "x", "collected_at": "2026-11-20T00:00:00Z", '
    '"commands": {}, "files": {}}\')'
)


@pytest.fixture
def node() -> Iterator[Node]:
    abort = Abort()
    yield Node(local_target(), None, abort, None)
    abort()


def stream_of(node: Node, *argv: str, limit_s: float = 20) -> Stream:
    name, *arguments = argv
    return node.stream((name,), arguments, sudo=False, limit_s=limit_s, missing="no such thing: install it", label="it")


def read_all(sock: socket.socket) -> bytes:
    sock.settimeout(10)
    return b"".join(iter(lambda: sock.recv(65536), b""))


def test_bytes_go_both_ways_whole(node: Node) -> None:
    stream = stream_of(node, "cat")
    sent = bytes(range(256)) * 8192

    def send() -> None:
        stream.sock.sendall(sent)
        stream.sock.shutdown(socket.SHUT_WR)

    threading.Thread(target=send).start()
    assert read_all(stream.sock) == sent
    assert stream.exit_status() == 0


def test_the_complaint_of_a_program_that_ended(node: Node) -> None:
    stream = stream_of(node, "sh", "-c", "echo out; echo first >&2; echo 'permission denied' >&2; exit 3")
    assert read_all(stream.sock) == b"out\n"
    assert (stream.complaint(), stream.exit_status()) == ("permission denied", 3)


def test_a_program_that_is_not_there(node: Node) -> None:
    with pytest.raises(MissingProgram, match=r"^no such thing: install it$"):
        stream_of(node, "gpunode-no-such-program")


def test_a_program_reads_the_end_of_its_stream(node: Node) -> None:
    stream = stream_of(node, "sh", "-c", "cat; echo $$ is over >&2")
    stream.sock.close()
    assert "is over" in stream.complaint()


def test_a_program_that_floods_ends_when_nobody_reads_any_more(node: Node) -> None:
    stream = stream_of(node, "yes")
    assert len(stream.sock.recv(65536)) > 0
    stream.sock.shutdown(socket.SHUT_RDWR)
    assert stream.exit_status(10) == -9


def test_a_program_ends_with_the_work(node: Node) -> None:
    second = stream_of(node, "sleep", "600")
    node._abort()
    began = time.monotonic()
    assert read_all(second.sock) == b""
    assert time.monotonic() - began < 5


def test_the_node_itself_ends_a_program_at_the_limit(node: Node) -> None:
    began = time.monotonic()
    assert read_all(stream_of(node, "sleep", "600", limit_s=1).sock) == b""
    assert time.monotonic() - began < 8


@dataclass
class Following:
    """What a test lets follow the probe."""

    limit_s: float = 20.0
    error: Exception | None = None
    hangs: threading.Event | None = None

    def __call__(self, node: Node, answer: Answer, deadline: float) -> list[dict[str, object]]:
        assert node.target.name == "a"
        assert 0 < deadline - time.monotonic() <= self.limit_s
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.error is not None:
            raise self.error
        assert answer.records == ()
        return [{"came": "back"}]

    def failed(self, reason: str) -> list[dict[str, object]]:
        return [{"failed": reason}]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: BUNDLE)


def collected(following: Following) -> Collected:
    target: Target = replace(local_target(), name="a", python=sys.executable)
    (node,) = collect([target], timeout_s=20, then=following)
    assert node.reason is None
    return node


def results(following: Following) -> list[dict[str, object]]:
    node = collected(following)
    assert node.answer is not None
    return node.answer.bundle().results


def test_what_follows_adds_to_the_bundle() -> None:
    assert results(Following()) == [{"came": "back", "simulated": False}]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NodeFailure("the connection broke off"), "the connection broke off"),
        (RuntimeError("first\nsecond"), "unexpected RuntimeError: first"),
    ],
)
def test_what_fails_later_does_not_take_the_bundle_with_it(error: Exception, reason: str) -> None:
    assert results(Following(error=error)) == [{"failed": reason, "simulated": False}]


def test_what_does_not_come_back_is_given_up_with_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.asking.GRACE_S", 0.2)
    release = threading.Event()
    began = time.monotonic()
    given_up = results(Following(limit_s=1.0, hangs=release))
    release.set()
    assert time.monotonic() - began < 8
    assert given_up == [{"failed": "it did not end within 1 s and was given up", "simulated": False}]
