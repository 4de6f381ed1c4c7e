"""System settings: lockdown, kernel settings, limits, environment."""

import re

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact
from gpunode.facts.probed import SYSCTLS
from gpunode.facts.system import read_systemd

_LOCKDOWN = "/sys/kernel/security/lockdown"
_CHOSEN = re.compile(r"\[([a-z]{1,20})\]")
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
    text = bundle.text(_LOCKDOWN)
    if text is None:
        return "none"
    match = _CHOSEN.search(text)
    if not match:
        raise ParseError(f"expected a word in brackets in {_LOCKDOWN}, found '{first_line(text)}'")
    return match[1]


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
