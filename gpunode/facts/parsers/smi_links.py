"""Links of GPUs as nvidia-smi prints them: ``topo -m``, ``nvlink --status`` and ``nvlink -e``."""

import re
from dataclasses import dataclass, field
from typing import TypeVar

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, Number, Nvlink, NvlinkGpu, NvlinkLink, Topology
from gpunode.facts.parsers import smi_base
from gpunode.facts.parsers.smi_base import label_of
from gpunode.facts.parsers.smi_lists import GPU_LINE
from gpunode.facts.parsers.values import found_text, lines_of, number, quantity, shorten, text_or_none

_COLOUR = re.compile(r"(?:\x1b|\^\[|\N{SYMBOL FOR ESCAPE})?\[\d{0,3}(?:;\d{1,3}){0,4}m")
_GPU = re.compile(r"GPU\d{1,4}")
_ELEMENT = re.compile(r"(?:GPU|NIC)\d{1,4}|[a-z][\w.-]*\d[\w.-]*")
_CELL = re.compile(r"X|NV\d{1,3}|(?!CPU$|NUMA$|GPU$)[A-Z][A-Z0-9]{2,4}|N/A|ERR!")
_PEER_WORDS = frozenset({"OK", "NS", "CNS", "GNS", "TNS", "DR", "U", "NP"})
_AFFINITY = re.compile(r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*")
_TITLES = {"cpu": "CPU Affinity", "numa": "NUMA Affinity", "gpu_numa": "GPU NUMA ID"}
_LEGEND = re.compile(r"\s*(?P<label>NIC\d{1,4})\s*:\s+(?P<rest>\S.*)")
_DEVICE = re.compile(r"(?:^|[\s,;(])ibdev\s*[=:]\s*(?P<name>[^\s,;()]+)", re.I)
_ROW_LIMIT = 20_000


def parse_topology(text: str) -> Topology | Failure:
    """Parse the matrix; ``messages`` are lines of the NIC legend that name no RDMA device.

    If nvidia-smi failed, return its error.

    Raise ParseError for another matrix (``topo -p2p``), a row with too few cells, a GPU without its row.
    """
    lines = [_COLOUR.sub("", line[:_ROW_LIMIT]).rstrip() for line in lines_of(text)]
    position = next((number for number, line in enumerate(lines) if _is_header(line)), None)
    if position is None:
        error = smi_base.find_error(text)
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


_LINK = re.compile(r"\s*Link (?P<link>\d{1,3}):\s*(?P<rest>\S.*?)\s*")
_COUNTER = re.compile(
    r"(?P<name>[A-Za-z][\w /()-]*?)\s*:\s*(?P<value>\S+|[\[<(]?not (?:supported|available)\S?\.?)", re.I
)
_OLD_COUNTER = re.compile(r"(?P<value>\d{1,20}) (?P<name>[A-Za-z][A-Za-z /-]{1,40}? errors?)", re.I)
"""Drivers of the branches 390 to 470: ``Link 0: 0 replay errors``."""
_TRAFFIC = re.compile(r"[TR]x (?:packets|bytes)", re.I)
_SMALL = re.compile(r"\d{1,6}(?:\.\d{1,6})?[eE]-?\d{1,3}")
_ENDING = re.compile(r"_(?:errors?|error_counters?|counters?)$")
_STATE = re.compile(r"<?(?P<state>inactive|sleep)>?", re.I)
_UNKNOWN = re.compile(r"[\[<(]?(?:n/?a|not available|(?P<unsupported>not supported|unsupported))[\])>]?\.?", re.I)
UNSUPPORTED = "unsupported"
"""The state of a link that nvidia-smi prints as not supported."""
_ELISION = re.compile(r"\s*(?:\[\.\.\.\]|\.\.\.|…)?\s*")
_GPU_MESSAGE = re.compile(
    r"\s*(?:NVML:|Nvlink quer|Device does not|.*\bnvlink\b|(?!\s*Link ?\d).*\bnot supported\b)", re.I
)
_ALL_INACTIVE = re.compile(r"all links are inactive", re.I)
_LINE_LIMIT = 1000
_Value = TypeVar("_Value", str | None, Number | None)


def parse_nvlink(text: str) -> Nvlink | Failure:
    """Parse a listing; numbers of GPUs and links are those printed.

    Counters of traffic are left out. The two listings of one node may follow each other. If nvidia-smi failed, return
    its error.

    Raise ParseError for other text, another listing (``nvlink -c``) and a truncated line.
    """
    gpus: dict[int, _Gpu] = {}
    current: _Gpu | None = None
    for raw in lines_of(text):
        line = raw[:_LINE_LIMIT]
        heading = GPU_LINE.fullmatch(line)
        if heading:
            current = _gpu(gpus, heading)
        elif current is not None and _is_message(current, line):
            _take_message(current, line.strip())
        elif _ELISION.fullmatch(line) or smi_base.is_remark(line):
            continue
        elif current is not None:
            _take_link(current, line)
        else:
            raise ParseError(f"expected 'GPU 0: NAME (UUID: ...)' of nvidia-smi nvlink, found '{shorten(line)}'")
    if not gpus:
        error = smi_base.find_error(text)
        if error is None:
            raise ParseError(f"expected the listing of nvidia-smi nvlink --status or -e, {found_text(text)}")
        return error
    if current is not None and not current.links and current.message is None:
        raise ParseError(f"expected links of GPU {current.index} in nvidia-smi nvlink, found the text ends there")
    return Nvlink(gpus=tuple(gpu.finished() for gpu in gpus.values()))


@dataclass
class _Link:
    """One link, with the fields read so far."""

    state: str | None = None
    speed_gb_per_s: Number | None = None
    errors: dict[str, Number | None] = field(default_factory=dict)

    def finished(self, number: int) -> NvlinkLink:
        active = {"active": True, "inactive": False}.get(self.state or "")
        return NvlinkLink(
            link=number, state=self.state, active=active, speed_gb_per_s=self.speed_gb_per_s, errors=self.errors
        )


@dataclass
class _Gpu:
    """One GPU, with the fields read so far."""

    index: int
    name: str | None
    uuid: str | None
    links: dict[int, _Link] = field(default_factory=dict)
    message: str | None = None
    all_inactive: bool | None = None

    def finished(self) -> NvlinkGpu:
        states = [link.state for link in self.links.values() if link.state != UNSUPPORTED]
        reported = any(state is not None for state in states)
        return NvlinkGpu(
            index=self.index,
            name=self.name,
            uuid=self.uuid,
            links=tuple(link.finished(number) for number, link in self.links.items()),
            message=self.message,
            all_inactive=all(state == "inactive" for state in states) if reported else self.all_inactive,
        )


def _is_message(gpu: _Gpu, line: str) -> bool:
    """Return whether a line is printed below a GPU in place of its links, or continues such a line."""
    if _LINK.fullmatch(line) or not line.strip():
        return False
    bare = _UNKNOWN.fullmatch(line.strip()) is not None and not gpu.links
    goes_on = gpu.message is not None and not gpu.links and not line.lstrip().startswith("Link")
    return bare or goes_on or _GPU_MESSAGE.match(line) is not None


def _gpu(gpus: dict[int, _Gpu], heading: re.Match[str]) -> _Gpu:
    index = int(heading["index"])
    uuid = heading["id"] if heading["key"] == "UUID" else None
    gpu = _Gpu(index, text_or_none(heading["name"]), text_or_none(uuid))
    known = gpus.setdefault(index, gpu)
    if (known.name, known.uuid) != (gpu.name, gpu.uuid):
        raise ParseError(f"expected one node's listing of nvidia-smi nvlink, found two GPUs with the index {index}")
    return known


def _take_message(gpu: _Gpu, line: str) -> None:
    gpu.message = gpu.message or line
    if _ALL_INACTIVE.search(line):
        gpu.all_inactive = True


def _take_link(gpu: _Gpu, line: str) -> None:
    where = f"GPU {gpu.index} of nvidia-smi nvlink"
    match = _LINK.fullmatch(line)
    if not match:
        raise ParseError(f"expected 'Link 0: ...' below {where}, found '{shorten(line)}'")
    link = gpu.links.setdefault(int(match["link"]), _Link())
    rest = match["rest"]
    counter = _COUNTER.fullmatch(rest)
    speed = quantity(rest, "GB/s")
    state = _STATE.fullmatch(rest)
    old = _OLD_COUNTER.fullmatch(rest)
    if old:
        _count(link, old, where)
        return
    if counter and _TRAFFIC.fullmatch(counter["name"]):
        return
    if counter and (_UNKNOWN.fullmatch(counter["value"]) or _figure(counter["value"]) is not None):
        _count(link, counter, where)
    elif speed is not None:
        link.speed_gb_per_s = _once(link.speed_gb_per_s, speed, "speed_gb_per_s", where)
        link.state = _once(link.state, "active", "state", where)
    elif state:
        link.state = _once(link.state, state["state"].lower(), "state", where)
    elif (unknown := _UNKNOWN.fullmatch(rest)) is not None:
        if unknown["unsupported"]:
            link.state = _once(link.state, UNSUPPORTED, "state", where)
    else:
        raise ParseError(f"expected a speed, <inactive>, <sleep> or a counter below {where}, found '{shorten(line)}'")


def _count(link: _Link, counter: re.Match[str], where: str) -> None:
    name = _ENDING.sub("", label_of(counter["name"]))
    link.errors[name] = _once(link.errors.get(name), _figure(counter["value"]), name, where)


def _figure(text: str) -> Number | None:
    """Return a counter, or a rate of bit errors (``15e-255``)."""
    return float(text) if _SMALL.fullmatch(text) else number(text)


def _once(before: _Value, value: _Value, name: str, where: str) -> _Value:
    """Return the value; raise ParseError if another one was printed before."""
    if before is not None and before != value:
        raise ParseError(f"expected one value for '{name}' of a link of {where}, found two")
    return value
