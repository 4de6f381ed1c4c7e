"""The node's part of a change: one writer, and marks that only their owner removes. And how nodes are asked."""

import _thread
import fcntl
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.change import leases
from gpunode.fleet import Target, asking
from gpunode.onnode.lease import LEASE, LOCK, MARK, answer

HOUR = 3600
LASTS = 8 * HOUR


def ask(folder: Path, op: str, token: str, at: float) -> str:
    question = {"op": op, "token": token, "owner": f"me with {token}", "lasts_s": LASTS, "findings": []}
    return answer(question, folder, at)["refused"]


def test_a_second_controller_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    assert ask(tmp_path, "take", "one", 0) == ""
    assert ask(tmp_path, "take", "two", HOUR) == "held by me with one since 1970-01-01T00:00:00Z"
    assert ask(tmp_path, "mark", "two", HOUR).startswith("held by me with one")
    assert ask(tmp_path, "free", "two", HOUR) == ""
    assert '"token": "one"' in (tmp_path / LEASE).read_text()
    assert ask(tmp_path, "free", "one", HOUR) == ""
    assert ask(tmp_path, "take", "two", HOUR) == ""


def test_an_expired_lease_passes_to_another_unless_the_node_is_drained(tmp_path: Path) -> None:
    ask(tmp_path, "take", "one", 0)
    assert ask(tmp_path, "take", "two", LASTS + 1) == ""
    # The old controller wakes.
    assert ask(tmp_path, "mark", "one", LASTS + 2).startswith("held by me with two")
    assert ask(tmp_path, "mark", "two", LASTS + 2) == ""
    refused = ask(tmp_path, "take", "three", 3 * LASTS)
    assert "held by me with two" in refused
    assert "without a sign of life for 960 minutes" in refused


def test_a_lock_that_somebody_keeps_is_refused_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.onnode.lease.WAIT_S", 0.3)
    assert ask(tmp_path, "take", "one", 0) == ""
    with (tmp_path / LOCK).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert ask(tmp_path, "free", "one", 0).startswith(f"another change has held {tmp_path / LOCK} for 0.3 s")
    assert (tmp_path / LEASE).exists()
    assert ask(tmp_path, "free", "one", 0) == ""


@pytest.mark.parametrize("at", [-10 * LASTS, 0.0])
def test_a_clock_that_was_set_back_ends_no_lease(tmp_path: Path, at: float) -> None:
    ask(tmp_path, "take", "one", LASTS)
    assert ask(tmp_path, "take", "two", at).startswith("held by me with one")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"owner": 4}'])
@pytest.mark.parametrize("name", [LEASE, MARK])
def test_a_damaged_file_is_nobodys_to_take(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text)
    assert ask(tmp_path, "take", "one", 100 * LASTS) != ""
    assert (tmp_path / name).read_text() == text


def test_the_mark_of_a_playbook_is_not_touched(tmp_path: Path) -> None:
    mark = json.dumps({"since": "2026-11-23", "findings": []})
    (tmp_path / MARK).write_text(mark)
    assert ask(tmp_path, "take", "one", 0).startswith("drained by a playbook")
    ask(tmp_path, "free", "one", 0)
    assert (tmp_path / MARK).read_text() == mark


@settings(max_examples=effort(25, 3000), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "mark", "free"]), st.sampled_from("ab"), st.integers(0, 3 * LASTS)),
        max_size=12,
    )
)
def test_two_controllers_are_never_both_served(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[str, str, int]]
) -> None:
    """A marked node is its owner's until that owner frees it, whatever the clocks show."""
    folder = tmp_path_factory.mktemp("node")
    marked = ""
    for op, token, at in requests:
        refused = ask(folder, op, token, at)
        if op != "free":
            assert refused or marked in ("", token)
        if op == "mark" and not refused:
            marked = token
        elif op == "free" and token == marked:
            marked = ""
        assert (folder / MARK).exists() == bool(marked)


class Stand:
    """Nodes that take an SSH session as they like, in place of those behind ``login``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.over = threading.Event()

    def login(self, target: Target, *, abort: Any, **_: Any) -> Any:
        """Log in to a node: one called ``slow`` opens its window bit by bit, one called ``deaf`` cannot be woken."""
        self.begun.append(target.name)
        abort.add(lambda: self.ended.append(target.name))
        if target.name.startswith("deaf"):
            self.over.wait(60)
        local_end, remote_end = socket.socketpair()
        local_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        abort.add(lambda: local_end.shutdown(socket.SHUT_RDWR))
        threading.Thread(target=self._take, args=(remote_end, target.name.startswith("slow")), daemon=True).start()
        return StandNode(local_end)

    def _take(self, remote_end: socket.socket, slow: bool) -> None:
        with remote_end, suppress(OSError):
            while remote_end.recv(64 if slow else 65536) and not self.over.is_set():
                time.sleep(0.02 if slow else 0)


class StandNode:
    """A node with one session, which is itself."""

    password = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def python(self, **_: Any) -> None:
        """Return no command: it is not looked at."""

    def session(self, *_: Any) -> "StandNode":
        """Return the session."""
        return self

    def converse(self, text: bytes, deadline: float) -> bytes:
        """Write as Paramiko does: the limit is that of one packet, so any packet begins it again."""
        for at in range(0, len(text), 64):
            self._sock.settimeout(max(0.1, deadline - time.monotonic()))
            self._sock.sendall(text[at : at + 64])
        return b'{"refused": ""}\n'


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    fake = Stand()
    monkeypatch.setattr(asking, "login", fake.login)
    monkeypatch.setattr(
        asking, "converse", lambda session, _, text, __, deadline, **___: session.converse(text, deadline)
    )
    monkeypatch.setattr(leases, "program_text", lambda _: "x" * 2**17)
    yield fake
    fake.over.set()


def asked(names: list[str], parallel: int) -> dict[str, str]:
    targets = [Target(name, "ssh") for name in names]
    return leases.ask(targets, {name: {} for name in names}, parallel=parallel, timeout_s=2.0)


def test_a_node_that_takes_the_program_bit_by_bit_holds_up_no_other(stand: Stand) -> None:
    names = ["slow", "deaf", *(f"gpu-{number}" for number in range(8))]
    began = time.monotonic()
    reasons = asked(names, 3)
    assert time.monotonic() - began < 20
    assert list(reasons) == names
    assert {name for name, reason in reasons.items() if reason} == {"slow", "deaf"}
    assert reasons["slow"].startswith("no answer within 2 s, ")
    assert set(stand.ended) == set(names)


def test_after_ctrl_c_no_node_is_asked_and_none_is_waited_for(stand: Stand) -> None:
    names = [f"deaf-{number}" for number in range(50)]

    def interrupt() -> None:
        while len(stand.begun) < 2:
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asked(names, 2)
    assert time.monotonic() - began < 30
    stand.over.set()
    end = time.monotonic() + 10
    while len(stand.ended) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(stand.ended) == sorted(stand.begun) == names[:2]
