"""How the system runs: its clock, uptime, load, processes that are stuck."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import Process, TimeSync
from gpunode.facts.seen import Seen, Unseen, first_line, whole
from gpunode.facts.units import units

_SERVICES = (
    "chrony.service",
    "chronyd.service",
    "ntpsec.service",
    "ntp.service",
    "ntpd.service",
    "systemd-timesyncd.service",
)
_DECIMAL = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")
_CHRONY_FIELDS = 14


def time_sync(seen: Seen) -> TimeSync:
    """timedatectl for what the kernel says, the units for who does it, chrony for how far it is off."""
    active = {unit.name for unit in units(seen) if unit.active == "active"}
    values = {}
    if not seen.command("timedatectl").missing:
        for line in seen.output("timedatectl").splitlines():
            name, equals, value = line.partition("=")
            if not equals:
                raise ParseError(f"expected NAME=VALUE from timedatectl show, found '{first_line(line)}'")
            values[name] = value
    return TimeSync(
        synchronized={"yes": True, "no": False}.get(values.get("NTPSynchronized", "")),
        service=next((name for name in _SERVICES if name in active), None),
        offset_s=_chrony_offset(seen),
        timezone=values.get("Timezone") or None,
    )


def _chrony_offset(seen: Seen) -> float | None:
    """The system time's offset, the fifth field of ``chronyc -c tracking``; None where chrony does not answer."""
    try:
        fields = seen.output("chronyc-tracking").strip().split(",")
    except Unseen:
        return None
    if len(fields) != _CHRONY_FIELDS or not _DECIMAL.fullmatch(fields[4]):
        return None
    return float(fields[4])


def uptime_s(seen: Seen) -> float:
    """From ``/proc/uptime``."""
    return _first_number(seen, "/proc/uptime")


def load_1min(seen: Seen) -> float:
    """From ``/proc/loadavg``."""
    return _first_number(seen, "/proc/loadavg")


def _first_number(seen: Seen, path: str) -> float:
    words = (seen.text(path) or "")[:200].split()
    if not words or not _DECIMAL.fullmatch(words[0]):
        raise ParseError(f"expected a number in {path}, found '{words[0][:40] if words else 'nothing'}'")
    return float(words[0])


def stuck_processes(seen: Seen) -> tuple[Process, ...]:
    """Processes that the probe saw in state D twice."""
    found = []
    for pid, name, function in seen.rows("stuck-processes", 3):
        if whole(pid) is None:
            raise ParseError(f"expected a process number, found '{first_line(pid)}'")
        found.append(Process(pid=int(pid), name=name, waits_in=function or None))
    return tuple(found)


def unanswered(seen: Seen) -> tuple[str, ...]:
    """Commands that hung, or were slower than the probe waits."""
    return seen.unanswered()
