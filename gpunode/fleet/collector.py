"""Answers from many nodes at once, each within its own time limit."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpunode.errors import UsageError
from gpunode.fleet.connection import Abort, Gateways
from gpunode.fleet.node import Node, login
from gpunode.fleet.session import NodeFailure, converse, probe_arguments
from gpunode.fleet.targets import Target
from gpunode.onnode import program_text
from gpunode.probe import Answer, Collected
from gpunode.probe.answer import redacted

_GRACE_S = 2.0
"""Seconds beyond the limit for a node's own thread to report the failure itself."""


_LOOK_S = 1.0


class Then(Protocol):
    """Work on a node after its probe, while it is still connected."""

    @property
    def limit_s(self) -> float:
        """Return how many seconds it may take, after the time of the probe."""

    def __call__(self, node: Node, answer: Answer, deadline: float) -> Sequence[dict[str, Any]]:
        """Do the work and return its records; ``deadline`` is a time.monotonic() value."""

    def failed(self, reason: str) -> Sequence[dict[str, Any]]:
        """Return the records after an exception or a time-out, with the reason in one line."""


@dataclass
class _Work:
    """One node in progress."""

    number: int
    target: Target
    started: float
    ends: float
    abort: Abort
    stage: str = "login did not succeed"
    """The stage that it reached, for the message if it fails there."""
    node: Node | None = None
    """Set after a successful login."""
    answer: Answer | None = None
    """Set if the probe finished."""


@dataclass(frozen=True)
class _Common:
    """Shared state of all nodes of one run."""

    script: bytes
    timeout_s: float
    become_password: str | None
    gateways: Gateways
    then: Then | None
    results: "queue.SimpleQueue[tuple[int, Collected]]"


def collect(
    targets: Sequence[Target],
    *,
    parallel: int = 32,
    timeout_s: float = 120.0,
    become_password: str | None = None,
    then: Then | None = None,
) -> Iterator[Collected]:
    """Run the probe on all targets and yield one ``Collected`` for each target, in order of arrival.

    ``timeout_s`` is the limit of one node, connecting included, in every case. A failing node never stops another.
    ``then`` is called for each answer while its node is still connected, within a limit of its own. No answer is parsed
    here. Ending the iteration early (Ctrl-C, ``close()``) ends what is under way and leaves nothing that would keep the
    process from exiting.
    """
    if parallel < 1 or timeout_s <= 0:
        raise UsageError(f"--parallel {parallel} and --timeout {timeout_s:g} must be positive")
    common = _Common(program_text("probe").encode(), timeout_s, become_password, Gateways(), then, queue.SimpleQueue())
    waiting = deque(enumerate(targets))
    running: dict[int, _Work] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                number, target = waiting.popleft()
                now = time.monotonic()
                work = running[number] = _Work(number, target, now, now + timeout_s, Abort())
                # Daemon threads: one that hangs in the resolver must not keep the process from exiting.
                threading.Thread(target=_collect_one, args=(work, common), daemon=True).start()
            next_end = min(work.ends for work in running.values()) + _GRACE_S
            try:
                # Not longer: a deadline may be nearer now, with the work after a probe.
                done, collected = common.results.get(timeout=min(_LOOK_S, max(0.0, next_end - time.monotonic())))
            except queue.Empty:
                yield from _give_up(running, common)
                continue
            if running.pop(done, None) is not None:
                yield collected
    finally:
        for work in running.values():
            work.abort()
        common.gateways.close()


def _give_up(running: dict[int, _Work], common: _Common) -> Iterator[Collected]:
    """Yield failures of nodes with a thread that did not notice the end of its time."""
    now = time.monotonic()
    for number, work in list(running.items()):
        if now - work.ends < _GRACE_S:
            continue
        del running[number]
        work.abort()
        if work.answer is not None and common.then is not None:
            answer = _with(work.answer, common.then.failed(_over_then(common.then)))
            unchecked = work.node.unchecked if work.node is not None else None
            yield Collected(work.target.name, answer, None, now - work.started, unchecked)
        else:
            yield Collected(work.target.name, None, _over(work, common.timeout_s), now - work.started)


def _over(work: _Work, timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s, {work.stage}; the node hangs or is overloaded (--timeout S)"


def _over_then(then: Then) -> str:
    return f"it did not end within {then.limit_s:g} s and was given up"


def _collect_one(work: _Work, common: _Common) -> None:
    answer, reason = None, None
    watch = _watch(work, common.timeout_s)
    try:
        output = _probe(work, common)
        answer = work.answer = Answer(output, host=work.target.name, secrets=tuple(_secrets(work, common)))
        watch.cancel()
        if common.then is not None and work.node is not None:
            work.ends = time.monotonic() + common.then.limit_s
            watch = _watch(work, common.then.limit_s)
            answer = _with(answer, _then(common.then, work.node, answer, work.ends))
    except NodeFailure as err:
        reason = str(err)
    except Exception as err:
        # An unexpected error on one node is that node's result, and must not end the others.
        reason = f"unexpected {type(err).__name__}: {err}".splitlines()[0]
    finally:
        watch.cancel()
        work.abort()
    seconds = time.monotonic() - work.started
    if reason is not None and seconds >= common.timeout_s:
        reason = _over(work, common.timeout_s)
    if reason is not None:
        reason = redacted(reason, _secrets(work, common))
    unchecked = work.node.unchecked if work.node is not None else None
    common.results.put((work.number, Collected(work.target.name, answer, reason, seconds, unchecked)))


def _secrets(work: _Work, common: _Common) -> list[str]:
    """Return the secrets that a node received or may have received, and could send back."""
    target = work.target
    return [text for text in (target.password, target.become_password, common.become_password) if text]


def _watch(work: _Work, limit_s: float) -> threading.Timer:
    watch = threading.Timer(limit_s, work.abort)
    watch.daemon = True
    watch.start()
    return watch


def _with(answer: Answer, records: Sequence[dict[str, Any]]) -> Answer:
    return replace(answer, records=(*answer.records, *records))


def _then(then: Then, node: Node, answer: Answer, ends: float) -> Sequence[dict[str, Any]]:
    try:
        return then(node, answer, ends)
    except Exception as err:
        if time.monotonic() >= ends:
            return then.failed(_over_then(then))
        if isinstance(err, NodeFailure):
            return then.failed(str(err))
        return then.failed(f"unexpected {type(err).__name__}: {err}".splitlines()[0])


def _probe(work: _Work, common: _Common) -> bytes:
    target, deadline = work.target, work.started + common.timeout_s

    def started() -> None:
        work.stage = "the probe started and did not end"

    node = work.node = login(
        target,
        gateways=common.gateways,
        deadline=deadline,
        abort=work.abort,
        become_password=common.become_password,
    )
    if target.ssh is not None:
        work.stage = "login succeeded, the probe did not start"
    left_s = deadline - time.monotonic()
    what = node.python(limit_s=left_s, arguments=probe_arguments(left_s))
    session = node.session(what, deadline)
    return converse(session, what, common.script, node.password, deadline, ready=started)
