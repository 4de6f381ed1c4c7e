"""The marks of every platform of the catalog, against what its hardware can reach."""

import pytest

from gpunode.catalog import Catalog
from gpunode.expectations import METRICS, Figure, MarkRules, Where, limit_of, marks_of, of_platform

CATALOG = Catalog()


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
