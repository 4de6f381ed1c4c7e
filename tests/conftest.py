"""Hooks of all tests."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from captured import (  # noqa: F401 (pytest takes them from here)
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Tests save no run in the history of the user who runs them; those of the history name a folder.
os.environ["GPUNODE_HISTORY"] = "off"


def pytest_collection_finish() -> None:
    """Spare the garbage collector, here and in each forked child, what all tests share: it stays until the end."""
    gc.collect()
    gc.freeze()
    # What a test makes is mostly gone with it: looking for cycles more often takes a tenth of the time.
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Undo what a test does to the signals that end a program: what later tests start would ignore them too."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        return (yield)
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
