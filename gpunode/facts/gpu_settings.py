"""The settings that the role gpu_settings requests, and the report of its unit in this boot."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, ValidationError

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact
from gpunode.frozen import invalid_field

_SETTINGS = "/etc/gpunode/gpu-settings.json"
_REPORT = "/run/gpunode/gpu-settings.json"


Clock = Annotated[StrictInt, Field(ge=0, le=100_000)]


Text = Annotated[str, Field(max_length=400)]


class GpuSelector(Fact):
    """The GPUs that a rule applies to: exactly one of the two fields is set."""

    indexes: Annotated[tuple[StrictInt, ...], Field(max_length=256)] | None = None
    pci_ids: Annotated[tuple[Text, ...], Field(max_length=256)] | None = None


class GpuRule(Fact):
    """One rule of the role gpu_settings; None: not requested."""

    gpus: Literal["all"] | GpuSelector
    sm_clock_mhz: (
        Literal["max", "default"] | Clock | Annotated[list[Clock], Field(min_length=2, max_length=2)] | None
    ) = None
    memory_clock_mhz: (
        Literal["max", "default"] | Clock | Annotated[list[Clock], Field(min_length=2, max_length=2)] | None
    ) = None
    application_clocks_mhz: Literal["default"] | dict[Literal["memory", "graphics"], Clock] | None = None
    power_limit: (
        Literal["max", "default"] | Annotated[str, Field(pattern=r"^[0-9.]{1,8}%$")] | StrictInt | StrictFloat | None
    ) = None
    compute_mode: Literal["default", "exclusive_process", "prohibited"] | None = None
    ecc: StrictBool | None = None
    mig: StrictBool | Annotated[list[Text], Field(max_length=8)] | None = None
    accounting: StrictBool | None = None


class GpuSetting(Fact):
    """The result of one setting of one GPU, as the unit of gpu_settings reported it."""

    value: Any
    result: Literal["applied", "kept", "pending", "busy", "refused"]
    message: Text


class GpuSettings(Fact):
    """The settings that the role gpu_settings requests, and the report of its unit in this boot."""

    rules: Annotated[tuple[GpuRule, ...], Field(max_length=256)]
    reported: (
        Annotated[dict[Text, Annotated[dict[Text, GpuSetting], Field(max_length=32)]], Field(max_length=256)] | None
    )
    """UUID, setting, entry; None: the unit reported nothing since the boot."""
    current: bool
    """True if the report is about these rules."""

    def plain_rules(self) -> list[dict[str, Any]]:
        """Return the rules in the form of the settings file."""
        return [rule.model_dump(exclude_none=True) for rule in self.rules]


def read_gpu_settings(bundle: BundleReader) -> GpuSettings | None:
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
        field, why = invalid_field(err)
        raise ParseError(f"the GPU settings are not as the role writes them: {field}: {why}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ParseError(f"expected the unit's report in {_REPORT}, found '{first_line(report_text or '')}'") from None


def _document(text: str, path: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ParseError(f"expected a JSON object in {path}, found '{first_line(text)}'")
    return document


class GpuSettingsFacts(FactArea):
    """The settings of the role gpu_settings."""

    gpu_settings: GpuSettings | None = fact(
        read_gpu_settings, none_means="the role gpu_settings sets nothing on this node"
    )
