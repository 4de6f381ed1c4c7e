"""Network interfaces and InfiniBand devices, from sysfs and the kernel's routes."""

import re
from collections.abc import Iterator

from gpunode.facts.errors import ParseError
from gpunode.facts.node import Gid, IbDevice, IbPort, Nic
from gpunode.facts.pci import slot_of
from gpunode.facts.seen import Seen, Unseen, whole

_NET = "/sys/class/net/"
_IB = "/sys/class/infiniband/"
_NOTHING = "00000000"
_DRIVER = re.compile(r"(?m)^DRIVER=(\S{1,80})$")
_MAPPED = re.compile(r"(?i)(?:0000:){5}ffff:")
"""How an IPv4 address stands in a GID."""
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec.*")
_PFC = re.compile(r"(?m)^\s*prio-pfc((?: [0-7]:(?:on|off)){1,8})\s*$")
_STATE = re.compile(r"[0-9]{1,3}: (\S.*)")


def nics(seen: Seen) -> tuple[Nic, ...]:
    """Interfaces with a device of their own below them."""
    names = seen.entries(_NET)
    if names is None:
        raise Unseen(f"{_NET} is not there")
    return tuple(_nic(seen, name) for name in names)


def _nic(seen: Seen, name: str) -> Nic:
    place = f"{_NET}{name}/"
    driver = _DRIVER.search(seen.value(place + "device/uevent") or "")
    speed = seen.number(place + "speed")
    return Nic(
        name=name,
        slot=slot_of(seen, place + "device/uevent"),
        driver=driver[1] if driver else None,
        state=seen.value(place + "operstate"),
        # -1, and the same number without its sign: the driver does not know.
        speed_mbit_per_s=speed if speed is not None and 0 < speed < 2**31 else None,
        mtu=seen.number(place + "mtu"),
        numa_node=_node(seen, place),
        carrier_changes=seen.number(place + "carrier_changes"),
        counters=_counters(seen, place + "statistics/"),
        pfc=_pfc(seen, name),
        ecn=_ecn(seen, place + "ecn/"),
    )


def _pfc(seen: Seen, name: str) -> tuple[int, ...] | None:
    """From ``dcb pfc show``: ``prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off``."""
    try:
        found = _PFC.search(seen.output(f"dcb-pfc-{name}"))
    except Unseen:
        return None
    if found is None:
        return None
    return tuple(int(word[0]) for word in found[1].split() if word.endswith(":on"))


def _ecn(seen: Seen, place: str) -> tuple[int, ...] | None:
    """From a file a priority, for the notification point (the receiver) and the reaction point (the sender)."""
    on = {
        side: {path[-1] for path in seen.under(f"{place}{side}/enable/") if seen.value(path) == "1"}
        for side in ("roce_np", "roce_rp")
    }
    if not seen.under(place):
        return None
    return tuple(sorted(map(int, on["roce_np"] & on["roce_rp"])))


def addressed(seen: Seen) -> tuple[str, ...]:
    """Return the interfaces with a connected IPv4 network, from ``/proc/net/route``.

    The kernel adds such a route with the first address of an interface that is up; its gateway is 0. The default route
    alone (mask 0) may lead over an interface without an address.
    """
    text = seen.text("/proc/net/route")
    if text is None:
        raise Unseen("/proc/net/route is not there")
    rows = [line.split() for line in text.splitlines()[1:]]
    if any(len(row) < 8 for row in rows if row):
        raise ParseError("expected 11 columns in /proc/net/route")
    connected = (row[0] for row in rows if row and row[2] == _NOTHING and row[7] != _NOTHING)
    return tuple(dict.fromkeys(connected))


def infiniband(seen: Seen) -> tuple[IbDevice, ...]:
    """Devices of ``/sys/class/infiniband``; none where the kernel has no RDMA."""
    return tuple(_device(seen, name) for name in seen.entries(_IB) or ())


def _device(seen: Seen, name: str) -> IbDevice:
    place = f"{_IB}{name}/"
    numbers = {path[len(place + "ports/") :].partition("/")[0] for path in seen.under(place + "ports/")}
    ports = sorted(number for text in numbers if (number := whole(text)) is not None)
    return IbDevice(
        name=name,
        firmware=seen.value(place + "fw_ver"),
        board_id=seen.value(place + "board_id"),
        type=seen.value(place + "hca_type"),
        slot=slot_of(seen, place + "device/uevent"),
        numa_node=_node(seen, place),
        ports=tuple(_port(seen, f"{place}ports/{number}/", number) for number in ports),
    )


def _port(seen: Seen, place: str, number: int) -> IbPort:
    rate = seen.value(place + "rate")
    speed = _RATE.fullmatch(rate or "")
    lid = seen.value(place + "lid") or ""
    interfaces = (seen.value(path) for path in seen.under(place + "gid_attrs/ndevs/"))
    return IbPort(
        port=number,
        state=_word(seen.value(place + "state")),
        physical_state=_word(seen.value(place + "phys_state")),
        rate_gbit_per_s=float(speed[1]) if speed else None,
        rate=rate,
        link_layer=seen.value(place + "link_layer"),
        lid=int(lid, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", lid) else None,
        interfaces=tuple(dict.fromkeys(name for name in interfaces if name)),
        gids=tuple(_gids(seen, place)),
        counters={**_counters(seen, place + "counters/"), **_counters(seen, place + "hw_counters/")},
    )


def _gids(seen: Seen, place: str) -> Iterator[Gid]:
    """Yield the entries that are in use: the kernel gives no type for an empty one."""
    for index in range(8):
        kind, address = seen.value(f"{place}gid_attrs/types/{index}"), seen.value(f"{place}gids/{index}")
        if kind and address:
            yield Gid(index=index, type=kind, ipv4=_MAPPED.match(address) is not None)


def _word(text: str | None) -> str | None:
    """``4: ACTIVE`` without its number."""
    match = _STATE.fullmatch(text or "")
    return match[1] if match else text


def _node(seen: Seen, place: str) -> int | None:
    node = seen.number(place + "device/numa_node")
    return node if node is not None and node >= 0 else None


def _counters(seen: Seen, place: str) -> dict[str, int]:
    counters = {path[len(place) :]: seen.number(path) for path in seen.under(place)}
    return {name: number for name, number in counters.items() if number is not None}
