"""Character devices of RDMA, and link events in the journal."""

import re

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.parsers.nvrm import begins_boot, message_of

_VERBS = "/sys/class/infiniband_verbs/"
_MAD = "/sys/class/infiniband_mad/"
_DEV = "/dev/infiniband/"
_KIND = re.compile(r"(uverbs|umad|issm)\d{1,5}")
# Recorded: mlx5_core 0000:41:00.0 enp65s0f0np0: Link up; systemd-networkd[5398]: ib6: lost carrier
_MLX5 = re.compile(r"mlx5_core (?P<slot>\S{1,40}) (?P<name>\S{1,40}): Link (?P<word>up|down)$")
_NETWORKD = re.compile(
    r"\S.{0,320}? systemd-networkd\[\d{1,10}\]: (?P<name>\S{1,40}): (?P<word>lost|gained) carrier$", re.I
)
_TIME = re.compile(r"\s*(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)\s")
_LINE_LIMIT = 1000


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


def read_rdma_nodes(bundle: BundleReader) -> tuple[RdmaNode, ...]:
    """Return the devices of ib_uverbs and ib_umad in sysfs, and whether each has its file in ``/dev/infiniband``."""
    kinds = {row[0]: row[1] for row in bundle.rows("rdma-nodes", 2)}
    nodes = []
    for folder in (_VERBS, _MAD):
        for name in bundle.entries(folder) or ():
            match = _KIND.fullmatch(name)
            if match is None:
                continue
            nodes.append(
                RdmaNode(
                    name=name,
                    kind=match[1],
                    device=bundle.value(f"{folder}{name}/ibdev"),
                    port=whole(bundle.value(f"{folder}{name}/port")),
                    file=kinds.get(_DEV + name) == "character",
                )
            )
    return tuple(nodes)


def read_peer_memory(bundle: BundleReader) -> bool | None:
    """Return whether memory of other devices can register with the kernel's RDMA; None if RDMA is not loaded."""
    if not bundle.ran("peer-memory"):
        bundle.require_finished("peer-memory")
        if not bundle.ran("rdma-nodes"):
            raise UnknownFactError("the peer memory interface was not queried")
        return None
    lines = bundle.look("peer-memory")
    if lines not in (("yes",), ("no",)):
        raise ParseError(f"expected yes or no of the peer memory interface, found '{' '.join(lines)[:40]}'")
    return lines == ("yes",)


def read_peer_memory_clients(bundle: BundleReader) -> tuple[str, ...]:
    """Return the names in the kernel's folder of registered clients; empty if it has no such folder."""
    return bundle.folder("/sys/kernel/mm/memory_peers/") or ()


def read_link_log(bundle: BundleReader) -> LinkLog:
    """Return each line of this boot's journal, or of dmesg, about a link that went up or down, in the log's order."""
    key = "dmesg-links" if bundle.ran("dmesg-links") else "journal-links"
    lines = [line[:_LINE_LIMIT].rstrip() for line in bundle.output(key).split("\n") if line.strip()]
    if not lines:
        raise UnknownFactError("the log has no line of this boot's start or of a link; run the probe as root")
    return LinkLog(
        complete=any(begins_boot(line) for line in lines),
        events=tuple(event for line in lines if (event := event_of(line)) is not None),
    )


def event_of(line: str) -> LinkEvent | None:
    """Return the link event in a line of a log; None for other lines."""
    match = _MLX5.match(message_of(line)) or _NETWORKD.match(line)
    if match is None:
        return None
    time = _TIME.match(line)
    slot = match.groupdict().get("slot")
    up = match["word"].lower() in {"up", "gained"}
    return LinkEvent(interface=match["name"], slot=slot, up=up, time=time[1] if time else None)


class RdmaFacts(FactArea):
    """RDMA and links."""

    rdma_nodes: tuple[RdmaNode, ...] | None = fact(read_rdma_nodes)
    peer_memory: bool | None = fact(read_peer_memory, none_means="ib_core is not loaded")
    """True if memory of other devices can register with the kernel's RDMA, as nvidia-peermem does: MLNX_OFED,
    DOCA-OFED, and kernels patched for it."""
    peer_memory_clients: tuple[str, ...] | None = fact(read_peer_memory_clients)
    """Modules that registered with it, by ``/sys/kernel/mm/memory_peers``: ``nv_mem``, ``nv_mem_nc``."""
    link_log: LinkLog | None = fact(read_link_log, needs_root=True, volatile=True)
    """From the drivers and daemons that report links (mlx5_core, systemd-networkd)."""
