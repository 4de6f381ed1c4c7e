"""Answers of the probe from many nodes at once, each within its own time limit."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

from gpunode.fleet.asking import Turn, ask_each, why
from gpunode.fleet.node import Node
from gpunode.fleet.session import probe_arguments
from gpunode.fleet.targets import Target
from gpunode.onnode import program_text
from gpunode.probe import Answer, Collected


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
