"""The running system: clock, uptime, load, stuck processes, and systemd's units."""

import re

from pydantic import Field

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.system import read_systemd

NO_SYSTEMD = "the node was not booted with systemd"
_MARK = re.compile(r"\s*(?:[\u25cf\u25cb\u00d7*x]\s+)?")
"""The mark that systemctl prints before a unit's name, with and without ``--plain``."""


class Unit(Fact):
    """One systemd unit."""

    VOLATILE = frozenset({"sub", "since", "started_s"})
    COUNTERS = frozenset({"restarts"})

    name: str
    load: str
    active: str
    sub: str
    enabled: str | None = None
    since: str | None = None
    """Time of its last change of state, as systemd prints it (``Fri 2026-11-20 09:00:01 UTC``); None if it never
    changed."""
    restarts: int | None = None
    """Number of automatic restarts since the unit was last started manually."""
    started_s: float | None = None
    """Seconds from the boot to its latest start; None if it was never active."""
    limits: dict[str, str] = Field(default_factory=dict)
    """``{"memlock": "infinity", "nofile": "1048576"}``: the hard limits of a service's processes."""


def read_units(bundle: BundleReader) -> tuple[Unit, ...] | None:
    """Return failed units and the GPU stack's; a unit that the node does not have is left out.

    None for a node that was not booted with systemd: a container, a guest with an init of its own.
    """
    if not read_systemd(bundle):
        return None
    stack = bundle.once("systemctl-units", lambda: parse_show(bundle.output("systemctl-units")))
    failed = parse_units(bundle.output("systemctl-failed"))
    known = {unit.name for unit in stack}
    return (
        *(unit for unit in stack if unit.load != "not-found"),
        *(unit for unit in failed if unit.name not in known),
    )


def _seconds(text: str | None) -> float | None:
    """Return microseconds as seconds; None for 0, by which systemd reports that it did not happen."""
    number = whole(text)
    return number / 1e6 if number else None


def parse_units(text: str) -> tuple[Unit, ...]:
    """Parse ``systemctl list-units --plain --no-legend``."""
    units = []
    for line in text.splitlines():
        if not line.strip():
            continue
        words = _MARK.sub("", line, count=1).split(None, 4)
        if len(words) < 4:
            raise ParseError(f"expected a line of systemctl list-units, found '{first_line(line)}'")
        units.append(Unit(name=words[0], load=words[1], active=words[2], sub=words[3]))
    return tuple(units)


def parse_show(text: str) -> tuple[Unit, ...]:
    """Parse ``systemctl show -p PROPERTIES UNIT...`` with the probe's properties, one block per unit."""
    units = []
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines() if line)
        if not values:
            continue
        if not all(values.get(name) for name in ("Id", "LoadState", "ActiveState", "SubState")):
            raise ParseError(f"expected Id and states from systemctl show, found '{first_line(block)}'")
        units.append(
            Unit(
                name=values["Id"],
                load=values["LoadState"],
                active=values["ActiveState"],
                sub=values["SubState"],
                enabled=values.get("UnitFileState") or None,
                since=values.get("StateChangeTimestamp") or None,
                restarts=whole(values.get("NRestarts")),
                started_s=_seconds(values.get("ActiveEnterTimestampMonotonic")),
                limits={
                    name[5:].lower(): value for name, value in values.items() if name.startswith("Limit") and value
                },
            )
        )
    if not units:
        raise ParseError("expected states from systemctl show, found nothing")
    return tuple(units)


class UnitsFacts(FactArea):
    """Units of systemd."""

    units: tuple[Unit, ...] | None = fact(read_units, none_means=NO_SYSTEMD)
    """Failed units, and installed units of the GPU stack, containers, time, RDMA and schedulers."""


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
