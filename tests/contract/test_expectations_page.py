"""docs/expectations.md: its table is what the catalog and the engine say, and every platform is in it."""

import re

import pytest
from expectations_table import PAGE, page

from gpunode.catalog import Catalog
from gpunode.expectations import METRICS, Figure, MarkRules, Where, limit_of, marks_of, of_platform

CATALOG = Catalog()


def test_the_table_of_the_page_is_the_current_one() -> None:
    assert page(CATALOG) == PAGE.read_text(encoding="utf-8"), (
        "run .venv/bin/python tests/contract/expectations_table.py"
    )


def test_every_platform_is_in_the_table_once() -> None:
    rows = re.findall(r"^\| ([\w-]+) \|.*\|$", page(CATALOG), re.MULTILINE)
    assert sorted(name for name in rows if name != "platform") == sorted(CATALOG.platforms)


@pytest.mark.parametrize("name", Catalog().platforms)
def test_no_mark_of_a_platform_is_above_its_limit(name: str) -> None:
    """A mark that no healthy machine can reach would fail all of them; NVLS may exceed what a ring carries."""
    shape = of_platform(CATALOG, CATALOG.platforms[name])
    for metric in METRICS:
        where = Where(0, 1) if metric == "peer_to_peer" else Where()
        limit = limit_of(metric, shape, where)
        marks = marks_of(Figure(metric, 0.0, where, 2**34), shape, CATALOG, MarkRules(gross=0.4))
        if limit is None or not limit.sure:
            continue
        allowed = 1.1 if metric.endswith("_busbw") else 1.0
        assert [mark for mark in marks if mark.fails and mark.value > limit.value * allowed] == [], metric
