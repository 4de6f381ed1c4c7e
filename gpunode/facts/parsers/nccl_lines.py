"""The lines of a log of nccl-tests, told apart: what a line says, whatever launcher put in front of it."""

import re
from dataclasses import dataclass
from typing import Any

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
    """One line that says something: ``kind`` is one of the constants' names below, ``stream`` the MPI tag before it."""

    kind: str
    stream: str
    text: str
    values: dict[str, Any]


def read(raw: str) -> Line:
    """Tell what a line is.

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
    """A line as what stands before NCCL's own log line in it, and that; None where it holds none."""
    match = _NCCL_LOG.search(text)
    if match is None:
        return text, None
    start = match.start()
    if text[:start].endswith("N/") and text[start] == "A":
        start += 1
    return text[:start], text[start:]


def is_message(line: Line) -> bool:
    """True for warnings of NCCL and errors of tests and launchers; NCCL's information is none."""
    if line.kind == "log":
        return _NCCL_TROUBLE.search(line.text) is not None
    return _MESSAGE.search(line.text) is not None


def is_abort(text: str) -> bool:
    """True where the line says that a process of the run came to a bad end."""
    return _ABORT.search(text) is not None


def library_version(code: str | None) -> str | None:
    """NCCL's version number ``22807`` as ``2.28.7``."""
    if code is None:
        return None
    number = int(code)
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
