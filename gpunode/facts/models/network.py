"""Network interfaces and InfiniBand."""

from pydantic import Field

from gpunode.facts.models.base import Fact


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
    ecn: tuple[int, ...] | None = None
    """Priorities on which RoCE reacts to congestion marks, as receiver and as sender; None: the driver does not report
    it."""


class LinkEvent(Fact):
    """One line of the journal that reports that an interface's link went up or down."""

    interface: str
    slot: str | None
    """The adapter's slot, if the line has it."""
    up: bool
    time: str | None


class LinkLog(Fact):
    """The link events in the log of this boot."""

    complete: bool
    """True if the log starts at the boot."""
    events: tuple[LinkEvent, ...]


class RdmaNode(Fact):
    """One device through which programs use an RDMA adapter."""

    name: str
    """``uverbs0``, ``umad0``, ``issm0``."""
    kind: str
    device: str | None
    """``mlx5_0``."""
    port: int | None
    """None for ``uverbs``, which belongs to the adapter."""
    file: bool
    """True if its character device is in ``/dev/infiniband``."""


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
    """``InfiniBand`` or ``Ethernet`` (RoCE)."""
    lid: int | None
    interfaces: tuple[str, ...] = ()
    """Network interfaces on top of it."""
    gids: tuple[Gid, ...] = ()
    """The first eight that are in use."""
    counters: dict[str, int] = Field(default_factory=dict)
    """``symbol_error``, ``link_downed``, ``link_error_recovery``, ``port_rcv_errors`` …, since they were cleared."""


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
