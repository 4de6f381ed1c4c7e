"""``dcgmi diag``: the JSON of DCGM 2, 3 and 4, and the table that it prints without ``-j``."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import DcgmDiag
from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import found_text, lines_of, shorten, text_or_none, version

_STATUSES = {
    "pass": "pass",
    "passed": "pass",
    "fail": "fail",
    "failed": "fail",
    "warn": "warn",
    "warning": "warn",
    "skip": "skip",
    "skipped": "skip",
    "not run": "skip",
    "error": "error",
}
_WORST_FIRST = ("fail", "error", "warn", "pass", "skip")
_ROOT = re.compile(r'"(DCGM (?:GPU )?Diagnostic)"\s*:')
_DRIVER_KEYS = ("Driver Version Detected", "driver_version", "Driver Version")


def parse(text: str) -> DcgmDiag | Failure:
    """Parse the JSON or the table; if dcgmi failed, return its error.

    Raise ParseError for another layout, an unknown status, no tests, and a truncated table (unless it contains a Fail).
    """
    root = _ROOT.search(text)
    if root:
        return _from_json(text, root)
    return _from_table(text)


def _from_json(text: str, root: re.Match[str]) -> DcgmDiag | Failure:
    start = text.rfind("{", 0, root.start())
    try:
        document, _ = json.JSONDecoder(parse_constant=lambda _: None).raw_decode(text, start)
    except (ValueError, RecursionError):
        raise ParseError("expected the whole JSON of dcgmi diag, found it cut or damaged") from None
    body = document.get(root[1]) if isinstance(document, dict) else None
    if not isinstance(body, dict):
        raise ParseError(f"expected an object '{root[1]}' in the JSON of dcgmi diag, found another shape")
    error = text_or_none(_string(body.get("runtime_error")))
    categories = body.get("test_categories")
    if error and not categories:
        return failure(error)
    tests = [
        _test(test, category)
        for category in _objects(categories, "test_categories")
        for test in _objects(category.get("tests"), "tests")
    ]
    if not tests:
        raise ParseError("expected tests in the JSON of dcgmi diag, found none")
    sections = [
        section
        for section in (document.get("metadata"), body.get("metadata"), document, body)
        if isinstance(section, dict)
    ]
    versions = (version(_string(section.get(key))) for section in sections for key in ("version", "DCGM Version"))
    drivers = (version(_string(section.get(key))) for section in sections for key in _DRIVER_KEYS)
    statuses = [test["status"] for test in tests]
    diagnosis = {
        "dcgm_version": next((value for value in versions if value), None),
        "driver_version": next((value for value in drivers if value), None),
        "level": None,
        "overall": overall([*statuses, "error"] if error else statuses),
        "tests": tests,
    }
    return checked(DcgmDiag, diagnosis, "the JSON of dcgmi diag")


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _objects(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ParseError(f"expected a list of objects '{where}' in the JSON of dcgmi diag, found another shape")
    return value


def _test(test: dict[str, Any], category: dict[str, Any]) -> dict[str, Any]:
    gpus: dict[int, dict[str, Any]] = {}
    statuses: list[str] = []
    messages: list[str] = []
    for result in _objects(test.get("results"), "results"):
        status = status_of(result.get("status"))
        statuses.append(status)
        ids = _gpu_ids(result)
        texts = _messages(result)
        for gpu in ids:
            known = gpus.setdefault(gpu, {"gpu": gpu, "status": status, "messages": []})
            known["status"] = overall([known["status"], status])
            known["messages"] += texts
        if not ids:
            messages += texts
    summary = test.get("test_summary")
    if isinstance(summary, dict):
        statuses.append(status_of(summary.get("status")))
        messages += _messages(summary)
    if not statuses:
        raise ParseError(f"expected results of the test '{shorten(str(test.get('name')))}' of dcgmi diag, found none")
    return {
        "name": _string(test.get("name")),
        "category": _string(category.get("category")),
        "status": overall(statuses),
        "messages": messages,
        "gpus": [gpus[gpu] for gpu in sorted(gpus)],
    }


def _gpu_ids(result: dict[str, Any]) -> list[int]:
    """Return GPU ids: DCGM 4 names an entity (a GPU, a CPU, a NIC), older versions print ids as text or number."""
    if "entity_id" in result:
        is_gpu = str(result.get("entity_group", "")).upper() == "GPU"
        return [result["entity_id"]] if is_gpu and isinstance(result["entity_id"], int) else []
    ids = result.get("gpu_ids", result.get("gpu_id"))
    return [int(part) for part in re.findall(r"\d{1,5}", str(ids))] if ids is not None else []


def _messages(result: dict[str, Any]) -> list[str]:
    """Return warnings and errors, without information messages."""
    texts: list[str] = []
    for key in ("warnings", "warning", "errors", "error"):
        entries = result.get(key)
        for entry in entries if isinstance(entries, list) else [entries]:
            value = entry.get("warning", entry.get("error")) if isinstance(entry, dict) else entry
            if isinstance(value, str) and value.strip():
                texts.append(value.strip())
    return texts


def status_of(value: object) -> str:
    """Return a status by our names; raise ParseError for an unknown one: it must never count as a pass."""
    status = _STATUSES.get(value.strip().lower()) if isinstance(value, str) else None
    if status is None:
        raise ParseError(f"expected a status of dcgmi diag, found '{shorten(str(value))}'")
    return status


def overall(statuses: list[str]) -> str:
    """Return the worst status: fail > error > warn > pass; skip only if all are skipped."""
    return next(status for status in _WORST_FIRST if status in statuses)


def failure(message: str) -> Failure:
    """Return the answer where dcgmi reports that it could not run the diagnostic."""
    return Failure(error=ToolError(kind="other", message=message))


# The table.

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
"""Width at which the table wraps a message."""
_LINE_LIMIT = 1000


@dataclass
class _Test:
    name: str | None
    category: str | None
    statuses: list[str] = field(default_factory=list)
    gpus: dict[int, dict[str, Any]] = field(default_factory=dict)
    texts: list[tuple[int | None, list[str]]] = field(default_factory=list)
    """Messages in pieces, with the GPU of their row."""

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
            raise ParseError(f"expected a status of '{name}' of dcgmi diag, {found_text(result)}")

    def _begin_text(self, row: re.Match[str], result: str) -> None:
        """Begin a row ``Warning``, ``Error`` or ``Info``; information is skipped, including its continuation lines."""
        pieces = [_piece(result)]
        self._text = pieces
        if row["kind"] == "Info":
            return
        if not self.tests:
            self.tests.append(_Test(row["kind"], self._category, ["error"]))
        gpu = int(row["gpu"]) if row["entity"] == "GPU" else None
        self.tests[-1].texts.append((gpu, pieces))


def _piece(result: str) -> str:
    """Return one line of a wrapped message, with the trailing blanks that belong to it."""
    return result.removeprefix(" ")[:_CHUNK]


def _joined(pieces: list[str]) -> str:
    """Join the lines of a message: lines that fill the column were cut within words, shorter ones between words."""
    text = ""
    for piece in pieces:
        text += piece if len(piece) == _CHUNK and piece[-1] != " " else f"{piece.rstrip()} "
    return " ".join(text.split())


def _from_table(text: str) -> DcgmDiag | Failure:
    table = _Table()
    lines = [line[:_LINE_LIMIT] for line in lines_of(text)]
    for line in lines:
        table.take(line)
    if not table.tests:
        message = next((line.strip() for line in lines if _FAILURE.fullmatch(line)), None)
        if message is None or table.has_head:
            raise ParseError(f"expected the JSON or the table of dcgmi diag with results, {found_text(text)}")
        return failure(message)
    tests = [test.answer() for test in table.tests]
    statuses = [test["status"] for test in tests]
    if not (table.has_head and table.closed) and "fail" not in statuses:
        part = "closing border" if table.has_head else "head"
        raise ParseError(f"expected a whole table of dcgmi diag, found it without its {part} and no Fail in it")
    level = next((int(match[1]) for line in lines if (match := _LEVEL.search(line))), None)
    diagnosis = {**table.metadata, "level": level, "overall": overall(statuses), "tests": tests}
    return checked(DcgmDiag, diagnosis, "the table of dcgmi diag")
