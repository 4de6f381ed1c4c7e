"""Content of the page: what a report has, in the order and grouping in which it is shown."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gpunode.checks import Category, Finding, NodeLayout, PairMatrix, Status, registry
from gpunode.checks.measurements import words
from gpunode.checks.registry import CATEGORIES
from gpunode.history.compare import Comparison
from gpunode.history.outliers import Outlier
from gpunode.judging.report import AFFECTED, WORST_FIRST, NodeReport, Report, category_of, count, in_words
from gpunode.names import fold
from gpunode.report.comparison import lines_of, notes_of
from gpunode.report.comparison import summary as summary_of
from gpunode.report.console import fabric_lines, stack_in_words
from gpunode.report.fleet import of_node, of_nodes
from gpunode.report.html.drawing import Drawing, draw, drawn, nvlink_words, pcie_words, port_words, short_model
from gpunode.report.summary import Fix, fix_of, to_drain, verdict
from gpunode.text import number_ranges

AREA: Mapping[Category, str] = {
    "gpu": "GPU",
    "memory": "Memory",
    "nvlink": "NVLink",
    "fabric": "Fabric",
    "pcie": "PCIe",
    "network": "Network",
    "host": "Host",
    "driver": "Driver",
    "container": "Containers",
}
WORD = {
    Status.FAIL: "failed",
    Status.ERROR: "not determined",
    Status.WARN: "warning",
    Status.NOTE: "note",
    Status.PASS: "passed",
    Status.SKIP: "skipped",
}
SIGN = {Status.FAIL: "\u00d7", Status.ERROR: "?", Status.WARN: "!", Status.NOTE: "i"}
NARROW, WIDE, AREA_GAP = 5, 18, 9
"""Columns of the heat map in pixels: of checks that passed on every node, and of others."""
ROW = 20
ROWS_UNFOLDED = 60
"""Nodes up to which each has its own row; beyond, nodes with equal results share one."""
MOST_OPEN = 3
"""Failed nodes that are shown open."""
MOST_OF_NODE = 60
"""Findings of one node that its section lists."""
MOST_UNAFFECTED = 20
"""Results of one check that passed, and differ, which are listed."""
MOST_NAMES = 1500
"""Characters of a list of nodes."""
MATRIX_NODES = 200
"""Nodes with matrices that are shown."""
SHADES = 8


@dataclass(frozen=True)
class HeatColumn:
    """A column of the heat map."""

    check: str
    number: int
    x: int
    width: int

    @property
    def wide(self) -> bool:
        """Return True for a check with a result to look at."""
        return self.width == WIDE


@dataclass(frozen=True)
class HeatRow:
    """One node, or several with the same results."""

    hosts: tuple[str, ...]
    name: str
    status: Status
    numbers: str
    paths: tuple[tuple[Status, str], ...]
    signs: tuple[tuple[float, str, Status], ...]
    label: str


@dataclass(frozen=True)
class HeatMap:
    """Checks by node."""

    columns: tuple[HeatColumn, ...]
    areas: tuple[tuple[str, int, int], ...]
    rows: tuple[HeatRow, ...]
    width: int
    head: int


@dataclass(frozen=True)
class ShownFinding:
    """A finding, folded over nodes."""

    status: Status
    checks: tuple[str, ...]
    components: str
    message: str
    source: str | None
    fix: Fix
    observed: str | None
    nodes: str
    number: int
    indexes: str


@dataclass(frozen=True)
class FigureRow:
    """A measured figure of the components of a node."""

    name: str
    check: str
    unit: str
    measured: str
    worst: Status
    expected: str
    expected_at: float | None
    limit: str
    limit_of: str
    limit_at: float | None
    baseline: str
    change: str
    """The largest drop below the baseline, else the smallest rise: ``-12.0 %``."""
    dots: tuple[tuple[float, Status, str], ...]
    by: str


@dataclass(frozen=True)
class MatrixView:
    """A matrix as a heat map: value and shade of each cell."""

    title: str
    origin: str
    unit: str
    labels: tuple[str, ...]
    rows: tuple[tuple[tuple[str, int, bool], ...], ...]
    low: str
    high: str
    note: str


@dataclass(frozen=True)
class PartRow:
    """A part in the table below a drawing."""

    name: str
    status: str
    model: str
    slot: str
    numa: str
    pcie: str
    link: str


@dataclass
class DrawingView:
    """A drawing, which equal nodes share, with its table; ``first`` is the node that shows the table."""

    drawing: Drawing | None
    parts: tuple[PartRow, ...]
    labels: tuple[str, ...]
    connections: tuple[tuple[tuple[str, str], ...], ...]
    first: int
    hosts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class NodeView:
    """A node's section."""

    number: int
    report: NodeReport
    counts: str
    gpus: str
    stack: str
    problems: tuple[ShownFinding, ...]
    more: int
    passed: tuple[tuple[str, int, int], ...]
    figures: tuple[FigureRow, ...]
    matrices: tuple[MatrixView, ...]
    hidden_matrices: int
    drawing: int | None
    open: bool


@dataclass(frozen=True)
class ResultRow:
    """A result of a check, with the nodes that have it."""

    status: Status
    components: str
    message: str
    source: str | None
    observed: str | None
    nodes: str
    number: int


@dataclass(frozen=True)
class CheckView:
    """A check with its results."""

    check: str
    number: int
    status: Status
    means: str
    remedy: str
    counts: tuple[tuple[Status, int], ...]
    results: tuple[ResultRow, ...]
    more: int


@dataclass
class Page:
    """The whole page."""

    document: Report
    verdict: str
    drain: str
    tiles: tuple[tuple[Status, int], ...]
    summary: str
    simulated: int
    problems: tuple[ShownFinding, ...]
    heat: HeatMap | None
    outliers: tuple[tuple[str, str], ...]
    since: str | None
    changes: tuple[tuple[str, str, str, str], ...]
    notes: tuple[str, ...]
    expired: tuple[str, ...]
    fabric: tuple[str, ...]
    fabric_matrix: MatrixView | None
    nodes: tuple[NodeView, ...]
    drawings: tuple[DrawingView, ...]
    areas: tuple[tuple[str, tuple[CheckView, ...]], ...]
    anchors: Mapping[str, int]


def page_of(document: Report) -> Page:
    """Return the content of the page."""
    nodes = sorted(document.nodes, key=lambda node: (WORST_FIRST.index(node.status), node.host))
    ids = {finding.check for node in nodes for finding in node.findings}
    order = sorted(ids, key=lambda check: (CATEGORIES.index(category_of(check)), check))
    anchors = {check: number for number, check in enumerate(order)}
    index = {node.host: number for number, node in enumerate(nodes)}
    cells = [_cells(node) for node in nodes]
    drawings = _Drawings()
    views = [_node(number, node, drawings) for number, node in enumerate(nodes)]
    comparison = None if document.fleet.since is None else Comparison.model_validate(document.fleet.since)
    outliers = [
        Outlier.model_validate(row)
        for row in (*(document.fleet.outliers or ()), *(document.fleet.inconsistencies or ()))
    ]
    return Page(
        document=document,
        verdict=verdict(document),
        drain=to_drain(nodes),
        tiles=tuple(
            (status, number) for status in WORST_FIRST if (number := sum(node.status is status for node in nodes))
        ),
        summary=in_words(document.counts),
        simulated=sum(bool(node.simulated) for node in nodes),
        problems=tuple(_problems(nodes, index)),
        heat=_heat(nodes, cells, order) if nodes and order else None,
        outliers=tuple((fold(outlier.hosts) if outlier.hosts else outlier.group, outlier.text) for outlier in outliers),
        since=None if comparison is None else summary_of(comparison),
        changes=() if comparison is None else tuple(lines_of(comparison)),
        notes=() if comparison is None else tuple(notes_of(comparison)),
        expired=tuple(dict.fromkeys(line for node in nodes if node.policy for line in node.policy.expired)),
        fabric=tuple(fabric_lines(document.fabric, verbose=False)) if document.fabric else (),
        fabric_matrix=_matrix(document.fabric.matrix, ()) if document.fabric and document.fabric.matrix else None,
        nodes=tuple(views),
        drawings=tuple(drawings.views),
        areas=tuple(_areas(nodes, order)),
        anchors=anchors,
    )


@lru_cache(maxsize=512)
def _folded(names: tuple[str, ...]) -> str:
    """Return names folded, and cut where the list is too long; most checks passed on the same nodes."""
    text = names[0] if len(names) == 1 else fold(names)
    return text if len(text) <= MOST_NAMES else f"{text[:MOST_NAMES]}…"


def _problems(nodes: Sequence[NodeReport], index: Mapping[str, int]) -> Iterator[ShownFinding]:
    for folded in of_nodes(nodes, frozenset(AFFECTED)):
        group = folded.group
        yield ShownFinding(
            status=group.status,
            checks=group.checks,
            components=_components(group.components),
            message=group.message,
            source=group.source,
            fix=fix_of(group.remedy, group.actions, folded.hosts, [group.message]),
            observed=group.observed,
            nodes=_folded(folded.hosts),
            number=len(folded.hosts),
            indexes=number_ranges({index[host] for host in folded.hosts}),
        )


def _components(names: Iterable[str]) -> str:
    distinct = tuple(dict.fromkeys(names))
    return "" if distinct == ("node",) else _folded(distinct)


# The heat map


def _cells(node: NodeReport) -> dict[str, Status]:
    """Return the worst result of each check; one that a policy only observes is a note."""
    statuses: dict[str, Status] = {}
    for finding in node.findings:
        status = Status.NOTE if finding.observed is not None else finding.status
        before = statuses.get(finding.check, status)
        statuses[finding.check] = min(before, status, key=WORST_FIRST.index)
    return statuses


def _heat(nodes: Sequence[NodeReport], cells: Sequence[Mapping[str, Status]], order: Sequence[str]) -> HeatMap:
    looked_at = {check for row in cells for check, status in row.items() if status in AFFECTED}
    columns: list[HeatColumn] = []
    areas: list[tuple[str, int, int]] = []
    x, area = 0, None
    for number, check in enumerate(order):
        category = category_of(check)
        if category != area:
            if area is not None:
                x = max(x, areas[-1][1] + 8 * len(areas[-1][0])) + AREA_GAP
            areas.append((AREA[category], x, 0))
            area = category
        width = WIDE if check in looked_at else NARROW
        columns.append(HeatColumn(check, number, x, width))
        x += width
        areas[-1] = (areas[-1][0], areas[-1][1], x - areas[-1][1])
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for number, row in enumerate(cells):
        unfolded = None if len(nodes) > ROWS_UNFOLDED else number
        groups[tuple(row.get(check) for check in order), nodes[number].status, unfolded].append(number)
    rows = tuple(
        _row([nodes[number] for number in group], cells[group[0]], columns, group) for group in groups.values()
    )
    longest = max((len(column.check) for column in columns if column.wide), default=0)
    return HeatMap(tuple(columns), tuple(areas), rows, x, 24 + round(longest * 5.4))


def _row(
    nodes: Sequence[NodeReport], cells: Mapping[str, Status], columns: Sequence[HeatColumn], numbers: Sequence[int]
) -> HeatRow:
    paths: defaultdict[Status, list[str]] = defaultdict(list)
    signs: list[tuple[float, str, Status]] = []
    named: defaultdict[Status, list[str]] = defaultdict(list)
    for column in columns:
        status = cells.get(column.check)
        if status is None:
            continue
        named[status].append(column.check)
        width = column.width - 1
        paths[status].append(f"M{column.x} 2h{width}v{ROW - 4}h-{width}z")
        if column.wide and status in SIGN:
            signs.append((column.x + width / 2, SIGN[status], status))
    hosts = tuple(node.host for node in nodes)
    texts = [f"{WORD[status]}: {', '.join(named[status][:12])}" for status in AFFECTED if named[status]]
    texts.append(f"{len(named[Status.PASS])} passed, {len(named[Status.SKIP])} skipped")
    return HeatRow(
        hosts=hosts,
        name=_folded(hosts),
        status=nodes[0].status,
        numbers=number_ranges(numbers),
        paths=tuple((status, "".join(parts)) for status, parts in paths.items()),
        signs=tuple(signs),
        label="; ".join(texts),
    )


# Nodes


def _node(number: int, node: NodeReport, drawings: "_Drawings") -> NodeView:
    looked_at = [finding for finding in node.findings if finding.status in (*AFFECTED, Status.NOTE)]
    groups = sorted(of_node(looked_at), key=lambda group: WORST_FIRST.index(group.status))
    problems = tuple(
        ShownFinding(
            status=group.status,
            checks=group.checks,
            components="" if group.message.startswith(group.components[0]) else _components(group.components),
            message=group.message,
            source=None,
            fix=Fix(),
            observed=group.observed,
            nodes="",
            number=1,
            indexes="",
        )
        for group in groups[:MOST_OF_NODE]
    )
    tally: dict[Category, list[int]] = {}
    for check, status in _cells(node).items():
        row = tally.setdefault(category_of(check), [0, 0])
        row[0] += status in (Status.PASS, Status.NOTE)
        row[1] += status is Status.SKIP
    models = sorted({short_model(gpu.name) for gpu in node.gpus if gpu.name})
    shown = number < MATRIX_NODES or node.status in AFFECTED
    peers = [
        finding for finding in node.findings if finding.figure is not None and finding.figure.metric == "peer_to_peer"
    ]
    return NodeView(
        number=number,
        report=node,
        counts=in_words(count(node.findings)),
        gpus=f"{len(node.gpus)} x {' + '.join(models) or 'GPU'}" if node.gpus else "",
        stack=stack_in_words(node.stack, 0),
        problems=problems,
        more=max(0, len(groups) - MOST_OF_NODE),
        passed=tuple((AREA[area], tally[area][0], tally[area][1]) for area in CATEGORIES if area in tally),
        figures=tuple(_figures(node.findings)),
        matrices=tuple(_matrix(matrix, peers) for matrix in node.matrices) if shown else (),
        hidden_matrices=0 if shown else len(node.matrices),
        drawing=drawings.of(number, node),
        open=number < MOST_OPEN and node.status in (Status.FAIL, Status.ERROR),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(value: float) -> str:
    """Return a figure with three or four digits that matter."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _figures(findings: Iterable[Finding]) -> Iterator[FigureRow]:
    groups: defaultdict[tuple[str, str, int | None], list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.figure is not None and _number(finding.measured) is not None:
            groups[finding.check, finding.figure.metric, finding.figure.message_bytes].append(finding)
    for (check, metric, size), members in groups.items():
        values = [value for member in members if (value := _number(member.measured)) is not None]
        earlier = [
            (value, member.figure.baseline)
            for member in members
            if member.figure is not None and member.figure.baseline and (value := _number(member.measured)) is not None
        ]
        first = members[0]
        expected = _number(first.expected)
        limit = first.figure.limit if first.figure is not None else None
        top = max([*values, expected or 0, limit or 0]) * 1.03 or 1
        scaled = " at " + _size(size) if size else ""
        yield FigureRow(
            name=f"{words(metric)}{scaled}",
            check=check,
            unit=first.unit or "",
            measured=_span(values),
            worst=min((member.status for member in members), key=WORST_FIRST.index),
            expected="" if expected is None else _plain(expected),
            expected_at=None if expected is None else round(100 * expected / top, 1),
            limit="" if limit is None else _plain(limit),
            limit_of=(first.figure.limit_of if first.figure is not None else None) or "",
            limit_at=None if limit is None else round(100 * limit / top, 1),
            baseline=_span([before for _, before in earlier]),
            change=f"{min(100 * value / before - 100 for value, before in earlier):+.1f} %" if earlier else "",
            dots=tuple(
                (
                    round(100 * value / top, 1),
                    member.status,
                    f"{member.component}: {_plain(value)} {member.unit or ''}".strip(),
                )
                for member in members
                if (value := _number(member.measured)) is not None
            ),
            by=_by(first.source),
        )


def _span(values: Sequence[float]) -> str:
    """Return ``41.2 to 57.6``; one value if they read alike; empty for none."""
    return " to ".join(dict.fromkeys(_plain(value) for value in (min(values), max(values)))) if values else ""


def _by(source: str | None) -> str:
    """Return where the expected value comes from: catalog, site file, baseline."""
    text = source or ""
    return next((word for word in ("baseline", "site file", "catalog") if text.startswith(word)), text[:40])


def _size(size: int) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size / step:g} {unit}" if size % step == 0 else f"{size / step:.1f} {unit}"
    return f"{size} B"


def _matrix(matrix: PairMatrix, peers: Sequence[Finding]) -> MatrixView:
    """Return a matrix; in one of copies in one direction, cells below the lowest expected value are marked."""
    cells = [cell for row in matrix.rows for cell in row if cell is not None]
    least, most = min(cells, default=0.0), max(cells, default=0.0)
    expected = [value for finding in peers if (value := _number(finding.expected)) is not None]
    marked = min(expected) if expected and "both" not in matrix.title else None
    note = (
        f"outlined: below the expected {_plain(marked)} {matrix.unit}" if marked is not None and least < marked else ""
    )
    return MatrixView(
        title=matrix.title.replace("_", " "),
        origin=matrix.origin,
        unit=matrix.unit,
        labels=matrix.labels,
        rows=tuple(
            tuple(
                ("", -1, False)
                if cell is None
                else (_plain(cell), _shade(cell, most), marked is not None and cell < marked)
                for cell in row
            )
            for row in matrix.rows
        ),
        low=_plain(least),
        high=_plain(most),
        note=note,
    )


def _shade(value: float, most: float) -> int:
    return 0 if most <= 0 else max(0, min(SHADES - 1, int(SHADES * value / most)))


# Drawings


class _Drawings:
    """Drawings of nodes: nodes with the same parts, and the same results on them, share one."""

    def __init__(self) -> None:
        self.views: list[DrawingView] = []
        self._known: dict[object, int] = {}

    def of(self, number: int, node: NodeReport) -> int | None:
        """Return the number of the node's drawing; None if nothing of it is known."""
        layout = node.layout
        if layout is None or not layout.parts:
            return None
        status = _statuses(node, layout)
        key = (layout, tuple(sorted(status.items())))
        if key not in self._known:
            self._known[key] = len(self.views)
            self.views.append(
                DrawingView(
                    drawing=draw(layout, status) if drawn(layout) else None,
                    parts=tuple(_part_rows(layout, status)),
                    labels=layout.labels[:32],
                    connections=tuple(
                        tuple((cell or "", _kind(cell)) for cell in row[:32]) for row in layout.connections[:32]
                    ),
                    first=number,
                )
            )
        self.views[self._known[key]].hosts.append(node.host)
        return self._known[key]


def _kind(connection: str | None) -> str:
    if connection is None:
        return "self"
    return "nv" if connection.startswith("NV") else connection.lower() if connection.isalpha() else "other"


def _statuses(node: NodeReport, layout: NodeLayout) -> dict[str, str]:
    """Return the worst result of each part and of its links, without those that passed."""
    names = {part.name for part in layout.parts}
    worst: dict[str, Status] = {}

    def note(key: str, status: Status) -> None:
        worst[key] = min(worst.get(key, status), status, key=WORST_FIRST.index)

    for finding in node.findings:
        if finding.status not in AFFECTED or finding.observed is not None:
            continue
        area = category_of(finding.check)
        parts = [finding.component] if finding.component in names else []
        first, _, second = finding.component.partition("-")
        if first in names and second in names:
            parts = [first, second]
            note(f"pair {first}-{second}", finding.status)
        for part in parts:
            note(part, finding.status)
            if area in ("pcie", "nvlink"):
                note(f"{area} {part}", finding.status)
        if area == "fabric":
            note("fabric", finding.status)
    return {key: status.value for key, status in worst.items()}


def _part_rows(layout: NodeLayout, status: Mapping[str, str]) -> Iterator[PartRow]:
    for part in layout.parts:
        yield PartRow(
            name=part.name,
            status=status.get(part.name, ""),
            model=short_model(part.model),
            slot=part.slot or "",
            numa="" if part.numa_node is None else str(part.numa_node),
            pcie=pcie_words(part.link),
            link=nvlink_words(part) or port_words(part),
        )


# Checks


def _areas(nodes: Sequence[NodeReport], order: Sequence[str]) -> Iterator[tuple[str, tuple[CheckView, ...]]]:
    results: dict[str, defaultdict[tuple[Any, ...], list[str]]] = {check: defaultdict(list) for check in order}
    remedies: dict[str, str] = {}
    for node in nodes:
        groups: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
        for finding in node.findings:
            groups[finding.check, finding.status, finding.message, finding.source, finding.observed].append(
                finding.component
            )
            if finding.remedy and finding.check not in remedies:
                remedies[finding.check] = finding.remedy
        for (check, *rest), components in groups.items():
            results[check][*rest, tuple(components)].append(node.host)
    by_area: defaultdict[Category, list[CheckView]] = defaultdict(list)
    for number, check in enumerate(order):
        by_area[category_of(check)].append(_check(number, check, results[check], remedies.get(check, "")))
    for area in CATEGORIES:
        if by_area[area]:
            yield AREA[area], tuple(by_area[area])


def _check(number: int, check: str, results: Mapping[tuple[Any, ...], Sequence[str]], remedy: str) -> CheckView:
    means, remedy = (registry[check].means, registry[check].remedy or remedy) if check in registry else ("", remedy)
    counts: defaultdict[Status, set[str]] = defaultdict(set)
    for (status, *_), hosts in results.items():
        counts[status].update(hosts)
    order = sorted(results, key=lambda key: (WORST_FIRST.index(key[0]), -len(results[key])))
    affected = [key for key in order if key[0] in AFFECTED]
    others = [key for key in order if key[0] not in AFFECTED]
    return CheckView(
        check=check,
        number=number,
        status=min(counts, key=WORST_FIRST.index),
        means=means,
        remedy=remedy,
        counts=tuple((status, len(counts[status])) for status in WORST_FIRST if status in counts),
        results=tuple(
            ResultRow(status, _components(components), message, source, observed, _folded(tuple(hosts)), len(hosts))
            for key in (*affected, *others[:MOST_UNAFFECTED])
            for (status, message, source, observed, components), hosts in [(key, results[key])]
        ),
        more=max(0, len(others) - MOST_UNAFFECTED),
    )
