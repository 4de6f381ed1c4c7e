"""Work on many nodes at once, as the probe, each within its own time: one that hangs or fails costs no other."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from gpunode.errors import UsageError
from gpunode.fleet.connection import Abort, Gateways
from gpunode.fleet.node import Node, login
from gpunode.fleet.session import NodeFailure, converse, probe_arguments
from gpunode.fleet.targets import Target
from gpunode.onnode import program_text
from gpunode.probe import Answer, Collected
from gpunode.probe.bundle import redacted
from gpunode.text import one_line

R = TypeVar("R")

GRACE_S = 2.0
"""Seconds beyond the limit for a node's own thread to report the failure itself."""
_LOOK_S = 1.0


class Turn:
    """One node's work in progress, and its limit: at its end the connections are closed."""

    def __init__(self, target: Target, gateways: Gateways, limit_s: float, become_password: str | None) -> None:
        self.target, self.abort, self.started = target, Abort(), time.monotonic()
        self.node: Node | None = None
        """Set after a successful login."""
        self.stage = "login did not succeed"
        """The stage that it reached, for the message if it fails there."""
        self._gateways, self._become_password = gateways, become_password
        self._watch: threading.Timer | None = None
        self.limit_s, self.ends = limit_s, self.started + limit_s

    def allow(self, limit_s: float) -> None:
        """Begin a limit, in place of the one before."""
        self.unlimited()
        self.limit_s, self.ends = limit_s, time.monotonic() + limit_s
        self._watch = threading.Timer(limit_s, self.abort)
        self._watch.daemon = True
        self._watch.start()

    def unlimited(self) -> None:
        """Let nothing end the connections from now on."""
        if self._watch is not None:
            self._watch.cancel()

    def end(self) -> None:
        """Close what is open."""
        self.unlimited()
        self.abort()

    @property
    def secrets(self) -> list[str]:
        """Return the secrets that the node received or may have received, and could send back."""
        target = self.target
        return [text for text in (target.password, target.become_password, self._become_password) if text]

    @property
    def late(self) -> str:
        """Return the reason of a node that did not answer in time."""
        return f"no answer within {self.limit_s:g} s, {self.stage}; the node hangs or is overloaded (--timeout S)"

    def reason(self, err: Exception) -> str:
        """Return the reason of a failure on one line, without the secrets."""
        return redacted(why(err), self.secrets)

    def login(self) -> Node:
        """Return the node after login; raise NodeFailure."""
        self.node = login(
            self.target,
            gateways=self._gateways,
            deadline=self.ends,
            abort=self.abort,
            become_password=self._become_password,
        )
        return self.node

    def run(
        self, node: Node, text: str, arguments: Callable[[float], Sequence[str]], label: str = "the probe"
    ) -> bytes:
        """Run a program with the node's Python and return its output; raise NodeFailure.

        ``arguments`` returns Python's arguments, given the seconds that are left.
        """
        if self.target.ssh is not None:
            self.stage = f"login succeeded, {label} did not start"
        left_s = self.ends - time.monotonic()
        program = node.python(limit_s=left_s, arguments=arguments(left_s), label=label)
        session = node.session(program, self.ends)
        return converse(session, program, text.encode(), node.password, self.ends, ready=lambda: self._started(label))

    def _started(self, label: str) -> None:
        self.stage = f"{label} started and did not end"


@dataclass(frozen=True)
class Reply(Generic[R]):
    """What one node answered, or why it did not."""

    turn: Turn
    result: R | None
    reason: str | None
    """None if there is a result."""
    seconds: float
    given_up: bool = False
    """True if the thread of the node did not notice the end of its time."""


def why(err: Exception) -> str:
    """Return the reason of a failure: of a NodeFailure its message, else the first line of what was unexpected."""
    if isinstance(err, NodeFailure):
        return str(err)
    return one_line(f"unexpected {type(err).__name__}: {err}".split("\n")[0])


def ask_each(
    targets: Sequence[Target],
    work: Callable[[Turn], R],
    *,
    parallel: int,
    timeout_s: float,
    become_password: str | None = None,
) -> Generator[Reply[R], None, None]:
    """Call ``work`` for each target in a thread of its own and yield one ``Reply`` each, in order of arrival.

    ``timeout_s`` is the limit of one node, connecting included, in every case; ``Turn.allow`` begins another. A failing
    node never stops another. What came while the caller was busy counts before anybody is late. Ending the iteration
    early (Ctrl-C, ``close()``) ends what is under way and leaves nothing that would keep the process from exiting.
    """
    if parallel < 1 or timeout_s <= 0:
        raise UsageError(f"--parallel {parallel} and --timeout {timeout_s:g} must be positive")
    gateways = Gateways()
    replies: queue.SimpleQueue[Reply[R]] = queue.SimpleQueue()
    waiting, running = deque(targets), set[Turn]()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                turn = Turn(waiting.popleft(), gateways, timeout_s, become_password)
                running.add(turn)
                # Daemon threads: one that hangs in the resolver must not keep the process from exiting.
                threading.Thread(target=_take_turn, args=(turn, work, replies), daemon=True).start()
            next_end = min(turn.ends for turn in running) + GRACE_S
            try:
                # Not longer: a deadline may be nearer now, with another limit.
                reply = replies.get(timeout=min(_LOOK_S, max(0.0, next_end - time.monotonic())))
            except queue.Empty:
                yield from _given_up(running)
                continue
            if reply.turn in running:
                running.remove(reply.turn)
                yield reply
    finally:
        for turn in running:
            turn.abort()
        gateways.close()


def _given_up(running: set[Turn]) -> Iterator[Reply[Any]]:
    """Yield the failures of nodes with a thread that did not notice the end of its time."""
    now = time.monotonic()
    for turn in [turn for turn in running if now - turn.ends >= GRACE_S]:
        running.remove(turn)
        turn.abort()
        yield Reply(turn, None, turn.late, now - turn.started, given_up=True)


def _take_turn(turn: Turn, work: Callable[[Turn], R], replies: "queue.SimpleQueue[Reply[R]]") -> None:
    result, reason = None, None
    turn.allow(turn.limit_s)
    try:
        result = work(turn)
    except Exception as err:
        # An unexpected error on one node is that node's result, and must not end the others.
        reason = turn.reason(err) if time.monotonic() < turn.ends else turn.late
    finally:
        turn.end()
    replies.put(Reply(turn, result, reason, time.monotonic() - turn.started))


class Then(Protocol):
    """Work on a node after its probe, while it is still connected."""

    @property
    def limit_s(self) -> float:
        """Return how many seconds it may take, after the time of the probe."""

    def __call__(self, node: Node, answer: Answer, deadline: float) -> Sequence[dict[str, Any]]:
        """Do the work and return its records; ``deadline`` is a time.monotonic() value."""

    def failed(self, reason: str) -> Sequence[dict[str, Any]]:
        """Return the records after an exception or a time-out, with the reason in one line."""


def collect(
    targets: Sequence[Target],
    *,
    parallel: int = 32,
    timeout_s: float = 120.0,
    become_password: str | None = None,
    then: Then | None = None,
) -> Iterator[Collected]:
    """Run the probe on all targets and yield one ``Collected`` for each target, in order of arrival.

    Limits, failures and an early end of the iteration are those of ``asking.ask_each``. ``then`` is called for each
    answer while its node is still connected, within a limit of its own. No answer is parsed here.
    """
    text = program_text("probe")
    probed: dict[Turn, Answer] = {}

    def probe(turn: Turn) -> Answer:
        node = turn.login()
        output = turn.run(node, text, probe_arguments)
        answer = probed[turn] = Answer(output, host=turn.target.name, secrets=tuple(turn.secrets))
        return answer if then is None else _with(answer, _followed(then, turn, node, answer))

    replies = ask_each(targets, probe, parallel=parallel, timeout_s=timeout_s, become_password=become_password)
    with closing(replies):
        for reply in replies:
            answer, reason, node = reply.result, reply.reason, reply.turn.node
            before = probed.pop(reply.turn, None)
            if reply.given_up and before is not None and then is not None:
                answer, reason = _with(before, then.failed(_over(then))), None
            unchecked = node.unchecked if node is not None else None
            yield Collected(reply.turn.target.name, answer, reason, reply.seconds, unchecked)


def _followed(then: Then, turn: Turn, node: Node, answer: Answer) -> Sequence[dict[str, Any]]:
    """Return the records of the work after the probe, or of its failure."""
    turn.allow(then.limit_s)
    try:
        return then(node, answer, turn.ends)
    except Exception as err:
        return then.failed(_over(then) if time.monotonic() >= turn.ends else why(err))


def _over(then: Then) -> str:
    return f"it did not end within {then.limit_s:g} s and was given up"


def _with(answer: Answer, records: Sequence[dict[str, Any]]) -> Answer:
    return replace(answer, records=(*answer.records, *records))
