"""Each node within its time: nodes that answer bit by bit, never, too late, or raise; and a caller that is busy."""

import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing

import pytest

from gpunode.fleet import NodeFailure, Target, asking
from gpunode.fleet.asking import Reply, Turn, ask_each

LIMIT_S, GRACE_S = 1.0, 1.0
GIVEN = "hunter22"
LATE = "no answer within 1 s, login did not succeed; the node hangs or is overloaded (--timeout S)"


class HostileNodes:
    """Work that goes as the name of its node announces."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.aborted: list[str] = []

    def work(self, turn: Turn) -> str:
        """Answer at once, unless the node's name has another behaviour."""
        turn.abort.add(lambda: self.aborted.append(turn.target.name))
        match turn.target.name.partition("-")[0]:
            case "bits":
                self._read_bits(turn)
            case "never":
                self.over.wait(60)
            case "late":
                time.sleep(LIMIT_S + GRACE_S / 4)
            case "longer":
                turn.allow(4 * LIMIT_S)
                time.sleep(1.2 * (LIMIT_S + GRACE_S))
            case "refuses":
                raise NodeFailure(f"sudo does not accept the password {GIVEN}")
            case "surprises":
                raise RuntimeError("first \x1b line\nsecond line")
        return f"answer of {turn.target.name}"

    def _read_bits(self, turn: Turn) -> None:
        """Read from a node that always has one more byte, until the connection is closed."""
        local_end, remote_end = socket.socketpair()
        turn.abort.add(lambda: local_end.shutdown(socket.SHUT_RDWR))
        with local_end, remote_end:
            while True:
                remote_end.send(b"x")
                if not local_end.recv(1):
                    raise NodeFailure("the connection was lost")
                time.sleep(0.01)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileNodes]:
    monkeypatch.setattr(asking, "GRACE_S", GRACE_S)
    hostile = HostileNodes()
    yield hostile
    hostile.over.set()


def asked(nodes: HostileNodes, *names: str, parallel: int = 3) -> Generator[Reply[str], None, None]:
    targets = [Target(name, "ssh", password=GIVEN) for name in names]
    return ask_each(targets, nodes.work, parallel=parallel, timeout_s=LIMIT_S)


def test_hostile_nodes_cost_the_others_nothing(nodes: HostileNodes) -> None:
    good = [f"gpu-{number}" for number in range(20)]
    names = ["bits", "never", "late", "longer", "refuses", "surprises", *good]
    began = time.monotonic()
    replies = {reply.turn.target.name: reply for reply in asked(nodes, *names)}
    assert time.monotonic() - began < 10
    assert set(replies) == set(names)
    answered = {name for name, reply in replies.items() if reply.result == f"answer of {name}"}
    assert answered == {*good, "late", "longer"}, "what comes within the grace is an answer"
    assert all(replies[name].reason is None for name in answered)
    assert replies["bits"].reason == replies["never"].reason == LATE
    assert [name for name, reply in replies.items() if reply.given_up] == ["never"]
    assert replies["refuses"].reason == "sudo does not accept the password [password]"
    assert replies["surprises"].reason == "unexpected RuntimeError: first ? line"
    assert set(nodes.aborted) == set(names), "every connection is closed"


def test_what_came_meanwhile_counts_before_anybody_is_late(nodes: HostileNodes) -> None:
    replies = asked(nodes, "gpu-1", "gpu-2", "never")
    with closing(replies):
        first = next(replies)
        time.sleep(LIMIT_S + GRACE_S + 0.2)  # the caller is busy for longer than any node may take
        second, last = replies
    assert {first.result, second.result} == {"answer of gpu-1", "answer of gpu-2"}
    assert last.given_up


def test_after_an_early_end_no_node_is_asked_and_all_are_closed(nodes: HostileNodes) -> None:
    replies = asked(nodes, "gpu-1", "never-1", *(f"never-{number}" for number in range(2, 50)), parallel=2)
    with closing(replies):
        next(replies)
        began = time.monotonic()
    assert time.monotonic() - began < LIMIT_S, "none is waited for"
    end = time.monotonic() + 10
    while "never-1" not in nodes.aborted and time.monotonic() < end:
        time.sleep(0.01)
    assert "never-1" in nodes.aborted
    assert set(nodes.aborted) <= {"gpu-1", "never-1", "never-2"}
