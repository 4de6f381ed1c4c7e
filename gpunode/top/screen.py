"""The screen of ``gpunode top``: rows for GPUs, nodes or groups of equal nodes, within a width and a height."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import Literal

from rich.cells import cell_len, set_cell_size

from gpunode.names import fold
from gpunode.text import counted, one_line
from gpunode.top.model import TopDocument, TopGpu, TopNode
from gpunode.top.samples import VerdictKind

Level = Literal["gpu", "node", "fold"]
LEVELS: tuple[Level | Literal["auto"], ...] = ("auto", "gpu", "node", "fold")
SORTS = ("verdict", "name", "util", "mem", "power", "temp")
KEYS = "q quit  s sort  r reverse  f fold  p processes  space pause  arrows scroll"
COLUMNS = ("NODE", "GPU", "UTIL", "VERDICT", "MEM", "POWER", "TEMP", "JOB", "CLOCK", "PCIE", "ERRORS", "WHY")
_ESSENTIAL = 4
"""Columns that are shown at any width; the others in their order, as far as they fit."""
_WIDEST = {"NODE": 40, "GPU": 24, "VERDICT": 28, "JOB": 28, "WHY": 400}
_RIGHT = frozenset({"UTIL", "MEM", "POWER", "TEMP", "CLOCK"})
_KINDS = {kind.title: kind for kind in VerdictKind}
_STYLES = {
    VerdictKind.LOST: "bold red",
    VerdictKind.STUCK: "bold red",
    VerdictKind.THROTTLED: "red",
    VerdictKind.PCIE_BOUND: "yellow",
    VerdictKind.STARVING: "yellow",
    VerdictKind.IDLE: "yellow",
    VerdictKind.HEAVIER: "yellow",
    VerdictKind.FREE: "dim",
}


@dataclass
class View:
    """What somebody chose to see."""

    level: Level | Literal["auto"] = "auto"
    sort: str = "verdict"
    reverse: bool = False
    processes: bool = False
    paused: bool = False
    offset: int = 0
    page: int = 10
    """Rows of the latest screen."""


@dataclass(frozen=True)
class ScreenLine:
    """A line, and its style for rich."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class _Row:
    cells: Mapping[str, str]
    style: str
    keys: Mapping[str, tuple[float | str, ...]]
    below: tuple[str, ...] = field(default=())


def press(view: View, key: str) -> bool:
    """Apply a key to the view; return False for the one that ends the program."""
    if key in ("q", "Q"):
        return False
    if key == "s":
        view.sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
    elif key == "r":
        view.reverse = not view.reverse
    elif key == "f":
        view.level = LEVELS[(LEVELS.index(view.level) + 1) % len(LEVELS)]
        view.offset = 0
    elif key == "p":
        view.processes = not view.processes
    elif key == " ":
        view.paused = not view.paused
    steps = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -view.page, "\x1b[6~": view.page}
    view.offset = max(0, view.offset + steps.get(key, 0))
    return True


def draw(document: TopDocument, view: View, width: int, height: int) -> list[ScreenLine]:
    """Return the screen's lines: at most ``height``, none wider than ``width``."""
    room = max(1, height - 3)
    rows = _rows(document, view, room)
    lines = _table(rows, width)
    view.page = room
    view.offset = min(view.offset, max(0, len(lines) - 1 - room))
    title, *body = lines
    hidden = len(body) - view.offset - room
    foot = KEYS if hidden <= 0 else f"{hidden} more rows below  {KEYS}"
    shown = [
        ScreenLine(_heading(document, view), "bold"),
        ScreenLine(title.text, "reverse"),
        *body[view.offset : view.offset + room],
        ScreenLine(foot, "dim"),
    ]
    return [ScreenLine(set_cell_size(line.text, width).rstrip(), line.style) for line in shown][:height]


def text_of(document: TopDocument, width: int) -> list[ScreenLine]:
    """Return everything once, for a file or a terminal of that width: GPUs, with their processes."""
    view = View(level="gpu", processes=True)
    return [ScreenLine(_heading(document, None)), *_table(_rows(document, view, 0), width)]


def _heading(document: TopDocument, view: View | None) -> str:
    gpus = [gpu for node in document.nodes for gpu in node.gpus]
    bad = Counter(gpu.verdict for gpu in gpus if _KINDS[gpu.verdict].is_bad)
    lost = sum(node.status != "live" for node in document.nodes)
    parts = [
        f"gpunode top {_local(document.at)}",
        "SIMULATED" if any(node.simulated for node in document.nodes) else "",
        f"{counted(len(document.nodes), 'node')}, {counted(len(gpus), 'GPU')}",
        f"{lost} not live" if lost else "",
        "PAUSED" if view and view.paused else "",
        f"by {view.sort}{' reversed' if view.reverse else ''}" if view else "",
        f"every {document.interval_s} s, over {document.window_s:.0f} s",
        ", ".join(f"{number} {title}" for title, number in bad.most_common()),
    ]
    return "  ".join(part for part in parts if part)


def _rows(document: TopDocument, view: View, room: int) -> list[_Row]:
    level = view.level
    if level == "auto":
        count = sum(max(1, len(node.gpus)) for node in document.nodes)
        level = "gpu" if count <= room else "node" if len(document.nodes) <= room else "fold"
    if level == "gpu":
        rows = [row for node in document.nodes for row in _of_gpus(node, document, view)]
    elif level == "node":
        rows = [_of_nodes([node], document) for node in document.nodes]
    else:
        groups: dict[tuple[object, ...], list[TopNode]] = defaultdict(list)
        for node in document.nodes:
            groups[_likeness(node)].append(node)
        rows = [_of_nodes(nodes, document) for nodes in groups.values()]
    return sorted(rows, key=lambda row: row.keys[view.sort], reverse=view.reverse)


def _likeness(node: TopNode) -> tuple[object, ...]:
    """Return what nodes of one row have in common."""
    return node.status, _models(node.gpus), _worst(node.gpus), node.reason if node.status != "live" else None


def _of_gpus(node: TopNode, document: TopDocument, view: View) -> Iterable[_Row]:
    if not node.gpus:
        yield _of_nodes([node], document)
        return
    for gpu in node.gpus:
        kind = _KINDS[gpu.verdict]
        cells = {
            "NODE": node.host,
            "GPU": str(gpu.index),
            "UTIL": _figure(gpu.utilization_percent, "{:.0f}%"),
            "VERDICT": gpu.verdict,
            "MEM": _share(gpu.memory_used_mib, gpu.memory_total_mib),
            "POWER": _figure(gpu.power_w, "{:.0f}W"),
            "TEMP": _figure(gpu.temperature_c, "{:.0f}C"),
            "JOB": _jobs([gpu]),
            "CLOCK": _figure(gpu.sm_clock_mhz, "{:.0f}"),
            "PCIE": _pcie(gpu),
            "ERRORS": _errors([gpu]),
            "WHY": gpu.reason,
        }
        below = tuple(_processes(gpu)) if view.processes else ()
        yield _Row(cells, _STYLES.get(kind, ""), _keys([node], [gpu]), below)


def _of_nodes(nodes: Sequence[TopNode], document: TopDocument) -> _Row:
    first = nodes[0]
    names = first.host if len(nodes) == 1 else fold(node.host for node in nodes)
    gpus = [gpu for node in nodes for gpu in node.gpus]
    if not gpus:
        since = f"since {_local(first.since)} ({_age(document.at, first.since)})"
        cells = {"NODE": names, "VERDICT": first.status, "WHY": f"{since}{f': {first.reason}' if first.reason else ''}"}
        style = "" if first.status == "connecting" else "bold red"
        return _Row(cells, style, _keys(nodes, gpus))
    verdicts = Counter(gpu.verdict for gpu in gpus)
    ordered = sorted(verdicts.items(), key=lambda item: _KINDS[item[0]])
    worst = min(gpus, key=lambda gpu: _KINDS[gpu.verdict])
    kind = _KINDS[worst.verdict]
    reasons = [] if not kind.is_bad else [f"{first.host} gpu{worst.index}: {worst.reason}"]
    cells = {
        "NODE": names,
        "GPU": (f"{len(nodes)}x " if len(nodes) > 1 else "") + _models(first.gpus),
        "UTIL": _figure(_mean(gpus, "utilization_percent"), "{:.0f}%"),
        "VERDICT": ", ".join(f"{number} {title}" for title, number in ordered) if len(ordered) > 1 else ordered[0][0],
        "MEM": _share(_mean(gpus, "memory_used_mib"), _mean(gpus, "memory_total_mib")),
        "POWER": _figure(sum(gpu.power_w or 0 for gpu in gpus) / 1000, "{:.1f}kW"),
        "TEMP": _figure(max((gpu.temperature_c or 0 for gpu in gpus), default=None), "{:.0f}C"),
        "JOB": _jobs(gpus),
        "ERRORS": _errors(gpus),
        "WHY": "; ".join([*reasons, *([first.reason] if first.reason else [])]),
    }
    return _Row(cells, _STYLES.get(kind, ""), _keys(nodes, gpus))


def _keys(nodes: Sequence[TopNode], gpus: Sequence[TopGpu]) -> Mapping[str, tuple[float | str, ...]]:
    name = _natural(nodes[0].host)
    index = gpus[0].index if len(gpus) == 1 else 0

    def largest(of: str) -> float:
        return -max((getattr(gpu, of) or 0.0 for gpu in gpus), default=0.0)

    urgency = min((_KINDS[gpu.verdict] for gpu in gpus), default=-1)
    return {
        "name": (*name, index),
        "verdict": (urgency if urgency < VerdictKind.UNKNOWN else VerdictKind.UNKNOWN, *name, index),
        "util": (_mean(gpus, "utilization_percent") or 0.0, *name, index),
        "mem": (largest("memory_used_mib"), *name, index),
        "power": (largest("power_w"), *name, index),
        "temp": (largest("temperature_c"), *name, index),
    }


def _natural(name: str) -> tuple[str]:
    """Return a key that sorts gpu-2 before gpu-10."""
    return ("".join(f"{part:0>12}" if part.isdigit() else part for part in re.split(r"(\d+)", name[:200])),)


def _worst(gpus: Sequence[TopGpu]) -> int:
    worst = min((_KINDS[gpu.verdict] for gpu in gpus), default=VerdictKind.FREE)
    return int(worst) if worst.is_bad else int(VerdictKind.UNKNOWN)


def _models(gpus: Sequence[TopGpu]) -> str:
    models = Counter(gpu.name.removeprefix("NVIDIA ") for gpu in gpus)
    return ", ".join(f"{number}x {name}" for name, number in models.items())


def _mean(gpus: Sequence[TopGpu], of: str) -> float | None:
    values = [value for gpu in gpus if (value := getattr(gpu, of)) is not None]
    return fmean(values) if values else None


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / 1024:.0f}/{whole / 1024:.0f}G"


def _pcie(gpu: TopGpu) -> str:
    if gpu.pcie_received_gb_per_s is None or gpu.pcie_sent_gb_per_s is None:
        return "-"
    return f"{gpu.pcie_received_gb_per_s:.1f}<>{gpu.pcie_sent_gb_per_s:.1f}"


def _errors(gpus: Sequence[TopGpu]) -> str:
    xids = sorted({xid.xid for gpu in gpus for xid in gpu.xids})
    corrected = sum(gpu.corrected_new or 0 for gpu in gpus)
    uncorrected = sum(gpu.uncorrected_new or 0 for gpu in gpus)
    parts = [f"Xid {'+'.join(map(str, xids))}" if xids else "", f"{uncorrected} ECC" if uncorrected else ""]
    parts.append(f"{corrected} corrected" if corrected else "")
    return " ".join(part for part in parts if part)


def _jobs(gpus: Sequence[TopGpu]) -> str:
    jobs = set()
    for process in (process for gpu in gpus for process in gpu.processes):
        job = f"job {process.slurm_job}" if process.slurm_job else process.container
        jobs.add(" ".join(part for part in (process.user, job) if part) or f"pid {process.pid}")
    return ", ".join(sorted(jobs))


def _processes(gpu: TopGpu) -> Iterable[str]:
    for process in gpu.processes:
        parts = [
            f"pid {process.pid}",
            process.name,
            process.user,
            f"container {process.container}" if process.container else None,
            f"job {process.slurm_job}" if process.slurm_job else None,
            _figure(process.memory_mib, "{:.0f} MiB"),
        ]
        yield "    " + one_line("  ".join(part for part in parts if part))


def _table(rows: Sequence[_Row], width: int) -> list[ScreenLine]:
    """Return the heading and the rows, with the columns that fit."""
    wide = {
        name: min(_WIDEST.get(name, 20), max([len(name), *(cell_len(row.cells.get(name, "")) for row in rows)]))
        for name in COLUMNS
    }
    shown: list[str] = []
    left = width
    for number, name in enumerate(COLUMNS):
        if number >= _ESSENTIAL and (left < wide[name] + 1 if name != "WHY" else left < 12):
            continue
        if (
            number >= _ESSENTIAL
            and name not in ("MEM", "POWER", "TEMP")
            and not any(row.cells.get(name) for row in rows)
        ):
            continue
        shown.append(name)
        left -= wide[name] + 1
    if left < 0 and len(shown) == _ESSENTIAL:
        wide["NODE"] = max(8, wide["NODE"] + left)
    order = [name for name in ("NODE", "GPU", "UTIL", *COLUMNS[4:-1], "VERDICT", "WHY") if name in shown]
    lines = [ScreenLine(_joined({name: name for name in order}, order, wide))]
    for row in rows:
        lines.append(ScreenLine(_joined(row.cells, order, wide), row.style))
        lines += [ScreenLine(text, "dim") for text in row.below]
    return [ScreenLine(set_cell_size(line.text, width).rstrip(), line.style) for line in lines]


def _joined(cells: Mapping[str, str], order: Sequence[str], wide: Mapping[str, int]) -> str:
    parts = []
    for name in order:
        text = one_line(cells.get(name, ""))
        pad = wide[name] - cell_len(text)
        parts.append(" " * pad + text if name in _RIGHT and pad > 0 else set_cell_size(text, wide[name]))
    return " ".join(parts)


def _local(stamp: str) -> str:
    return datetime.fromisoformat(stamp).astimezone().strftime("%H:%M:%S")


def _age(at: str, since: str) -> str:
    seconds = max(0, int((datetime.fromisoformat(at) - datetime.fromisoformat(since)).total_seconds()))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
