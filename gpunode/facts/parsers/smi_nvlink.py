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
_COUNTER_NAMES = re.compile(r"\b(?:errors?|events?|ber|recover\w*|counters?|discards)\b", re.I)
_TRAFFIC = re.compile(r"[TR]x (?:packets|bytes)", re.I)
_SMALL = re.compile(r"\d{1,6}(?:\.\d{1,6})?[eE]-?\d{1,3}")
_ENDING = re.compile(r"_(?:errors?|error_counters?|counters?)$")
_INACTIVE = re.compile(r"<?inactive>?", re.I)
_ELISION = re.compile(r"\s*(?:\[\.\.\.\]|\.\.\.|…)?\s*")
_GPU_MESSAGE = re.compile(r"\s*(?:NVML:|Nvlink quer|Device does not|.*\bnvlink\b)", re.I)
_ALL_INACTIVE = re.compile(r"all links are inactive", re.I)
_LINE_LIMIT = 1000


def parse(text: str) -> dict[str, Any]:
    """``{gpus: [{index, name, uuid, links: [{link, active, speed_gb_per_s, errors: {replay, recovery, crc, ...}}]}]}``.

    Numbers of GPUs and links are those printed. ``active`` and the speed are None in a listing of errors, ``errors`` is
    empty in one of states; the two listings of one node may follow each other. A GPU also has ``message``, what
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
        elif current is not None and _GPU_MESSAGE.match(line) and not _LINK.fullmatch(line):
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
    link = gpu["links"].setdefault(index, {"link": index, "active": None, "speed_gb_per_s": None, "errors": {}})
    counter = _COUNTER.fullmatch(match["rest"])
    speed = quantity(match["rest"], "GB/s")
    if counter and _COUNTER_NAMES.search(counter["name"]):
        name = _ENDING.sub("", label_of(counter["name"]))
        _set_once(link["errors"], name, _figure(counter["value"]), where)
    elif counter and _TRAFFIC.fullmatch(counter["name"]):
        return
    elif speed is not None:
        _set_once(link, "speed_gb_per_s", speed, where)
        _set_once(link, "active", True, where)
    elif _INACTIVE.fullmatch(match["rest"]):
        _set_once(link, "active", False, where)
    elif match["rest"] not in {"N/A", "<N/A>", "Not Supported"}:
        raise ParseError(f"expected a speed, <inactive> or an error counter below {where}, found '{shorten(line)}'")


def _figure(text: str) -> int | float | None:
    """A counter, or a rate of bit errors (``15e-255``)."""
    return float(text) if _SMALL.fullmatch(text) else number(text)


def _set_once(record: dict[str, Any], key: str, value: object, where: str) -> None:
    if record.get(key) is not None and record[key] != value:
        raise ParseError(f"expected one value for '{key}' of a link of {where}, found two")
    record[key] = value


def _finished(gpu: dict[str, Any]) -> dict[str, Any]:
    links = list(gpu["links"].values())
    if any(link["active"] is not None for link in links):
        gpu["all_inactive"] = all(link["active"] is False for link in links)
    return gpu | {"links": links}
