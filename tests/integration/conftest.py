"""Hooks and fixtures of the tests with real programs."""

from pathlib import Path

import pytest

from gpunode.workload.payload import payload_zip

LONG = (
    "test_payload_measured.py",
    "test_provision.py",
    "test_waves.py",
    "test_wheel.py",
    "test_zipapp.py",
)
"""Files that take longest: a process that begins one of them last would run for minutes after the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest (scripts/run_tests.py keeps this order)."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The payload, as it is sent to a node."""
    path = tmp_path_factory.mktemp("payload") / "payload.pyz"
    path.write_bytes(payload_zip())
    return path
