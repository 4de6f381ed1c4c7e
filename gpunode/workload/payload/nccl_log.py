"""What NCCL reports of itself with NCCL_DEBUG=INFO: network, adapters, GPUDirect RDMA, channels, NVLS, and fallbacks.

Formats: NVIDIA/nccl, src/transport/net.cc (``via NET/...``), src/transport/net_ib.cc (``NET/IB : Using``),
src/init.cc (``busId``, ``coll channels``), src/misc/utils.cc (the form of a bus id).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

MAX_PROCESSES = 4096
MOST_RANKS, MOST_VIEWS = 8192, 128
"""Those that have room in a record; of more ranks, none are reported."""
MOST_PAIRS, MOST_IN_RINGS = 1024, 2048
"""Connections between ranks, and ranks in all rings, in a record: those of about 128 ranks; of more, none."""
MOST_FALLBACKS = 5
MOST_TEXT = 160
_LINE = re.compile(
    r"(?:^|\s|>:)(?P<host>[\w.-]{1,200}):(?P<pid>\d{1,10}):\d{1,10} \[(?P<device>\d{1,4})\] .{0,60}?NCCL "
)
_VIA = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)(?:\[(?P<source_id>[0-9a-f]+)\])? -> "
    r"(?P<target>\d+)(?:\[(?P<target_id>[0-9a-f]+)\])? (?:\[(?P<end>send|receive)\] )?via (?P<transport>[^\n]{1,80})"
)
_NET = re.compile(r"NET/(?P<network>[^/]+)/(?P<adapter>\d+)(?:\((?P<proxy>\d+)\))?(?P<direct>/GDRDMA)?")
_USING = re.compile(r"NET/(?P<network>[\w ]{1,40}) : Using (?P<adapters>\[0\].*)")
_ADAPTER = re.compile(r"\[(\d+)\](?:=\{(?P<several>[^}]*)\}|(?P<name>[\w.-]+):)")
_PART = re.compile(r"([\w.-]+):\d+/(?:IB|RoCE)")
_NETWORK = re.compile(r"Using network (.{1,40}?)\s*$")
_BUS_ID = re.compile(r"\bbusId ([0-9a-f]+)\b")
_RING = re.compile(r"Channel \d+/(?P<channels>\d+) :(?P<order>(?:\s+\d{1,6})+)\s*$")
_TREE = re.compile(r"Trees \[0\] [-/\d]{1,40}->(?P<rank>\d{1,6})->(?P<parent>-?\d+)")
_NVLS = re.compile(r"(\d+) nvls channels")
_BRACKETS_HAVE_BUS_IDS = 4
"""Hexadecimal digits from which on a number in brackets is a bus id; newer releases print the GPU's index there."""
FALLBACKS = (
    re.compile(r"NET/IB : No device found"),
    re.compile(r"Failed to open libibverbs\S*"),
    re.compile(r"GPU Direct RDMA Disabled for [^\n]{1,100}"),
    re.compile(r"P2P is disabled between connected GPUs[^\n]{0,60}"),
    re.compile(r"Could not enable P2P between [^\n]{1,60}"),
)


def views(text: str) -> list[dict[str, Any]]:
    """Return one view for each process and GPU in a log, in the order of their ranks.

    A view: ``rank``; ``gpu``, its bus id; ``network``; ``adapters``, the connections by adapter; ``direct`` and
    ``staged``, network connections with and without GPUDirect RDMA; ``relayed``, those through the adapter of another
    rank (PXN); ``transports``, connections within the node; ``channels``; ``nvls``, channels through NVSwitches;
    ``fallbacks``; ``peers``, the transport to each rank that it sends to; ``rings``, the distinct orders of all ranks,
    which rank 0 prints; ``parent`` in the first tree. What a log does not contain is None.
    """
    by_process: dict[tuple[str, str, str], _View] = {}
    for line in text.split("\n"):
        head = _LINE.search(line[:4000])
        if head is None:
            continue
        key = (head["host"], head["pid"], head["device"])
        if key not in by_process and len(by_process) >= MAX_PROCESSES:
            continue
        by_process.setdefault(key, _View(head["host"])).read(line[head.end() : 4000].partition(" ")[2])
    known = [view.values() for view in by_process.values() if not view.empty]
    return sorted(known, key=lambda view: (view["rank"] is None, view["rank"] or 0))


OF_ONE_RANK = ("rank", "host", "channels", "peers", "rings", "parent")


def connections(every: Sequence[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Return how the ranks are connected: ``ways``, names of transports; ``pairs``, sender, receiver and number of the
    way; ``rings``; ``tree``, the parent of each rank, -1 for the root, None if it is unknown.
    """
    known = [(rank, view) for rank, view in enumerate(every) if view is not None]
    ways = sorted({way for _, view in known for _, way in view["peers"]})
    pairs = [[rank, peer, ways.index(way)] for rank, view in known for peer, way in view["peers"]]
    rings = [ring for _, view in known for ring in view["rings"]]
    tree = [None if view is None else view["parent"] for view in every]
    return {
        "ways": ways,
        "pairs": pairs if len(pairs) <= MOST_PAIRS else [],
        "rings": rings if sum(map(len, rings)) <= MOST_IN_RINGS else [],
        "tree": tree if len(tree) <= MOST_IN_RINGS else [],
    }


def folded(every: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the views of all ranks, equal ones once with their ``ranks``: on equal nodes as many as a node has GPUs.

    Numbers of connections, which differ between equal nodes, are yes or no here; only rank 0 reports channels.
    """
    groups: dict[str, dict[str, Any]] = {}
    for rank, view in enumerate(every):
        if view is None:
            continue
        short = {name: value for name, value in view.items() if name not in OF_ONE_RANK}
        short.update({name: sorted(view[name]) for name in ("adapters", "transports")})
        short.update({name: bool(view[name]) for name in ("direct", "staged", "relayed")})
        groups.setdefault(json.dumps(short, sort_keys=True), {"ranks": [], **short})["ranks"].append(rank)
    if sum(len(group["ranks"]) for group in groups.values()) > MOST_RANKS or len(groups) > MOST_VIEWS:
        return []
    return list(groups.values())


class _View:
    def __init__(self, host: str) -> None:
        self._host = host
        self._ranks: Counter[int] = Counter()
        self._gpu: str | None = None
        self._network: str | None = None
        self._names: list[str] = []
        self._uses: Counter[int] = Counter()
        self._ways: Counter[str] = Counter()
        self._net = {"direct": 0, "staged": 0, "relayed": 0}
        self._channels: int | None = None
        self._nvls: int | None = None
        self._fallbacks: dict[str, None] = {}
        self._peers: dict[int, str] = {}
        self._rings: dict[tuple[int, ...], None] = {}
        self._parent: int | None = None

    @property
    def empty(self) -> bool:
        """Return whether no line had anything about the process."""
        return not (self._ranks or self._gpu or self._network or self._fallbacks or self._rings)

    def read(self, text: str) -> None:
        """Read one line, without its prefix."""
        via = _VIA.search(text)
        if via is not None:
            self._connection(via)
            return
        using = _USING.search(text)
        if using is not None:
            self._network = self._network or using["network"].strip()
            self._names = [_name(match) for match in _ADAPTER.finditer(using["adapters"].partition("; OOB")[0])]
        network = _NETWORK.search(text)
        if network is not None:
            self._network = network[1]
        bus_id = _BUS_ID.search(text)
        if bus_id is not None:
            self._gpu = bus_id_of(bus_id[1])
        ring = _RING.search(text)
        if ring is not None:
            self._channels = int(ring["channels"])
            if len(self._rings) < MOST_VIEWS:
                self._rings[tuple(map(int, ring["order"].split()))] = None
        tree = _TREE.search(text)
        if tree is not None:
            self._ranks[int(tree["rank"])] += 1
            self._parent = int(tree["parent"])
        nvls = _NVLS.search(text)
        if nvls is not None:
            self._nvls = int(nvls[1])
        for pattern in FALLBACKS:
            fallback = pattern.search(text)
            if fallback is not None and len(self._fallbacks) < MOST_FALLBACKS:
                self._fallbacks[fallback[0].strip()[:MOST_TEXT]] = None

    def _connection(self, via: re.Match[str]) -> None:
        side = "target" if via["end"] == "receive" else "source"
        self._ranks[int(via[side])] += 1
        number = via[f"{side}_id"]
        if self._gpu is None and number is not None and len(number) >= _BRACKETS_HAVE_BUS_IDS:
            self._gpu = bus_id_of(number)
        net = _NET.match(via["transport"])
        if side == "source" and len(self._peers) < MOST_PAIRS:
            self._peers[int(via["target"])] = f"NET/{net['network']}" if net else via["transport"].strip()
        if net is None:
            self._ways[via["transport"].strip()] += 1
            return
        self._network = self._network or net["network"]
        self._net["direct" if net["direct"] else "staged"] += 1
        if net["proxy"] is not None:
            # The adapter is one of the rank that relays.
            self._net["relayed"] += 1
        else:
            self._uses[int(net["adapter"])] += 1

    def values(self) -> dict[str, Any]:
        """Return the view."""
        names = self._names
        uses = {
            names[index] if index < len(names) else str(index): number for index, number in sorted(self._uses.items())
        }
        return {
            "rank": self._ranks.most_common(1)[0][0] if self._ranks else None,
            "host": self._host,
            "gpu": self._gpu,
            "network": self._network,
            "adapters": uses,
            "transports": dict(sorted(self._ways.items())),
            **self._net,
            "channels": self._channels,
            "nvls": self._nvls,
            "fallbacks": list(self._fallbacks),
            "peers": [[peer, way] for peer, way in sorted(self._peers.items())],
            "rings": [list(ring) for ring in self._rings],
            "parent": self._parent,
        }


def _name(adapter: re.Match[str]) -> str:
    """Return an adapter's name: ``mlx5_0``; of several that NCCL merges ``mlx5_0+mlx5_1``."""
    return adapter["name"] or "+".join(dict.fromkeys(_PART.findall(adapter["several"])))


def bus_id_of(number: str) -> str:
    """Return ``0000:07:00.0`` for NCCL's ``7000``: domain, bus, device and function of 4, 2, 2 and 1 digits."""
    value = int(number[:16], 16)
    return f"{value >> 20:04x}:{value >> 12 & 0xFF:02x}:{value >> 4 & 0xFF:02x}.{value & 0xF:x}"
