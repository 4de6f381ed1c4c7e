"""Ranks that work together: how they meet, what they share, and which of them is missing.

On one node the ranks meet at a file, on several at a port of rank 0. Everything except the collectives themselves goes
through that store, so that the remaining ranks can name a rank that ended, within their limit.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, UndeterminedPart, one_line
from gpunode.workload.payload.pytorch import need_gpu, torch_module

LOOK_S = 0.01
ABORT_S = 30.0
"""Seconds between our limit and PyTorch's own watchdog, which ends the process without reporting the missing rank."""
FAREWELL_S = 3.0
START_S = 60.0
"""Seconds between the start of the first and of the last container of a group."""
GRACE_S = 5.0
"""Seconds beyond a collective's own limit: for the remaining ranks to notice an error."""
STORE_RANK = 0
PORT_RANGE = range(1, 65536)


class BrokenGroupError(RuntimeError):
    """Another rank had an error and does not continue."""


@dataclass(frozen=True)
class Seat:
    """One rank's place in a group."""

    rank: int
    size: int
    meet: str
    """``file:FOLDER`` on one node, ``tcp:HOST:PORT`` on several: a port for each part, from PORT on."""
    backend: str
    device: int = 0
    """Index of this rank's GPU among those that its process sees."""
    limit_s: float = 60.0
    """Seconds for each step of the group: a rank that does not arrive in this time is missing. A collective has half of
    it, so that the ranks for which it fails reach the next step in time.
    """
    nodes: int = 1
    notes: str | None = None
    """A file that records a missing rank: a container that ended does not take part in the next part."""

    @property
    def notice_s(self) -> float:
        """Return the seconds in which a rank notices another one's error: a collective's own limit, and more."""
        return self.limit_s / 2 + GRACE_S


class Group:
    """A process group for one part. In its context all ranks are present, or the missing ones are named."""

    def __init__(self, seat: Seat, part: int) -> None:
        """Set up the group; ``part`` is the same on all ranks: each part has its own meeting, so a failed one affects
        no other.

        Raises SkipPart if this PyTorch has no such backend, Trouble if it finds no GPU.
        """
        self.seat, self._part = seat, part
        self.torch = torch_module()
        self.distributed = importlib.import_module("torch.distributed")
        present = self.distributed.is_available()
        if not present or not getattr(self.distributed, f"is_{seat.backend}_available")():
            raise SkipPart(f"PyTorch {self.torch.__version__} has no {seat.backend.upper()}")
        self.device = self.torch.device("cpu")
        self._store: Any = None
        self._started = False
        self._steps = 0
        if seat.backend == "nccl":
            need_gpu(self.torch)
            number = int(self.torch.cuda.device_count())
            if seat.device >= number:
                raise Trouble(f"no GPU for rank {seat.rank}: PyTorch finds {number} of {seat.size}")
            self.device = self.torch.device(f"cuda:{seat.device}")
            self.torch.cuda.set_device(self.device)
            return
        # Ranks of one machine share its processors.
        self.torch.set_num_threads(1)
        if not seat.meet.startswith("tcp:"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of the group in each record."""
        return {
            "device": self.device.type,
            "backend": self.seat.backend,
            "ranks": self.seat.size,
            "nodes": self.seat.nodes,
        }

    def __enter__(self) -> Group:
        if self.seat.notes is not None and Path(self.seat.notes).exists():
            raise UndeterminedPart(Path(self.seat.notes).read_text(encoding="utf-8"))
        with self._naming():
            self._store = self._opened()
            # Containers start at different times, and after a failed part some ranks arrive later than others.
            first_s = START_S if self.seat.meet.startswith("tcp:") else 0.0
            self.share("here", None, self.seat.limit_s + (self.seat.limit_s if self._part else first_s) + GRACE_S)
            # From now on a store that does not answer is that of a rank that hangs.
            self._store.set_timeout(datetime.timedelta(seconds=self.seat.limit_s))
            self.start(0)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self.stop()
            self._take_leave()
        elif isinstance(error, (Trouble, SkipPart, UndeterminedPart)):
            # An error of this rank only: the others need not wait for it.
            with contextlib.suppress(Exception):
                self._store.set_timeout(datetime.timedelta(seconds=GRACE_S))
                self._store.set(f"lost/{self.seat.rank}", "1")
            self._abandon()
        elif isinstance(error, Exception):
            with self._naming():
                raise error

    def _opened(self) -> Any:
        distributed, seat = self.distributed, self.seat
        timeout = datetime.timedelta(seconds=seat.limit_s + START_S)
        kind, _, address = seat.meet.partition(":")
        if kind == "file":
            return distributed.FileStore(str(Path(address, f"meeting-{self._part}")), seat.size)
        host, _, port = address.rpartition(":")
        return distributed.TCPStore(
            host,
            int(port) + self._part,
            is_master=seat.rank == STORE_RANK,
            timeout=timeout,
            wait_for_workers=False,
        )

    def start(self, generation: int) -> None:
        """Connect the ranks; after ``stop``, again with another ``generation``."""
        seat, distributed = self.seat, self.distributed
        limit_s = seat.limit_s + ABORT_S if seat.backend == "nccl" else seat.limit_s / 2
        distributed.init_process_group(
            seat.backend,
            store=distributed.PrefixStore(f"group-{generation}", self._store),
            rank=seat.rank,
            world_size=seat.size,
            timeout=datetime.timedelta(seconds=limit_s),
        )
        self._started = True

    def stop(self) -> None:
        """Disconnect from the ranks; those that wait for this one notice that its connections end."""
        if self._started:
            self._started = False
            with contextlib.suppress(Exception):
                self.distributed.destroy_process_group()

    def _abandon(self) -> None:
        """Disconnect after an error. NCCL may wait for ever there: its processes end with the part."""
        if self.seat.backend != "nccl":
            self.stop()

    def restart(self, generation: int) -> None:
        """Connect the ranks again after an exchange that failed: it may have broken the whole group."""
        abort = getattr(getattr(self.distributed, "distributed_c10d", None), "_abort_process_group", None)
        if self.seat.backend == "nccl" and abort is not None:
            with contextlib.suppress(Exception):
                abort()
            self._started = False
        self.stop()
        self.share("again", None)
        self.start(generation)

    @contextlib.contextmanager
    def _naming(self) -> Any:
        """Add the missing ranks to an error of the group."""
        try:
            yield
        except (Trouble, SkipPart, UndeterminedPart):
            raise
        except Exception as err:
            self._abandon()
            raise self._lost(self._absent(), one_line(f"{type(err).__name__}: {err}")) from None

    def _lost(self, missing: list[int], reason: str = "") -> Trouble:
        size = self.seat.size
        if not missing:
            return Trouble(f"the group of {size} ranks failed: {reason}", {**self.values, "missing": []})
        names = ", ".join(map(str, missing))
        if self.seat.notes is not None:
            note = f"not run: rank {names} of {size} was missing in an earlier part"
            with contextlib.suppress(OSError):
                Path(self.seat.notes).write_text(note, encoding="utf-8")
        text = f"rank{'s' if len(missing) > 1 else ''} {names} of {size} ended or did not answer within "
        return Trouble(f"{text}{self.seat.limit_s:g} s", {**self.values, "missing": missing})

    def _absent(self) -> list[int]:
        """Return the ranks that do not meet after an error: each remaining rank soon notices and reports it."""
        if self._store is None:
            return [STORE_RANK]
        try:
            self._store.set(f"lost/{self.seat.rank}", "1")
            missing = self._without("lost", self.seat.notice_s)
        except Exception:
            # The store ended with its rank.
            return [STORE_RANK]
        self._take_leave(missing)
        return missing

    def share(self, step: str, value: Any, limit_s: float | None = None) -> list[Any]:
        """Send a value to all ranks; return the values of all, by rank.

        Trouble names a rank that is missing; RuntimeError if another rank had an error.
        """
        self._steps += 1
        key = f"{step}-{self._steps}"
        try:
            self._store.set(f"{key}/{self.seat.rank}", json.dumps(value))
            missing = self._without(key, self.seat.limit_s if limit_s is None else limit_s, unless="lost")
            if not missing:
                return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.seat.size)]
            self._store.set(f"lost/{self.seat.rank}", "1")
            self._take_leave(missing)
        except BrokenGroupError:
            raise
        except Exception:
            missing = [STORE_RANK]
        self._abandon()
        raise self._lost(missing)

    def _without(self, key: str, limit_s: float, unless: str | None = None, but: Sequence[int] = ()) -> list[int]:
        """Return the ranks that have not set their part of ``key`` after ``limit_s``; BrokenGroupError if one of those
        has set its part of ``unless``. Ranks of ``but`` are not waited for.
        """
        until = time.monotonic() + limit_s
        missing = [rank for rank in range(self.seat.size) if rank not in but]
        while True:
            missing = [rank for rank in missing if not self._store.check([f"{key}/{rank}"])]
            if not missing or time.monotonic() >= until:
                return missing
            broken = [rank for rank in missing if unless and self._store.check([f"{unless}/{rank}"])]
            if broken:
                raise BrokenGroupError(f"rank {broken[0]} met an error first")
            time.sleep(LOOK_S)

    def _take_leave(self, missing: Sequence[int] = ()) -> None:
        """Leave, the rank with the store last: the others still read from it, and would name its rank as missing."""
        with contextlib.suppress(Exception):
            self._store.set(f"bye/{self.seat.rank}", "1")
            if self.seat.rank == STORE_RANK:
                self._without("bye", self.seat.limit_s / 2 if missing else FAREWELL_S, but=missing)

    def finish(self) -> None:
        """Wait for the device, no longer than the limit: a collective that hangs is reported as an error here."""
        if self.device.type != "cuda":
            return
        event = self.torch.cuda.Event()
        event.record()
        until = time.monotonic() + self.seat.limit_s / 2
        while not event.query():
            if time.monotonic() >= until:
                raise RuntimeError(f"NCCL did not return within {self.seat.limit_s / 2:g} s")
            time.sleep(0.0005)

    def seconds(self, work: Callable[[], Any], repetitions: int) -> list[float]:
        """Return the seconds of each repetition: by events on GPUs, by the clock elsewhere; within the limit."""
        if self.device.type != "cuda":
            times = []
            for _ in range(repetitions):
                started = time.perf_counter()
                work()
                times.append(time.perf_counter() - started)
            return times
        marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.finish()
        return [start.elapsed_time(end) / 1000 for start, end in zip(marks, marks[1:])]


def seat_of(values: dict[str, Any]) -> Seat:
    """Return a seat from its settings; ValueError for invalid ones."""
    seat = Seat(**values)
    host, _, port = seat.meet.partition(":")[2].rpartition(":")
    if seat.meet.startswith("tcp:") and not (host and port.isdigit() and int(port) in PORT_RANGE):
        raise ValueError(f"meet: expected tcp:HOST:PORT, found {seat.meet}")
    if not 0 <= seat.rank < seat.size or seat.backend not in ("gloo", "nccl"):
        raise ValueError("expected a rank below size, and backend gloo or nccl")
    return seat


def merged(outcomes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of all ranks as one: transports added up, the first warning."""
    ways: dict[str, int] = {}
    nvls, warning = False, None
    for outcome in outcomes:
        for name, count in (outcome.get("transports") or {}).items():
            ways[name] = ways.get(name, 0) + count
        nvls = nvls or bool(outcome.get("nvls"))
        warning = warning or outcome.get("warning")
    return {"transports": dict(sorted(ways.items())), "kinds": kinds_of(ways, nvls=nvls), "warning": warning}


def kinds_of(transports: Iterable[str], *, nvls: bool) -> list[str]:
    """Return the kinds of the connections in NCCL's log: ``P2P/CUMEM``, ``NET/IB``, ``NET/AWS``."""
    kinds = {"NVLS"} if nvls else set()
    for name in transports:
        kind, _, network = name.partition("/")
        if kind in ("P2P", "SHM"):
            kinds.add(kind)
        elif kind == "NET" and network.startswith("IB"):
            kinds.add("IB")
        elif kind == "NET" and network == "Socket":
            kinds.add("socket")
        else:
            kinds.add("other")
    return sorted(kinds)
