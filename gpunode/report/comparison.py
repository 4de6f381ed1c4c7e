"""A comparison of two runs as text and as Markdown."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gpunode.history.compare import SECTIONS, Change, Comparison
from gpunode.names import fold
from gpunode.text import counted, listed, printable

EFFECTS = ("worse", "better", "other")
PLURALS = {"library": "libraries", "dkms": "dkms"}
MOST = 8
"""Components and nodes of a line that are named, where their names cannot be folded."""


def lines_of(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Return effect, nodes, component and change of each difference; what is alike on several nodes is one line."""
    nodes: defaultdict[tuple[str, str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for node in comparison.nodes:
        components: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        for change in node.changes:
            components[change.effect, change.section, change.text].append(change.component)
        for (effect, section, text), names in components.items():
            nodes[effect, section, text, tuple(dict.fromkeys(names))].append(node.host)
        if node.more:
            nodes["other", "setting", f"{node.more} more changes", ("node",)].append(node.host)
    rows = sorted(nodes.items(), key=lambda row: (EFFECTS.index(row[0][0]), SECTIONS.index(row[0][1])))
    return [
        (effect, fold(hosts), "" if names == ("node",) else _folded(names), text)
        for (effect, _, text, names), hosts in rows
    ]


def _folded(names: Sequence[str]) -> str:
    if all(" " not in name for name in names):
        return fold(names)
    first = names[0].partition(" ")[0]
    if len(names) > 1 and all(name.startswith(f"{first} ") for name in names):
        return f"{PLURALS.get(first, f'{first}s')} {listed([name.partition(' ')[2] for name in names], most=MOST)}"
    return listed(names, most=MOST)


def summary(comparison: Comparison) -> str:
    """Return the result in one line."""
    sides = f"{_origin(comparison, 0)} -> {_origin(comparison, 1)}"
    changed = [node for node in comparison.nodes if node.changes]
    counts = [
        f"{sum(change.effect == effect for node in changed for change in node.changes)} {effect}" for effect in EFFECTS
    ]
    if comparison.unchanged:
        return f"{sides}: {counted(len(comparison.nodes), 'node')}, no change"
    return f"{sides}: {counted(len(comparison.nodes), 'node')}, {len(changed)} changed: {', '.join(counts)}"


def _origin(comparison: Comparison, side: int) -> str:
    origin = (comparison.before, comparison.after)[side]
    return f"{origin.name} ({origin.started_at})" if origin.started_at else origin.name


def notes_of(comparison: Comparison) -> Iterator[str]:
    """Yield what was not compared, a line each."""
    for title, names in (
        ("only in the first run", comparison.only_before),
        ("only in the second run", comparison.only_after),
        ("not reached in the second run", comparison.not_reached),
    ):
        if names:
            yield f"{title}: {fold(names)}"
    unknown: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for node in comparison.nodes:
        for field, reason in node.not_compared.items():
            unknown[field, reason].append(node.host)
    for (field, reason), hosts in unknown.items():
        yield f"not compared: {fold(hosts)}: {field} ({reason})"


def as_text(comparison: Comparison) -> str:
    """Return the comparison as lines for a terminal."""
    rows = lines_of(comparison)
    lines = [
        f"{effect.ljust(6)}  {hosts}: {f'{component}: ' if component else ''}{text}"
        for effect, hosts, component, text in rows
    ]
    return _joined([*lines, *notes_of(comparison), summary(comparison)])


def as_markdown(comparison: Comparison) -> str:
    """Return the comparison as a Markdown table."""
    rows = lines_of(comparison)
    table = ["| effect | nodes | component | change |", "|---|---|---|---|"] if rows else []
    for row in rows:
        table.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    notes = [f"- {note}" for note in notes_of(comparison)]
    return _joined([f"**{summary(comparison)}**", *([""] if table or notes else []), *table, *notes])


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{printable(line)}\n" for line in lines)


def as_lines(changes: Iterable[Change]) -> list[str]:
    """Return the changes of one node, a line each."""
    return [
        f"{change.effect.ljust(6)}  {'' if change.component == 'node' else f'{change.component}: '}{change.text}"
        for change in changes
    ]
