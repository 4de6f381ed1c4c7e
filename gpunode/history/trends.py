"""Trends of a node over its history: counters that grow, GPUs that become warmer, figures that fall."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Literal

from gpunode.checks.measurements import words
from gpunode.frozen import Frozen
from gpunode.history.snapshot import Snapshot
from gpunode.text import moment

LEAST_POINTS = 5
"""Points below which a temperature or a figure has no trend."""
WARMER_C, SLOWER = 5.0, 0.05
"""Change over the history that is a trend: degrees, share of the median."""
MOST_POINTS = 200
DAY_S = 86_400.0
COUNTED = re.compile(
    r"\.(ecc\.(aggregate|volatile)_(un)?corrected|remapped_rows\.\w+|retired_pages\.\w+|pcie\.replays|media_errors"
    r"|carrier_changes|corrected|uncorrected|counters\[(link_downed|symbol_error|link_error_recovery|port_rcv_errors"
    r"|local_link_integrity_errors)\]|(replay|recovery|crc)\w*)$",
    re.IGNORECASE,
)
"""Counters of errors; others, such as dropped packets, grow on healthy nodes."""
_KEY = re.compile(r"\[(.*?)\](?=[.\[])(.*)$", re.DOTALL)


class Trend(Frozen):
    """One value that changed over the history of a node."""

    host: str
    kind: Literal["counter", "temperature", "figure"]
    component: str
    """UUID or slot of a GPU or device."""
    what: str
    change: float
    """Over all points: events, degrees, or the share of the median."""
    per_30_days: float
    """The slope."""
    days: float
    points: int

    @property
    def text(self) -> str:
        """Return the trend in one line: ``12 more remapped rows in 30 days (9 points)``."""
        span = f"in {self.days:.3g} days ({self.points} points)"
        if self.kind == "counter":
            return f"{self.component}: {self.change:.0f} more {self.what} {span}"
        if self.kind == "temperature":
            return f"{self.component}: {self.change:+.1f} °C at idle {span}"
        return f"{self.component}: {self.what} {self.change:+.0%} {span}"


Point = tuple[float, float]
"""Days since the first run, and the value."""


def trends(host: str, runs: Iterable[tuple[str, Snapshot]]) -> list[Trend]:
    """Return the trends of a node from its runs, in their order, each with its time."""
    counters: defaultdict[str, list[Point]] = defaultdict(list)
    warm: defaultdict[str, list[Point]] = defaultdict(list)
    figures: defaultdict[tuple[str, str, int | None], list[Point]] = defaultdict(list)
    start, latest = None, 0.0
    for time, node in runs:
        at = moment(time)
        if at is None:
            continue
        start = start or at
        # A clock that went back: the order of the runs counts.
        latest = max(latest, (at - start).total_seconds() / DAY_S)
        for path, value in node.counters.items():
            counters[path].append((latest, value))
        for gpu, value in node.idle_temperatures_c.items():
            warm[gpu].append((latest, value))
        for figure in node.figures:
            figures[figure.metric, figure.component, figure.message_bytes].append((latest, figure.value))
    return [
        *_counted(host, counters),
        *_sloped(host, "temperature", {(gpu, "temperature"): points for gpu, points in warm.items()}),
        *_sloped(host, "figure", {(where, words(metric)): points for (metric, where, _), points in figures.items()}),
    ]


def _counted(host: str, counters: dict[str, list[Point]]) -> Iterator[Trend]:
    for path, points in counters.items():
        grown = growth([value for _, value in points])
        days = points[-1][0] - points[0][0]
        if grown <= 0 or not COUNTED.search(path):
            continue
        match = _KEY.search(path)
        name = match[2] if match else path
        yield Trend(
            host=host,
            kind="counter",
            component=match[1] if match else "node",
            what=re.sub(r"[.\[\]_]+", " ", name).strip(),
            change=grown,
            per_30_days=30 * grown / days if days else grown,
            days=days,
            points=len(points),
        )


def growth(values: Sequence[float]) -> float:
    """Return the growth of a counter; a lower value than before means that it began again at 0."""
    return sum(new - old if new >= old else new for old, new in pairwise(values))


def _sloped(
    host: str, kind: Literal["temperature", "figure"], series: dict[tuple[str, str], list[Point]]
) -> Iterator[Trend]:
    for (component, subject), points in series.items():
        slope = slope_of(points)
        if slope is None:
            continue
        days = points[-1][0] - points[0][0]
        change = slope * days
        if kind == "figure":
            usual = median(value for _, value in points)
            change, slope = change / usual, slope / usual
        if (kind == "temperature" and change >= WARMER_C) or (kind == "figure" and change <= -SLOWER):
            yield Trend(
                host=host,
                kind=kind,
                component=component,
                what=subject,
                change=change,
                per_30_days=30 * slope,
                days=days,
                points=len(points),
            )


def slope_of(points: Sequence[Point]) -> float | None:
    """Return the slope per day: the median of those between all pairs (Theil-Sen); None for too few points."""
    kept = points[-MOST_POINTS:]
    slopes = [(later[1] - old[1]) / (later[0] - old[0]) for old, later in combinations(kept, 2) if later[0] > old[0]]
    return median(slopes) if len(kept) >= LEAST_POINTS and slopes else None
