"""Fans, power supplies and events of the management controller, from ipmitool.

The formats are those of ipmitool's manual (``sdr type``, ``sel list``); the tests contain lines of real controllers.
"""

import re
from datetime import datetime
from typing import Literal

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact

_REFUSED = re.compile(r"permission denied|operation not permitted", re.I)
_NO_DEVICE = re.compile(r"could not open device .*no such (?:file|device)", re.I)
_NO_PROGRAM = 127
_LINE_LIMIT = 500
_SENSOR_FIELDS = 5
_EVENT_FIELDS = 5
_DIRECTIONS = {"asserted": True, "deasserted": False}
_STATUS = re.compile(r"ok|ns|us|nc|cr|nr|[lu](?:nc|cr|nr)")


BmcAccess = Literal["read", "no-device", "no-program", "no-permission"]


class BmcSensor(Fact):
    """One line of ``ipmitool sdr type TYPE``."""

    VOLATILE = frozenset({"reading"})

    name: str
    status: str
    """``ok``, ``ns`` (no reading), ``nc`` (not critical), ``cr`` (critical), ``nr`` (not recoverable)."""
    reading: str
    """``5600 RPM``, ``Presence detected, Failure detected``, ``No Reading``."""


class BmcEvent(Fact):
    """One line of ``ipmitool sel list``."""

    sensor: str
    """``Power Supply #0x3b``; the whole text of a line in another format."""
    event: str
    """``Power Supply AC lost``; empty for a line in another format."""
    asserted: bool | None
    """False if the event ended; None if the line does not contain it."""
    time: str | None = None
    """By the BMC's own clock, as ``2021-09-08T06:34:15``; None before that clock was set."""


def read_bmc_access(bundle: BundleReader) -> BmcAccess:
    """Return whether the controller can be queried: needs a kernel device, the program ipmitool, and permission for
    both."""
    if not bundle.look("ipmi-devices"):
        return "no-device"
    answer = bundle.raw("ipmi-fans")
    if answer is None:
        raise bundle.not_collected()
    if answer.rc == _NO_PROGRAM:
        return "no-program"
    if answer.rc != 0 and _REFUSED.search(answer.stderr):
        return "no-permission"
    return "no-device" if answer.rc != 0 and _NO_DEVICE.search(answer.stderr) else "read"


def read_bmc_fans(bundle: BundleReader) -> tuple[BmcSensor, ...]:
    """Return the sensors of ``ipmitool sdr type Fan``; empty if the controller cannot be queried."""
    return _sensors(bundle, "ipmi-fans")


def read_bmc_power_supplies(bundle: BundleReader) -> tuple[BmcSensor, ...]:
    """Return the sensors of ``ipmitool sdr type "Power Supply"``; empty if the controller cannot be queried."""
    return _sensors(bundle, "ipmi-power-supplies")


def read_bmc_events(bundle: BundleReader) -> tuple[BmcEvent, ...]:
    """Return the events of ``ipmitool sel list last N``, in the log's order; empty if the controller cannot be
    queried."""
    if read_bmc_access(bundle) != "read":
        return ()
    return tuple(_event(line[:_LINE_LIMIT]) for line in bundle.output("ipmi-events").splitlines() if "|" in line)


def _sensors(bundle: BundleReader, key: str) -> tuple[BmcSensor, ...]:
    if read_bmc_access(bundle) != "read":
        return ()
    lines = [line[:_LINE_LIMIT] for line in bundle.output(key).splitlines() if line.strip()]
    return tuple(_sensor(line) for line in lines)


def _sensor(line: str) -> BmcSensor:
    """Parse ``PS1 Status       | C8h | ok  | 10.1 | Presence detected``."""
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != _SENSOR_FIELDS or not _STATUS.fullmatch(fields[2]):
        raise ParseError(f"expected a sensor's line of ipmitool sdr, found '{first_line(line)}'")
    return BmcSensor(name=fields[0], status=fields[2], reading=fields[4])


def _event(line: str) -> BmcEvent:
    """Parse ``7 | 09/08/2021 | 06:34:15 | Power Supply #0x3b | Failure detected | Asserted``.

    Some records have no direction, readings after it, or another format (``9 | Linux kernel panic: ...``).
    """
    fields = [field.strip() for field in line.split("|")]
    if len(fields) < _EVENT_FIELDS:
        return BmcEvent(sensor=" ".join(fields[1:]), event="", asserted=None)
    direction = next((word for field in fields[_EVENT_FIELDS:] if (word := field.lower()) in _DIRECTIONS), None)
    return BmcEvent(
        sensor=fields[3],
        event=fields[4],
        asserted=_DIRECTIONS[direction] if direction else None,
        time=_time(fields[1], fields[2]),
    )


def _time(date: str, clock: str) -> str | None:
    """Return ``YYYY-MM-DDTHH:MM:SS``; the date is month first, and AM or PM and the controller's zone may follow the
    clock."""
    words = clock.split()
    hours = words[0] if words else ""
    half = words[1].upper() if len(words) > 1 and words[1].upper() in {"AM", "PM"} else None
    for day in ("%m/%d/%Y", "%m/%d/%y"):
        try:
            form = f"{day} %I:%M:%S %p" if half else f"{day} %H:%M:%S"
            return datetime.strptime(f"{date} {hours}{f' {half}' if half else ''}", form).isoformat()
        except ValueError:
            continue
    return None


class BmcFacts(FactArea):
    """The management controller."""

    bmc_access: BmcAccess | None = fact(read_bmc_access, needs_root=True)
    """If it is not ``read``, the next three are empty."""
    bmc_fans: tuple[BmcSensor, ...] | None = fact(read_bmc_fans, needs_root=True)
    bmc_power_supplies: tuple[BmcSensor, ...] | None = fact(read_bmc_power_supplies, needs_root=True)
    bmc_events: tuple[BmcEvent, ...] | None = fact(read_bmc_events, needs_root=True, volatile=True)
