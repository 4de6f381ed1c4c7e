"""Leases and marks on nodes: one short program on each, over a connection of its own."""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpunode.fleet import NodeFailure, Target
from gpunode.fleet.connection import Abort, Gateways
from gpunode.fleet.node import login
from gpunode.fleet.session import converse
from gpunode.onnode import program_text
from gpunode.probe.answer import redacted
from gpunode.text import one_line

WHAT = "the program of the lease"
LASTS_S = 8 * 3600
"""Longer than any act; each act renews it."""
_LOOK_S, _GRACE_S = 1.0, 2.0
"""Between looks at the time of nodes, and beyond its limit for a node's own thread to report the failure itself."""


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
    gateways = Gateways()
    answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def one(target: Target, abort: Abort, deadline: float) -> None:
        question = json.dumps(questions[target.name])
        secrets = [text for text in (target.password, target.become_password, become_password) if text]
        try:
            node = login(target, gateways=gateways, deadline=deadline, abort=abort, become_password=become_password)
            program = node.python(limit_s=timeout_s, arguments=("-I", "-", question), what=WHAT)
            session = node.session(program, deadline)
            text = program_text("lease").encode()
            reason = _refused(converse(session, program, text, node.password, deadline))
        except NodeFailure as err:
            reason = redacted(str(err), secrets)
        except Exception as err:
            # An unexpected error on one node must not end the others.
            reason = redacted(one_line(f"unexpected {type(err).__name__}: {err}"), secrets)
        finally:
            abort()
        answers.put((target.name, reason))

    asked = [target for target in targets if target.name in questions]
    waiting, reasons = deque(asked), dict.fromkeys((target.name for target in asked), "")
    running: dict[str, tuple[Abort, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                target, abort, end = waiting.popleft(), Abort(), time.monotonic() + timeout_s
                running[target.name] = abort, end
                # As in fleet.collector: one that hangs in the resolver must not keep the process from exiting.
                threading.Thread(target=one, args=(target, abort, end), daemon=True).start()
            with suppress(queue.Empty):
                wait_s = _LOOK_S
                while True:
                    name, reason = answers.get(timeout=wait_s)
                    wait_s = 0.0  # what came meanwhile counts before anybody is late
                    if running.pop(name, None) is not None:
                        reasons[name] = reason
            for name, (abort, end) in list(running.items()):
                if time.monotonic() - end >= _GRACE_S:
                    del running[name]
                    abort()
                    reasons[name] = f"no answer within {timeout_s:g} s; the node hangs or is overloaded (--timeout S)"
    finally:
        for abort, _ in running.values():
            abort()
        gateways.close()
    return reasons


def _refused(answer: bytes) -> str:
    """Return the reason in a node's answer; a node is not trusted."""
    try:
        reason = json.loads(answer[-4096:].splitlines()[-1])["refused"]
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):
        return f"{WHAT} gave no readable answer"
    return one_line(str(reason))
