"""The running system: clock, uptime, load, stuck processes."""

import re

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact
from gpunode.facts.units import read_units

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


class TimeSync(Fact):
    """The clock."""

    VOLATILE = frozenset({"offset_s"})

    synchronized: bool | None
    """True if the kernel reports a synchronized clock. None if this could not be determined."""
    service: str | None
    """The active unit: ``chrony.service``, ``systemd-timesyncd.service`` …; None if there is none."""
    offset_s: float | None = None
    """chrony's estimate of the clock's offset."""
    timezone: str | None = None


class Process(Fact):
    """A process that waits in the kernel and cannot be killed (state D), found twice in a row."""

    pid: int
    name: str
    waits_in: str | None = None
    """The kernel's function, if root may read it."""


def read_time_sync(bundle: BundleReader) -> TimeSync:
    """Return the kernel's state of the clock by timedatectl, the active unit, and the offset by chrony."""
    active = {unit.name for unit in (read_units(bundle) or ()) if unit.active == "active"}
    values = {}
    if not bundle.command("timedatectl").missing:
        for line in bundle.output("timedatectl").splitlines():
            name, equals, value = line.partition("=")
            if not equals:
                raise ParseError(f"expected NAME=VALUE from timedatectl show, found '{first_line(line)}'")
            values[name] = value
    return TimeSync(
        synchronized={"yes": True, "no": False}.get(values.get("NTPSynchronized", "")),
        service=next((name for name in _SERVICES if name in active), None),
        offset_s=_chrony_offset(bundle),
        timezone=values.get("Timezone") or None,
    )


def _chrony_offset(bundle: BundleReader) -> float | None:
    """Return the system time's offset, the fifth field of ``chronyc -c tracking``; None if chrony does not respond."""
    try:
        fields = bundle.output("chronyc-tracking").strip().split(",")
    except UnknownFactError:
        return None
    if len(fields) != _CHRONY_FIELDS or not _DECIMAL.fullmatch(fields[4]):
        return None
    return float(fields[4])


def read_uptime_s(bundle: BundleReader) -> float:
    """Return the seconds in ``/proc/uptime``."""
    return _first_number(bundle, "/proc/uptime")


def read_load_1min(bundle: BundleReader) -> float:
    """Return the first figure of ``/proc/loadavg``."""
    return _first_number(bundle, "/proc/loadavg")


def _first_number(bundle: BundleReader, path: str) -> float:
    words = (bundle.text(path) or "")[:200].split()
    if not words or not _DECIMAL.fullmatch(words[0]):
        raise ParseError(f"expected a number in {path}, found '{words[0][:40] if words else 'nothing'}'")
    return float(words[0])


def read_stuck_processes(bundle: BundleReader) -> tuple[Process, ...]:
    """Return the processes that the probe found in state D twice."""
    processes = []
    for pid, name, function in bundle.rows("stuck-processes", 3):
        if whole(pid) is None:
            raise ParseError(f"expected a process number, found '{first_line(pid)}'")
        processes.append(Process(pid=int(pid), name=name, waits_in=function or None))
    return tuple(processes)


def read_cloud_init_running(bundle: BundleReader) -> bool:
    """Return True between cloud-init's first record of its state and that of its result (``/run/cloud-init``)."""
    signs = bundle.look("signs")
    return "/run/cloud-init/status.json" in signs and "/run/cloud-init/result.json" not in signs


def read_unanswered(bundle: BundleReader) -> tuple[str, ...]:
    """Return the commands that hung, or exceeded the probe's limit."""
    return bundle.unanswered()


class RunningFacts(FactArea):
    """The running system."""

    time_sync: TimeSync | None = fact(read_time_sync)
    uptime_s: float | None = fact(read_uptime_s, volatile=True)
    """Seconds since the boot."""
    load_1min: float | None = fact(read_load_1min, volatile=True)
    """The load average of the last minute."""
    stuck_processes: tuple[Process, ...] | None = fact(read_stuck_processes, volatile=True)
    cloud_init_running: bool | None = fact(read_cloud_init_running, volatile=True)
    """True while cloud-init sets the node up; False: it is done, or not installed."""
    unanswered: tuple[str, ...] | None = fact(read_unanswered, volatile=True)
    """Commands that did not end in time, as they were called, without those that were not run because of them."""
