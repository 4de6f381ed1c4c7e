"""What nodes report of themselves and of each other, and what ranks found: data of nodes, typed and bounded."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gpunode.text import one_line

Short = Annotated[str, Field(max_length=300)]
Count = Annotated[int, Field(ge=0, le=10**7)]
Rate = Annotated[float, Field(ge=0, le=1e6)]
"""Also a share of a rate."""
Bytes = Annotated[int, Field(ge=0, le=2**50)]
NodeName = Annotated[Short, AfterValidator(lambda text: one_line(text, 100))]
"""Printable: it becomes the name of a report."""


class Answered(BaseModel):
    """Part of a node's answer; unknown keys are ignored, and an infinite number is refused."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class InterfaceAddress(Answered):
    """One IPv4 address of a node."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.@-]{1,15}$")]
    address: Annotated[str, Field(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$")]
    prefix: Annotated[int, Field(ge=0, le=32)]
    mtu: Count | None = None
    speed_mbit_per_s: Count | None = None


class PortMeasurement(Answered):
    """One RDMA port, measured with the same port of another node."""

    gbit_per_s: Rate | None = None
    latency_us: Annotated[float, Field(ge=0, le=1e9)] | None = None
    error: Short | None = None


class Hello(Answered):
    """What a node reports before ranks start."""

    hostname: Short
    resolved: Annotated[tuple[Short, ...], Field(max_length=64)] = ()
    """Addresses of its own name, as programs resolve it there."""
    addresses: Annotated[tuple[InterfaceAddress, ...], Field(max_length=512)] = ()
    port: Annotated[int, Field(gt=0, le=65535)]
    taken: Annotated[tuple[Count, ...], Field(max_length=64)] = ()
    """Ports of the ranks on which something listens."""
    programs: Annotated[tuple[Short, ...], Field(max_length=16)] = ()
    """Programs of perftest that are installed."""


class Reached(Answered):
    """What a node reached of another."""

    tcp: Short | None = None
    """Why it does not answer; None: it does."""
    mtu: Count | None = None
    """Largest packet that arrives whole; None: unknown, since no datagram arrived."""


class SuspectValues(Answered):
    """One cause that the search named (``fabric_search.Suspect``)."""

    kind: Short
    ranks: Annotated[tuple[Count, ...], Field(max_length=100_000)]
    name: Short
    late: Count
    tried: Count
    partners: Count
    share: Rate | None
    corrupt: bool = False
    only_large: bool = False
    confirmed: bool = False


class RankNodes(Answered):
    """Where ranks run, as they share it before they measure."""

    backend: Short = "unknown"
    names: Annotated[tuple[NodeName, ...], Field(max_length=10_000)] = ()
    rank_nodes: Annotated[tuple[Count, ...], Field(max_length=100_000)] = ()
    """The number of each rank's node in ``names``."""


class FabricValues(RankNodes):
    """The values of ``fabric.links``."""

    ranks: Annotated[int, Field(ge=0, le=100_000)]
    versions: Short | None = None
    """PyTorch and NCCL of most ranks."""
    odd_versions: Annotated[tuple[tuple[Count, Short], ...], Field(max_length=10_000)] = ()
    """Ranks with other ones."""
    rounds: Count = 0
    size_bytes: Bytes = 0
    usual_gb_per_s: Rate | None = None
    causes: Annotated[tuple[SuspectValues, ...], Field(max_length=10_000)] = ()
    pairs: Annotated[tuple[tuple[Count, Count, Rate | None], ...], Field(max_length=10_000)] = ()
    """Two nodes, by their numbers in ``names``, and the rate of their slowest rail in GB/s; None: it failed."""
    missing: Annotated[tuple[Count, ...], Field(max_length=100_000)] = ()
    seconds: float = 0.0

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node."""
        if rank < len(self.rank_nodes) and self.rank_nodes[rank] < len(self.names):
            return self.names[self.rank_nodes[rank]]
        return f"the node of rank {rank}"


class RankView(Answered):
    """What NCCL reports of equal ranks (``payload.nccl_log``)."""

    ranks: Annotated[tuple[Count, ...], Field(max_length=100_000)]
    gpu: Short | None = None
    network: Short | None = None
    adapters: Annotated[tuple[Short, ...], Field(max_length=64)] = ()
    transports: Annotated[tuple[Short, ...], Field(max_length=64)] = ()
    direct: bool = False
    staged: bool = False
    relayed: bool = False
    nvls: Count | None = None
    fallbacks: Annotated[tuple[Short, ...], Field(max_length=16)] = ()


class RankConnections(Answered):
    """How NCCL connected the ranks (``payload.nccl_log.connections``)."""

    ways: Annotated[tuple[Short, ...], Field(max_length=1000)] = ()
    pairs: Annotated[tuple[tuple[Count, Count, Count], ...], Field(max_length=10_000)] = ()
    """Sender, receiver, and the number of their transport in ``ways``."""
    rings: Annotated[tuple[tuple[Count, ...], ...], Field(max_length=1000)] = ()
    tree: Annotated[tuple[int | None, ...], Field(max_length=10_000)] = ()
    """The parent of each rank in the first tree; -1 for its root."""


class RateRow(Answered):
    """One size of message of a collective."""

    size_bytes: Annotated[Bytes, Field(gt=0)]
    time_us: Annotated[float, Field(ge=0, le=1e12)]
    busbw_gb_per_s: Rate
    wrong: Annotated[int, Field(ge=0, le=2**63)]


class CollectiveRates(Answered):
    """The values of ``nccl.NAME`` that the verdict needs."""

    ranks: Annotated[Count, Field(gt=0)]
    backend: Short
    rows: Annotated[tuple[RateRow, ...], Field(max_length=200)] = ()
    max_busbw_gb_per_s: Rate | None = None
    kinds: Annotated[tuple[Short, ...], Field(max_length=32)] = ()
    transports: Annotated[dict[Short, Count], Field(max_length=64)] = {}
    warning: Short | None = None
    nccl_version: Short | None = None
    nodes: Annotated[int, Field(ge=1, le=10**6)] = 1
    channels: Count | None = None
    views: Annotated[tuple[RankView, ...], Field(max_length=1000)] = ()
    connections: RankConnections = RankConnections()
