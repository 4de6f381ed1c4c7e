"""``nvidia-smi topo -m``: links between GPUs and NICs, and the CPUs near them."""

import re
from dataclasses import dataclass

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, Topology
from gpunode.facts.parsers import smi_error
from gpunode.facts.parsers.values import found_text, lines_of, shorten

_COLOUR = re.compile(r"(?:\x1b|\^\[|\N{SYMBOL FOR ESCAPE})?\[\d{0,3}(?:;\d{1,3}){0,4}m")
_GPU = re.compile(r"GPU\d{1,4}")
_ELEMENT = re.compile(r"(?:GPU|NIC)\d{1,4}|[a-z][\w.-]*\d[\w.-]*")
_CELL = re.compile(r"X|NV\d{1,3}|(?!CPU$|NUMA$|GPU$)[A-Z][A-Z0-9]{2,4}|N/A|ERR!")
_PEER_WORDS = frozenset({"OK", "NS", "CNS", "GNS", "TNS", "DR", "U", "NP"})
_AFFINITY = re.compile(r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*")
_TITLES = {"cpu": "CPU Affinity", "numa": "NUMA Affinity", "gpu_numa": "GPU NUMA ID"}
_LEGEND = re.compile(r"\s*(?P<label>NIC\d{1,4})\s*:\s+(?P<rest>\S.*)")
_DEVICE = re.compile(r"(?:^|[\s,;(])ibdev\s*[=:]\s*(?P<name>[^\s,;()]+)", re.I)
_LINE_LIMIT = 20_000


def parse(text: str) -> Topology | Failure:
    """Parse the matrix; ``messages`` are lines of the NIC legend that name no RDMA device.

    If nvidia-smi failed, return its error.

    Raise ParseError for another matrix (``topo -p2p``), a row with too few cells, a GPU without its row.
    """
    lines = [_COLOUR.sub("", line[:_LINE_LIMIT]).rstrip() for line in lines_of(text)]
    position = next((number for number, line in enumerate(lines) if _is_header(line)), None)
    if position is None:
        error = smi_error.find(text)
        if error is None:
            raise ParseError(
                f"expected the matrix of nvidia-smi topo -m with a line 'GPU0 ... CPU Affinity', {found_text(text)}"
            )
        return error
    header = _header(lines[position])
    rows = _rows(lines[position + 1 :], header)
    return _answer(header, rows, _legend(lines))


@dataclass(frozen=True)
class _Header:
    elements: list[str]
    affinities: dict[str, int]
    """Positions of the columns after the elements."""


@dataclass(frozen=True)
class _Row:
    cells: list[str]
    cpu: str | None
    numa: str | None


def _is_header(line: str) -> bool:
    words = line.split()
    return len(words) > 0 and _GPU.fullmatch(words[0]) is not None and not (len(words) > 1 and _is_cell(words[1]))


def _is_cell(word: str) -> bool:
    return (_CELL.fullmatch(word) is not None or word in _PEER_WORDS) and not _ELEMENT.fullmatch(word)


def _header(line: str) -> _Header:
    elements = []
    for word in line.split():
        if not _ELEMENT.fullmatch(word):
            break
        elements.append(word)
    if len(set(elements)) < len(elements):
        raise ParseError("expected every GPU once in the heading of nvidia-smi topo -m, found one twice")
    positions = {name: line.find(title) for name, title in _TITLES.items()}
    return _Header(elements, {name: position for name, position in positions.items() if position >= 0})


def _rows(lines: list[str], header: _Header) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for line in lines:
        words = line.split()
        if not words or not _ELEMENT.fullmatch(words[0]):
            if words[:1] == ["Legend:"]:
                break
            continue
        label = words[0]
        if label in rows or _is_header(line):
            raise ParseError(f"expected one matrix of nvidia-smi topo -m, found a second line for {label}")
        cells = words[1 : len(header.elements) + 1]
        if set(cells) & _PEER_WORDS:
            raise ParseError("expected the matrix of nvidia-smi topo -m, found one of peer access (topo -p2p)")
        if len(cells) < len(header.elements) or not all(_is_cell(cell) for cell in cells):
            raise ParseError(
                f"expected {len(header.elements)} cells for {label} in nvidia-smi topo -m, found '{shorten(line)}'"
            )
        cpu, numa = _affinities(line, header)
        rows[label] = _Row(cells, cpu, numa)
    missing = [label for label in header.elements if _GPU.fullmatch(label) and label not in rows]
    if missing:
        raise ParseError(f"expected a row for every GPU in nvidia-smi topo -m, found none for {missing[0]}")
    if not header.affinities and not any(set(row.cells) - {"X"} for row in rows.values()):
        raise ParseError("expected the matrix of nvidia-smi topo -m, found one GPU and no affinity")
    return rows


def _affinities(line: str, header: _Header) -> tuple[str | None, str | None]:
    """Return CPU and NUMA affinity. Tabs separate empty columns; between blanks a value belongs to the column above
    it."""
    count = len(header.elements)
    if "\t" in line:
        fields = [field.strip() for field in line.strip(" ").split("\t")][count + 1 :]
        values = dict(zip(("cpu", "numa"), [*fields, "", ""][:2], strict=True))
    else:
        words = [(match.start(), match[0]) for match in re.finditer(r"\S+", line)][count + 1 :]
        values = _by_column(words, header.affinities)
    found_values = [values.get(name, "") if name in header.affinities else "" for name in ("cpu", "numa")]
    cpu, numa = (value if _AFFINITY.fullmatch(value) else None for value in found_values)
    return cpu, numa


def _by_column(words: list[tuple[int, str]], columns: dict[str, int]) -> dict[str, str]:
    if len(words) >= len(columns):
        return {name: word for name, (_, word) in zip(columns, words, strict=False)}
    return {
        min(columns, key=lambda name, start=start: abs(columns[name] - start)): word  # type: ignore[misc]
        for start, word in words
        if columns
    }


def _legend(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the names of NICs, and the lines of the legend that have none."""
    names: dict[str, str] = {}
    messages = []
    for line in lines:
        match = _LEGEND.fullmatch(line)
        name = _name_of(match["rest"]) if match else None
        if match and name:
            names[match["label"]] = name
        elif match:
            messages.append(f"the NIC legend was not read: {shorten(line.strip())}")
    return names, messages


def _name_of(rest: str) -> str | None:
    """Return ``mlx5_0``, alone or as ``ibdev=mlx5_0`` among other fields."""
    if "=" not in rest and len(rest.split()) == 1:
        return rest.strip()
    device = _DEVICE.search(rest)
    return device["name"] if device else None


def _answer(header: _Header, rows: dict[str, _Row], legend: tuple[dict[str, str], list[str]]) -> Topology:
    links: dict[str, dict[str, str]] = {
        label: {column: cell for column, cell in zip(header.elements, row.cells, strict=True) if column != label}
        for label, row in rows.items()
    }
    gpus = [label for label in header.elements if _GPU.fullmatch(label)]
    nics = [label for label in header.elements if label not in gpus]
    for label in rows:
        if label not in header.elements:
            nics.append(label)
            for column, cell in links[label].items():
                links.setdefault(column, {})[label] = cell
    return Topology(
        gpus=tuple(gpus),
        nics=tuple(nics),
        nic_names=legend[0],
        links=links,
        cpu_affinity={label: rows[label].cpu for label in gpus},
        numa_affinity={label: rows[label].numa for label in gpus},
        messages=tuple(legend[1]),
    )
