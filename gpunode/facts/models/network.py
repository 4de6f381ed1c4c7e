"""Network interfaces and InfiniBand."""

from pydantic import Field

from gpunode.facts.models.base import Fact


class Nic(Fact):
    """One network interface that is hardware: no bridge, bond, veth or loopback."""

    name: str
    slot: str | None
    driver: str | None
    state: str | None
    """``up``, ``down``, ``unknown``, ``dormant`` …: the operational one."""
    speed_mbit_per_s: int | None
    """None where it is down or does not tell."""
    mtu: int | None
    numa_node: int | None
    carrier_changes: int | None
    """Since boot: a link that flaps counts up."""
    counters: dict[str, int] = Field(default_factory=dict)
    """``rx_errors``, ``tx_errors``, ``rx_dropped``, ``rx_crc_errors`` …, since boot."""
    pfc: tuple[int, ...] | None = None
    """Priorities with priority-based flow control, by ``dcb``; None: it was not asked, or has no answer."""
    ecn: tuple[int, ...] | None = None
    """Priorities on which RoCE heeds congestion marks, as receiver and as sender; None: the driver does not say."""


class LinkEvent(Fact):
    """One line of the journal that says that an interface's link went up or down."""

    interface: str
    slot: str | None
    """The adapter's, where the line has it."""
    up: bool
    time: str | None


class LinkLog(Fact):
    """What this boot's log says of links."""

    complete: bool
    """It reaches back to the boot."""
    events: tuple[LinkEvent, ...]


class RdmaNode(Fact):
    """One device by which programs reach an RDMA adapter."""

    name: str
    """``uverbs0``, ``umad0``, ``issm0``."""
    kind: str
    device: str | None
    """``mlx5_0``."""
    port: int | None
    """None for ``uverbs``, which is the adapter's."""
    file: bool
    """Its character device is in ``/dev/infiniband``."""


class Gid(Fact):
    """One entry of a port's table of addresses, as programs name it by its number."""

    index: int
    type: str
    """``RoCE v2``, ``IB/RoCE v1``."""
    ipv4: bool
    """It stands for an IPv4 address."""


class IbPort(Fact):
    """One port of an InfiniBand or RoCE device."""

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
    """``MT4129``: its kind of chip."""
    slot: str | None
    numa_node: int | None
    ports: tuple[IbPort, ...]
