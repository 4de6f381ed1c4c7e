"""Short listings of nvidia-smi: GPUs with their MIG devices (``-L``), and CSV (``--query-gpu=... --format=csv``)."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, ListedGpu, ListedMigDevice, SmiList, SmiQuery
from gpunode.facts.parsers import smi_base
from gpunode.facts.parsers.values import (
    MOST_GPUS,
    bus_id,
    found_text,
    is_nothing,
    lines_of,
    number,
    shorten,
    text_or_none,
)

GPU_LINE = re.compile(r"\s*GPU (?P<index>\d{1,4}): (?P<name>.*?)\s*\((?P<key>UUID|S/N): (?P<id>[^()]*)\)\s*")
_LOST_LINE = re.compile(r"\s*GPU (?P<index>\d{1,4}): (?P<name>Unknown Error|GPU is lost|ERR!)\s*")
_MIG_LINE = re.compile(r"\s+MIG (?P<name>\S+)\s+Device\s+(?P<index>\d{1,4}): \(UUID: (?P<uuid>MIG-[^()]*)\)\s*")
_GPU_LINE_LIMIT = 1000


def parse_list(text: str) -> SmiList | Failure:
    """Parse the list.

    ``messages`` are lines that nvidia-smi prints beside the list; a lost GPU is named only there. If nvidia-smi failed,
    return its error. Raise ParseError for other text and for a truncated line.
    """
    gpus: list[ListedGpu] = []
    messages: list[str] = []
    for raw in lines_of(text):
        line = raw[:_GPU_LINE_LIMIT]
        gpu = GPU_LINE.fullmatch(line) or _LOST_LINE.fullmatch(line)
        device = _MIG_LINE.fullmatch(line)
        if gpu:
            gpus.append(_gpu(gpu))
            if len(gpus) > MOST_GPUS:
                raise ParseError(f"expected the list of nvidia-smi -L, found more than {MOST_GPUS} GPUs")
        elif device and gpus:
            entry = ListedMigDevice(name=device["name"], index=int(device["index"]), uuid=device["uuid"])
            gpus[-1] = gpus[-1].model_copy(update={"mig_devices": (*gpus[-1].mig_devices, entry)})
        elif smi_base.is_remark(line):
            messages.append(line.strip())
        elif line.strip():
            raise ParseError(
                f"expected lines of nvidia-smi -L such as 'GPU 0: NAME (UUID: ...)', found '{shorten(line)}'"
            )
    if gpus:
        if len({gpu.index for gpu in gpus}) < len(gpus):
            raise ParseError("expected every GPU once in nvidia-smi -L, found an index twice")
        return SmiList(gpus=tuple(gpus), messages=tuple(messages))
    error = smi_base.find_error(text)
    if error is None:
        raise ParseError(f"expected lines of nvidia-smi -L such as 'GPU 0: NAME (UUID: ...)', {found_text(text)}")
    return error


def _gpu(match: re.Match[str]) -> ListedGpu:
    groups = match.groupdict()
    uuid = groups["id"] if groups.get("key") == "UUID" else None
    return ListedGpu(index=int(groups["index"]), name=text_or_none(groups["name"]), uuid=text_or_none(uuid))


_FIELD = re.compile(r"[A-Za-z][\w.]*(?: \[[^\]]*\])?")
_UNIT = re.compile(r".* \[([^\]]+)\]")
_SINGLE_WORDS = frozenset(
    {"name", "index", "uuid", "serial", "count", "timestamp", "pid", "pstate", "mem", "gr", "type", "cause", "address"}
)
_TEXT_FIELD = re.compile(
    r"(?:.*version|inforom\..*|.*serial|.*uuid|.*name|pci\..*id|timestamp|.*bus_id)(?: \[.*)?", re.I
)
_QUANTITY = re.compile(r"([+-]?\d{1,30}(?:\.\d{1,30})?)(?: ?([A-Za-z%][A-Za-z%/]{0,7}))?")
_LEADING_ZERO = re.compile(r"[+-]?0\d")
_TYPICAL = re.compile(
    r"GPU-[0-9a-f-]{8,}|\[[^\]]+\]|\d{1,9}(?:\.\d{1,9})? (?:MiB|W|C|%|MHz|KB/s|us)|\d{3}(?:\.\d{2,3}){1,2}"
    r"|(?:NVIDIA|Tesla|Quadro|GeForce|GRID|RTX)\b.*|P\d{1,2}"
)
_LINE_LIMIT = 100_000


def parse_query(text: str) -> SmiQuery | Failure:
    """Parse the table into columns and rows.

    Names are those of the header, with their unit (``memory.total [MiB]``); without a header ``column_1``, ``column_2
    [MiB]`` and so on. A value is a number if all values of its column are, else text; identifiers and versions stay
    text. ``[N/A]``, ``[Not Supported]``, ``[Unknown Error]`` and other text in brackets are None. ``messages`` are
    lines such as ``Unable to determine the device handle``. If the text is only an error, return the error.

    Raise ParseError for other text and for a truncated row.
    """
    lines = [line[:_LINE_LIMIT].strip() for line in lines_of(text)]
    messages = [line for line in lines if line and smi_base.is_remark(line)]
    lines = [line for line in lines if line and not smi_base.is_remark(line)]
    if not lines:
        error = smi_base.find_error(text)
        if error is None:
            raise ParseError(f"expected the CSV of nvidia-smi --query-gpu, {found_text(text)}")
        return error
    table = [_cells(line) for line in lines]
    columns = table.pop(0) if _is_header(table[0]) else None
    if columns is None:
        columns = _invented_columns(table)
    rows = [_fitted(cells, columns) for cells in table]
    values = [_column(name, [row[number_] for row in rows]) for number_, name in enumerate(columns)]
    return SmiQuery(
        columns=tuple(columns),
        rows=tuple(dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)) if rows else (),
        messages=tuple(messages),
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _is_header(cells: list[str]) -> bool:
    return all(_FIELD.fullmatch(cell) for cell in cells) and any(
        "." in cell or "_" in cell or cell.split()[0] in _SINGLE_WORDS for cell in cells
    )


def _invented_columns(table: list[list[str]]) -> list[str]:
    """Return names for a table without header; raise ParseError if nothing in a row is typical of nvidia-smi."""
    width = len(table[0])
    for cells in table:
        numbers = len(cells) > 1 and all(number(cell) is not None or _is_null(cell) for cell in cells)
        if not numbers and not any(_TYPICAL.fullmatch(cell) or bus_id(cell) for cell in cells):
            raise ParseError(f"expected the CSV of nvidia-smi --query-gpu, found '{shorten(', '.join(cells))}'")
    names = []
    for position in range(width):
        units = {
            match[2]
            for cells in table
            if position < len(cells) and (match := _QUANTITY.fullmatch(cells[position])) and match[2]
        }
        names.append(f"column_{position + 1} [{units.pop()}]" if len(units) == 1 else f"column_{position + 1}")
    return names


def _fitted(cells: list[str], columns: list[str]) -> list[str]:
    """Return the row with as many cells as columns: the name of a process may contain a comma."""
    if cells == columns:
        raise ParseError("expected one table of nvidia-smi --query-gpu, found its header twice")
    surplus = len(cells) - len(columns)
    if surplus > 0 and "process_name" in columns:
        index = columns.index("process_name")
        cells = [*cells[:index], ", ".join(cells[index : index + surplus + 1]), *cells[index + surplus + 1 :]]
        surplus = 0
    if surplus:
        raise ParseError(
            f"expected {len(columns)} values in a row of nvidia-smi --query-gpu, found {len(cells)}: "
            f"'{shorten(', '.join(cells))}'"
        )
    return cells


def _column(name: str, cells: list[str]) -> list[str | int | float | None]:
    unit = _UNIT.fullmatch(name)
    known = [cell for cell in cells if not _is_null(cell)]
    if unit:
        for cell in known:
            if _number(cell, unit[1]) is None:
                raise ParseError(f"expected a number in {unit[1]} for '{name}', found '{shorten(cell)}'")
    is_numeric = bool(unit) or (
        not _TEXT_FIELD.fullmatch(name) and all(_number(cell, unit[1] if unit else None) is not None for cell in known)
    )
    if not is_numeric:
        return [None if _is_null(cell) else cell for cell in cells]
    return [None if _is_null(cell) else _number(cell, unit[1] if unit else None) for cell in cells]


def _is_null(cell: str) -> bool:
    return (cell.startswith("[") and cell.endswith("]")) or (is_nothing(cell) and cell != "None")


def _number(cell: str, unit: str | None) -> int | float | None:
    """Return the cell's number; its unit, if printed, must be the header's. ``007`` is an identifier."""
    match = _QUANTITY.fullmatch(cell)
    if not match or (match[2] and match[2] != unit) or _LEADING_ZERO.match(match[1]):
        return None
    return number(match[1])
