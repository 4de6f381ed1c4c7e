"""Assessment of one figure: the marks that apply to it, and whether it reaches them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import Version

from gpunode.catalog import Catalog
from gpunode.catalog.hardware import ExpectedFigure as Row
from gpunode.expectations.limits import METRICS, Metric, PhysicalLimit, Shape, Where, limit_of, unit_of

CATALOG = "catalog (expectations.yml"
Grade = Literal["good", "low", "bad", "unknown"]
NEARLY = 0.98
"""Share of a pass mark that a message of half its size must reach: B200 reached 99 % of 16 GiB with 8 GiB (stas)."""
SUMS_SINCE = Version("9.0")
"""The first compute capability with NVSwitches that perform reductions."""
SMALLEST = 16
"""A pass mark does not apply to messages smaller than its own size divided by this number."""


@dataclass(frozen=True)
class Figure:
    """One measured figure of any program."""

    metric: Metric
    value: float
    where: Where = field(default_factory=Where)
    message_bytes: float | None = None
    algorithm: str | None = None
    """NCCL's algorithm, if it is known: ``ring``, ``nvls``."""


@dataclass(frozen=True)
class Mark:
    """A lower bound and its origin."""

    value: float
    origin: str
    fails: bool
    """True: a figure below it is a failure; False: a warning."""


@dataclass(frozen=True)
class MarkRules:
    """Rules of the site and the policy, applied together with the catalog."""

    site: Mapping[Metric, float] = field(default_factory=dict)
    """Minimum values of the site's file: they replace the catalog's marks."""
    site_origin: str = "site file"
    baseline: float | None = None
    """The same figure of an earlier run of this node."""
    baseline_origin: str = "baseline"
    drop_warns: float = 0.05
    drop_fails: float = 0.1
    """Maximum drop below the baseline, as a share of it."""
    gross: float | None = None
    """Share of a sure limit below which a figure is a failure whatever the marks; None: none."""
    gross_origin: str = "policy"


@dataclass(frozen=True)
class Assessment:
    """The result for a figure."""

    figure: Figure
    grade: Grade
    limit: PhysicalLimit | None
    mark: Mark | None
    """The mark that was missed, of several the highest that fails; else the highest that applies. None: there is
    none."""
    baseline: float | None = None
    """The same figure of an earlier run of this node."""

    @property
    def ratio(self) -> float | None:
        """Return the figure as a share of its limit."""
        return None if self.limit is None else self.figure.value / self.limit.value

    @property
    def origin(self) -> str | None:
        """Return the origin of the expectation."""
        return self.mark.origin if self.mark else None

    def __str__(self) -> str:
        """Return ``41.2 GB/s, 71 % of 57.6 (PCIe 5.0 x16 …), expected at least 48``."""
        unit = unit_of(self.figure.metric)
        text = f"{_number(self.figure.value)} {unit}"
        if self.limit is not None:
            text += f", {self.ratio:.0%} of {_number(self.limit.value)} ({self.limit.what})"
        if self.mark is not None:
            text += f", expected at least {_number(self.mark.value)}"
        return text


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def assess(figure: Figure, shape: Shape, catalog: Catalog, rules: MarkRules) -> Assessment:
    """Return the assessment of a figure by the marks of the site or else the catalog, and by the baseline."""
    limit = limit_of(figure.metric, shape, figure.where)
    marks = marks_of(figure, shape, catalog, rules)
    missed = [mark for mark in marks if figure.value < mark.value]
    if not marks:
        return Assessment(figure, "unknown", limit, None, rules.baseline)
    if not missed:
        return Assessment(figure, "good", limit, max(marks, key=lambda mark: mark.value), rules.baseline)
    worst = max(missed, key=lambda mark: (mark.fails, mark.value))
    return Assessment(figure, "bad" if worst.fails else "low", limit, worst, rules.baseline)


def marks_of(figure: Figure, shape: Shape, catalog: Catalog, rules: MarkRules) -> list[Mark]:
    """Return the lower bounds that apply to a figure, whatever its value."""
    limit = limit_of(figure.metric, shape, figure.where)
    return [*_marks(figure, shape, catalog, rules, limit), *_earlier(rules)]


def _marks(
    figure: Figure, shape: Shape, catalog: Catalog, rules: MarkRules, limit: PhysicalLimit | None
) -> Iterator[Mark]:
    if figure.metric in rules.site:
        yield Mark(rules.site[figure.metric], rules.site_origin, fails=True)
        return
    for mark in _rows(figure, shape, catalog):
        # Above this machine's limit: the figure is from a machine with a faster link, or at a higher clock.
        if limit is None or not limit.sure or figure.metric.endswith("_busbw") or mark.value <= limit.value:
            yield mark
    if limit is None:
        return
    kind = METRICS[figure.metric]
    for band in catalog.bands.values():
        path = "nvlink" if band.metric == "peer" and limit.path == "nvswitch" else limit.path
        large = band.message_bytes is None or (figure.message_bytes or 0) >= band.message_bytes
        if band.metric == kind.group and band.path == path and large:
            yield Mark(band.share * limit.value, f"{CATALOG} bands.{band.id}: {', '.join(band.source)})", fails=False)
            if rules.gross is not None and limit.sure and band.confidence != "unsure":
                yield Mark(rules.gross * limit.value, rules.gross_origin, fails=True)


def _earlier(rules: MarkRules) -> Iterator[Mark]:
    if rules.baseline is not None:
        yield Mark(rules.baseline * (1 - rules.drop_fails), rules.baseline_origin, fails=True)
        yield Mark(rules.baseline * (1 - rules.drop_warns), rules.baseline_origin, fails=False)


def _rows(figure: Figure, shape: Shape, catalog: Catalog) -> Iterator[Mark]:
    """Yield the marks of the catalog's expectations for this machine and this measurement."""
    for row in catalog.expectations.values():
        if row.metric != METRICS[figure.metric].row or not _about(row, shape, figure):
            continue
        origin = f"{CATALOG} {row.id}: {', '.join(row.source)})"
        share, fails = _by_size(row, figure)
        if share is None:
            continue
        if row.kind == "floor":
            yield Mark(row.value * share, origin, fails=fails and all(map(row.sure, (None, "gpu", "platform"))))
        else:
            yield Mark(row.lowest * share, origin, fails=False)


def _about(row: Row, shape: Shape, figure: Figure) -> bool:
    """Return whether a row applies to this machine."""
    where = figure.where
    if row.gpu is not None and (shape.gpu is None or row.gpu != shape.gpu.id):
        return False
    if row.nodes != where.nodes or (row.platform is not None and row.platform not in shape.platforms):
        return False
    if row.gpu is None and not shape.nvswitch:
        return False
    if row.algorithm is not None and row.algorithm != figure.algorithm:
        return False
    if row.algorithm is None and figure.algorithm == "ring" and sums_in_switch(shape):
        # A mark without an algorithm was measured with NCCL's own choice, which is not the ring there.
        return False
    if METRICS[figure.metric].group == "busbw":
        ranks = where.ranks if where.ranks is not None else shape.count * where.nodes
        return ranks == row.count * row.nodes
    if METRICS[figure.metric].group == "peer":
        # Figures of pairs are figures of NVLink: a pair over PCIe has others.
        links = None if where.peer is None else shape.links_between(where.gpu, where.peer)
        return shape.gpu is not None and shape.gpu.nvlink is not None and links == shape.gpu.nvlink.links
    return True


def sums_in_switch(shape: Shape) -> bool:
    """Return whether NCCL can use the NVSwitches for reductions (NVLS): Hopper and later."""
    return shape.nvswitch and shape.gpu is not None and shape.gpu.capability >= SUMS_SINCE


def _by_size(row: Row, figure: Figure) -> tuple[float | None, bool]:
    """Return the share of a row's figure that applies at the measured message size, and whether it may fail there."""
    if row.message_bytes is None or (figure.message_bytes or 0) >= row.message_bytes:
        return 1.0, True
    if figure.message_bytes is None or figure.message_bytes * SMALLEST < row.message_bytes:
        return None, False
    if figure.message_bytes * 2 >= row.message_bytes:
        return NEARLY, True
    return NEARLY, False
