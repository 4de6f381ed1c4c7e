"""``dcgmi diag``: the JSON of DCGM 2, 3 and 4."""

import json
import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import checked
from gpunode.facts.models.outputs import DcgmDiag
from gpunode.facts.models.smi import Failure
from gpunode.facts.parsers import dcgm_table
from gpunode.facts.parsers.dcgm_status import failure, overall, status_of
from gpunode.facts.parsers.values import shorten, text_or_none, version

_ROOT = re.compile(r'"(DCGM (?:GPU )?Diagnostic)"\s*:')
_DRIVER_KEYS = ("Driver Version Detected", "driver_version", "Driver Version")


def parse(text: str) -> DcgmDiag | Failure:
    """Parse the JSON or the table; where dcgmi failed: its error.

    Raises ParseError for another layout, an unknown status, no tests, and a table that is cut (but for a visible Fail).
    """
    root = _ROOT.search(text)
    if root:
        return _from_json(text, root)
    return dcgm_table.parse(text)


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
    places = [
        place for place in (document.get("metadata"), body.get("metadata"), document, body) if isinstance(place, dict)
    ]
    versions = (version(_string(place.get(key))) for place in places for key in ("version", "DCGM Version"))
    drivers = (version(_string(place.get(key))) for place in places for key in _DRIVER_KEYS)
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
    """DCGM 4 names an entity (a GPU, a CPU, a NIC), older ones ids as text or number."""
    if "entity_id" in result:
        is_gpu = str(result.get("entity_group", "")).upper() == "GPU"
        return [result["entity_id"]] if is_gpu and isinstance(result["entity_id"], int) else []
    ids = result.get("gpu_ids", result.get("gpu_id"))
    return [int(part) for part in re.findall(r"\d{1,5}", str(ids))] if ids is not None else []


def _messages(result: dict[str, Any]) -> list[str]:
    """Warnings and errors; what a test tells as information is none."""
    texts: list[str] = []
    for key in ("warnings", "warning", "errors", "error"):
        entries = result.get(key)
        for entry in entries if isinstance(entries, list) else [entries]:
            value = entry.get("warning", entry.get("error")) if isinstance(entry, dict) else entry
            if isinstance(value, str) and value.strip():
                texts.append(value.strip())
    return texts
