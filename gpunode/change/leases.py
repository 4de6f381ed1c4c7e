"""Leases and marks on nodes: one short program on each, over a connection of its own."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def ask(
    targets: Sequence[Target],
    questions: Mapping[str, Mapping[str, Any]],
    *,
    parallel: int,
    timeout_s: float,
    become_password: str | None = None,
) -> dict[str, str]:
    """Return why each node refused its question, by its name, or could not be asked; empty if it was done."""
    gateways = Gateways()

    def one(target: Target) -> str:
        question = json.dumps(questions[target.name])
        secrets = [text for text in (target.password, target.become_password, become_password) if text]
        abort = Abort()
        deadline = time.monotonic() + timeout_s
        try:
            node = login(target, gateways=gateways, deadline=deadline, abort=abort, become_password=become_password)
            program = node.python(limit_s=timeout_s, arguments=("-I", "-", question), what=WHAT)
            session = node.session(program, deadline)
            text = program_text("lease").encode()
            return _refused(converse(session, program, text, node.password, deadline))
        except NodeFailure as err:
            return redacted(str(err), secrets)
        except Exception as err:
            # An unexpected error on one node must not end the others.
            return redacted(one_line(f"unexpected {type(err).__name__}: {err}"), secrets)
        finally:
            abort()

    asked = [target for target in targets if target.name in questions]
    try:
        with ThreadPoolExecutor(max_workers=max(1, min(parallel, len(asked)))) as pool:
            return dict(zip((target.name for target in asked), pool.map(one, asked), strict=True))
    finally:
        gateways.close()


def _refused(answer: bytes) -> str:
    """Return the reason in a node's answer; a node is not trusted."""
    try:
        reason = json.loads(answer[-4096:].splitlines()[-1])["refused"]
    except (ValueError, IndexError, KeyError, TypeError):
        return f"{WHAT} gave no readable answer"
    return one_line(str(reason))
