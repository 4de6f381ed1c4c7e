"""Leases and marks on nodes: one short program on each, over a connection of its own."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from gpunode.fleet import Target
from gpunode.fleet.asking import Turn, ask_each
from gpunode.onnode import program_text
from gpunode.probe.bundle import redacted
from gpunode.text import one_line

WHAT = "the program of the lease"
LASTS_S = 8 * 3600
"""Longer than any act; each act renews it."""


def ask(
    targets: Sequence[Target],
    questions: Mapping[str, Mapping[str, Any]],
    *,
    parallel: int,
    timeout_s: float,
    become_password: str | None = None,
) -> dict[str, str]:
    """Return why each node refused its question, by its name, or could not be asked; empty if it was done.

    ``timeout_s`` is the limit of one node in every case. On Ctrl-C no further node is asked, and none is waited for.
    """
    text = program_text("lease")

    def ask_lease(turn: Turn) -> str:
        question = json.dumps(questions[turn.target.name])
        answer = turn.run(turn.login(), text, lambda _: ("-I", "-", question), WHAT)
        return redacted(_refused(answer), turn.secrets)

    queried = [target for target in targets if target.name in questions]
    reasons = dict.fromkeys((target.name for target in queried), "")
    replies = ask_each(queried, ask_lease, parallel=parallel, timeout_s=timeout_s, become_password=become_password)
    with closing(replies):
        for reply in replies:
            reasons[reply.turn.target.name] = reply.reason or reply.result or ""
    return reasons


def _refused(answer: bytes) -> str:
    """Return the reason in a node's answer; a node is not trusted."""
    try:
        reason = json.loads(answer[-4096:].splitlines()[-1])["refused"]
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):
        return f"{WHAT} gave no readable answer"
    return one_line(str(reason))
