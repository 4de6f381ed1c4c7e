"""Units of systemd: failed ones, and those of the GPU stack."""

import re

from pydantic import Field

from gpunode.facts.bundle_reader import BundleReader, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact
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
    failed = parse_list(bundle.output("systemctl-failed"))
    known = {unit.name for unit in stack}
    return (
        *(unit for unit in stack if unit.load != "not-found"),
        *(unit for unit in failed if unit.name not in known),
    )


def _seconds(text: str | None) -> float | None:
    """Return microseconds as seconds; None for 0, by which systemd reports that it did not happen."""
    number = whole(text)
    return number / 1e6 if number else None


def parse_list(text: str) -> tuple[Unit, ...]:
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
