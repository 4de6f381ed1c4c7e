"""Logs of nccl-tests (``all_reduce_perf`` and the others), any version, with the lines of launchers and NCCL."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.facts.models.outputs import NcclDevice, NcclRow, NcclRun, NcclTests, Placement
from gpunode.facts.parsers import nccl_lines
from gpunode.facts.parsers.nccl_lines import Line, RowReader
from gpunode.facts.parsers.values import bus_id, found_text, lines_of, text_or_none

_MESSAGES = 200
_MESSAGE_LENGTH = 500


def parse(text: str) -> NcclTests:
    """Parse a log into its runs.

    Lines of several processes without a common MPI job are attributed by their MPI tag; without tags their rows cannot
    be attributed and are left out. Raise ParseError for text without output of nccl-tests.
    """
    log = _Log()
    streams: dict[str, _Stream] = {}
    for raw in lines_of(text):
        if not raw.strip():
            continue
        line = nccl_lines.read(raw)
        streams.setdefault(line.stream, _Stream(log)).take(line)
    for stream in streams.values():
        stream.close_group()
    log.give_out_notes()
    if not log.runs:
        raise ParseError(f"expected the log of a program of nccl-tests, {found_text(text)}")
    return NcclTests(runs=tuple(run.answer() for run in log.runs))


@dataclass
class _Run:
    """One process (or one MPI job) of nccl-tests, with the lines read so far."""

    seen: set[str] = field(default_factory=set)
    version: str | None = None
    nccl_version: str | None = None
    collective: str | None = None
    ranks: dict[int, NcclDevice] = field(default_factory=dict)
    reader: RowReader | None = None
    out_of_bounds: int | None = None
    average: float | None = None
    failed: bool = False
    unattributed: bool = False
    messages: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return bool(self.seen & {"bounds", "average"})

    def add_message(self, text: str) -> None:
        if len(self.messages) < _MESSAGES:
            self.messages.append(text.strip()[:_MESSAGE_LENGTH])

    def answer(self) -> NcclRun:
        rows = self.reader.rows if self.reader and not self.unattributed else []
        if self.reader and self.reader.lost and not self.unattributed:
            self.add_message(f"{self.reader.lost} rows could not be read")
        wrong = _total([placement.wrong for placement in _placements(rows)])
        types = {row.datatype for row in rows}
        in_bounds = self.out_of_bounds in {0, None}
        measured = bool(rows) or self.unattributed
        hosts = [device.host for _, device in sorted(self.ranks.items())]
        ranks = max(self.ranks) + 1 if self.ranks else None
        whole = ranks == len(self.ranks)
        nodes = len(set(hosts)) if whole else None
        per_node = {hosts.count(host) for host in set(hosts)} if whole else set()
        return NcclRun(
            version=self.version,
            nccl_version=self.nccl_version,
            collective=self.collective,
            datatype=types.pop() if len(types) == 1 else None,
            ranks=ranks,
            nodes=nodes,
            gpus_per_node=per_node.pop() if len(per_node) == 1 else None,
            devices=tuple(device for _, device in sorted(self.ranks.items())),
            rows=tuple(rows),
            avg_busbw_gb_per_s=self.average,
            max_busbw_gb_per_s=max(_known(placement.busbw_gb_per_s for placement in _placements(rows)), default=None),
            wrong_total=wrong,
            out_of_bounds=self.out_of_bounds,
            complete=self.complete,
            ok=self.complete and measured and in_bounds and not wrong and not self.failed,
            messages=tuple(self.messages),
        )


class _Log:
    """All runs in the order of their start, and the messages outside of any run."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self._notes: list[tuple[int, str]] = []

    def note(self, owner: _Run | None, text: str) -> None:
        """Add a warning or an error to its run, or to the run beside which it is found later."""
        if owner is not None:
            owner.add_message(text)
            owner.failed = owner.failed or nccl_lines.is_abort(text)
        elif len(self._notes) < _MESSAGES:
            self._notes.append((max(len(self.runs) - 1, 0), text))

    def give_out_notes(self) -> None:
        """Attribute the notes; other ranks' lines belong to the run with the table, which the first rank prints."""
        for index, text in self._notes:
            if index < len(self.runs):
                self.note(self.runs[index], text)


def _placements(rows: list[NcclRow]) -> list[Placement]:
    return [placement for row in rows for placement in (row.out_of_place, row.in_place) if placement is not None]


def _known(values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def _total(values: list[int | None]) -> int | None:
    known = _known(values)
    return sum(known) if known else None


class _Stream:
    """The lines of one process or of all processes; runs follow each other, or overlap."""

    def __init__(self, log: "_Log") -> None:
        self._log = log
        self._group: list[_Run] = []
        """Runs that were started and not closed."""
        self._closings: list[Line] = []
        self._closed: Counter[str] = Counter()
        self._cursors: Counter[str] = Counter()
        self._reading: _Run | None = None
        self._last: _Run | None = None
        """The run that was closed last; errors after its closing lines belong to it."""
        self._command: str | None = None
        self._nccl_version: str | None = None

    def take(self, line: Line) -> None:
        handlers: dict[str, Callable[[Line], None]] = {
            "start": self._begin,
            "starting": self._begin,
            "version": self._begin,
            "command": self._note_command,
            "concluded": self._note_concluded,
            "nccl-version": self._note_nccl_version,
            "rank": self._take_rank,
            "header": self._take_header,
            "bounds": self._take_closing,
            "average": self._take_closing,
        }
        handlers.get(line.kind, self._take_text)(line)

    def _first_without(self, mark: str) -> _Run:
        """Return the first open run that does not have this part of the start yet, else a new one.

        A mark is never removed, so that each list is walked once: a log of headers only takes linear time.
        """
        index = self._cursors[mark]
        while index < len(self._group) and self._group[index].seen & {mark, "header"}:
            index += 1
        self._cursors[mark] = index
        run = self._group[index] if index < len(self._group) else self._new_run()
        run.seen.add(mark)
        return run

    def _new_run(self) -> _Run:
        run = _Run(collective=self._command, nccl_version=self._nccl_version)
        self._group.append(run)
        self._log.runs.append(run)
        self._last = None
        return run

    def _begin(self, line: Line) -> None:
        """Begin a run: version, ``Collective test starting`` and ``nThread`` are one start; a repeated one starts
        another run."""
        self._close_if_complete()
        run = self._first_without(line.kind)
        if line.kind == "starting":
            run.collective = line.values["collective"]
        elif line.kind == "version":
            run.version = line.values["version"]
            run.nccl_version = nccl_lines.library_version(line.values["library"]) or run.nccl_version

    def _close_if_complete(self) -> None:
        if self._closings and self._closed["bounds"] >= len(self._group):
            self.close_group()

    def _note_command(self, line: Line) -> None:
        self.close_group()
        self._command = line.values["collective"]
        self._last = None

    def _note_concluded(self, line: Line) -> None:
        run = self._group[0] if len(self._group) == 1 else self._last
        if run is not None and run.collective is None:
            run.collective = line.values["collective"]

    def _note_nccl_version(self, line: Line) -> None:
        version = line.values["version"]
        for run in self._group[self._cursors["nccl-version"] :]:
            run.nccl_version = run.nccl_version or version
        self._cursors["nccl-version"] = len(self._group)
        if not self._group:
            self._nccl_version = version

    def _take_rank(self, line: Line) -> None:
        rank = int(line.values["rank"])
        self._first_without(f"rank {rank}").ranks[rank] = NcclDevice(
            rank=rank,
            host=line.values["host"],
            device=int(line.values["device"]),
            pci_bus_id=bus_id(line.values["pci"]),
            name=text_or_none(line.values["name"]),
        )

    def _take_header(self, line: Line) -> None:
        self._close_if_complete()
        self._reading = self._first_without("header")
        self._reading.reader = RowReader(line.values["columns"])

    def _take_text(self, line: Line) -> None:
        reader = self._reading.reader if self._reading and not self._closings and line.kind == "text" else None
        if reader and reader.take(line.text):
            return
        if nccl_lines.is_message(line):
            owner = self._group[-1] if self._group else self._last
            self._log.note(owner, line.text)

    def _take_closing(self, line: Line) -> None:
        if not self._group:
            self._new_run().add_message("closing lines without a table")
        self._closings.append(line)
        self._closed[line.kind] += 1
        if self._closed["average"] >= len(self._group):
            self.close_group()

    def close_group(self) -> None:
        """Assign the closing lines to the runs that were started since the last time."""
        group, closings = self._group, self._closings
        finished = max(self._closed["bounds"], self._closed["average"])
        self._group, self._closings, self._reading = [], [], None
        self._closed.clear()
        self._cursors.clear()
        if not group:
            return
        self._command = self._nccl_version = None
        self._last = group[-1]
        for run in group:
            if run.reader:
                run.reader.close()
        if len(group) > 1 and (finished > 1 or _lie_within_each_other(group)):
            _close_interleaved(group, closings, finished)
            return
        for line in closings:
            _close(group[-1], line)


def _lie_within_each_other(group: list[_Run]) -> bool:
    """Return True if the rows below the last header may belong to an earlier one.

    A process that died leaves its rows or its error; one that printed only its header may still run.
    """
    silent = [run for run in group[:-1] if run.reader and not run.reader.rows and not run.failed]
    return bool(silent) or any(run.reader and not run.reader.ascending for run in group)


def _close(run: _Run, line: Line) -> None:
    run.seen.add(line.kind)
    if line.kind == "bounds":
        run.out_of_bounds = nccl_lines.count(line.values["count"])
        if run.out_of_bounds is None:
            run.failed = True
    else:
        run.average = nccl_lines.measure(line.values["count"])
    run.failed = run.failed or line.values["verdict"] == "FAILED"


def _close_interleaved(group: list[_Run], closings: list[Line], finished: int) -> None:
    """Close runs of several processes in one log: values are kept only if all processes report the same."""
    for run in group:
        run.unattributed = True
        run.add_message(
            f"{len(group)} processes wrote their tables into one log: rows and results cannot be attributed to one"
        )
        if finished < len(group):
            continue
        for kind in ("bounds", "average"):
            lines = [line for line in closings if line.kind == kind]
            if lines:
                run.seen.add(kind)
            run.failed = run.failed or any(line.values["verdict"] == "FAILED" for line in lines)
            if len({line.values["count"] for line in lines}) == 1:
                _close(run, lines[0])
