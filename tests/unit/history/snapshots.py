"""Snapshots of nodes for the tests of the history: of the healthy simulated machines, with edits of their raw text."""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "fleet"))

from fleet_bundles import healthy

from gpunode.facts import facts_from_bundle
from gpunode.history.snapshot import Snapshot, snapshot_of
from gpunode.probe.bundle import Bundle

NODE = 2
"""Number of a node with four L40S."""


@functools.cache
def raw(number: int = NODE, host: str = "gpu-01") -> str:
    return str(healthy(number, host))


def snapshot(text: str) -> Snapshot:
    """The snapshot of a bundle; it is not judged, which takes most of the time."""
    return snapshot_of(facts_from_bundle(Bundle.from_json(text.encode(), "a test's bundle")))


@functools.cache
def good(number: int = NODE, host: str = "gpu-01") -> Snapshot:
    return snapshot(raw(number, host))


def edited(*edits: Callable[[str], str], number: int = NODE) -> Snapshot:
    """The snapshot of the node after edits, each of which must change its text."""
    text = raw(number)
    for edit in edits:
        before, text = text, edit(text)
        assert text != before
    return snapshot(text)


def swapped(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


def in_command(command: str, old: str, new: str, times: int = 0) -> Callable[[str], str]:
    """Edit the output of one command by a regular expression; ``times`` 0: everywhere."""

    def edit(text: str) -> str:
        document = json.loads(text)
        answer = document["commands"][command]
        answer["stdout"] = re.sub(old, new, answer["stdout"], count=times, flags=re.DOTALL)
        return json.dumps(document)

    return edit


def in_file(path: str, text: str | None) -> Callable[[str], str]:
    """Replace the text of a file; None: it does not exist."""

    def edit(raw_text: str) -> str:
        document = json.loads(raw_text)
        assert path in document["files"], path
        document["files"][path] = text
        return json.dumps(document)

    return edit
