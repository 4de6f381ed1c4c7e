"""Hooks of all tests."""

from captured import (  # noqa: F401 (pytest takes them from here)
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
