"""Sensors and events that the management controller (BMC) reports over IPMI."""

from typing import Literal

from gpunode.facts.models.base import Fact

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
