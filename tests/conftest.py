"""Hooks of all tests."""

import gc

from captured import (  # noqa: F401 (pytest takes them from here)
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)


def pytest_collection_finish() -> None:
    """Spare the garbage collector, here and in each forked child, what all tests share: it stays until the end."""
    gc.collect()
    gc.freeze()
