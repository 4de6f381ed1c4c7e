"""Output of nvbandwidth, as text and as JSON."""

import json
import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import Nvbandwidth
from gpunode.facts.parsers.values import found_text, lines_of, number, shorten, text_or_none, version

_VERSION = re.compile(r"nvbandwidth Version:\s*v?(\S+)\s*")
_DRIVER = re.compile(r"Driver Version:\s*(\d[\d.]*)\s*")
_RUNNING = re.compile(r"Running (\w{1,100})\.?\s*")
_UNIT = re.compile(r".*\(((?:[KMGT]i?B/s)|ns|us|ms)\)\s*")
_COLUMNS = re.compile(r"\s*0(?:\s+\d{1,4})*\s*")
_ROW = re.compile(r"\s*(\d{1,4})(?:\(\S*\))?(?P<cells>(?:\s+(?:\d{1,12}\.\d{1,6}|N/A))+)\s*")
_TOTAL = re.compile(r"(SUM|MIN|MAX)\s+(\S{1,100})\s+(\d{1,15}(?:\.\d{1,6})?)\s*")
_WAIVED = re.compile(r"\s*Waived\b.*", re.I)
_ERROR = re.compile(r"\s*+(?:ERROR\b|\[?CUDA_ERROR|\[?NVML_ERROR|.*\bfailed\b)", re.I)
_STATUSES = {"passed": "passed", "waived": "waived", "failed": "failed", "error": "error"}
_LINE_LIMIT = 20_000


def parse(text: str) -> Nvbandwidth:
    """Parse the text or the JSON; in the text a test with a matrix passed.

    Raise ParseError for other text and for a truncated matrix.
    """
    key = text.find('"nvbandwidth"')
    if key >= 0:
        return _from_json(text, key)
    return _from_text(text)


def _from_json(text: str, key: int) -> Nvbandwidth:
    start = text.rfind("{", 0, key)
    try:
        document, _ = json.JSONDecoder(parse_constant=lambda _: None).raw_decode(text, start)
        body = document["nvbandwidth"]
        tests = [_json_test(test) for test in body["testcases"]]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise ParseError("expected the whole JSON of nvbandwidth, found it cut or of another shape") from None
    if not tests:
        raise ParseError("expected tests in the JSON of nvbandwidth, found none")
    output = {
        "version": _bare_version(body.get("version")),
        "driver_version": version(_text(body.get("Driver Version"))),
        "tests": tests,
    }
    return checked(Nvbandwidth, output, "the JSON of nvbandwidth")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _bare_version(value: object) -> str | None:
    text = text_or_none(_text(value))
    return text.removeprefix("v") if text else None


def _json_test(test: dict[str, Any]) -> dict[str, Any]:
    status = _STATUSES.get(str(test["status"]).lower())
    if status is None:
        raise ParseError(f"expected a status of nvbandwidth, found '{shorten(str(test['status']))}'")
    rows = test.get("bandwidth_matrix")
    matrix = [[number(str(cell)) for cell in row] for row in rows] if rows else None
    unit = _UNIT.fullmatch(_text(test.get("bandwidth_description")) or "")
    printed = {
        name: test.get(name) if isinstance(test.get(name), int | float) else None for name in ("sum", "min", "max")
    }
    return _test(_text(test["name"]), status, unit[1] if unit else None, matrix, printed)


def _test(
    name: str | None,
    status: str,
    unit: str | None,
    matrix: list[list[int | float | None]] | None,
    printed: dict[str, Any],
) -> dict[str, Any]:
    cells = _measured(matrix or [])
    return {
        "name": name,
        "status": status,
        "unit": unit,
        "matrix": matrix,
        "sum": printed.get("sum"),
        "min": printed["min"] if printed.get("min") is not None else min(cells, default=None),
        "max": printed["max"] if printed.get("max") is not None else max(cells, default=None),
    }


def _measured(matrix: list[list[int | float | None]]) -> list[int | float]:
    square = len(matrix) > 1
    return [
        cell
        for row, cells in enumerate(matrix)
        for column, cell in enumerate(cells)
        if cell is not None and not (square and row == column and cell == 0)
    ]


class _Reading:
    """The test to which the current lines belong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: str | None = None
        self.unit: str | None = None
        self.by_gpu = False
        """True if rows are GPUs, too: then there are as many rows as columns."""
        self.columns: int | None = None
        self.matrix: list[list[int | float | None]] = []
        self.printed: dict[str, Any] = {}

    def finished(self) -> dict[str, Any]:
        if not self.matrix and self.status is None:
            raise ParseError(f"expected a matrix of the test {self.name} of nvbandwidth, found the text cut")
        if self.by_gpu and self.matrix and len(self.matrix) != self.columns and "sum" not in self.printed:
            raise ParseError(f"expected {self.columns} rows of {self.name} of nvbandwidth, found {len(self.matrix)}")
        return _test(self.name, self.status or "passed", self.unit, self.matrix or None, self.printed)


def _from_text(text: str) -> Nvbandwidth:
    head: dict[str, str | None] = {"version": None, "driver_version": None}
    tests: list[dict[str, Any] | _Reading] = []
    current: _Reading | None = None
    for raw in lines_of(text):
        line = raw[:_LINE_LIMIT]
        running = _RUNNING.fullmatch(line)
        if running:
            current = _Reading(running[1])
            tests.append(current)
        elif current is None:
            for name, pattern in (("version", _VERSION), ("driver_version", _DRIVER)):
                match = pattern.fullmatch(line)
                head[name] = match[1] if match else head[name]
        else:
            _take(current, line, tests)
    if not tests:
        raise ParseError(f"expected nvbandwidth's lines 'Running TEST.' or its JSON, {found_text(text)}")
    answers = [test.finished() if isinstance(test, _Reading) else test for test in tests]
    return checked(Nvbandwidth, {**head, "tests": answers}, "the text of nvbandwidth")


def _take(current: _Reading, line: str, tests: list[dict[str, Any] | _Reading]) -> None:
    total = _TOTAL.fullmatch(line)
    if total and total[2] == current.name:
        current.printed[total[1].lower()] = number(total[3])
    elif _WAIVED.fullmatch(line):
        if current.matrix or current.status:
            tests.append(_test(None, "waived", None, None, {}))
        else:
            current.status = "waived"
    elif current.columns is not None and (row := _ROW.fullmatch(line)):
        cells = row["cells"].split()
        if len(cells) != current.columns:
            raise ParseError(
                f"expected {current.columns} cells in a row of {current.name} of nvbandwidth, found {len(cells)}"
            )
        current.matrix.append([number(cell) for cell in cells])
    elif current.unit is None and (unit := _UNIT.fullmatch(line)):
        current.unit = unit[1]
        current.by_gpu = "GPU(row)" in line
    elif current.unit and _COLUMNS.fullmatch(line):
        current.columns = len(line.split())
    elif current.columns is not None and re.match(r"\s*\d+\s", line):
        raise ParseError(f"expected a row of {current.name} of nvbandwidth, found '{shorten(line)}'")
    elif _ERROR.match(line) and not current.matrix:
        current.status = "error"
