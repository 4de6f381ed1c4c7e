"""Collectives by NCCL on GPUs, Gloo elsewhere: an all-reduce of one node, and all over ranks, from 8 bytes to 8 GB."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpunode.workload.payload import nccl_log
from gpunode.workload.payload.group import Group, Seat, merged
from gpunode.workload.payload.isolate import Outcome, SkipPart, one_line
from gpunode.workload.payload.measuring import repetition_values, significant
from gpunode.workload.payload.pytorch import nccl_version, need_gpu, timed, torch_module

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv")
PATTERN = 1_048_583
"""Elements of the random pattern that a message repeats: a prime, so that no two ranks' parts are the same."""
LARGEST_VALUE = 1024
LARGE = 64 * 2**20
SHARE_OF_FREE = 4
SIZES: dict[tuple[str, str], tuple[int, ...]] = {
    ("nccl", "standard"): (8, 64 * 2**10, 2**20, 64 * 2**20, 2**30),
    ("nccl", "deep"): tuple(8 * 2**step for step in range(31)),
    ("gloo", "standard"): (8, 64 * 2**10, 2**20),
    ("gloo", "deep"): (8, 2**10, 64 * 2**10, 2**20, 4 * 2**20),
}
"""Bytes by backend and level: deep from 8 bytes to 8 GiB on GPUs."""


def run(seat: Seat, part: int, folder: str | None, name: str, level: str) -> dict[str, Any]:
    """Return the values of ``nccl.NAME``, the same on all ranks."""
    log = Path(folder or ".", f"{seat.rank}.{part}.nccl.log")
    if seat.backend == "nccl":
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH,ENV,P2P,SHM,NET", NCCL_DEBUG_FILE=str(log))
        if seat.meet.startswith("file:"):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with Group(seat, part) as group:
        rows = []
        for size in sizes_for(group, SIZES[seat.backend, level]):
            rows.append(measured(group, name, size))
        group.stop()
        several = seat.backend == "nccl" and seat.nodes > 1 and name == "all-reduce"
        report = {**sent(log), "nvls": uses_nvls(log), "view": view_of(log) if several else None}
        answers = group.share("log", report)
    values = {
        **group.values,
        "dtype": "float32",
        "rows": rows,
        "max_busbw_gb_per_s": max((row["busbw_gb_per_s"] for row in rows), default=None),
        "nccl_version": nccl_version() if seat.backend == "nccl" else None,
        **merged(answers),
    }
    if several:
        values["views"] = nccl_log.folded(reply["view"] for reply in answers)
        values["connections"] = nccl_log.connections([reply["view"] for reply in answers])
        values["channels"] = max((reply["view"]["channels"] or 0 for reply in answers if reply["view"]), default=None)
    return values


def view_of(log: Path) -> dict[str, Any] | None:
    """Return what NCCL reports of this rank; None without a log."""
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            views = nccl_log.views(stream.read(MAX_LOG_BYTES))
    except OSError:
        return None
    return views[0] if views else None


def uses_nvls(log: Path) -> bool:
    """Return whether NCCL connected the ranks through the switches' own sums (NVLink SHARP)."""
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            return "Connected NVLS tree" in stream.read(MAX_LOG_BYTES)
    except OSError:
        return False


def sizes_for(group: Group, requested: tuple[int, ...]) -> list[int]:
    """Return the sizes for which every rank has memory."""
    free = None
    if group.device.type == "cuda":
        free = group.torch.cuda.mem_get_info(group.device)[0] // SHARE_OF_FREE
    least = min((memory for memory in group.share("memory", free) if memory is not None), default=None)
    return [size for size in requested if least is None or size <= least]


def measured(group: Group, name: str, size: int) -> dict[str, Any]:
    """Return one row of a collective, in the form of ``CollectiveRow``: the median of the slowest rank, elements of all
    ranks.
    """
    ranks = group.seat.size
    words = max(1, size // 4 // ranks) * ranks
    operation = Operation(group, name, words)
    repetitions = 5 if size >= LARGE else 20
    group.seconds(operation.work, 2)
    seconds = group.seconds(operation.work, repetitions)
    wrong = operation.wrong()
    answers = group.share("row", {"seconds": statistics.median(seconds), "wrong": wrong, **repetition_values(seconds)})
    slowest = max(answers, key=lambda answer: answer["seconds"])
    took = max(slowest["seconds"], 1e-9)
    algbw = words * 4 / took / 1e9
    return {
        "size_bytes": words * 4,
        "time_us": significant(took * 1e6),
        "algbw_gb_per_s": significant(algbw),
        "busbw_gb_per_s": significant(algbw * bus_factor(name, ranks)),
        "repetitions": slowest["repetitions"],
        "spread": slowest["spread"],
        "wrong": sum(answer["wrong"] for answer in answers),
    }


def bus_factor(name: str, ranks: int) -> float:
    """Return bus bandwidth divided by algorithm bandwidth, as in nccl-tests (its doc/PERFORMANCE.md)."""
    if name == "all-reduce":
        return 2 * (ranks - 1) / ranks
    if name in ("all-gather", "reduce-scatter", "all-to-all"):
        return (ranks - 1) / ranks
    return 1.0


class Operation:
    """One collective with its buffers. Each rank can compute what the others have, and so what must arrive."""

    def __init__(self, group: Group, name: str, words: int) -> None:
        self._group, self._name = group, name
        self._rank, self._ranks = group.seat.rank, group.seat.size
        torch = group.torch
        generator = torch.Generator().manual_seed(7)
        count = min(PATTERN, words)
        self._pattern = torch.randint(0, LARGEST_VALUE, (count,), generator=generator).float().to(group.device)
        self._words = words
        self._part = words // self._ranks
        self.work = self._prepared()

    def _message(self, rank: int, words: int | None = None, start: int = 0) -> Any:
        """Return ``words`` of a rank's message, from ``start`` on: the pattern, and the rank's number added."""
        torch, pattern = self._group.torch, self._pattern
        words = self._words if words is None else words
        message = torch.empty(words, dtype=torch.float32, device=self._group.device)
        done = 0
        while done < words:
            offset = (start + done) % len(pattern)
            piece = pattern[offset : offset + words - done]
            torch.add(piece, float(rank + 1), out=message[done : done + len(piece)])
            done += len(piece)
        return message

    def _prepared(self) -> Callable[[], Any]:
        torch, distributed, rank = self._group.torch, self._group.distributed, self._rank
        self._sent = self._message(rank, self._part if self._name == "all-gather" else None)
        small = self._name == "reduce-scatter"
        self._received = torch.zeros(
            self._part if small else self._words, dtype=torch.float32, device=self._group.device
        )
        message, received = self._sent, self._received
        if self._name == "all-reduce":
            received.copy_(message)
        # PyTorch 2.13 renamed two of them.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        if self._name == "send-recv":
            return self._exchange
        return {
            "all-reduce": lambda: distributed.all_reduce(received),
            "all-gather": lambda: gather(received, message),
            "reduce-scatter": lambda: scatter(received, message),
            "all-to-all": lambda: distributed.all_to_all_single(received, message),
            "broadcast": lambda: distributed.broadcast(message if rank == 0 else received, 0),
        }[self._name]

    def _exchange(self) -> None:
        """Send to the next rank, receive from the one before."""
        distributed = self._group.distributed
        ring = [
            distributed.P2POp(distributed.isend, self._sent, (self._rank + 1) % self._ranks),
            distributed.P2POp(distributed.irecv, self._received, (self._rank - 1) % self._ranks),
        ]
        for work in distributed.batch_isend_irecv(ring):
            work.wait()

    def wrong(self) -> int:
        """Return the number of wrong elements in this rank's result, from one more run with fresh buffers."""
        if self._name == "all-reduce":
            self._received.copy_(self._sent)
        else:
            self._received.zero_()
        self.work()
        self._group.finish()
        if self._name == "broadcast" and self._rank == 0:
            return int((self._sent != self._message(0)).sum())
        requested = self._wanted()
        return int((self._received != requested).sum())

    def _wanted(self) -> Any:
        ranks, part, rank = self._ranks, self._part, self._rank
        if self._name in ("all-reduce", "reduce-scatter"):
            # The pattern once for each rank, and 1 + 2 + ... + ranks: whole numbers that float32 sums exactly.
            small = self._name == "reduce-scatter"
            message = self._message(0, part if small else None, rank * part if small else 0)
            return (message - 1) * ranks + ranks * (ranks + 1) // 2
        if self._name == "all-gather":
            return self._group.torch.cat([self._message(other, part) for other in range(ranks)])
        if self._name == "all-to-all":
            pieces = [self._message(other, part, rank * part) for other in range(ranks)]
            return self._group.torch.cat(pieces)
        return self._message(0 if self._name == "broadcast" else (rank - 1) % ranks)


WORDS = (1024, 16 * 2**20)
"""Float32: 4 KiB and 64 MiB. NCCL uses other algorithms for small messages than for large ones."""
WORDS_ON_PROCESSOR = (1024, 2**20)
WAIT_S = 120
_LOG = "nccl.log"
_VIA = re.compile(r"\bvia ([A-Z0-9]+(?:/[A-Za-z0-9]+)?)")
_WARNING = re.compile(r"NCCL WARN (.*)")
MAX_LOG_BYTES = 4 * 2**20


def rank(number: int, size: int, folder: str, backend: str) -> dict[str, Any]:
    """Return the result of one process of the group: wrong elements, seconds, and NCCL's transports."""
    torch = torch_module()
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available() or not getattr(distributed, f"is_{backend}_available")():
        raise SkipPart(f"PyTorch {torch.__version__} has no {backend.upper()}")
    log = Path(folder, f"{number}.{_LOG}")
    if backend == "nccl":
        need_gpu(torch)
        torch.cuda.set_device(number)
        # At a file, not over a network: the processes run on this machine.
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH,ENV,P2P,SHM,NET", NCCL_DEBUG_FILE=str(log))
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(f"cuda:{number}" if backend == "nccl" else "cpu")
    distributed.init_process_group(
        backend,
        init_method=Path(folder, "meeting").as_uri(),
        rank=number,
        world_size=size,
        timeout=datetime.timedelta(seconds=WAIT_S),
    )
    wrong, seconds = 0, 0.0
    # 1 + 2 + ... + size, and what an element adds: whole numbers, which float32 represents and sums exactly.
    total = size * (size + 1) // 2
    try:
        for words in WORDS if backend == "nccl" else WORDS_ON_PROCESSOR:
            places = torch.arange(words, dtype=torch.float32, device=device).remainder_(1024)
            values = places + float(number + 1)
            _, seconds = timed(torch, device, functools.partial(distributed.all_reduce, values))
            wrong += int((values != places * size + total).sum())
    finally:
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()
    return {"device": device.type, "wrong": wrong, "seconds": round(seconds, 6), **sent(log)}


def sent(log: Path) -> dict[str, Any]:
    """Return the transports in NCCL's log, with the number of connections each, and its first warning."""
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            text = stream.read(MAX_LOG_BYTES)
    except OSError:
        return {}
    warning = _WARNING.search(text)
    return {
        "transports": transports(text),
        "nvls": "NVLS multicast support is available" in text,
        "warning": one_line(warning.group(1)) if warning else None,
    }


def transports(text: str) -> dict[str, int]:
    """Parse ``{"P2P/CUMEM": 14}`` from lines such as ``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``."""
    return dict(sorted(Counter(_VIA.findall(text)).items()))


def together(outcomes: list[Outcome], backend: str, size: int) -> Outcome:
    """Return one outcome for the group: of the rank that failed first, or the sum of all."""
    seconds = max((outcome.seconds for outcome in outcomes), default=0.0)
    for key in ("error", "undetermined", "skipped"):
        reasons = [(number, getattr(outcome, key)) for number, outcome in enumerate(outcomes) if getattr(outcome, key)]
        if reasons:
            # If one process ends, the others report a broken connection: the one that ended first has the cause.
            number, reason = min(reasons, key=lambda pair: outcomes[pair[0]].seconds)
            group_outcome = Outcome(seconds)
            setattr(group_outcome, key, reason if key == "skipped" else f"rank {number} of {size}: {reason}")
            return group_outcome
    ways: Counter[str] = Counter()
    for outcome in outcomes:
        ways.update(outcome.values.get("transports") or {})
    warnings = [outcome.values["warning"] for outcome in outcomes if outcome.values.get("warning")]
    return Outcome(
        seconds,
        outcomes[0].device,
        {
            "backend": backend,
            "ranks": size,
            "wrong": sum(outcome.values["wrong"] for outcome in outcomes),
            "seconds": max(outcome.values["seconds"] for outcome in outcomes),
            "transports": dict(sorted(ways.items())),
            "nvls": any(outcome.values.get("nvls") for outcome in outcomes),
            "warning": warnings[0] if warnings else None,
        },
    )
