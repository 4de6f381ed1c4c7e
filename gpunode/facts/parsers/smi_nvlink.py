"""``nvidia-smi nvlink --status`` and ``-e``: the links of each GPU, their speed and their error counters."""

import re
from dataclasses import dataclass, field
from typing import TypeVar

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, Number, Nvlink, NvlinkGpu, NvlinkLink
from gpunode.facts.parsers import smi_error
from gpunode.facts.parsers.smi_list import GPU_LINE
from gpunode.facts.parsers.tree import label_of
from gpunode.facts.parsers.values import found_text, lines_of, number, quantity, shorten, text_or_none

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


def parse(text: str) -> Nvlink | Failure:
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
        elif _ELISION.fullmatch(line) or smi_error.is_remark(line):
            continue
        elif current is not None:
            _take_link(current, line)
        else:
            raise ParseError(f"expected 'GPU 0: NAME (UUID: ...)' of nvidia-smi nvlink, found '{shorten(line)}'")
    if not gpus:
        error = smi_error.find(text)
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
