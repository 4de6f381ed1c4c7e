"""Checks on what the management controller (BMC) reports: its event log, fans, power supplies."""

import re
from collections.abc import Iterator
from datetime import timedelta

from gpunode.checks.compare import Scale, passed, skipped, warned
from gpunode.checks.registry import CheckResult, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.node import NodeFacts
from gpunode.facts.system import BmcEvent, BmcSensor
from gpunode.text import counted, is_recent, listed

IPMI = "IPMI 2.0, sensor types and event states as ipmitool prints them"
OBSTACLES = {
    "no-device": "no IPMI device, or no BMC connected to it",
    "no-program": "the program ipmitool is not installed",
    "no-permission": "reading the BMC requires root",
}
FAULTS = re.compile(
    r"(?<!predictive )\bfail(?:ed|ure)\b|\b(?:AC|input) lost\b|out-of-range|redundancy lost|uncorrectable"
    r"|non-redundant: insufficient|\bIERR\b|thermal trip|bus (?:fatal|uncorrectable) error|\b[PS]ERR\b|FRB\d"
    r"|kernel panic|run-time critical stop|transition to (?:critical|non-recoverable)"
    r"|(?:upper|lower) (?:critical|non-recoverable) going|config(?:uration)? error",
    re.I,
)
SIGNS = re.compile(r"predictive|non-redundant|redundancy degraded|inactive|non-critical", re.I)
"""Events that announce a fault, or report lost redundancy."""
LOOK_BACK = Threshold(
    "bmc.events.look-back",
    30,
    "days",
    "Older events of the log are ignored.",
    source="our choice: the log is kept until it is cleared",
)
STILL = Threshold("bmc.fans.still", 0, "RPM", "A fan at this speed or below counts as stopped.", source="our choice")
BAD_STATUS, ODD_STATUS = ("cr", "nr", "lcr", "ucr", "lnr", "unr"), ("nc", "lnc", "unc")
_RPM = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) RPM")


def _obstacle(node: NodeFacts) -> CheckResult | None:
    reason = OBSTACLES.get(node.bmc_access or "")
    return skipped(reason) if reason else None


@registry.check(
    "bmc.events",
    needs=("bmc_access", "bmc_events"),
    means="The BMC's event log has no fault that is not over: memory, processors, PCI Express, power, heat.",
    remedy="ipmitool sel elist shows the whole log; ipmitool sel clear empties it once the fault is repaired.",
    actions=("open_support_case", "replace_hardware"),
    state="observe",
    category="host",
    bare_metal=True,
    thresholds=(LOOK_BACK,),
)
def events(node: NodeFacts) -> Iterator[CheckResult]:
    obstacle = _obstacle(node)
    if obstacle is not None:
        yield obstacle
        return
    recent = [event for event in node.bmc_events or () if _is_recent(node, event)]
    open_faults = _not_over(recent)
    events_of: Scale = {"unit": "events", "source": IPMI}
    for sensor, faults in sorted(open_faults.items()):
        last = faults[-1]
        when = f", last at {last.time}" if last.time else ""
        message = f"{sensor}: {last.event or 'see the log'}, {counted(len(faults), 'event')}{when}"
        yield warned(message, expected=0, measured=len(faults), **events_of)
    if not open_faults:
        yield passed(
            f"no open fault in {counted(len(recent), 'event')} of the log", expected=0, measured=0, **events_of
        )


def _is_recent(node: NodeFacts, event: BmcEvent) -> bool:
    """Return True for a recent event, and for one without a time: the BMC's clock was not set."""
    return is_recent(event.time, node.collected_at, timedelta(days=LOOK_BACK.value))


def _not_over(recent: list[BmcEvent]) -> dict[str, list[BmcEvent]]:
    """Return faults by their sensor, without those that ended later in the log."""
    faults: dict[str, list[BmcEvent]] = {}
    for event in recent:
        if event.asserted is False:
            left = [fault for fault in faults.get(event.sensor, []) if fault.event != event.event]
            faults[event.sensor] = left
        elif FAULTS.search(event.event or event.sensor) or "predictive" in event.event.lower():
            faults.setdefault(event.sensor, []).append(event)
    return {sensor: events for sensor, events in faults.items() if events}


@registry.check(
    "bmc.fans",
    needs=("bmc_access", "bmc_fans"),
    means="Every fan that the BMC has a reading of turns, within its limits.",
    remedy="Replace the fan; ipmitool sdr type Fan shows all readings.",
    actions=("replace_hardware",),
    state="observe",
    category="host",
    bare_metal=True,
    thresholds=(STILL,),
)
def fans(node: NodeFacts) -> Iterator[CheckResult]:
    return _sensors(node, node.bmc_fans or (), "fan")


@registry.check(
    "bmc.power-supplies",
    needs=("bmc_access", "bmc_power_supplies"),
    means="Every installed power supply has input power and reports no failure, and the machine reports "
    "redundancy where it supports it.",
    remedy='Check the cable and the input, then replace it; ipmitool sdr type "Power Supply" shows all readings.',
    actions=("replace_hardware",),
    state="observe",
    category="host",
    bare_metal=True,
)
def power_supplies(node: NodeFacts) -> Iterator[CheckResult]:
    return _sensors(node, node.bmc_power_supplies or (), "power supply")


def _sensors(node: NodeFacts, sensors: tuple[BmcSensor, ...], kind: str) -> Iterator[CheckResult]:
    obstacle = _obstacle(node)
    read = [sensor for sensor in sensors if sensor.status not in {"ns", "us"}]
    if obstacle is not None or not read:
        yield obstacle or skipped(f"the BMC has no reading of a {kind}")
        return
    good = []
    for sensor in read:
        status = _status_of(sensor)
        if status is Status.PASS:
            good.append(sensor.name)
        else:
            message = f"{sensor.reading or 'no reading'} (status {sensor.status})"
            yield CheckResult(status, message, sensor.name, expected="ok", measured=sensor.status, source=IPMI)
    if good:
        yield passed(f"good: {listed(good)}", expected="ok", measured="ok", source=IPMI)


def _status_of(sensor: BmcSensor) -> Status:
    turns = _RPM.search(sensor.reading)
    if sensor.status in BAD_STATUS or FAULTS.search(sensor.reading):
        return Status.FAIL
    if turns and float(turns[1]) <= STILL.value:
        return Status.FAIL
    return Status.WARN if sensor.status in ODD_STATUS or SIGNS.search(sensor.reading) else Status.PASS
