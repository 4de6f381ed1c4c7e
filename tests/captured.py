"""Recorded outputs of other people's machines: named by tests/captures/manifest.tsv, and no part of the project.

`make captures` fetches them; GPUNODE_CAPTURES names a folder that has them. A test that needs some carries the marker
``captures`` with their names (without a name: all); where one is missing, or is not the one of the manifest, the test
is not selected, and the summary has their number. tests/conftest.py registers the hooks.
"""

import csv
import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import xml_key

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("GPUNODE_CAPTURES") or ROOT / ".cache" / "captures")
with (ROOT / "tests" / "captures" / "manifest.tsv").open(encoding="utf-8", newline="") as _stream:
    ROWS = {row["file"]: row for row in csv.DictReader(_stream, delimiter="\t", quoting=csv.QUOTE_NONE)}
"""Rows of the manifest by name."""
NOT_SELECTED = pytest.StashKey[int]()


@cache
def there(name: str) -> bool:
    """Whether a capture is there, and is the one of the manifest."""
    try:
        return hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == ROWS[name]["sha256"]
    except OSError:
        return False


def each(rows: Iterable[str | tuple[Any, ...]]) -> list[Any]:
    """Names, or rows that begin with one, as parameters of a test, each of which needs its own capture."""
    whole = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=pytest.mark.captures(row[0]), id=row[0]) for row in whole]


def in_folder(*folders: str) -> list[str]:
    """The names below some folders."""
    return sorted(name for name in ROWS if name.partition("/")[0] in folders)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that need a capture that is not there."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("captures"))]
    assert all(name in ROWS for _, mark in marked for name in mark.args), "a name that the manifest has not"
    return [item for item, mark in marked if not all(there(name) for name in mark.args or ROWS)]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = left_out(items)
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in set(absent)]
    config.stash[NOT_SELECTED] = len(absent)


def summary_line(config: pytest.Config) -> str | None:
    """The line of the summary; None where nothing was left out."""
    number = config.stash.get(NOT_SELECTED, 0)
    return f"captures: not fetched (make captures): {number} tests not selected" if number else None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report the number as a worker of pytest-xdist; write it in the JUnit report, for scripts/run_tests.py."""
    config = session.config
    output: dict[str, int] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output["captures_not_selected"] = config.stash.get(NOT_SELECTED, 0)
    elif report := config.stash.get(xml_key, None):
        report.add_global_property("captures", config.stash.get(NOT_SELECTED, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    number = getattr(node, "workeroutput", {}).get("captures_not_selected", 0)
    node.config.stash[NOT_SELECTED] = max(number, node.config.stash.get(NOT_SELECTED, 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if line := summary_line(config):
        terminalreporter.write_line(line)
