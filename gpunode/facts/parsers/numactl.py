"""``numactl --hardware``: NUMA nodes, their CPUs and memory, and their distances."""

import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import Numactl
from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import found_text, lines_of, shorten

_AVAILABLE = re.compile(r"\s*available: (\d{1,6}) nodes? \(([\d,-]*)\)\s*")
_CPUS = re.compile(r"\s*node (\d{1,6}) cpus:((?: \d{1,6})*)\s*")
_MEMORY = re.compile(r"\s*node (\d{1,6}) (size|free): (\d{1,12}) MB\s*")
_DISTANCES = re.compile(r"\s*node distances:\s*")
_DISTANCE_HEAD = re.compile(r"\s*node((?:\s+\d{1,6})+)\s*")
_DISTANCE_ROW = re.compile(r"\s*(\d{1,6}):((?:\s+\d{1,6})+)\s*")
_NO_DISTANCES = re.compile(r"\s*No distance information available\.?\s*")
_NO_NUMA = re.compile(r"\s*+(?:.*: )?(No NUMA (?:available|support).*)")
_LOCAL = 10
"""The distance of a node to itself in the table of every firmware."""

_LINE_LIMIT = 60_000


def parse(text: str) -> Numactl | Failure:
    """Parse the nodes and their distances; numactl's MB are 2^20. Without NUMA, return numactl's error.

    Raise ParseError for other text and for truncated text.
    """
    reading = _Reading(last_is_open=not text.endswith(("\n", "\r")))
    for raw in lines_of(text):
        reading.take(raw[:_LINE_LIMIT])
    if reading.expected is None:
        message = next((match[1] for line in lines_of(text) if (match := _NO_NUMA.match(line[:_LINE_LIMIT]))), None)
        if message is None:
            raise ParseError(f"expected numactl --hardware with a line 'available: N nodes (...)', {found_text(text)}")
        return Failure(error=ToolError(kind="other", message=message.strip()))
    return reading.answer()


class _Reading:
    def __init__(self, *, last_is_open: bool) -> None:
        self._last_is_open = last_is_open
        self.expected: int | None = None
        self._nodes: dict[int, dict[str, Any]] = {}
        self._columns: list[int] | None = None
        self._rows: dict[int, list[int]] = {}
        self._no_distances = False

    def take(self, line: str) -> None:
        available = _AVAILABLE.fullmatch(line)
        cpus = _CPUS.fullmatch(line)
        memory = _MEMORY.fullmatch(line)
        head = _DISTANCE_HEAD.fullmatch(line)
        row = _DISTANCE_ROW.fullmatch(line)
        if available:
            if self.expected is not None:
                raise ParseError("expected the output of one numactl --hardware, found two in one text")
            self.expected = int(available[1])
        elif cpus:
            node = self._node(int(cpus[1]))
            if node["cpus"] is not None:
                raise ParseError(f"expected the CPUs of node {cpus[1]} once in numactl --hardware, found them twice")
            node["cpus"] = [int(cpu) for cpu in cpus[2].split()]
        elif memory:
            key = "memory_total_mib" if memory[2] == "size" else "memory_free_mib"
            self._node(int(memory[1]))[key] = int(memory[3])
        elif head and self._columns is None:
            self._columns = [int(node) for node in head[1].split()]
        elif row and self._columns is not None:
            self._rows[int(row[1])] = [int(distance) for distance in row[2].split()]
        elif _NO_DISTANCES.fullmatch(line):
            self._no_distances = True
        elif self.expected is not None and line.lstrip().startswith("node ") and not _DISTANCES.fullmatch(line):
            raise ParseError(f"expected a line of numactl --hardware, found '{shorten(line)}'")

    def _node(self, number: int) -> dict[str, Any]:
        empty: dict[str, Any] = {"node": number, "cpus": None, "memory_total_mib": None, "memory_free_mib": None}
        return self._nodes.setdefault(number, empty)

    def answer(self) -> Numactl:
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        if len(nodes) != self.expected or any(node["cpus"] is None for node in nodes):
            raise ParseError(
                f"expected {self.expected} nodes in numactl --hardware, found {len(nodes)}: the text is cut"
            )
        distances = self._distances([node["node"] for node in nodes])
        return checked(Numactl, {"nodes": nodes, "distances": distances}, "numactl --hardware")

    def _distances(self, nodes: list[int]) -> list[list[int]]:
        if self._no_distances and not self._rows:
            return []
        if self._columns is None or any(len(self._rows.get(node, [])) != len(self._columns) for node in nodes):
            raise ParseError("expected the distances of all nodes in numactl --hardware, found them cut")
        if sorted(self._columns) != nodes:
            raise ParseError("expected the distances of the listed nodes in numactl --hardware, found those of others")
        if self._last_is_open and self._rows[nodes[-1]][self._columns.index(nodes[-1])] != _LOCAL:
            raise ParseError("expected a whole last line of numactl --hardware, found it cut")
        positions = [self._columns.index(node) for node in nodes]
        return [[self._rows[node][position] for position in positions] for node in nodes]
