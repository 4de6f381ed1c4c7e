"""``ibstat`` and ``ibstatus``: InfiniBand and RoCE adapters and their ports."""

import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import Ibstat
from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import found_text, lines_of, number, text_or_none

_CA = re.compile(r"\s*CA '([^']{1,64})'\s*")
_STATUS_HEADING = re.compile(r"\s*Infiniband device '([^']{1,64})' port (\d{1,3}) status:\s*", re.I)
_PORT = re.compile(r"\s*Port (\d{1,3}):\s*")
_FIELD = re.compile(r"\s*([A-Za-z][\w ]{1,30}):\s*(.*?)\s*")
_NUMBERED_STATE = re.compile(r"\d{1,3}: (\S.*)")
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(?: Gb/sec.*| \(.*\))?")
_FAILURE = re.compile(r"\s*(?:ibpanic:|ibwarn:|ibstat(?:us)?:|can't\b|Fatal error:|No (?:CA|IB|InfiniBand)).*", re.I)
_CA_FIELDS = {"ca type": "type", "firmware version": "firmware", "number of ports": "_ports"}
_PORT_FIELDS = {
    "state": "state",
    "physical state": "physical_state",
    "phys state": "physical_state",
    "rate": "rate_gbit_per_s",
    "base lid": "lid",
    "port guid": "guid",
    "link layer": "link_layer",
    "link_layer": "link_layer",
}
_LAST_FIELD = "link_layer"
_LINE_LIMIT = 1000


def parse(text: str) -> Ibstat | Failure:
    """Parse the adapters and their ports.

    For a truncated listing the complete part is returned, and ``messages`` has a line about it. If the text is only an
    error, return the error. Raise ParseError otherwise.
    """
    lines = [line[:_LINE_LIMIT] for line in lines_of(text)]
    last_is_cut = bool(lines[-1].strip()) and not _FAILURE.fullmatch(lines[-1])
    listing = _Listing()
    for line in lines[:-1] if last_is_cut and not _ends_a_port(lines[-1]) else lines:
        listing.take(line)
    if not listing.cas:
        if not listing.messages:
            raise ParseError(f"expected the listing of ibstat or ibstatus, {found_text(text)}")
        kind = "no-devices" if re.search(r"\bno (?:CA|IB|InfiniBand|device)", listing.messages[0], re.I) else "other"
        return Failure(error=ToolError(kind=kind, message=listing.messages[0]))
    return listing.answer()


def _ends_a_port(line: str) -> bool:
    """Return True for the last field of a port; its values are words, so that a truncated one is recognized."""
    field = _FIELD.fullmatch(line)
    return (
        field is not None
        and _PORT_FIELDS.get(field[1].lower()) == _LAST_FIELD
        and field[2] in {"InfiniBand", "Ethernet"}
    )


class _Listing:
    def __init__(self) -> None:
        self.cas: dict[str, dict[str, Any]] = {}
        self.messages: list[str] = []
        self._ca: dict[str, Any] | None = None
        self._port: dict[str, Any] | None = None

    def take(self, line: str) -> None:
        ca = _CA.fullmatch(line)
        status = _STATUS_HEADING.fullmatch(line)
        port = _PORT.fullmatch(line)
        if ca:
            if ca[1] in self.cas:
                raise ParseError(f"expected every CA once in ibstat, found {ca[1]} twice")
            self._open_ca(ca[1])
        elif status:
            self._open_ca(status[1])
            self._open_port(int(status[2]))
        elif port and self._ca is not None:
            self._open_port(int(port[1]))
        elif _FAILURE.fullmatch(line):
            self.messages.append(line.strip())
        elif field := _FIELD.fullmatch(line):
            self._take_field(field[1].lower(), field[2])

    def _open_ca(self, name: str) -> None:
        empty: dict[str, Any] = {"name": name, "type": None, "firmware": None, "_ports": None, "ports": []}
        self._ca = self.cas.setdefault(name, empty)
        self._port = None

    def _open_port(self, number_: int) -> None:
        ports = self._ca["ports"] if self._ca else []
        if any(port["port"] == number_ for port in ports):
            raise ParseError(f"expected every port once in ibstat, found port {number_} twice")
        self._port = dict.fromkeys(("port", *dict.fromkeys(_PORT_FIELDS.values())))
        self._port["port"] = number_
        ports.append(self._port)

    def _take_field(self, name: str, value: str) -> None:
        if self._port is not None and name in _PORT_FIELDS:
            key = _PORT_FIELDS[name]
            self._port[key] = _value(key, value)
        elif self._ca is not None and self._port is None and name in _CA_FIELDS:
            self._ca[_CA_FIELDS[name]] = text_or_none(value)

    def answer(self) -> Ibstat:
        messages = list(self.messages)
        cas = []
        for ca in self.cas.values():
            expected = number(ca["_ports"])
            if expected is not None and expected != len(ca["ports"]):
                messages.append(f"{ca['name']}: {len(ca['ports'])} of {expected} ports are listed")
            messages += [f"{ca['name']} port {port['port']}: the listing breaks off" for port in _cut(ca["ports"])]
            cas.append({key: value for key, value in ca.items() if key != "_ports"})
        return checked(Ibstat, {"cas": cas, "messages": messages}, "the listing of ibstat")


def _cut(ports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [port for port in ports if port[_LAST_FIELD] is None]


def _value(key: str, value: str) -> Any:
    if key == "rate_gbit_per_s":
        rate = _RATE.fullmatch(value)
        return number(rate[1]) if rate else None
    if key == "lid":
        digits = value.removeprefix("0x")
        base = 16 if digits != value else 10
        valid = re.fullmatch(r"[0-9a-fA-F]{1,8}" if base == 16 else r"\d{1,8}", digits)
        return int(digits, base) if valid else None
    state = _NUMBERED_STATE.fullmatch(value)
    if state:
        return state[1].capitalize() if state[1].isupper() else state[1]
    return text_or_none(value)
