"""Settings: of the system (kernel, limits, environment), and of GPUs as the role gpu_settings requests them."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, ValidationError

from gpunode.facts.bundle_reader import SYSCTLS, BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.system import read_systemd
from gpunode.frozen import invalid_field

_LOCKDOWN = "/sys/kernel/security/lockdown"
_LIMITS = "/etc/security/limits.conf"
_LIMITS_FOLDER = "/etc/security/limits.d/"
_LINE_LIMIT = 4000
_ARGUMENTS = "/var/lib/gpunode/kernel_tuning/command-line"


class Limit(Fact):
    """One line of ``/etc/security/limits.conf`` or ``limits.d``, in the order in which PAM reads them."""

    path: str
    domain: str
    """``*``, ``root``, ``@group``, ``alice``."""
    type: str
    """``soft``, ``hard``, or ``-`` for both."""
    item: str
    """``memlock``, ``nofile`` …"""
    value: str


class Limits(Fact):
    """Resource limits of processes."""

    defaults: dict[str, str] | None
    """systemd's hard limits for its services: ``{"memlock": "8388608", "nofile": "524288"}``; None without systemd."""
    settings: tuple[Limit, ...]
    """Limits of sessions that PAM opens (ssh, su)."""


class EnvironmentSetting(Fact):
    """One variable for debugging or tuning that is set for the whole system. Other variables are not collected."""

    path: str
    """The file, or ``systemd`` for the environment that services inherit."""
    name: str
    value: str


class BootSetting(Fact):
    """One kernel setting that the next boot applies, in the order in which files are read: the last of a name takes
    effect."""

    path: str
    name: str
    """``vm.swappiness``, or ``transparent_hugepage``."""
    value: str


def read_lockdown(bundle: BundleReader) -> str:
    """Return the value in brackets; ``none`` if the kernel does not support lockdown."""
    return bundle.chosen(_LOCKDOWN) or "none"


def read_sysctl(bundle: BundleReader) -> dict[str, str]:
    """Return the settings of the probe's list that the kernel has; several numbers are separated by one blank."""
    values = {name: bundle.value("/proc/sys/" + name.replace(".", "/")) for name in SYSCTLS}
    known = {name: " ".join(value.split()) for name, value in values.items() if value is not None}
    if not known:
        raise bundle.not_collected()
    return known


def read_limits(bundle: BundleReader) -> Limits:
    """Return systemd's default limits, and the lines of limits.conf and limits.d."""
    names = [name for name in bundle.folder(_LIMITS_FOLDER) or () if name.endswith(".conf")]
    settings = [
        limit
        for path in (_LIMITS, *(_LIMITS_FOLDER + name for name in names))
        for limit in parse_limits(bundle.text(path) or "", path)
    ]
    return Limits(defaults=_defaults(bundle) if read_systemd(bundle) else None, settings=tuple(settings))


def parse_limits(text: str, path: str) -> tuple[Limit, ...]:
    """Parse limits.conf(5); lines that PAM cannot parse are left out, as in PAM."""
    limits = []
    for line in text.splitlines():
        words = line[:_LINE_LIMIT].partition("#")[0].split()
        if len(words) == 4 and words[1] in {"soft", "hard", "-"}:
            limits.append(Limit(path=path, domain=words[0], type=words[1], item=words[2], value=words[3]))
    return tuple(limits)


def _defaults(bundle: BundleReader) -> dict[str, str]:
    defaults = {}
    for line in bundle.output("systemctl-defaults").splitlines():
        name, equals, value = line.partition("=")
        if not equals or not name.startswith("DefaultLimit"):
            raise ParseError(f"expected DefaultLimit... from systemctl show, found '{first_line(line)}'")
        defaults[name.removeprefix("DefaultLimit").lower()] = value
    return defaults


def read_environment(bundle: BundleReader) -> tuple[EnvironmentSetting, ...]:
    """Return variables of the probe's list in ``/etc/environment``, profile.d and similar files, and in systemd's
    environment."""
    return tuple(
        EnvironmentSetting(path=path, name=name, value=value) for path, name, value in bundle.rows("variables", 3)
    )


def read_boot_settings(bundle: BundleReader) -> tuple[BootSetting, ...]:
    """Return the kernel settings that the next boot applies."""
    return tuple(
        BootSetting(path=path, name=name, value=value) for path, name, value in bundle.rows("boot-settings", 3)
    )


def read_boot_arguments(bundle: BundleReader) -> tuple[str, ...]:
    """Return the arguments that the role kernel_tuning recorded: the second line of its file."""
    lines = (bundle.text(_ARGUMENTS) or "").splitlines()
    return tuple(lines[1].split()) if len(lines) > 1 else ()


class SettingsFacts(FactArea):
    """Settings of the system."""

    lockdown: str | None = fact(read_lockdown)
    """``none``, ``integrity``, ``confidentiality``; ``none`` if the kernel does not support lockdown."""
    sysctl: dict[str, str] | None = fact(read_sysctl)
    """Kernel settings by name, if the kernel has them: ``{"vm.swappiness": "60"}``."""
    boot_settings: tuple[BootSetting, ...] | None = fact(read_boot_settings)
    """Values that files of sysctl.d and tmpfiles.d set for these at the next boot."""
    boot_arguments: tuple[str, ...] | None = fact(read_boot_arguments)
    """Arguments that the role kernel_tuning added to the boot loader's command line; empty: none."""
    limits: Limits | None = fact(read_limits)
    environment: tuple[EnvironmentSetting, ...] | None = fact(read_environment)
    """Variables of a fixed list (CUDA_LAUNCH_BLOCKING, NCCL_DEBUG …) that are set for the whole system."""


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
