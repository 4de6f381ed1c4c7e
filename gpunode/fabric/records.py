"""Results of ranks that another program started, judged without a node: records, nccl-tests' output, a job's dumps.

Dumps are those of PyTorch's flight recorder: a job that hangs writes one for each rank if TORCH_FR_BUFFER_SIZE (older:
TORCH_NCCL_TRACE_BUFFER_SIZE) is set: docs.pytorch.org, "Flight Recorder for Debugging Stuck Jobs". A dump is a pickle
of plain values, or JSON; pickles that name a class or a function are refused.
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

from gpunode.checks import Baseline, Expectation, Finding, Identity, RunningStack, Status
from gpunode.errors import UndeterminedError, UsageError
from gpunode.fabric.model import Answered, Count, RankNodes, Short
from gpunode.fabric.preflight import finding
from gpunode.fabric.verdict import FabricVerdict, values_of, verdict_of
from gpunode.facts.errors import ParseError
from gpunode.facts.models.outputs import NcclRun
from gpunode.facts.parsers import nccl_tests
from gpunode.judging.report import CollectiveReport, FabricReport, NodeReport, judged
from gpunode.text import counted, last_line, number_ranges, one_line
from gpunode.whole import read_bounded
from gpunode.workload.output import BoundedOutput
from gpunode.workload.transport import LaunchFailure

MOST_RECORDS = 64 * 2**20
"""Bytes of a file with the output of ranks."""
UNKNOWN = Identity(simulated=False, stack=RunningStack(), gpus=())
"""What is known of a node without facts."""


@dataclass(frozen=True)
class ExpectedOfNodes:
    """What the site expects, and the earlier figures of each node."""

    site: Expectation
    baselines: Mapping[str, Baseline]

    def of(self, names: Iterable[str]) -> dict[str, Expectation]:
        """Return the expectation of each node."""
        return {
            name: self.site.with_baseline(self.baselines[name]) if name in self.baselines else self.site
            for name in names
        }


def of_records(
    records: list[dict[str, Any]],
    engine: str,
    minutes: float,
    expects: ExpectedOfNodes,
    nccl_tests_log: tuple[str, str | None] | None = None,
) -> tuple[FabricVerdict, list[NodeReport]]:
    """Return the verdict on records, and on nccl-tests' output, and the reports on the nodes that the records name."""
    links = next((record for record in records if record.get("record") == "fabric.links"), {})
    try:
        known = RankNodes.model_validate(values_of(links))
    except ValidationError:
        known = RankNodes()  # the verdict has the reason
    names = list(dict.fromkeys(known.names)) or ["rank 0"]
    verdict = verdict_of(
        records,
        nodes=names,
        engine=engine,
        backend=known.backend,
        ranks=len(known.rank_nodes or names),
        minutes=minutes,
        expects=expects.of(names),
    )
    if nccl_tests_log is not None:
        output, failure = nccl_tests_log
        verdict.add(names, opinion_of(output, verdict.report, failure))
    return verdict, [judged(name, UNKNOWN, verdict.findings[name], None) for name in sorted(verdict.findings)]


def of_dumps(folder: Path) -> list[NodeReport]:
    """Return the verdict on the dumps of one job, as the report on a node of its name. Raises UsageError."""
    findings = [finding for _, finding in findings_of(read_dumps(folder))]
    return [judged("job", UNKNOWN, findings, None)]


def read_file(path: Path) -> str:
    """Return the text of a file. Raises UsageError."""
    try:
        data = read_bounded(path, MOST_RECORDS)
    except UsageError as err:
        raise UsageError(f"--records {err}") from None
    if len(data) > MOST_RECORDS:
        raise UsageError(f"--records {path}: more than {MOST_RECORDS >> 20} MiB")
    return data.decode(errors="replace")


def records_of(text: str) -> list[dict[str, Any]]:
    """Return the records in the output of ranks."""
    output = BoundedOutput()
    try:
        output.stdout(text.encode() + b"\n")
    except LaunchFailure as err:
        raise UndeterminedError(str(err)) from None
    return output.records


NCCL_TESTS_CHECK = "nodes.nccl-tests"
AGREED = 0.8
"""Share of the greater rate that the other one reaches where both measured the same."""
NEAR = 2.0
"""Messages of sizes within this factor are compared."""
_HEAD = re.compile(r"nThread \d|\balgbw\b")


def has_nccl_tests(output: str) -> bool:
    """Return whether there is output of nccl-tests between the records of ranks."""
    return any(_HEAD.search(line) for line in _lines(output))


def opinion_of(output: str, report: FabricReport | None, failure: str | None = None) -> Finding:
    """Return the finding on nccl-tests' output; ``failure``: how the program that started them failed."""
    lines = _lines(output)
    try:
        runs = nccl_tests.parse("\n".join(lines)).runs
    except ParseError as err:
        if failure is not None:
            return finding(NCCL_TESTS_CHECK, Status.ERROR, "node", f"nccl-tests: {failure}")
        if last_line("\n".join(lines)):
            return finding(NCCL_TESTS_CHECK, Status.ERROR, "node", f"nccl-tests: {one_line(str(err))[:200]}")
        return finding(NCCL_TESTS_CHECK, Status.SKIP, "node", "nccl-tests are not installed on the nodes")
    several = [run for run in runs if (run.ranks or 0) > 1]
    if not several:
        if len(runs) > 1 or any(run.ranks == 1 for run in runs):
            text = "nccl-tests measured each process alone: they are built without MPI, or srun's --mpi differs from it"
            return finding(NCCL_TESTS_CHECK, Status.SKIP, "node", text, "Build them with MPI=1; srun --mpi=list")
        several = list(runs)
    return _opinion(several[0], report, failure)


def _lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if not line.lstrip().startswith("{")]


def _opinion(run: NcclRun, report: FabricReport | None, failure: str | None) -> Finding:
    name = f"nccl-tests {run.collective or ''}".strip() + (f" over {counted(run.ranks, 'rank')}" if run.ranks else "")
    wrong = run.out_of_bounds or run.wrong_total
    if wrong:
        text = f"{name}: {wrong} wrong elements"
        return finding(NCCL_TESTS_CHECK, Status.FAIL, "node", text, "Run it in halves of the nodes.")
    if not run.complete or not run.ok:
        why = next(iter(run.messages), None) or failure or "its output ended early"
        return finding(NCCL_TESTS_CHECK, Status.ERROR, "node", f"{name} did not finish: {one_line(why)[:200]}")
    collective = next((row for row in (report.collectives if report else ()) if row.name == "all-reduce"), None)
    busbw = None if collective is None else _nearest_busbw(run, collective)
    if collective is None or busbw is None:
        rate = "" if run.max_busbw_gb_per_s is None else f", {run.max_busbw_gb_per_s:.4g} GB/s at most"
        return finding(NCCL_TESTS_CHECK, Status.PASS, "node", f"{name}: no wrong element{rate}")
    both = f"{name}: {busbw:.4g} GB/s, gpunode measured {collective.busbw_gb_per_s:.4g} GB/s"
    agree = min(busbw, collective.busbw_gb_per_s) >= AGREED * max(busbw, collective.busbw_gb_per_s)
    remedy = "Run both again, on idle nodes; then compare NCCL's variables and versions of both."
    return finding(NCCL_TESTS_CHECK, Status.PASS if agree else Status.WARN, "node", both, None if agree else remedy)


def _nearest_busbw(run: NcclRun, collective: CollectiveReport) -> float | None:
    """Return nccl-tests' bus bandwidth for the message that is nearest to our own; None if none is near."""
    rates: dict[int, list[float]] = {}
    for row in run.rows:
        known = [
            placement.busbw_gb_per_s
            for placement in (row.out_of_place, row.in_place)
            if placement and placement.busbw_gb_per_s
        ]
        if known and max(row.size_bytes, collective.size_bytes) <= NEAR * min(row.size_bytes, collective.size_bytes):
            rates[row.size_bytes] = known
    nearest = min(rates, key=lambda size: abs(size - collective.size_bytes), default=None)
    return None if nearest is None else max(rates[nearest])


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
