"""Lines of a log of nccl-tests: their kinds, prefixes of launchers, and the rows of the tables."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from gpunode.facts.models.outputs import NcclRow, OldPlacement, Placement

_LINE_LIMIT = 4000
_MPI_TAG = re.compile(r"\s*(\[\d{1,9},\d{1,9}\])<std(?:out|err|diag)>:[ ]?")
_LAUNCHER = re.compile(
    r"\s*(?:\d{4}-\d\d-\d\dT[\d:.,]{6,20}(?:Z|[+-]\d\d:?\d\d)\s"
    r"|\[(?P<pod>[^\]\s]{1,200})\][ ](?=[ ]*(?:#|\d)|$)"
    r"|(?P<label>[A-Za-z0-9][\w.-]{0,80}):[ ](?=[ ]*(?:#|\d|\.\.)|$))"
)
_NCCL_LOG = re.compile(
    r"[\w.-]{1,200}:\d{1,10}:\d{1,10} \[\d{1,4}\] (?:\S{1,60} )?NCCL (?:INFO|WARN|TRACE|ABORT|ERROR)\b"
)
_NCCL_PLAIN = re.compile(r"NCCL (?:version |(?:INFO|WARN)\b)")
_START = re.compile(r"nThreads? \d+ nGpus \d+ minBytes ")
_STARTING = re.compile(r"Collective test (starting|concluded):\s*(\w{1,60}?)(?:_perf)?\s*")
_TESTS_VERSION = re.compile(r"nccl-tests version\s+v?(\S{1,60})(?:.*\bnccl-library=(\d{5,6})\b)?")
_NCCL_VERSION = re.compile(r"\bNCCL version\s+v?(\d[\w.+-]{0,40})")
_COMMAND = re.compile(r"(?:^|[\s/'\"])(\w{2,40})_perf(?:_mpi)?(?=[\s'\"]|$)")
_RANK = re.compile(
    r"Rank\s+(?P<rank>\d{1,7})\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(?P<host>\S{1,255})\s+"
    r"device\s+(?P<device>\d{1,4})\s+\[(?P<pci>[^\]]{1,30})\]\s*(?P<name>.{0,100}?)\s*"
)
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\S{1,30})\s*(OK|FAILED)?\b.*")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(\S{1,30})\s*(OK|FAILED)?\b.*")
_MESSAGE = re.compile(
    r"NCCL (?:WARN|ERROR|ABORT)\b|\bTest (?:\w+ )?failure\b|\bunhandled (?:cuda|system)\b|\b(?:error|abort|failed)\b"
    r"|noticed that process|Segmentation fault|exited on signal|terminated|core dumped|Killed|[Oo]ut of memory",
    re.I,
)
_NCCL_TROUBLE = re.compile(r"\bNCCL (?:WARN|ERROR|ABORT)\b")
_ABORT = re.compile(
    r"\bTest (?:\w+ )?failure\b|MPI_ABORT|noticed that process|detected that one or more processes|Segmentation fault"
    r"|exited on signal|terminated (?:by|with) signal|core dumped|\bKilled\b|srun: error|slurmstepd: error|\bAborted\b"
    r"|Abort\(\d",
)
_BODY = re.compile(r"[\s#]*")


@dataclass(frozen=True)
class Line:
    """One classified line: ``kind`` is one of the constants' names below, ``stream`` the MPI tag before it."""

    kind: str
    stream: str
    text: str
    values: dict[str, Any]


def read(raw: str) -> Line:
    """Return the kind and the content of a line.

    Kinds: start, starting, concluded, version, nccl-version, command, rank, header, bounds, average, log (NCCL's own),
    text (anything else: may be a row).
    """
    line = raw[:_LINE_LIMIT].rstrip()
    tag = _MPI_TAG.match(line)
    stream = tag[1] if tag else ""
    line = line[tag.end() :] if tag else line
    launcher = _LAUNCHER.match(line)
    if launcher:
        stream = stream or launcher["label"] or launcher["pod"] or ""
        line = line[launcher.end() :]
    body = line[_BODY.match(line).end() :]  # type: ignore[union-attr]
    kind, values = _classify(body)
    return Line(kind, stream, line, values)


def _classify(body: str) -> tuple[str, dict[str, Any]]:
    if _NCCL_LOG.match(body) or _NCCL_PLAIN.match(body):
        version = _NCCL_VERSION.search(body)
        return ("nccl-version", {"version": version[1]}) if version else ("log", {})
    if _START.match(body):
        return "start", {}
    for kind, pattern in (("rank", _RANK), ("bounds", _OUT_OF_BOUNDS), ("average", _AVERAGE)):
        match = pattern.fullmatch(body)
        if match:
            return kind, match.groupdict() or {"count": match[1], "verdict": match[2]}
    starting = _STARTING.fullmatch(body)
    if starting:
        return starting[1], {"collective": starting[2]}
    version = _TESTS_VERSION.match(body)
    if version:
        return "version", {"version": version[1], "library": version[2]}
    words = body.split()
    if words[:2] in (["size", "count"], ["bytes", "N"]) and "busbw" in words:
        return "header", {"columns": words}
    if not body[:1].isdigit():
        command = _COMMAND.search(body)
        if command and not _MESSAGE.search(body):
            return "command", {"collective": command[1]}
    return "text", {}


def split_at_nccl_log(text: str) -> tuple[str, str | None]:
    """Split a line at NCCL's own log line in it: the text before, and the log line; None if there is none."""
    match = _NCCL_LOG.search(text)
    if match is None:
        return text, None
    start = match.start()
    if text[:start].endswith("N/") and text[start] == "A":
        start += 1
    return text[:start], text[start:]


def is_message(line: Line) -> bool:
    """Return True for warnings of NCCL and errors of tests and launchers, False for NCCL's information."""
    if line.kind == "log":
        return _NCCL_TROUBLE.search(line.text) is not None
    return _MESSAGE.search(line.text) is not None


def is_abort(text: str) -> bool:
    """Return True if the line reports that a process of the run aborted."""
    return _ABORT.search(text) is not None


def library_version(code: str | None) -> str | None:
    """Return NCCL's version number ``22807`` as ``2.28.7``."""
    if code is None:
        return None
    number = int(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# Rows: columns from the header; halves that NCCL's log lines split are joined.

_LEFT = re.compile(r"\s*(\d{1,20})\s+(\d{1,20})\s+([a-z][a-z0-9_]{1,20})(?=\s|$)")
_FLOAT = re.compile(r"[+-]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,3})?")
_VALUE = re.compile(r"[+-]?(?:[\d.]{1,80}(?:[eE][+-]?\d{1,3})?|nan|inf)|N/A", re.I)
_KEYS = {
    "time": "time_us",
    "cputime": "time_us",
    "algbw": "algbw_gb_per_s",
    "busbw": "busbw_gb_per_s",
    "#wrong": "wrong",
    "error": "error",
    "res": "error",
}
_TIMES = frozenset({"time", "cputime"})
_ROOT = re.compile(r"-?\d{1,7}")
_GLUED_NUMBER = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)(?![\d.])")


class RowReader:
    """Reader of the rows below one header; keeps the first half of a row until its second half comes."""

    def __init__(self, columns: list[str]) -> None:
        first = next((position for position, name in enumerate(columns) if name in _TIMES), len(columns))
        self._optional = columns[3:first]
        """``redop`` and ``root``: blank for some collectives, and not part of the result."""
        self._right = columns[first:]
        self._joints = {position for position, name in enumerate(self._right) if name in _TIMES} | {len(self._right)}
        """Numbers of values before the positions at which nccl-tests pauses its output to measure."""
        self._pending: tuple[re.Match[str], list[str]] | None = None
        self.rows: list[NcclRow] = []
        self.lost = 0
        """Rows that were started and could not be read."""

    @property
    def ascending(self) -> bool:
        """Return True if sizes only increase (0 may repeat): the rows of one process."""
        sizes = [row.size_bytes for row in self.rows if row.size_bytes]
        return all(before < after for before, after in itertools.pairwise(sizes))

    def take(self, text: str) -> bool:
        """Read a line that may be a row or a part of one; return False if it is neither."""
        line, log = split_at_nccl_log(text)
        match = _LEFT.match(line)
        if match:
            self.close()
            self._finish_or_keep(match, self._with_glued(self._values(line[match.end() :].split()), log))
            return True
        words = line.split()
        if self._pending is None or not words or not all(_VALUE.fullmatch(word) for word in words):
            return False
        first, known = self._pending
        self._finish_or_keep(first, self._with_glued(known + words, log))
        return True

    def close(self) -> None:
        """Discard a half row that still waits for its second half."""
        if self._pending is not None:
            self.lost += 1
            self._pending = None

    def _values(self, words: list[str]) -> list[str]:
        """Return the values after ``redop``, a word or blank, and ``root``, a number wherever the column exists."""
        if words and self._optional[:1] in (["redop"], ["op"]) and words[0].isalpha():
            words = words[1:]
        if words and "root" in self._optional and _ROOT.fullmatch(words[0]):
            words = words[1:]
        return words

    def _with_glued(self, values: list[str], log: str | None) -> list[str]:
        """Return the values with NCCL's line split off the last: ``0node-1:25:25 [0] NCCL INFO``."""
        glued = _GLUED_NUMBER.match(log) if log else None
        return [*values, glued[1]] if glued and len(values) + 1 in self._joints else values

    def _finish_or_keep(self, match: re.Match[str], values: list[str]) -> None:
        right = self._right
        if not right:
            self.lost += 1
            return
        if "timestamp" in right[-1].lower() and len(values) == len(right) + 1:
            values = [*values[:-2], f"{values[-2]} {values[-1]}"]
        if len(values) < len(right):
            self._pending = (match, values)
            return
        self._pending = None
        named = right[:-1] if "timestamp" in right[-1].lower() else right
        if len(values) > len(right) or not all(_VALUE.fullmatch(value) for value in values[: len(named)]):
            self.lost += 1
            return
        self.rows.append(_row(match, right, values))


def _row(match: re.Match[str], columns: list[str], values: list[str]) -> NcclRow:
    groups: list[dict[str, float | None]] = []
    in_milliseconds = "res" in columns
    for name, value in zip(columns, values, strict=True):
        if name in _TIMES:
            groups.append({"time_us": None, "algbw_gb_per_s": None, "busbw_gb_per_s": None, "wrong": None})
        key = _KEYS.get(name)
        if key and groups and not (in_milliseconds and key == "time_us"):
            groups[-1][key] = count(value) if key == "wrong" else measure(value)
    placements = [(OldPlacement if "error" in group else Placement).model_validate(group) for group in groups]
    return NcclRow(
        size_bytes=int(match[1]),
        count=int(match[2]),
        datatype=match[3],
        out_of_place=placements[0] if placements else None,
        in_place=placements[1] if len(placements) > 1 else None,
    )


def measure(text: str) -> float | None:
    """Return a measured number; None for ``N/A``, ``nan`` and ``inf``."""
    if not _FLOAT.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def count(text: str) -> int | None:
    """Return a count; large ones are printed as ``1.04858e+06``."""
    value = measure(text)
    return int(value) if value is not None and value == int(value) else None
