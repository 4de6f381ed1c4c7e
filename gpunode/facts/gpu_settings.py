"""The settings that the role gpu_settings requests, and the report of its unit in this boot."""

import hashlib
import json
from typing import Any

from pydantic import ValidationError

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models.gpu import GpuSettings
from gpunode.frozen import invalid_field

_SETTINGS = "/etc/gpunode/gpu-settings.json"
_REPORT = "/run/gpunode/gpu-settings.json"


def gpu_settings(bundle: BundleReader) -> GpuSettings | None:
    """Return the rules and the last report; None if the node has no settings file."""
    text = bundle.text(_SETTINGS)
    if text is None:
        return None
    report_text = bundle.text(_REPORT)
    report = _document(report_text, _REPORT) if report_text is not None else None
    try:
        return GpuSettings.model_validate(
            {
                "rules": _document(text, _SETTINGS).get("rules"),
                "reported": None
                if report is None
                else {uuid: gpu["settings"] for uuid, gpu in dict(report["gpus"]).items()},
                "current": report is not None
                and report.get("settings_sha256") == hashlib.sha256(text.encode()).hexdigest(),
            }
        )
    except ValidationError as err:
        place, why = invalid_field(err)
        raise ParseError(f"the GPU settings are not as the role writes them: {place}: {why}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ParseError(f"expected the unit's report in {_REPORT}, found '{first_line(report_text or '')}'") from None


def _document(text: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ParseError(f"expected a JSON object in {path}, found '{first_line(text)}'")
    return found
