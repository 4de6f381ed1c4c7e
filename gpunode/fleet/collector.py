"""Bundles from many nodes at once, each within its own time limit."""

import os
import queue
import shlex
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunode.errors import UsageError
from gpunode.fleet.connection import Abort, Gateways, connect, start
from gpunode.fleet.session import LocalSession, NodeFailure, converse, program
from gpunode.fleet.targets import Target
from gpunode.probe import Bundle, script_text

_GRACE_S = 2.0
"""What a node's own thread gets beyond the limit to say itself what was wrong."""


@dataclass(frozen=True)
class Collected:
    """What came from one node: exactly one of ``bundle`` and ``reason`` is set.

    ``host`` is the name in the inventory (or as typed); the bundle's own ``host`` is what the node calls itself.
    ``reason`` is one line: what is wrong and what to do.
    """

    host: str
    bundle: Bundle | None
    reason: str | None
    seconds: float


@dataclass
class _Work:
    """One node under way."""

    number: int
    target: Target
    started: float
    abort: Abort
    stage: str = "it did not let us in"
    """How far it came, for the case that it goes no further."""


@dataclass(frozen=True)
class _Common:
    """What all nodes of one run share."""

    script: bytes
    timeout_s: float
    become_password: str | None
    gateways: Gateways
    results: "queue.SimpleQueue[tuple[int, Collected]]"


def collect(
    targets: Sequence[Target],
    *,
    parallel: int = 32,
    timeout_s: float = 120.0,
    become_password: str | None = None,
) -> Iterator[Collected]:
    """Run the probe on all targets and yield what comes, as it comes: one ``Collected`` for each target.

    ``timeout_s`` is the limit of one node, connecting included, whatever the node does. A failing node never stops
    another. Ending the iteration early (Ctrl-C, ``close()``) ends what is under way and leaves nothing that would
    keep the process from exiting.
    """
    if parallel < 1 or timeout_s <= 0:
        raise UsageError(f"--parallel {parallel} and --timeout {timeout_s:g} must be positive")
    common = _Common(script_text().encode(), timeout_s, become_password, Gateways(), queue.SimpleQueue())
    waiting = deque(enumerate(targets))
    running: dict[int, _Work] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                number, target = waiting.popleft()
                work = running[number] = _Work(number, target, time.monotonic(), Abort())
                # Daemon threads: one that hangs in the resolver must not keep the process from exiting.
                threading.Thread(target=_collect_one, args=(work, common), daemon=True).start()
            next_end = min(work.started for work in running.values()) + timeout_s + _GRACE_S
            try:
                done, collected = common.results.get(timeout=max(0.0, next_end - time.monotonic()))
            except queue.Empty:
                yield from _give_up(running, timeout_s)
                continue
            if running.pop(done, None) is not None:
                yield collected
    finally:
        for work in running.values():
            work.abort()
        common.gateways.close()


def _give_up(running: dict[int, _Work], timeout_s: float) -> Iterator[Collected]:
    """Nodes whose own thread did not even notice the end of its time."""
    now = time.monotonic()
    for number, work in list(running.items()):
        if now - work.started >= timeout_s + _GRACE_S:
            del running[number]
            work.abort()
            yield Collected(work.target.name, None, _over(work, timeout_s), now - work.started)


def _over(work: _Work, timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s, {work.stage}; the node hangs or is overloaded (--timeout S)"


def _collect_one(work: _Work, common: _Common) -> None:
    bundle, reason = None, None
    watch = threading.Timer(common.timeout_s, work.abort)
    watch.daemon = True
    watch.start()
    try:
        bundle = _bundle(_probe(work, common))
    except NodeFailure as err:
        reason = str(err)
    except Exception as err:
        # One node's surprise is that node's finding, never the end of the others.
        reason = f"unexpected {type(err).__name__}: {err}".splitlines()[0]
    finally:
        watch.cancel()
        work.abort()
    seconds = time.monotonic() - work.started
    if reason is not None and seconds >= common.timeout_s:
        reason = _over(work, common.timeout_s)
    common.results.put((work.number, Collected(work.target.name, bundle, reason, seconds)))


def _probe(work: _Work, common: _Common) -> bytes:
    target, deadline = work.target, work.started + common.timeout_s
    password = target.become_password or common.become_password
    become = password is not None if target.become is None else target.become
    root = target.user == "root" if target.connection == "ssh" else os.geteuid() == 0
    what = program(
        target.python,
        sudo=become and not root,
        ask=password is not None,
        limit_s=deadline - time.monotonic(),
    )

    def started() -> None:
        work.stage = "the probe was started and did not end"

    if target.ssh is None:
        local = LocalSession(shlex.split(what.command))
        work.abort.add(local.close)
        return converse(local, what, common.script, password, deadline, ready=started)
    connection = connect(
        target.ssh,
        gateways=common.gateways,
        deadline=deadline,
        abort=work.abort,
        password=target.password,
        passphrase=target.key_passphrase,
    )
    work.abort.add(connection.close)
    work.stage = "it let us in and did not start the probe"
    session = start(connection, what.command, deadline)
    work.abort.add(session.close)
    return converse(session, what, common.script, password, deadline, ready=started)


def _bundle(output: bytes) -> Bundle:
    try:
        return Bundle.from_json(output, "the node's answer")
    except UsageError as err:
        raise NodeFailure(str(err)) from None
