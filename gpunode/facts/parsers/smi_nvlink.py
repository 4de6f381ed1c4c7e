"""``nvidia-smi nvlink --status`` and ``-e``: the links of each GPU, their speed and their error counters."""

import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers import smi_error
from gpunode.facts.parsers.smi_list import GPU_LINE
from gpunode.facts.parsers.tree import label_of
from gpunode.facts.parsers.values import found, lines_of, number, quantity, shorten, text_or_none

_LINK = re.compile(r"\s*Link (?P<link>\d{1,3}):\s*(?P<rest>\S.*?)\s*")
_COUNTER = re.compile(r"(?P<name>[A-Za-z][\w /()-]*?)\s*:\s*(?P<value>\S+)")
_OLD_COUNTER = re.compile(r"(?P<value>\d{1,20}) (?P<name>[A-Za-z][A-Za-z /-]{1,40}? errors?)", re.I)
"""Drivers of the branches 390 to 470: ``Link 0: 0 replay errors``."""
_TRAFFIC = re.compile(r"[TR]x (?:packets|bytes)", re.I)
_SMALL = re.compile(r"\d{1,6}(?:\.\d{1,6})?[eE]-?\d{1,3}")
_ENDING = re.compile(r"_(?:errors?|error_counters?|counters?)$")
_STATE = re.compile(r"<?(?P<state>inactive|sleep)>?", re.I)
_UNKNOWN = frozenset({"N/A", "<N/A>", "Not Supported"})
_ELISION = re.compile(r"\s*(?:\[\.\.\.\]|\.\.\.|…)?\s*")
_GPU_MESSAGE = re.compile(r"\s*(?:NVML:|Nvlink quer|Device does not|.*\bnvlink\b)", re.I)
_ALL_INACTIVE = re.compile(r"all links are inactive", re.I)
_LINE_LIMIT = 1000


def parse(text: str) -> dict[str, Any]:
    """``{gpus: [{index, name, uuid, links: [{link, state, active, speed_gb_per_s, errors: {replay, crc, ...}}]}]}``.

    Numbers of GPUs and links are those printed. ``state`` is active, inactive or sleep, ``active`` None for the last;
    both and the speed are None in a listing of errors, whose counters are all in ``errors`` but those of traffic, the
    rates of bit errors too; ``errors`` is empty in a listing of states. The two listings of one node may follow each
    other. A GPU also has ``message``, what
    nvidia-smi prints in place of links, and ``all_inactive`` (True where it says so, None where it says nothing).
    Where nvidia-smi failed: ``{"error": {kind, message, nvml_version}}``.

    Raises ParseError for text that is not of the kind, another listing (``nvlink -c``) and a line that is cut.
    """
    gpus: dict[int, dict[str, Any]] = {}
    current: dict[str, Any] | None = None
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
            raise ParseError(f"expected the listing of nvidia-smi nvlink --status or -e, {found(text)}")
        return error
    if current is not None and not current["links"] and current["message"] is None:
        raise ParseError(f"expected links of GPU {current['index']} in nvidia-smi nvlink, found the text ends there")
    return {"gpus": [_finished(gpu) for gpu in gpus.values()]}


def _is_message(gpu: dict[str, Any], line: str) -> bool:
    """True for what stands below a GPU in place of its links, and for the lines that go on with it."""
    if _LINK.fullmatch(line) or not line.strip():
        return False
    bare = line.strip() in _UNKNOWN and not gpu["links"]
    goes_on = gpu["message"] is not None and not gpu["links"] and not line.lstrip().startswith("Link")
    return bare or goes_on or _GPU_MESSAGE.match(line) is not None


def _gpu(gpus: dict[int, dict[str, Any]], heading: re.Match[str]) -> dict[str, Any]:
    index = int(heading["index"])
    uuid = heading["id"] if heading["key"] == "UUID" else None
    gpu: dict[str, Any] = {
        "index": index,
        "name": text_or_none(heading["name"]),
        "uuid": text_or_none(uuid),
        "links": {},
        "message": None,
        "all_inactive": None,
    }
    known = gpus.setdefault(index, gpu)
    if (known["name"], known["uuid"]) != (gpu["name"], gpu["uuid"]):
        raise ParseError(f"expected one node's listing of nvidia-smi nvlink, found two GPUs with the index {index}")
    return known


def _take_message(gpu: dict[str, Any], line: str) -> None:
    gpu["message"] = gpu["message"] or line
    if _ALL_INACTIVE.search(line):
        gpu["all_inactive"] = True


def _take_link(gpu: dict[str, Any], line: str) -> None:
    where = f"GPU {gpu['index']} of nvidia-smi nvlink"
    match = _LINK.fullmatch(line)
    if not match:
        raise ParseError(f"expected 'Link 0: ...' below {where}, found '{shorten(line)}'")
    index = int(match["link"])
    empty: dict[str, Any] = {"link": index, "state": None, "active": None, "speed_gb_per_s": None, "errors": {}}
    link = gpu["links"].setdefault(index, empty)
    rest = match["rest"]
    counter = _COUNTER.fullmatch(rest)
    speed = quantity(rest, "GB/s")
    state = _STATE.fullmatch(rest)
    old = _OLD_COUNTER.fullmatch(rest)
    if old:
        _set_once(link["errors"], _ENDING.sub("", label_of(old["name"])), _figure(old["value"]), where)
        return
    if counter and _TRAFFIC.fullmatch(counter["name"]):
        return
    if counter and (counter["value"] in _UNKNOWN or _figure(counter["value"]) is not None):
        name = _ENDING.sub("", label_of(counter["name"]))
        _set_once(link["errors"], name, _figure(counter["value"]), where)
    elif speed is not None:
        _set_once(link, "speed_gb_per_s", speed, where)
        _set_state(link, "active", where)
    elif state:
        _set_state(link, state["state"].lower(), where)
    elif rest not in _UNKNOWN:
        raise ParseError(f"expected a speed, <inactive>, <sleep> or a counter below {where}, found '{shorten(line)}'")


def _set_state(link: dict[str, Any], state: str, where: str) -> None:
    _set_once(link, "state", state, where)
    link["active"] = {"active": True, "inactive": False}.get(state)


def _figure(text: str) -> int | float | None:
    """A counter, or a rate of bit errors (``15e-255``)."""
    return float(text) if _SMALL.fullmatch(text) else number(text)


def _set_once(record: dict[str, Any], key: str, value: object, where: str) -> None:
    if record.get(key) is not None and record[key] != value:
        raise ParseError(f"expected one value for '{key}' of a link of {where}, found two")
    record[key] = value


def _finished(gpu: dict[str, Any]) -> dict[str, Any]:
    links = list(gpu["links"].values())
    if any(link["state"] is not None for link in links):
        gpu["all_inactive"] = all(link["state"] == "inactive" for link in links)
    return gpu | {"links": links}
