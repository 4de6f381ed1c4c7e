"""``dcgmi diag`` as the table for people."""

import re
from dataclasses import dataclass, field
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import checked
from gpunode.facts.models.outputs import DcgmDiag
from gpunode.facts.models.smi import Failure
from gpunode.facts.parsers.dcgm_status import failure, overall, status_of
from gpunode.facts.parsers.values import found, lines_of, version

_HEAD = re.compile(r"\s*\|\s*Diagnostic\s*\|\s*Result\s*\|\s*")
_BORDER = re.compile(r"\s*[+|]-+\+-+[+|]\s*")
_CATEGORY = re.compile(r"\s*[+|]-----\s+(\S.*?)\s+-+\+-*[+|]?\s*")
_ROW = re.compile(r"\s*\|(?P<name>[^|]{10,60})\|(?P<result>[^|]{0,200})(?P<end>\|?)\s*")
_STATUS = re.compile(
    r"\s*(?P<status>Pass|Fail|Warn|Skip|Error|Not Run)\b(?:\s*-\s*(?:(?P<all>All)|GPUs?:?\s*(?P<gpus>[\d, ]+)))?\s*"
)
_ENTITY = re.compile(r"\s*(GPU|CPU|NIC)\s?(?P<gpu>\d{1,5}):?\s+(?P<status>Pass|Fail|Warn|Skip|Error|Not Run)\s*")
_TEXT_ROW = re.compile(r"(?P<kind>Warning|Error|Info)(?::?\s*(?:(?P<entity>GPU|CPU|NIC)\s?(?P<gpu>\d{1,5})))?\s*")
_ABOUT_GPU = re.compile(r"GPU (\d{1,5})\b")
_METADATA = {"DCGM Version": "dcgm_version", "Driver Version Detected": "driver_version"}
_LEVEL = re.compile(r"dcgmi\s+diag\b.*?(?:-r|--run)[ =]?([1-4])\b")
_FAILURE = re.compile(r"\s*(?:Error:?\s+\S.*|.*[Uu]nable to (?:connect|establish|run|launch|complete)\b.*)")
_CHUNK = 45
"""Where the table wraps a message."""
_LINE_LIMIT = 1000


@dataclass
class _Test:
    name: str | None
    category: str | None
    statuses: list[str] = field(default_factory=list)
    gpus: dict[int, dict[str, Any]] = field(default_factory=dict)
    texts: list[tuple[int | None, list[str]]] = field(default_factory=list)
    """Messages in pieces, with the GPU that their row names."""

    def add_gpu(self, gpu: int, status: str) -> None:
        self.gpus[gpu] = {"gpu": gpu, "status": status, "messages": []}

    def answer(self) -> dict[str, Any]:
        messages = []
        for gpu, pieces in self.texts:
            text = _joined(pieces)
            about = _ABOUT_GPU.match(text)
            owner = gpu if gpu is not None else int(about[1]) if about else None
            if owner in self.gpus:
                self.gpus[owner]["messages"].append(text)
            else:
                messages.append(text)
        statuses = self.statuses + [gpu["status"] for gpu in self.gpus.values()]
        return {
            "name": self.name,
            "category": self.category,
            "status": overall(statuses or ["error"]),
            "messages": messages,
            "gpus": [self.gpus[gpu] for gpu in sorted(self.gpus)],
        }


class _Table:
    def __init__(self) -> None:
        self.metadata: dict[str, str | None] = dict.fromkeys(_METADATA.values())
        self.tests: list[_Test] = []
        self.has_head = False
        self.closed = False
        self._category: str | None = None
        self._text: list[str] | None = None

    def take(self, line: str) -> None:
        category = _CATEGORY.fullmatch(line)
        row = _ROW.fullmatch(line)
        if _HEAD.fullmatch(line):
            if self.has_head:
                raise ParseError("expected one table of dcgmi diag, found two in one text")
            self.has_head = True
        elif _BORDER.fullmatch(line):
            self.closed = bool(self.tests)
        elif category:
            self._category, self._text, self.closed = category[1], None, False
        elif row:
            self.closed = False
            self._take_row(row["name"].strip(), row["result"])

    def _take_row(self, name: str, result: str) -> None:
        if name in _METADATA:
            self.metadata[_METADATA[name]] = version(result)
            return
        if self._category == "Metadata":
            return
        text = _TEXT_ROW.fullmatch(name)
        if text:
            self._begin_text(text, result)
        elif name:
            self._text = None
            test = _Test(name, self._category)
            self.tests.append(test)
            self._take_status(test, result, name)
        elif self._text is not None:
            self._text.append(_piece(result))
        elif self.tests:
            self._take_status(self.tests[-1], result, self.tests[-1].name)

    def _take_status(self, test: _Test, result: str, name: str | None) -> None:
        entity = _ENTITY.fullmatch(result)
        status = _STATUS.fullmatch(result)
        if entity:
            if entity[1] == "GPU":
                test.add_gpu(int(entity["gpu"]), status_of(entity["status"]))
            else:
                test.statuses.append(status_of(entity["status"]))
        elif status:
            test.statuses.append(status_of(status["status"]))
            for gpu in re.findall(r"\d{1,5}", status["gpus"] or ""):
                test.add_gpu(int(gpu), test.statuses[-1])
        else:
            raise ParseError(f"expected a status of '{name}' of dcgmi diag, {found(result)}")

    def _begin_text(self, row: re.Match[str], result: str) -> None:
        """A row ``Warning``, ``Error`` or ``Info``: information is read over, and what follows it on the next lines."""
        pieces = [_piece(result)]
        self._text = pieces
        if row["kind"] == "Info":
            return
        if not self.tests:
            self.tests.append(_Test(row["kind"], self._category, ["error"]))
        gpu = int(row["gpu"]) if row["entity"] == "GPU" else None
        self.tests[-1].texts.append((gpu, pieces))


def _piece(result: str) -> str:
    """One line of a wrapped message, with the blanks at its end that belong to it."""
    return result.removeprefix(" ")[:_CHUNK]


def _joined(pieces: list[str]) -> str:
    """A message from its lines: those that fill the column were cut within words, shorter ones between them."""
    text = ""
    for piece in pieces:
        text += piece if len(piece) == _CHUNK and piece[-1] != " " else f"{piece.rstrip()} "
    return " ".join(text.split())


def parse(text: str) -> DcgmDiag | Failure:
    """See ``dcgm_diag.parse``."""
    table = _Table()
    lines = [line[:_LINE_LIMIT] for line in lines_of(text)]
    for line in lines:
        table.take(line)
    if not table.tests:
        message = next((line.strip() for line in lines if _FAILURE.fullmatch(line)), None)
        if message is None or table.has_head:
            raise ParseError(f"expected the JSON or the table of dcgmi diag with results, {found(text)}")
        return failure(message)
    tests = [test.answer() for test in table.tests]
    statuses = [test["status"] for test in tests]
    if not (table.has_head and table.closed) and "fail" not in statuses:
        part = "closing border" if table.has_head else "head"
        raise ParseError(f"expected a whole table of dcgmi diag, found it without its {part} and no Fail in it")
    level = next((int(match[1]) for line in lines if (match := _LEVEL.search(line))), None)
    diagnosis = {**table.metadata, "level": level, "overall": overall(statuses), "tests": tests}
    return checked(DcgmDiag, diagnosis, "the table of dcgmi diag")
