"""How the system is set: lockdown, kernel settings, limits, environment."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import BootSetting, EnvironmentSetting, Limit, Limits
from gpunode.facts.probed import SYSCTLS
from gpunode.facts.seen import Seen, Unseen, first_line
from gpunode.facts.system import systemd

_LOCKDOWN = "/sys/kernel/security/lockdown"
_CHOSEN = re.compile(r"\[([a-z]{1,20})\]")
_LIMITS = "/etc/security/limits.conf"
_LIMITS_FOLDER = "/etc/security/limits.d/"
_LINE_LIMIT = 4000
_ARGUMENTS = "/var/lib/gpunode/kernel_tuning/command-line"


def lockdown(seen: Seen) -> str:
    """The word in brackets; ``none`` where the kernel offers no lockdown."""
    text = seen.text(_LOCKDOWN)
    if text is None:
        return "none"
    match = _CHOSEN.search(text)
    if not match:
        raise ParseError(f"expected a word in brackets in {_LOCKDOWN}, found '{first_line(text)}'")
    return match[1]


def sysctl(seen: Seen) -> dict[str, str]:
    """The probe's list, as far as the kernel has them; several numbers are separated by one blank."""
    found = {name: seen.value("/proc/sys/" + name.replace(".", "/")) for name in SYSCTLS}
    known = {name: " ".join(value.split()) for name, value in found.items() if value is not None}
    if not known:
        raise Unseen("/proc/sys was not read")
    return known


def limits(seen: Seen) -> Limits:
    """systemd's defaults, and the lines of limits.conf and limits.d."""
    names = [name for name in seen.folder(_LIMITS_FOLDER) or () if name.endswith(".conf")]
    settings = [
        limit
        for path in (_LIMITS, *(_LIMITS_FOLDER + name for name in names))
        for limit in parse_limits(seen.text(path) or "", path)
    ]
    return Limits(defaults=_defaults(seen) if systemd(seen) else None, settings=tuple(settings))


def parse_limits(text: str, path: str) -> tuple[Limit, ...]:
    """Read limits.conf(5); lines that PAM would not understand are left out, as PAM does."""
    found = []
    for line in text.splitlines():
        words = line[:_LINE_LIMIT].partition("#")[0].split()
        if len(words) == 4 and words[1] in {"soft", "hard", "-"}:
            found.append(Limit(path=path, domain=words[0], type=words[1], item=words[2], value=words[3]))
    return tuple(found)


def _defaults(seen: Seen) -> dict[str, str]:
    found = {}
    for line in seen.output("systemctl-defaults").splitlines():
        name, equals, value = line.partition("=")
        if not equals or not name.startswith("DefaultLimit"):
            raise ParseError(f"expected DefaultLimit... from systemctl show, found '{first_line(line)}'")
        found[name.removeprefix("DefaultLimit").lower()] = value
    return found


def environment(seen: Seen) -> tuple[EnvironmentSetting, ...]:
    """Variables of the probe's list in ``/etc/environment``, profile.d and their like, and in systemd's environment."""
    return tuple(
        EnvironmentSetting(path=path, name=name, value=value) for path, name, value in seen.rows("variables", 3)
    )


def boot_settings(seen: Seen) -> tuple[BootSetting, ...]:
    """Return kernel settings that the next boot sets."""
    return tuple(BootSetting(path=path, name=name, value=value) for path, name, value in seen.rows("boot-settings", 3))


def boot_arguments(seen: Seen) -> tuple[str, ...]:
    """Return the words that the role kernel_tuning recorded: its second line."""
    lines = (seen.text(_ARGUMENTS) or "").splitlines()
    return tuple(lines[1].split()) if len(lines) > 1 else ()
