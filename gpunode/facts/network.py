"""Network interfaces and InfiniBand devices, from sysfs and the kernel's routes."""

import re
from collections.abc import Iterator
from ipaddress import IPv4Network

from pydantic import Field

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.pci import slot_of

_NET = "/sys/class/net/"
_IB = "/sys/class/infiniband/"
_NOTHING = "00000000"
_DRIVER = re.compile(r"(?m)^DRIVER=(\S{1,80})$")
_MAPPED = re.compile(r"(?i)(?:0000:){5}ffff:")
"""Prefix of a GID that represents an IPv4 address."""
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec.*")
_PFC = re.compile(r"(?m)^\s*prio-pfc((?: [0-7]:(?:on|off)){1,8})\s*$")
_DSCP = re.compile(r"(?m)^\s*dscp-prio((?: [A-Za-z0-9]{1,6}:[0-7]){1,64})\s*$")
_DCBX = re.compile(r"(?:(?:host|lld-managed|cee|ieee|static)\s+){0,5}")
_CM = "/sys/kernel/config/rdma_cm/"
_CONF = "/proc/sys/net/ipv4/conf/"
_RULE = re.compile(r"[0-9]{1,10}:\s+(?:not )?from (\S{1,50})(?: .{0,200})? lookup \S{1,40}\s*")
_STRICT = 1
_STATE = re.compile(r"[0-9]{1,3}: (\S.*)")


class Nic(Fact):
    """One network interface of hardware; bridges, bonds, veth and loopback are excluded."""

    COUNTERS = frozenset({"carrier_changes", "counters"})

    name: str
    slot: str | None
    driver: str | None
    state: str | None
    """The operational state: ``up``, ``down``, ``unknown``, ``dormant`` …"""
    speed_mbit_per_s: int | None
    """None if the interface is down or does not report it."""
    mtu: int | None
    numa_node: int | None
    carrier_changes: int | None
    """Since boot; the count increases when a link flaps."""
    counters: dict[str, int] = Field(default_factory=dict)
    """``rx_errors``, ``tx_errors``, ``rx_dropped``, ``rx_crc_errors`` …, since boot."""
    pfc: tuple[int, ...] | None = None
    """Priorities with priority-based flow control, by ``dcb``; None: dcb was not run or printed none."""
    dscp: tuple[str, ...] | None = None
    """Code points with a priority of their own, ``26:3``, by ``dcb``; None: dcb was not run or printed none."""
    dcbx: tuple[str, ...] | None = None
    """Who sets the above, by ``dcb``: ``host``, ``lld-managed``, with the protocol; None: dcb was not run or failed."""
    rp_filter: int | None = None
    """The reverse path filter in force: 0 none, 1 strict, 2 loose; None: unknown, or no adapter of RDMA."""
    ecn: tuple[int, ...] | None = None
    """Priorities on which RoCE reacts to congestion marks, as receiver and as sender; None: the driver does not report
    it."""

    @property
    def filters_strictly(self) -> bool | None:
        """Return whether the reverse path filter drops what the node would answer on another interface."""
        return None if self.rp_filter is None else self.rp_filter == _STRICT


class SourceRoutes(Fact):
    """IPv4 networks of the interfaces, and what is routed by its source address."""

    networks: dict[str, tuple[str, ...]]
    """Connected networks of each interface: ``{"rail0": ("10.9.0.0/24",)}``."""
    sources: tuple[str, ...]
    """Addresses and networks with a rule and a table of their own: ``10.9.0.5``, ``10.9.1.0/24``."""


class Gid(Fact):
    """One entry of a port's GID table; programs select an entry by its index."""

    index: int
    type: str
    """``RoCE v2``, ``IB/RoCE v1``."""
    ipv4: bool
    """True if the GID represents an IPv4 address."""


class IbPort(Fact):
    """One port of an InfiniBand or RoCE device."""

    VOLATILE = frozenset({"lid"})
    COUNTERS = frozenset({"counters"})

    port: int
    state: str | None
    """``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``."""
    physical_state: str | None
    """``LinkUp``, ``Disabled``, ``Polling`` …"""
    rate_gbit_per_s: float | None
    rate: str | None
    """As printed: ``400 Gb/sec (4X NDR)``."""
    link_layer: str | None
    """``InfiniBand``, ``Ethernet`` (RoCE), or ``Unknown``: a cloud's own fabric (EFA)."""
    lid: int | None
    interfaces: tuple[str, ...] = ()
    """Network interfaces on top of it."""
    gids: tuple[Gid, ...] = ()
    """The first eight that are in use."""
    cm_tos: int | None = None
    """Traffic class that RDMA CM gives new connections; None: nobody has set it, or the kernel does not report it."""
    counters: dict[str, int] = Field(default_factory=dict)
    """``symbol_error``, ``link_downed``, ``link_error_recovery``, ``port_rcv_errors`` …, since they were cleared."""

    @property
    def of_provider(self) -> bool:
        """Return whether the port leads to a cloud's own fabric, which programs reach through libfabric (AWS EFA).

        The kernel knows no link layer of EFA's ports (``efa_port_link_layer``: unspecified, printed as ``Unknown``),
        and NCCL's own transport leaves such ports out.
        """
        return self.link_layer == "Unknown"


class IbDevice(Fact):
    """One device of ``/sys/class/infiniband``."""

    name: str
    """``mlx5_0``."""
    firmware: str | None
    board_id: str | None
    type: str | None
    """``MT4129``: the chip type."""
    slot: str | None
    numa_node: int | None
    ports: tuple[IbPort, ...]


class OwnName(Fact):
    """The node's own name."""

    name: str
    addresses: tuple[str, ...]
    """What ``/etc/hosts`` has for it, in its order."""


def read_nics(bundle: BundleReader) -> tuple[Nic, ...]:
    """Return the interfaces that have a hardware device."""
    names = bundle.entries(_NET)
    if names is None:
        raise UnknownFactError(f"{_NET} is not there")
    return tuple(_nic(bundle, name) for name in names)


def _nic(bundle: BundleReader, name: str) -> Nic:
    folder = f"{_NET}{name}/"
    driver = _DRIVER.search(bundle.value(folder + "device/uevent") or "")
    speed = bundle.number(folder + "speed")
    return Nic(
        name=name,
        slot=slot_of(bundle, folder + "device/uevent"),
        driver=driver[1] if driver else None,
        state=bundle.value(folder + "operstate"),
        # -1, and the same number as unsigned: the driver does not know the speed.
        speed_mbit_per_s=speed if speed is not None and 0 < speed < 2**31 else None,
        mtu=bundle.number(folder + "mtu"),
        numa_node=_node(bundle, folder),
        carrier_changes=bundle.number(folder + "carrier_changes"),
        counters=_counters(bundle, folder + "statistics/"),
        pfc=_pfc(bundle, name),
        dscp=_dscp(bundle, name),
        dcbx=_dcbx(bundle, name),
        rp_filter=_rp_filter(bundle, name),
        ecn=_ecn(bundle, folder + "ecn/"),
    )


def _pfc(bundle: BundleReader, name: str) -> tuple[int, ...] | None:
    """Parse ``dcb pfc show``: ``prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off``."""
    try:
        match = _PFC.search(bundle.output(f"dcb-pfc-{name}"))
    except UnknownFactError:
        return None
    if match is None:
        return None
    return tuple(int(word[0]) for word in match[1].split() if word.endswith(":on"))


def _dscp(bundle: BundleReader, name: str) -> tuple[str, ...] | None:
    """Parse ``dcb app show dev NAME dscp-prio``: ``dscp-prio 26:3 CS6:6``; nothing is printed without an entry."""
    try:
        text = bundle.output(f"dcb-app-{name}")
    except UnknownFactError:
        return None
    match = _DSCP.search(text)
    return tuple(match[1].split()) if match is not None else ()


def _dcbx(bundle: BundleReader, name: str) -> tuple[str, ...] | None:
    """Parse ``dcb dcbx show``: ``host ieee``."""
    try:
        text = bundle.output(f"dcb-dcbx-{name}")
    except UnknownFactError:
        return None
    return tuple(text.split()) if _DCBX.fullmatch(f"{text.strip()} ".lstrip()) else None


def _rp_filter(bundle: BundleReader, name: str) -> int | None:
    """Return the greater one of the filters of all interfaces and of this one, which is in force (ip-sysctl)."""
    values = [bundle.number(f"{_CONF}{which}/rp_filter") for which in ("all", name)]
    return None if None in values else max(value for value in values if value is not None)


def _ecn(bundle: BundleReader, folder: str) -> tuple[int, ...] | None:
    """Return the priorities that are on for the notification point (receiver) and the reaction point (sender); one file
    each."""
    on = {
        side: {path[-1] for path in bundle.under(f"{folder}{side}/enable/") if bundle.value(path) == "1"}
        for side in ("roce_np", "roce_rp")
    }
    if not bundle.under(folder):
        return None
    return tuple(sorted(map(int, on["roce_np"] & on["roce_rp"])))


def read_addressed(bundle: BundleReader) -> tuple[str, ...]:
    """Return the interfaces with a connected IPv4 network, from ``/proc/net/route``.

    The kernel adds such a route with the first address of an interface that is up; its gateway is 0. The default route
    alone (mask 0) may lead over an interface without an address.
    """
    text = bundle.text("/proc/net/route")
    if text is None:
        raise UnknownFactError("/proc/net/route is not there")
    rows = [line.split() for line in text.splitlines()[1:]]
    if any(len(row) < 8 for row in rows if row):
        raise ParseError("expected 11 columns in /proc/net/route")
    connected = (row[0] for row in rows if row and row[2] == _NOTHING and row[7] != _NOTHING)
    return tuple(dict.fromkeys(connected))


def read_source_routes(bundle: BundleReader) -> SourceRoutes | None:
    """Return connected networks and rules by source; None if no Ethernet interface belongs to an RDMA adapter."""
    if not bundle.ran("ip-rules"):
        bundle.require_finished("ip-rules")
        if not bundle.ran("rdma-nodes"):
            raise bundle.not_collected()
        return None
    text = bundle.text("/proc/net/route")
    if text is None:
        raise UnknownFactError("/proc/net/route is not there")
    networks: dict[str, list[str]] = {}
    for row in (line.split() for line in text.splitlines()[1:] if line.strip()):
        if len(row) < 8 or not all(re.fullmatch(r"[0-9A-Fa-f]{8}", row[at]) for at in (1, 2, 7)):
            raise ParseError("expected 11 columns in /proc/net/route")
        if row[2] == _NOTHING and row[7] != _NOTHING:
            networks.setdefault(row[0], []).append(_network(row[1], row[7]))
    sources = []
    for line in bundle.output("ip-rules").splitlines():
        match = _RULE.fullmatch(line)
        if line.strip() and match is None:
            raise ParseError(f"expected a line of ip rule show, found '{first_line(line)}'")
        if match is not None and match[1] != "all":
            sources.append(match[1])
    return SourceRoutes(networks={name: tuple(rows) for name, rows in networks.items()}, sources=tuple(sources))


def _network(address: str, mask: str) -> str:
    """Return a network from two numbers of ``/proc/net/route``, which are in the byte order of the processor."""
    number, bits = (int.from_bytes(bytes.fromhex(text), "little") for text in (address, mask))
    return str(IPv4Network((number, bits.bit_count()), strict=False))


def read_own_name(bundle: BundleReader) -> OwnName:
    """Return the node's name, and the addresses that /etc/hosts has for it."""
    rows = bundle.rows("own-name", 2)
    names = [value for key, value in rows if key == "name" and value]
    if len(names) != 1 or any(key not in {"name", "address"} for key, _ in rows):
        raise ParseError(f"expected the node's name and addresses, found {len(names)} names")
    return OwnName(name=names[0], addresses=tuple(value for key, value in rows if key == "address"))


def read_infiniband(bundle: BundleReader) -> tuple[IbDevice, ...]:
    """Return the devices of ``/sys/class/infiniband``; empty if the kernel has no RDMA."""
    return tuple(_device(bundle, name) for name in bundle.entries(_IB) or ())


def _device(bundle: BundleReader, name: str) -> IbDevice:
    folder = f"{_IB}{name}/"
    numbers = {path[len(folder + "ports/") :].partition("/")[0] for path in bundle.under(folder + "ports/")}
    ports = sorted(number for text in numbers if (number := whole(text)) is not None)
    return IbDevice(
        name=name,
        firmware=bundle.value(folder + "fw_ver"),
        board_id=bundle.value(folder + "board_id"),
        type=bundle.value(folder + "hca_type"),
        slot=slot_of(bundle, folder + "device/uevent"),
        numa_node=_node(bundle, folder),
        ports=tuple(
            _port(
                bundle,
                f"{folder}ports/{number}/",
                number,
                bundle.number(f"{_CM}{name}/ports/{number}/default_roce_tos"),
            )
            for number in ports
        ),
    )


def _port(bundle: BundleReader, folder: str, number: int, cm_tos: int | None) -> IbPort:
    rate = bundle.value(folder + "rate")
    speed = _RATE.fullmatch(rate or "")
    lid = bundle.value(folder + "lid") or ""
    interfaces = (bundle.value(path) for path in bundle.under(folder + "gid_attrs/ndevs/"))
    return IbPort(
        port=number,
        state=_word(bundle.value(folder + "state")),
        physical_state=_word(bundle.value(folder + "phys_state")),
        rate_gbit_per_s=float(speed[1]) if speed else None,
        rate=rate,
        link_layer=bundle.value(folder + "link_layer"),
        lid=int(lid, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", lid) else None,
        interfaces=tuple(dict.fromkeys(name for name in interfaces if name)),
        gids=tuple(_gids(bundle, folder)),
        cm_tos=cm_tos,
        counters={**_counters(bundle, folder + "counters/"), **_counters(bundle, folder + "hw_counters/")},
    )


def _gids(bundle: BundleReader, folder: str) -> Iterator[Gid]:
    """Yield the entries that are in use: the kernel reports no type for an empty one."""
    for index in range(8):
        kind, address = bundle.value(f"{folder}gid_attrs/types/{index}"), bundle.value(f"{folder}gids/{index}")
        if kind and address:
            yield Gid(index=index, type=kind, ipv4=_MAPPED.match(address) is not None)


def _word(text: str | None) -> str | None:
    """Return the text of ``4: ACTIVE`` without its number."""
    match = _STATE.fullmatch(text or "")
    return match[1] if match else text


def _node(bundle: BundleReader, folder: str) -> int | None:
    node = bundle.number(folder + "device/numa_node")
    return node if node is not None and node >= 0 else None


def _counters(bundle: BundleReader, folder: str) -> dict[str, int]:
    counters = {path[len(folder) :]: bundle.number(path) for path in bundle.under(folder)}
    return {name: number for name, number in counters.items() if number is not None}


class NetworkFacts(FactArea):
    """Network interfaces and InfiniBand."""

    nics: tuple[Nic, ...] | None = fact(read_nics)
    addressed: tuple[str, ...] | None = fact(read_addressed)
    """Interfaces with an IPv4 network of their own, including bonds and bridges; the ports of these have none."""
    source_routes: SourceRoutes | None = fact(
        read_source_routes, none_means="no Ethernet interface belongs to an RDMA adapter"
    )
    infiniband: tuple[IbDevice, ...] | None = fact(read_infiniband)
    own_name: OwnName | None = fact(read_own_name)
