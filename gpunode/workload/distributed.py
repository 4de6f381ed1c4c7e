"""One group of ranks over several containers, on one node or on many: collectives, training, and links by name.

Each member runs the payload with its seats; the ranks meet at a port of rank 0. If a member ends, the others report its
rank, within the group's limit. No container of any member is left.
"""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpunode.workload import container, engine
from gpunode.workload.container import ContainerJob, Devices, Network
from gpunode.workload.image import Image
from gpunode.workload.launch import STOP_S, on_host, sent
from gpunode.workload.output import BoundedOutput
from gpunode.workload.payload import MAIN
from gpunode.workload.transport import LaunchFailure, Transport

PORT = 29400
"""Port of rank 0 for the first part; each part of the payload uses the next one."""
TESTS = "nccl,ddp"
LEAST_MEMBERS = 2


@dataclass(frozen=True)
class Member:
    """One container of the group."""

    transport: Transport
    ranks: int = 1
    devices: Devices = field(default_factory=lambda: Devices("none"))
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the payload for this member alone."""
    rdma: bool = False
    """It has RDMA devices, which NCCL needs in the container."""


@dataclass(frozen=True)
class GroupRequest:
    """What a group runs, the same for all its members."""

    image: str | None
    """Must exist on each member's engine; None: the payload runs on the node itself."""
    network: str
    """The engine's network that joins the members; ``host`` between nodes."""
    host: str = "rank-0"
    """Address of rank 0: its name in the network, or its address between nodes."""
    port: int = PORT
    backend: Literal["gloo", "nccl"] = "gloo"
    level: Literal["standard", "deep"] = "standard"
    tests: str = TESTS
    rank_limit_s: float = 30.0
    """How long the group waits for a rank in each step, in seconds."""
    run_limit_s: float = 600.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the payload for all members."""


@dataclass
class GroupResult:
    """The result of a group."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """One for each part, for all members together."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why a member did not finish, by its first rank."""


def measure_group(members: Sequence[Member], request: GroupRequest) -> GroupResult:
    """Run the payload in a container of each member at the same time. Never raises for a node's failure."""
    if len(members) < LEAST_MEMBERS:
        raise ValueError("a group has at least two members")
    firsts = [sum(member.ranks for member in members[:number]) for number in range(len(members))]
    size = sum(member.ranks for member in members)
    outputs = {first: BoundedOutput() for first in firsts}
    result = GroupResult()

    def run(first: int, member: Member) -> None:
        try:
            run_member(member, request, outputs[first], seats_of(request, first, member.ranks, size, len(members)))
        except LaunchFailure as err:
            result.failures[first] = str(err)

    with ThreadPoolExecutor(max_workers=len(members)) as pool:
        list(pool.map(run, firsts, members))
    result.records = joined({first: output.records for first, output in outputs.items()}, result.failures)
    return result


def seats_of(request: GroupRequest, first: int, ranks: int, size: int, nodes: int) -> list[dict[str, Any]]:
    """Return the seats of a member's ranks in the form of the payload's settings."""
    return [
        {
            "rank": first + number,
            "size": size,
            "meet": f"tcp:{request.host}:{request.port}",
            "backend": request.backend,
            "device": number,
            "limit_s": request.rank_limit_s,
            "nodes": nodes,
        }
        for number in range(ranks)
    ]


def run_member(member: Member, request: GroupRequest, output: BoundedOutput, seats: list[dict[str, Any]]) -> None:
    """Run the payload of one member to its end. Raises LaunchFailure."""
    deadline = time.monotonic() + request.run_limit_s
    settings = {"level": request.level, "seats": seats, **request.settings, **member.settings}
    limit_s = request.run_limit_s - STOP_S
    words = ("--tests", request.tests, "--settings", json.dumps(settings), "--limit", f"{limit_s - STOP_S:.0f}")
    program = sent(MAIN, limit_s, *words)
    if request.image is None:
        on_host(member.transport, program, output, deadline, limit_s)
        return
    with engine.connected(member.transport, deadline) as node_engine:
        with node_engine.doing("image", f"looking at image {request.image}"):
            image = Image(request.image, str(node_engine.api.inspect_image(request.image)["Id"]), brought=False)
        network = Network(request.network, f"rank-{seats[0]['rank']}")
        job = ContainerJob(image, member.devices, program, limit_s, network=network, rdma=member.rdma)
        container.run(replace(node_engine, deadline=deadline), job, output)
        output.judge(limit_s)


def joined(records: Mapping[int, Sequence[Mapping[str, Any]]], failures: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return one record for each part, from those of all members by their first rank.

    The values are the same on all members that finished. Of several errors the one that names the missing rank is used;
    how that member ended is added if it is known.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for first in sorted(records):
        for record in records[first]:
            by_name.setdefault(str(record["record"]), []).append(record)
    return [_representative(part_records, failures) for part_records in by_name.values()]


def _representative(records: Sequence[Mapping[str, Any]], failures: Mapping[int, str]) -> dict[str, Any]:
    broken = [record for record in records if record.get("error") is not None]
    unknown = [record for record in records if record.get("undetermined") is not None]
    if not broken:
        return dict((unknown or records)[0])
    naming = [record for record in broken if missing_ranks(record)]
    if not naming:
        return dict((unknown or broken)[0])
    missing = missing_ranks(naming[0])
    ends = [f"rank {rank}: {failures[rank]}" for rank in missing if rank in failures]
    why = f" ({'; '.join(ends)})" if ends else ""
    return {**naming[0], "error": f"{naming[0]['error']}{why}"}


def missing_ranks(record: Mapping[str, Any]) -> list[int]:
    """Return the ranks that a record names as missing."""
    values = record.get("values")
    missing = values.get("missing") if isinstance(values, dict) else None
    return [rank for rank in missing if isinstance(rank, int)] if isinstance(missing, list) else []
