"""Dumps of PyTorch's flight recorder: which rank stopped first, and what the others wait for. Pure.

A job that hangs writes one dump for each rank if TORCH_FR_BUFFER_SIZE (older: TORCH_NCCL_TRACE_BUFFER_SIZE) is set:
docs.pytorch.org, "Flight Recorder for Debugging Stuck Jobs". A dump is a pickle of plain values, or JSON; pickles that
name a class or a function are refused.
"""

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpunode.checks import Finding, Status
from gpunode.errors import UsageError
from gpunode.fabric.model import Answered, Count, Short
from gpunode.fabric.preflight import finding
from gpunode.text import counted, number_ranges, one_line

MOST_BYTES = 256 * 2**20
MOST_DUMPS = 100_000
_RANK = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl))?$")
REMEDY = "Look at the rank's stack (py-spy dump --pid PID), at its node's kernel log, and at its GPU: gpunode validate."


class RecordedCall(Answered):
    """One collective of a rank, as its dump has it."""

    collective_seq_id: Count = 0
    is_p2p: bool = False
    profiling_name: Short = ""
    process_group: tuple[Short, ...] = ()
    state: Short = ""
    """``scheduled``, ``started``, ``completed``."""
    retired: bool = False

    @property
    def group(self) -> str:
        """Return the name of its process group."""
        return self.process_group[0] if self.process_group else ""

    @property
    def operation(self) -> str:
        """Return ``all_reduce``, without the backend."""
        return one_line(self.profiling_name.rpartition(":")[2] or "collective")[:60]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse: a dump has plain values only."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@dataclass(frozen=True)
class Dump:
    """The entries of one rank, and the ranks of its job as far as it knows them."""

    rank: int
    entries: tuple[RecordedCall, ...]
    ranks: frozenset[int] = frozenset()


def read_dumps(folder: Path) -> list[Dump]:
    """Return the dumps in a folder: files with names that end in the number of a rank. Raises UsageError."""
    try:
        every = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as err:
        raise UsageError(f"--dumps {folder}: {err.strerror}") from None
    files = [(path, int(match[1])) for path in every if (match := _RANK.search(path.name)) is not None]
    if not files:
        raise UsageError(f"--dumps {folder}: no file with a name that ends in a rank, as nccl_trace_rank_0")
    dumps: dict[int, Dump] = {}
    for path, rank in files[:MOST_DUMPS]:
        if rank in dumps:
            raise UsageError(f"--dumps {folder}: two dumps of rank {rank}: keep those of one job and one time")
        try:
            with path.open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
        except OSError as err:
            raise UsageError(f"--dumps {path}: {err.strerror}") from None
        dumps[rank] = parse(data, rank, str(path))
    return list(dumps.values())


def parse(data: bytes, rank: int, name: str) -> Dump:
    """Return the dump in a file's content. Raises UsageError."""
    if len(data) > MOST_BYTES:
        raise UsageError(f"--dumps {name}: more than {MOST_BYTES >> 20} MiB")
    try:
        if data[:1] in (b"{", b"["):
            document: Any = json.loads(data)
        else:
            document = _PlainUnpickler(io.BytesIO(data)).load()
        entries = tuple(RecordedCall.model_validate(entry) for entry in document["entries"])
        return Dump(rank, entries, _ranks(document.get("pg_config")))
    except ValidationError as err:
        raise UsageError(f"--dumps {name}: not a dump of the flight recorder: {err.errors()[0]['msg']}") from None
    except Exception as err:
        text = one_line(f"{type(err).__name__}: {err}")[:200]
        raise UsageError(f"--dumps {name}: not a dump of the flight recorder: {text}") from None


def _ranks(groups: object) -> frozenset[int]:
    """Return the ranks of the largest group in ``pg_config``: ``{"0": {"ranks": "[0, 1]"}}``."""
    ranks: frozenset[int] = frozenset()
    for group in groups.values() if isinstance(groups, dict) else ():
        text = group.get("ranks") if isinstance(group, dict) else None
        numbers = frozenset(int(digits) for digits in re.findall(r"\d{1,7}", str(text))[:MOST_DUMPS])
        ranks = max(ranks, numbers, key=len)
    return ranks


@dataclass(frozen=True)
class _Last:
    """How far a rank came in one group."""

    called: int
    done: int
    entries: Mapping[int, RecordedCall] = field(default_factory=dict)


def findings_of(dumps: Iterable[Dump]) -> list[tuple[int | None, Finding]]:
    """Return what the dumps show, each with its rank: those without a dump, that stopped first, or called another
    collective than the others.
    """
    known = {dump.rank: dump for dump in dumps}
    everyone = frozenset().union(*(dump.ranks for dump in known.values())) | set(known)
    findings: list[tuple[int | None, Finding]] = []
    absent = sorted(everyone - set(known))
    for rank in absent:
        text = f"rank {rank} left no dump: it ended, or it hangs outside of a collective"
        findings.append((rank, finding("nodes.stopped", Status.FAIL, f"rank {rank}", text, REMEDY)))
    groups = sorted({entry.group for dump in known.values() for entry in dump.entries})
    for group in groups:
        findings += _of_group(group, {rank: _last(dump, group) for rank, dump in known.items()})
    if not findings:
        calls = sum(len(dump.entries) for dump in known.values())
        text = f"all {counted(len(known), 'rank')} came equally far in {counted(calls, 'recorded collective')}"
        findings.append((None, finding("nodes.stopped", Status.PASS, "node", text)))
    return findings


def _last(dump: Dump, group: str) -> _Last:
    entries = {entry.collective_seq_id: entry for entry in dump.entries if entry.group == group and not entry.is_p2p}
    done = [number for number, entry in entries.items() if entry.state == "completed"]
    return _Last(max(entries, default=0), max(done, default=0), entries)


def _of_group(group: str, lasts: Mapping[int, _Last]) -> list[tuple[int | None, Finding]]:
    members = {rank: last for rank, last in lasts.items() if last.entries}
    if len(members) < 2:
        return []
    most = max(last.called for last in members.values())
    least = min(last.called for last in members.values())
    name = f" of group {one_line(group)[:40]}" if group not in ("", "0") else ""
    if least < most:
        # The ranks that called fewer collectives than all others: these wait for the next one.
        stopped = sorted(rank for rank, last in members.items() if last.called == least)
        waiting = sorted(rank for rank, last in members.items() if last.called > least)
        following = members[waiting[0]].entries.get(least + 1)
        operation = f"{following.operation} " if following else "collective "
        text = (
            f"stopped first: it did not call {operation}{least + 1}{name}, in which ranks {number_ranges(waiting)} wait"
            f"; its last one was {_name(members[stopped[0]].entries[least])} {least}"
        )
        return [
            (rank, finding("nodes.stopped", Status.FAIL, f"rank {rank}", f"rank {rank} {text}", REMEDY))
            for rank in stopped
        ]
    names = Counter(last.entries[most].operation for last in members.values())
    if len(names) > 1:
        usual = names.most_common(1)[0][0]
        return [
            (
                rank,
                finding(
                    "nodes.stopped",
                    Status.FAIL,
                    f"rank {rank}",
                    f"rank {rank} calls {last.entries[most].operation} as collective {most}{name}, the others {usual}",
                    "Compare the program's branches by rank: all ranks of a group call the same collectives.",
                ),
            )
            for rank, last in sorted(members.items())
            if last.entries[most].operation != usual
        ]
    behind = sorted(rank for rank, last in members.items() if last.done < max(peer.done for peer in members.values()))
    return [
        (
            rank,
            finding(
                "nodes.stopped",
                Status.FAIL,
                f"rank {rank}",
                f"rank {rank} did not complete {_name(members[rank].entries[most])} {most}{name}, others did",
                REMEDY,
            ),
        )
        for rank in behind
        if members[rank].done < most
    ]


def _name(entry: RecordedCall) -> str:
    return entry.operation
