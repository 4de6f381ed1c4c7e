"""What of a node can be reached from outside, and by whom."""

from gpunode.facts.models.base import Fact


class PacketFilter(Fact):
    """The rules of nftables, those that iptables writes through it among them."""

    tables: tuple[str, ...]
    """Family and name: ``inet gpunode``, ``ip filter``."""
    refusing: tuple[str, ...]
    """Tables with a chain for input that drops or rejects whatever no rule of it accepts."""
    ipv4_refused: bool
    """What no rule accepts does not come in over IPv4."""
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
    """Name of the process; None where it could not be seen."""


class Address(Fact):
    """An address of one of the node's interfaces."""

    interface: str
    address: str
