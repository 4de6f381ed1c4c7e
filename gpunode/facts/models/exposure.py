"""Network exposure of a node: packet filter, listening sockets, addresses."""

from gpunode.facts.models.base import Fact


class PacketFilter(Fact):
    """The rules of nftables, including those that iptables writes through it."""

    tables: tuple[str, ...]
    """Family and name: ``inet gpunode``, ``ip filter``."""
    refusing: tuple[str, ...]
    """Tables with an input chain that drops or rejects every packet that none of its rules accepts."""
    ipv4_refused: bool
    """True if packets that no rule accepts are refused over IPv4."""
    ipv6_refused: bool
    own: str | None
    """SHA-256 of the table of the role firewall as nft lists it; None: it is not loaded."""


class Listener(Fact):
    """A socket that waits for connections or datagrams."""

    protocol: str
    """``tcp`` or ``udp``."""
    address: str
    """``0.0.0.0``, ``::``, ``*`` (both) or one address of the node."""
    port: int
    process: str | None
    """Name of the process; None if it could not be determined."""


class Address(Fact):
    """An address of one of the node's interfaces."""

    interface: str
    address: str
