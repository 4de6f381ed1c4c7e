"""``lscpu``, as text in the C locale or as JSON (``-J``)."""

import json
import re

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import Lscpu, LscpuNode
from gpunode.facts.parsers.values import found_text, integer, lines_of, shorten, text_or_none

_NODE = re.compile(r"NUMA node(\d{1,6}) CPU\(s\)")
_FIELD = re.compile(r"\s*+([^:]{1,80}):(.*)")
_CPU_LIST = re.compile(r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*")
_LINE_LIMIT = 60_000
_LARGEST_LIST = 1_000_000


def parse(text: str) -> Lscpu:
    """Parse the processors and their NUMA nodes.

    Raise ParseError for other text (lscpu translates its labels: run it with LC_ALL=C) and for truncated text.
    """
    fields = _from_json(text) if text.lstrip()[:1] == "{" else _from_lines(text)
    names = [name for name, _ in fields]
    if "Architecture" not in names or "CPU(s)" not in names:
        raise ParseError(f"expected lscpu in the C locale with 'Architecture:' and 'CPU(s):', {found_text(text)}")
    if names.count("Architecture") > 1:
        raise ParseError("expected the output of one lscpu, found two in one text")
    first = dict(reversed(fields))
    nodes = [
        LscpuNode(node=int(match[1]), cpus=text_or_none(value))
        for name, value in fields
        if (match := _NODE.fullmatch(name))
    ]
    _refuse_cut(first, nodes)
    output = {
        "architecture": text_or_none(first.get("Architecture")),
        "model_name": text_or_none(first.get("Model name")),
        "cpus": integer(first.get("CPU(s)")),
        "sockets": integer(first.get("Socket(s)")),
        "cores_per_socket": integer(first.get("Core(s) per socket")),
        "threads_per_core": integer(first.get("Thread(s) per core")),
        "nodes": nodes,
    }
    return checked(Lscpu, output, "lscpu")


def _from_lines(text: str) -> list[tuple[str, str]]:
    lines = lines_of(text)
    ended = lines[-1] == ""
    fields = [(match[1], match[2].strip()) for line in lines if (match := _FIELD.fullmatch(line[:_LINE_LIMIT]))]
    if not ended and fields and not _NODE.fullmatch(fields[-1][0]):
        fields.pop()
    return fields


def _from_json(text: str) -> list[tuple[str, str]]:
    try:
        entries = json.loads(text)["lscpu"]
        pending = list(reversed(entries))
        fields: list[tuple[str, str]] = []
        while pending:
            entry = pending.pop()
            fields.append((str(entry["field"]).rstrip(": "), str(entry.get("data") or "")))
            pending.extend(reversed(entry.get("children") or []))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ParseError(
            f"expected the whole JSON of lscpu -J, found it cut or of another shape: '{shorten(text)}'"
        ) from None
    return fields


def _refuse_cut(first: dict[str, str], nodes: list[LscpuNode]) -> None:
    count = integer(first.get("NUMA node(s)"))
    if count is not None and count != len(nodes):
        raise ParseError(f"expected {count} lines 'NUMA node... CPU(s):' in lscpu, found {len(nodes)}: the text is cut")
    online = _size(first.get("On-line CPU(s) list", ""))
    of_nodes = [_size(node.cpus or "") for node in nodes]
    known = [size for size in of_nodes if size is not None]
    if nodes and online and (len(known) < len(of_nodes) or sum(known) < online):
        raise ParseError(f"expected {online} CPUs in the NUMA nodes of lscpu, found {sum(known)}: the text is cut")


def _size(text: str) -> int | None:
    """Return the number of CPUs in a list; None for other text."""
    if not text:
        return 0
    if not _CPU_LIST.fullmatch(text):
        return None
    ends = [part.partition("-") for part in text.split(",")]
    size = sum(int(last or first) - int(first) + 1 for first, _, last in ends)
    return size if 0 < size <= _LARGEST_LIST else None
