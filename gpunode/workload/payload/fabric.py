"""Exchanges between the ranks of many nodes, in the rounds of ``fabric_search``: what is slow or broken, by name."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from gpunode.workload.payload.fabric_search import ALONE, FabricSearch, LateLimits, Position, Trial
from gpunode.workload.payload.group import Group, Seat
from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.measuring import significant
from gpunode.workload.payload.pairs import FACTORS, LEAST_S, Exchange
from gpunode.workload.payload.pytorch import nccl_version

SMALL_BYTES = 64
"""Fits into one packet of any network."""
WIDTH, WIDTH_ON_PROCESSOR = 8192, 1024
"""On a processor a product takes longer than a turn of the scheduler (a tick of 4 ms): the limit of a process that is
throttled is enforced at the tick, and a product of 512 (1.7 ms) ended before it.
"""
PRODUCTS = 5
ALONE_FACTOR = {"nccl": 1.25, "gloo": 4.0}
MOST_ODD = 64
"""Ranks with another version in a record."""
MOST_PAIRS = 1500
"""Pairs of nodes in a record: those of 256 nodes; of more, only the slow ones."""
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""Rank, number of ranks and local rank of torchrun, Open MPI, MPICH and Slurm. mpirun within a Slurm job sets both."""


def seat_from_environment(settings: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Return the seat of this process, as its starter numbered it; ValueError if it set no rank."""
    set_by = [names for names in RANK_VARIABLES if names[0] in environment and names[1] in environment]
    if not set_by:
        raise ValueError("no rank in the environment: start the ranks by torchrun, mpirun or srun")
    rank, size, local = set_by[0]
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    host = settings.get("host") or environment.get("MASTER_ADDR") or first_name(nodes)
    if not host:
        raise ValueError("no address of rank 0: set MASTER_ADDR")
    return {
        "rank": int(environment[rank]),
        "size": int(environment[size]),
        "meet": f"tcp:{host}:{settings['port']}",
        "backend": settings["backend"],
        "device": int(environment.get(local, "0")),
        "limit_s": settings["limit_s"],
        "nodes": settings["nodes"],
    }


def first_name(nodes: str) -> str:
    """Return the first of Slurm's folded names: ``gpu-01`` of ``gpu-[01-16,20],login``."""
    head, bracket, rest = nodes.partition(",")[0].partition("[")
    return head + re.split(r"[-,\]]", rest)[0] if bracket else head


def run(seat: Seat, part: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``fabric.links``, the same on all ranks.

    ``settings``: ``node``, the name of this node in reports; ``racks``, by node; ``expected_gb_per_s`` of a pair.
    """
    started = time.monotonic()
    with Group(seat, part) as group:
        names = group.share(
            "node", str(settings.get("node") or os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        )
        version = version_text(str(group.torch.__version__), seat.backend)
        versions, odd = odd_versions(group.share("versions", version))
        positions, nodes = positions_of(names, settings.get("racks") or {})
        small, large = Exchange(group, SMALL_BYTES), Exchange(group)
        search = FabricSearch(positions, limits_of(seat.backend, large.size, settings.get("expected_gb_per_s")))
        product = AloneWork(group)

        def values() -> dict[str, Any]:
            return {
                **group.values,
                "nodes": len(nodes),
                "names": nodes,
                "rank_nodes": [position.node for position in positions],
                "versions": versions,
                "odd_versions": odd,
                "size_bytes": large.size,
                **found_by(search, large.size),
                "seconds": round(time.monotonic() - started, 1),
            }

        try:
            while True:
                tried = search.next_round()
                if tried is None:
                    break
                if tried.kind == ALONE:
                    answers = group.share("alone", product.seconds() if seat.rank in tried.ranks else None)
                    search.take(dict(enumerate(answers)))
                    continue
                partners = sorted(other for link in tried.links if seat.rank in link for other in link)
                partners = [other for other in partners if other != seat.rank]
                answers = group.share("round", exchanged(small, large, partners))
                search.take({link: trial_of(link, answers) for link in tried.links})
                if any(answer is not None and answer["error"] for answer in answers):
                    group.restart(search.rounds)
        except Trouble as err:
            missing = err.values.get("missing") or []
            search.take({}, missing)
            where = ", ".join(f"rank {rank} on {names[rank]}" for rank in missing)
            text = f"{where} stopped: {err}" if where else str(err)
            raise Trouble(text, {**values(), "missing": missing}) from None
    return {**values(), "missing": []}


def version_text(torch: str, backend: str) -> str:
    """Return ``PyTorch 2.13.0, NCCL 2.27.7``, what all ranks should have."""
    return f"PyTorch {torch}" + (f", NCCL {nccl_version() or 'unknown'}" if backend == "nccl" else "")


def odd_versions(versions: list[str]) -> tuple[str, list[list[Any]]]:
    """Return the versions that most ranks have, and the ranks with other ones and theirs."""
    usual = Counter(versions).most_common(1)[0][0]
    odd = [[rank, version] for rank, version in enumerate(versions) if version != usual]
    return usual, odd[:MOST_ODD]


def positions_of(names: list[str], racks: dict[str, Any]) -> tuple[list[Position], list[str]]:
    """Return the position of each rank from the names of their nodes, and these in the order of their first ranks."""
    nodes = list(dict.fromkeys(names))
    rails = dict.fromkeys(nodes, 0)
    positions = []
    for name in names:
        rack = racks.get(name)
        positions.append(Position(nodes.index(name), rails[name], None if rack is None else str(rack)))
        rails[name] += 1
    return positions, nodes


def limits_of(backend: str, size: int, expected_gb_per_s: float | None) -> LateLimits:
    """Return when a link is late: processes on a CPU disturb each other."""
    least_s = LEAST_S[backend]
    expected_s = size / expected_gb_per_s / 1e9 if expected_gb_per_s else None
    return LateLimits(FACTORS[backend], least_s, ALONE_FACTOR[backend], least_s, expected_s)


def exchanged(small: Exchange, large: Exchange, partners: list[int]) -> dict[str, Any] | None:
    """Return the outcome of this rank's exchange: of a small message first; None without a partner."""
    if not partners:
        return None
    first = small.run(partners)
    if first["error"] or first["corrupt"]:
        return {**first, "small": not first["error"]}
    return {**large.run(partners), "small": True}


def trial_of(link: tuple[int, int], answers: list[Any]) -> Trial:
    """Return the outcome of a link: that of the later of its two ranks."""
    ends = [answers[rank] for rank in link]
    took = [end["seconds"] for end in ends]
    corrupt = any(end["corrupt"] for end in ends)
    return Trial(None if None in took else max(took), corrupt, all(end["small"] for end in ends))


class AloneWork:
    """The work of a rank alone: matrix products."""

    def __init__(self, group: Group) -> None:
        self._group = group
        torch, device = group.torch, group.device
        width = WIDTH if device.type == "cuda" else WIDTH_ON_PROCESSOR
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._factor = torch.ones(width, width, dtype=dtype, device=device)

    def seconds(self) -> float:
        """Return the fastest of several products: others disturb a process, and nothing makes it faster."""
        work = lambda: self._group.torch.mm(self._factor, self._factor)  # noqa: E731
        self._group.seconds(work, 2)
        return min(self._group.seconds(work, PRODUCTS))


def found_by(search: FabricSearch, size: int) -> dict[str, Any]:
    """Return what the search found, as values of a record."""
    usual = search.reference()
    pairs = [
        [node, other, None if took is None else significant(size / took / 1e9)] for node, other, took in search.rows()
    ]
    if len(pairs) > MOST_PAIRS:
        least = None if usual is None else size / usual / 1e9 / search.limits.factor
        pairs = [pair for pair in pairs if pair[2] is None or least is None or pair[2] < least][:MOST_PAIRS]
    return {
        "rounds": search.rounds,
        "usual_gb_per_s": None if usual is None else significant(size / usual / 1e9),
        "causes": [asdict(suspect) for suspect in search.causes()],
        "pairs": pairs,
    }
