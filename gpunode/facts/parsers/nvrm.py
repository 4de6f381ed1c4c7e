"""The driver's own text (NVRM): its version in /proc, and its messages in the kernel's log, of any tool and format."""

import re
from collections.abc import Mapping
from typing import Literal, Protocol

from gpunode.facts.errors import ParseError
from gpunode.facts.models.outputs import Dmesg, DriverVersion, LogEvent, LogProcess
from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import bus_id, found_text, lines_of

_MODULE = re.compile(
    r"\s*NVRM version:\s+NVIDIA UNIX (?P<open>Open )?(?:Kernel Module for \S+|\S+ (?P<open_after>Open )?Kernel Module)"
    r"\s+(?P<version>\d{1,4}(?:\.\d{1,4}){1,2})\s+(?P<rest>.*)"
)
_BEFORE_DATE = re.compile(r".*\([^)]*@[^)]*\)|\s*\w+ [Bb]uild\b")
_DATE = re.compile(r"(?=.*(?<!\d)\d\d?:\d\d:\d\d(?!\d))(?=.*(?<!\d)\d{4}(?!\d)).*")
_OTHER_COMPILER = re.compile(r"\b(?:clang|LLVM)\b", re.I)
_GCC = re.compile(r"\s*GCC version:\s*(.*)")
_VERSION = re.compile(r"(?<![\w.~-])(\d{1,3}(?:\.\d{1,3}){2})(?![\w.])")


def parse_version(text: str) -> DriverVersion:
    """Parse the version of the loaded NVIDIA kernel module.

    ``gcc`` and ``built`` are None if the line is absent or truncated. Raise ParseError if there is no complete line
    ``NVRM version: NVIDIA UNIX …``.
    """
    lines = lines_of(text)
    module = next((match for line in lines if (match := _MODULE.fullmatch(line[:2000]))), None)
    if module is None:
        raise ParseError(f"expected a line 'NVRM version: NVIDIA UNIX ... Kernel Module ...', {found_text(text)}")
    date = _DATE.fullmatch(_BEFORE_DATE.sub("", module["rest"], count=1).strip())
    compiler = next((match[1] for line in lines if (match := _GCC.fullmatch(line[:2000]))), "")
    return DriverVersion(
        version=module["version"],
        flavour="open" if module["open"] or module["open_after"] else "proprietary",
        gcc=_compiler_version(compiler),
        built=date[0] if date else None,
    )


def _compiler_version(text: str) -> str | None:
    """Return the version of gcc after its name; distributions put their own revision in brackets before or after it."""
    if _OTHER_COMPILER.search(text):
        return None
    outside = re.sub(r"\([^()]*\)", " ", text)
    match = _VERSION.search(outside) or _VERSION.search(text)
    return match[1] if match else None


_LINE_LIMIT = 4096
_DEVICE = r"(?:PCI:)?[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?(?: [^)]{1,60})?"
_BOOT = re.compile(r"Linux version \d")
_XID = re.compile(rf"NVRM: Xid \((?P<where>{_DEVICE})\): (?P<xid>\d{{1,6}})(?:,\s*(?P<rest>.*))?$")
_SXID = re.compile(rf"nvidia-nvswitch\d{{1,3}}: SXid \((?P<where>{_DEVICE})\): (?P<xid>\d{{1,6}}),\s*(?P<rest>.*)$")
_NVRM = re.compile(r"NVRM: (?P<rest>\S.*)$")
_NOUVEAU = re.compile(r"(?P<rest>nouveau(?: [0-9a-f:.]{7,16})?: \S.*|\[drm\] nouveau\b.*)$")
_PROCESS = re.compile(r"pid='?(?P<pid>\d{1,10}|<unknown>)'?,\s*(?:name=(?P<name>[^,]{0,200}),?\s*)?")
_ADDRESS = re.compile(r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)\b")
_SEVERITY = re.compile(r"(Fatal|Non-fatal)\b", re.I)
_TROUBLE = re.compile(
    r"fail|error|fallen off|\blost\b|mismatch|tim(?:ed|e)\s?out|unable|cannot|can't|could not|not supported|unsupported"
    r"|not support|none of"
    r"|invalid|not called|no nvidia|crash|assert|refus|exception|\bhung\b|halt|denied|conflict|unexpected",
    re.I,
)
_TIMES = (
    re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)(?=\s)"),
    re.compile(r"\[([A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4})\]"),
    re.compile(r"^(\S{1,12}(?: +\S{1,4}){0,2} +\d\d:\d\d:\d\d)(?= \S)"),
    re.compile(r"\[ *(\d{1,12}\.\d{1,9})\]"),
    re.compile(r"^\d{1,4},\d{1,20},(\d{1,20}),"),
)
_LOG_LINE = re.compile(
    r"(?:<\d{1,3}>)?(?:\w{2,8} *: *\w{2,7} *: *)?"
    r"(?:\[ *\d{1,12}\.\d{1,9}(?: <[ \d.]{1,24}>)?\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4}\]"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\s|\d{1,4},\d{1,20},\d{1,20},[^;]{0,40};"
    r"|\S{1,12}(?: +\S{1,4}){0,2} +\d\d:\d\d:\d\d \S{1,255} \S{1,64}: )"
)
_HEAD = re.compile(
    r"(?:<\d{1,3}>)?(?:\w{2,8} *: *\w{2,7} *: *)?"
    r"(?:\d{1,4},\d{1,20},\d{1,20},[^;]{0,40};"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S* +(?:\S{1,255} kernel: )?"
    r"|\S{1,12}(?: +\S{1,4}){0,2} +\d\d:\d\d:\d\d \S{1,255} kernel: "
    r"|\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4}\] *|(?=\[ *\d))"
    r"(?:\[ *\d{1,12}\.\d{1,9}(?: <[ \d.]{1,24}>)?\] *)?(?:\[ *[TC]\d{1,10}\] *)?"
)
# These begin with a name of up to 15 characters that the process chose.
_OF_A_PROCESS = re.compile(
    r".{1,15}(?:\[\d{1,10}\]: (?:segfault|unhandled) |\[\d{1,10}\] bad frame| invoked oom-killer|: page allocation "
    r"|: vmalloc )"
)
_FAILURE = re.compile(r"\s*dmesg: (?P<message>.*(?:failed|not permitted|denied).*)$")


class XidMeaning(Protocol):
    """The catalog's description of an Xid."""

    @property
    def meaning(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def action(self) -> str: ...


def parse_log(text: str, xids: Mapping[int, XidMeaning] | None = None) -> Dmesg | Failure:
    """Parse the lines about errors of a GPU, one event per line; ``xids`` has the meanings of Xids.

    Of the NVRM lines only errors become events. A log without such lines has no events. If dmesg had no permission,
    return its error. Raise ParseError if no line has the format of a log.
    """
    events = []
    is_log = False
    # Only "\n" ends a line of these programs: the text of a message may contain all others.
    lines = text.split("\n")
    for raw in lines:
        line = raw[:_LINE_LIMIT].rstrip()
        event = _event(line, xids or {})
        if event:
            events.append(event)
        is_log = is_log or event is not None or _LOG_LINE.match(line) is not None
    if is_log:
        return Dmesg(events=tuple(events))
    failure = next((match for line in lines if (match := _FAILURE.match(line[:_LINE_LIMIT]))), None)
    if failure is None:
        raise ParseError(f"expected lines of the kernel's log, {found_text(text)}")
    message = failure[0].strip()
    kind = "permission" if re.search(r"permitted|denied", message) else "other"
    return Failure(error=ToolError(kind=kind, message=message))


def message_at(line: str) -> int | None:
    """Return where the kernel's own message begins in a line of its log; None if users could have written its text.

    Names of programs, files and control groups are within or at the start of messages, also with line ends: dmesg and
    journalctl indent the lines after the first, which therefore have no time at their start.
    """
    head = _HEAD.match(line)
    return None if head is None or _OF_A_PROCESS.match(line, head.end()) else head.end()


def message_of(line: str) -> str:
    """Return the kernel's own message in a line of its log; empty if there is none."""
    at = message_at(line)
    return "" if at is None else line[at:]


def begins_boot(line: str) -> bool:
    """Return whether a line of the kernel's log is the first one of a boot."""
    return _BOOT.match(message_of(line)) is not None


def _event(line: str, xids: Mapping[int, XidMeaning]) -> LogEvent | None:
    """Return the event of a line; None for a line that reports no error of a GPU's driver."""
    at = message_at(line)
    if at is None:
        return None
    if match := _XID.match(line, at):
        return _xid(line, match, xids)
    if (match := _NVRM.match(line, at)) and _TROUBLE.search(match["rest"]):
        return _plain("nvrm", line, match)
    if match := _SXID.match(line, at):
        severity = _SEVERITY.match(match["rest"])
        found_values = {
            "xid": int(match["xid"]),
            "pci_bus_id": _address(match["where"]),
            "severity": severity[1].lower() if severity else None,
        }
        return _plain("sxid", line, match).model_copy(update=found_values)
    if match := _NOUVEAU.match(line, at):
        return _plain("nouveau", line, match)
    return None


def _plain(kind: Literal["sxid", "nvrm", "nouveau"], line: str, match: re.Match[str]) -> LogEvent:
    message = match["rest"].strip()
    return LogEvent(
        kind=kind,
        xid=None,
        pci_bus_id=_address(message),
        time=_time(line[: match.start()]),
        process=None,
        message=message,
        meaning=None,
        severity=None,
        action=None,
    )


def _xid(line: str, match: re.Match[str], xids: Mapping[int, XidMeaning]) -> LogEvent:
    number = int(match["xid"])
    known = xids.get(number)
    rest = (match["rest"] or "").strip()
    process = _PROCESS.match(rest)
    return LogEvent(
        kind="xid",
        xid=number,
        pci_bus_id=_address(match["where"]),
        time=_time(line[: match.start()]),
        process=_known_process(process),
        message=rest[process.end() :].strip() if process else rest,
        meaning=known.meaning if known else None,
        severity=known.severity if known else None,
        action=known.action if known else None,
    )


def _known_process(match: re.Match[str] | None) -> LogProcess | None:
    if match is None:
        return None
    pid = int(match["pid"]) if match["pid"].isdigit() else None
    name = (match["name"] or "").strip("' ")
    name_or_none = name if name and name != "<unknown>" else None
    return None if pid is None and name_or_none is None else LogProcess(pid=pid, name=name_or_none)


def _address(text: str) -> str | None:
    match = _ADDRESS.search(text)
    return bus_id(match[1]) if match else None


def _time(prefix: str) -> str | None:
    """Return the wall clock's time if the line has one, else the seconds since the start."""
    return next((match[1] for pattern in _TIMES if (match := pattern.search(prefix))), None)
