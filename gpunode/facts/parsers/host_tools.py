"""Tools that list hardware of the host: ``lspci``, ``numactl --hardware``, ``ibstat`` and ``ibstatus``."""

import re
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import Ibstat, Lspci, Numactl
from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import found_text, lines_of, number, shorten, text_or_none

_DEVICE = re.compile(r"(?P<slot>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<rest>\S.*)")
_NUMBERS_ONLY = re.compile(r"(?P<class_id>[0-9a-f]{4}): (?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\b.*")
_CLASS_ID = re.compile(r"(.*?) \[([0-9a-f]{4})\]")
_IDS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\](?=[^\[\]]*$|.*\(rev)")
_UNNAMED = re.compile(r"\bDevice ([0-9a-f]{4})\b")
_REVISION = re.compile(r"\s*\((?:rev [0-9a-f]{2}|prog-if [^()]*(?:\([^()]*\))?[^()]*)\)\s*$")
_OPEN_BRACKET = re.compile(r"\s\([^()]*$")
_SUBSYSTEM = re.compile(r"\s+Subsystem: (.*)")
_DRIVER = re.compile(r"\s+Kernel driver in use: (\S+)\s*")
_LINK = re.compile(
    r"\s+(?P<side>LnkCap|LnkSta):\s+(?:Port #\d+, )?Speed (?P<speed>[\d.]{1,6}GT/s|unknown)(?: \([^)]*\))?, "
    r"Width (?:x(?P<width>\d{1,2})|unknown)\b"
)
_VENDORS = {"NVIDIA Corporation": "10de", "Mellanox Technologies": "15b3"}
"""Vendors by their name in pci.ids, for the ids that the parser needs."""

_LINE_LIMIT = 1000


def parse_lspci(text: str) -> Lspci:
    """Parse the devices.

    Ids are lower case without ``0x``, from ``-nn`` or ``-n``. Without these options the device's id is known only if
    lspci has no name for it (``Device 2330``), and the vendor's only for NVIDIA and Mellanox, by name; else they are
    None.

    Raise ParseError for other text and if the last device's line is truncated.
    """
    lines = lines_of(text)
    if lines[-1].strip() and not _DEVICE.fullmatch(lines[-1]):
        lines.pop()
    devices: list[dict[str, Any]] = []
    for raw in lines:
        line = raw[:_LINE_LIMIT].rstrip()
        match = _DEVICE.fullmatch(line)
        if match:
            devices.append(_device(match))
        elif devices:
            _take_detail(devices[-1], line)
    if not devices:
        raise ParseError(f"expected lines of lspci such as '1a:00.0 3D controller: ...', {found_text(text)}")
    last = devices[-1]
    numbered = sum(device["class_id"] is not None for device in devices)
    if numbered > len(devices) / 2 and not (last["class_id"] and last["device_id"]):
        raise ParseError(f"expected ids in every line of lspci -nn, found the last cut: '{shorten(last['slot'])}'")
    return checked(Lspci, {"devices": devices}, "lines of lspci")


def _device(match: re.Match[str]) -> dict[str, Any]:
    device: dict[str, Any] = {
        "slot": match["slot"],
        "class": None,
        "class_id": None,
        "vendor_id": None,
        "device_id": None,
        "subsystem_id": None,
        "description": None,
        "link": None,
        "kernel_driver": None,
    }
    rest = match["rest"]
    plain = _NUMBERS_ONLY.fullmatch(rest)
    if plain:
        return device | {"class_id": plain["class_id"], "vendor_id": plain["vendor"], "device_id": plain["device"]}
    name, colon, described = rest.partition(": ")
    if not colon:
        raise ParseError(f"expected 'CLASS: DEVICE' in a line of lspci, found '{shorten(rest)}': it is cut")
    while (shorter := _REVISION.sub("", described)) != described:
        described = shorter
    with_id = _CLASS_ID.fullmatch(name)
    device["class"] = with_id[1] if with_id else name
    device["class_id"] = with_id[2] if with_id else None
    device["vendor_id"], device["device_id"] = _ids(described)
    device["description"] = _OPEN_BRACKET.sub("", _IDS.sub("", described)).strip() or None
    return device


def _ids(described: str) -> tuple[str | None, str | None]:
    ids = _IDS.search(described)
    if ids:
        return ids[1], ids[2]
    vendor = next((number_ for name, number_ in _VENDORS.items() if described.startswith(name)), None)
    unnamed = _UNNAMED.search(described)
    return vendor, unnamed[1] if unnamed else None


def _take_detail(device: dict[str, Any], line: str) -> None:
    subsystem = _SUBSYSTEM.fullmatch(line)
    driver = _DRIVER.fullmatch(line)
    link = _LINK.match(line)
    if subsystem:
        vendor, part = _ids(subsystem[1])
        device["subsystem_id"] = f"{vendor}:{part}" if vendor and part else None
    elif driver:
        device["kernel_driver"] = driver[1]
    elif link:
        known = device["link"] or dict.fromkeys(("speed_gt_per_s", "width", "speed_max_gt_per_s", "width_max"))
        suffix = "_max" if link["side"] == "LnkCap" else ""
        known[f"speed{suffix}_gt_per_s"] = number(link["speed"].removesuffix("GT/s"))
        known[f"width{suffix}"] = int(link["width"]) if link["width"] else None
        device["link"] = known


_AVAILABLE = re.compile(r"\s*available: (\d{1,6}) nodes? \(([\d,-]*)\)\s*")
_CPUS = re.compile(r"\s*node (\d{1,6}) cpus:((?: \d{1,6})*)\s*")
_MEMORY = re.compile(r"\s*node (\d{1,6}) (size|free): (\d{1,12}) MB\s*")
_DISTANCES = re.compile(r"\s*node distances:\s*")
_DISTANCE_HEAD = re.compile(r"\s*node((?:\s+\d{1,6})+)\s*")
_DISTANCE_ROW = re.compile(r"\s*(\d{1,6}):((?:\s+\d{1,6})+)\s*")
_NO_DISTANCES = re.compile(r"\s*No distance information available\.?\s*")
_NO_NUMA = re.compile(r"\s*+(?:.*: )?(No NUMA (?:available|support).*)")
_LOCAL = 10
"""The distance of a node to itself in the table of every firmware."""

_NUMA_LINE_LIMIT = 60_000


def parse_numactl(text: str) -> Numactl | Failure:
    """Parse the nodes and their distances; numactl's MB are 2^20. Without NUMA, return numactl's error.

    Raise ParseError for other text and for truncated text.
    """
    reading = _Reading(last_is_open=not text.endswith(("\n", "\r")))
    for raw in lines_of(text):
        reading.take(raw[:_NUMA_LINE_LIMIT])
    if reading.expected is None:
        message = next(
            (match[1] for line in lines_of(text) if (match := _NO_NUMA.match(line[:_NUMA_LINE_LIMIT]))), None
        )
        if message is None:
            raise ParseError(f"expected numactl --hardware with a line 'available: N nodes (...)', {found_text(text)}")
        return Failure(error=ToolError(kind="other", message=message.strip()))
    return reading.answer()


class _Reading:
    def __init__(self, *, last_is_open: bool) -> None:
        self._last_is_open = last_is_open
        self.expected: int | None = None
        self._nodes: dict[int, dict[str, Any]] = {}
        self._columns: list[int] | None = None
        self._rows: dict[int, list[int]] = {}
        self._no_distances = False

    def take(self, line: str) -> None:
        available = _AVAILABLE.fullmatch(line)
        cpus = _CPUS.fullmatch(line)
        memory = _MEMORY.fullmatch(line)
        head = _DISTANCE_HEAD.fullmatch(line)
        row = _DISTANCE_ROW.fullmatch(line)
        if available:
            if self.expected is not None:
                raise ParseError("expected the output of one numactl --hardware, found two in one text")
            self.expected = int(available[1])
        elif cpus:
            node = self._node(int(cpus[1]))
            if node["cpus"] is not None:
                raise ParseError(f"expected the CPUs of node {cpus[1]} once in numactl --hardware, found them twice")
            node["cpus"] = [int(cpu) for cpu in cpus[2].split()]
        elif memory:
            key = "memory_total_mib" if memory[2] == "size" else "memory_free_mib"
            self._node(int(memory[1]))[key] = int(memory[3])
        elif head and self._columns is None:
            self._columns = [int(node) for node in head[1].split()]
        elif row and self._columns is not None:
            self._rows[int(row[1])] = [int(distance) for distance in row[2].split()]
        elif _NO_DISTANCES.fullmatch(line):
            self._no_distances = True
        elif self.expected is not None and line.lstrip().startswith("node ") and not _DISTANCES.fullmatch(line):
            raise ParseError(f"expected a line of numactl --hardware, found '{shorten(line)}'")

    def _node(self, number: int) -> dict[str, Any]:
        empty: dict[str, Any] = {"node": number, "cpus": None, "memory_total_mib": None, "memory_free_mib": None}
        return self._nodes.setdefault(number, empty)

    def answer(self) -> Numactl:
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        if len(nodes) != self.expected or any(node["cpus"] is None for node in nodes):
            raise ParseError(
                f"expected {self.expected} nodes in numactl --hardware, found {len(nodes)}: the text is cut"
            )
        distances = self._distances([node["node"] for node in nodes])
        return checked(Numactl, {"nodes": nodes, "distances": distances}, "numactl --hardware")

    def _distances(self, nodes: list[int]) -> list[list[int]]:
        if self._no_distances and not self._rows:
            return []
        if self._columns is None or any(len(self._rows.get(node, [])) != len(self._columns) for node in nodes):
            raise ParseError("expected the distances of all nodes in numactl --hardware, found them cut")
        if sorted(self._columns) != nodes:
            raise ParseError("expected the distances of the listed nodes in numactl --hardware, found those of others")
        if self._last_is_open and self._rows[nodes[-1]][self._columns.index(nodes[-1])] != _LOCAL:
            raise ParseError("expected a whole last line of numactl --hardware, found it cut")
        positions = [self._columns.index(node) for node in nodes]
        return [[self._rows[node][position] for position in positions] for node in nodes]


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


def parse_ibstat(text: str) -> Ibstat | Failure:
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
