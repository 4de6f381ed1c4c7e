"""What is known of the nodes: lines of their streams in, documents out (JSON, CSV). Bounded, whatever they send."""

import csv
import io
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Literal

from pydantic import Field

from gpunode.frozen import Frozen, FrozenByName
from gpunode.text import all_printable, one_line, printable_json
from gpunode.top import samples
from gpunode.top.samples import GpuSample, GpuVerdict, GpuWindow, PcieSample, ProcessOwner, SampledGpu, verdicts

NodeStatus = Literal["connecting", "live", "silent", "failed"]


class TopProcess(Frozen):
    """A process on a GPU."""

    pid: int
    memory_mib: float | None
    user: str | None = None
    name: str | None = None
    container: str | None = None
    """The engine's number of the container, 12 digits, or the name of an LXC container."""
    slurm_job: str | None = None


class TopXid(Frozen):
    """How often the driver reported an Xid since the start."""

    xid: int
    count: int


class TopGpu(Frozen):
    """The latest reading of a GPU, and the verdict over the window."""

    index: int
    uuid: str
    name: str
    verdict: str
    reason: str
    utilization_percent: float | None
    utilization_mean_percent: float | None
    """Over the window."""
    memory_used_mib: float | None
    memory_total_mib: float | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    slowdowns: tuple[str, ...] | None
    pcie_received_gb_per_s: float | None
    pcie_sent_gb_per_s: float | None
    pcie_gen: int | None
    pcie_width: int | None
    corrected_new: int | None
    """Corrected memory errors since the start."""
    uncorrected_new: int | None
    xids: tuple[TopXid, ...]
    processes: tuple[TopProcess, ...]


class TopNode(Frozen):
    """One node."""

    host: str
    status: NodeStatus
    since: str
    """Time since which it has the status."""
    reason: str | None
    """Why it is not live, or what is missing."""
    simulated: bool | None
    latency_ms: float | None
    """Half of the round trip to the program on the node."""
    cost_percent: float | None
    """Processor time of everything that top runs on the node, as a share of one core."""
    gpus: tuple[TopGpu, ...]


class TopDocument(FrozenByName):
    """All nodes at one time."""

    schema_name: Literal["gpunode.top/1"] = Field("gpunode.top/1", alias="schema")
    at: str
    interval_s: int
    window_s: float
    nodes: tuple[TopNode, ...]

    def as_json(self) -> str:
        """Return the document in one line."""
        return printable_json(self.model_dump_json(by_alias=True))


_NODE_COLUMNS = ("host", "status", "since", "node_reason", "latency_ms", "cost_percent")
_OF_GPU = tuple(name for name in TopGpu.model_fields if name not in ("xids", "processes", "slowdowns"))
COLUMNS = ("at", *_NODE_COLUMNS, *_OF_GPU, "slowdowns", "xids", "users", "containers", "slurm_jobs")


def csv_lines(document: TopDocument, *, header: bool) -> str:
    """Return a row for each GPU; one without a GPU for a node that has none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow(COLUMNS)
    for node in document.nodes:
        first = [document.at, node.host, node.status, node.since, node.reason, node.latency_ms, node.cost_percent]
        for gpu in node.gpus or (None,):
            cells = [*first, *(_cells(gpu) if gpu else [None] * (len(COLUMNS) - len(first)))]
            writer.writerow(["" if cell is None else _inert(cell) for cell in cells])
    return out.getvalue()


def _cells(gpu: TopGpu) -> Iterator[object]:
    yield from (getattr(gpu, name) for name in _OF_GPU)
    yield None if gpu.slowdowns is None else " ".join(gpu.slowdowns)
    yield " ".join(f"{xid.xid}x{xid.count}" for xid in gpu.xids)
    for of in ("user", "container", "slurm_job"):
        yield " ".join(sorted({text for process in gpu.processes if (text := getattr(process, of))}))


def _inert(cell: object) -> object:
    """Return a cell that no spreadsheet evaluates as a formula."""
    text = all_printable(cell)
    return f"'{text}" if isinstance(text, str) and text.startswith(("=", "+", "-", "@")) and text != "-" else text


GPUS_MOST, PROCESSES_MOST, SAMPLES_MOST, XIDS_MOST = 64, 512, 1000, 32
BEAT_S = 5.0
"""Seconds between two beats of this machine; the program on the node ends 30 s after the last."""


@dataclass
class _Gpu:
    identity: SampledGpu
    first: GpuSample
    samples: deque[GpuSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MOST))
    pcie: deque[PcieSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MOST))


class NodeModel:
    """One node. ``lock`` is held by whoever calls."""

    def __init__(
        self, host: str, interval_s: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.host = host
        self._interval_s, self._window_s, self._clock = interval_s, window_s, clock
        self._status: NodeStatus = "connecting"
        self._since = _now()
        self._reason: str | None = None
        self._simulated: bool | None = None
        self._gpus: dict[str, _Gpu] = {}
        self._apps: dict[tuple[str, int], tuple[float | None, float]] = {}
        self._owners: dict[int, ProcessOwner] = {}
        self._xids: dict[str, Counter[int]] = {}
        self._trouble: dict[str, str] = {}
        self._beats: dict[int, float] = {}
        self._beat = 0
        self._latency_s: float | None = None
        self._cost: tuple[float, float] | None = None
        self._latest = self._heard = clock()

    @property
    def answered(self) -> bool:
        """Return whether it sent a sample."""
        return bool(self._gpus)

    @property
    def status(self) -> NodeStatus:
        return self._status

    def set_status(self, status: NodeStatus, reason: str | None = None) -> None:
        """Set the status, with the time if it is another one than before; a silent node that fails is silent since
        before.
        """
        if status != self._status:
            if {status, self._status} != {"silent", "failed"}:
                self._since = _now()
            self._status = status
        self._reason = None if reason is None else one_line(reason)
        self._latest = self._clock()

    def beat(self) -> int:
        """Return the number of a new beat, to be sent now."""
        self._beat += 1
        self._beats = {self._beat: self._clock(), **dict(list(self._beats.items())[:7])}
        return self._beat

    def feed(self, line: str) -> None:
        """Take a line of the node's stream; one of another form is ignored."""
        self._heard = self._clock()
        kind, _, text = line.partition(" ")
        reader = getattr(self, f"_read_{kind.lower()}", None) if len(kind) == 1 and kind in "NGATKPCEB" else None
        if reader is not None:
            reader(text, self._clock())

    def _read_n(self, text: str, _: float) -> None:
        self._simulated = samples.document_line(text).get("simulated") is True

    def _read_g(self, text: str, now: float) -> None:
        reading = samples.gpu_line(text, now)
        if reading is None:
            return
        identity, sample = reading
        if identity.uuid.startswith("["):
            # A GPU that is lost may not report its identity.
            known = [gpu.identity for gpu in self._gpus.values() if gpu.identity.index == identity.index]
            identity = known[0] if known else identity
        gpu = self._gpus.get(identity.uuid)
        if gpu is None:
            if len(self._gpus) >= GPUS_MOST:
                return
            gpu = self._gpus[identity.uuid] = _Gpu(identity, sample)
        gpu.identity = identity
        gpu.samples.append(sample)
        while gpu.samples[0].at < now - self._window_s:
            gpu.samples.popleft()
        while gpu.pcie and gpu.pcie[0].at < now - max(self._window_s, 30.0):
            gpu.pcie.popleft()
        self._trouble.pop("G", None)
        self.set_status("live")

    def _read_t(self, text: str, now: float) -> None:
        pcie = samples.pcie_line(text, now)
        if pcie is not None:
            for gpu in self._gpus.values():
                if gpu.identity.index == pcie[0]:
                    gpu.pcie.append(pcie[1])

    def _read_a(self, text: str, now: float) -> None:
        app = samples.app_line(text)
        if app is not None and (app[:2] in self._apps or len(self._apps) < PROCESSES_MOST):
            self._apps[app[:2]] = (app[2], now)

    def _read_k(self, text: str, _: float) -> None:
        xid = samples.xid_line(text)
        if xid is not None and (xid[0] in self._xids or len(self._xids) < GPUS_MOST):
            counter = self._xids.setdefault(xid[0], Counter())
            if xid[1] in counter or len(counter) < XIDS_MOST:
                counter[xid[1]] += 1

    def _read_p(self, text: str, _: float) -> None:
        owner = samples.owner_line(text)
        if owner is not None and (owner[0] in self._owners or len(self._owners) < PROCESSES_MOST):
            self._owners[owner[0]] = owner[1]

    def _read_c(self, text: str, _: float) -> None:
        numbers = samples.numbers_line(text, 3)
        if numbers is not None and numbers[2] > 0:
            self._cost = (numbers[0] + numbers[1], numbers[2])

    def _read_e(self, text: str, now: float) -> None:
        kind, _, reason = text.partition(",")
        if kind in "GATK":
            self._trouble[kind] = one_line(reason, 200) or "ended"
            if kind == "G" and not self._recent(now):
                self.set_status("silent")

    def _read_b(self, text: str, now: float) -> None:
        sent = self._beats.pop(int(text), None) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if sent is not None:
            self._latency_s = (now - sent) / 2

    def _patience_s(self) -> float:
        return 2.0 * self._interval_s + 5.0

    def _recent(self, now: float) -> bool:
        return any(gpu.samples and now - gpu.samples[-1].at <= self._patience_s() for gpu in self._gpus.values())

    def snapshot(self) -> TopNode:
        """Return what is known now."""
        now = self._clock()
        if self._status == "live" and not self._recent(now):
            latest = self._latest
            self.set_status("silent")
            self._since = _now(now - latest)
        if self._status == "silent":
            self._reason = self._silence(now)
        self._forget(now)
        gpus = sorted(self._gpus.values(), key=lambda gpu: (gpu.identity.index, gpu.identity.uuid))
        windows = [self._window(gpu, now) for gpu in gpus]
        gpu_verdicts = verdicts(windows, self._window_s)
        live = self._status == "live"
        return TopNode(
            host=self.host,
            status=self._status,
            since=self._since,
            reason=self._reason or self._missing(),
            simulated=self._simulated,
            latency_ms=None if self._latency_s is None or not live else round(1000 * self._latency_s, 1),
            cost_percent=None if self._cost is None else round(100 * self._cost[0] / self._cost[1], 2),
            gpus=tuple(map(self._gpu, gpus, gpu_verdicts)) if live else (),
        )

    def _silence(self, now: float) -> str:
        """Return why there is no sample: the program on the node answers every beat, also while nvidia-smi hangs."""
        if "G" in self._trouble:
            return f"nvidia-smi: {self._trouble['G']}"
        answers = now - self._heard <= 2 * BEAT_S
        return "no sample: " + ("the node answers, nvidia-smi hangs" if answers else "the node or the connection hangs")

    def _missing(self) -> str | None:
        """Return what a live node does not report."""
        names = {"A": "processes", "T": "PCIe rates", "K": "Xids"}
        missing = [f"no {name}: {self._trouble[kind]}" for kind, name in names.items() if kind in self._trouble]
        return "; ".join(missing) or None

    def _forget(self, now: float) -> None:
        """Remove processes that are not listed any more."""
        self._apps = {key: value for key, value in self._apps.items() if now - value[1] <= self._patience_s()}
        pids = {pid for _, pid in self._apps}
        if len(self._owners) > 2 * len(pids) + 16:
            self._owners = {pid: owner for pid, owner in self._owners.items() if pid in pids}

    def _window(self, gpu: _Gpu, now: float) -> GpuWindow:
        readings = list(gpu.samples)
        if readings and now - readings[-1].at > self._patience_s():
            # The others are still listed.
            readings[-1] = replace(readings[-1], lost=True)
        return GpuWindow(gpu.identity.index, readings, list(gpu.pcie), frozenset(map(self._job, self._pids(gpu))))

    def _pids(self, gpu: _Gpu) -> list[int]:
        return sorted(pid for uuid, pid in self._apps if uuid == gpu.identity.uuid)

    def _job(self, pid: int) -> str:
        """Return the job of a process: GPUs of one job are compared with each other."""
        owner = self._owners.get(pid)
        if owner is None:
            return "unknown"
        job = f"slurm {owner.slurm_job}" if owner.slurm_job else None
        return job or (f"container {owner.container}" if owner.container else f"user {owner.user}")

    def _gpu(self, gpu: _Gpu, verdict: GpuVerdict) -> TopGpu:
        last = gpu.samples[-1] if gpu.samples else gpu.first
        loads = [sample.utilization_percent for sample in gpu.samples if sample.utilization_percent is not None]
        pcie = gpu.pcie[-1] if gpu.pcie else None
        xids = self._xids.get(gpu.identity.slot, Counter())
        return TopGpu(
            index=gpu.identity.index,
            uuid=gpu.identity.uuid,
            name=gpu.identity.name,
            verdict=verdict.kind.title,
            reason=verdict.reason,
            utilization_percent=last.utilization_percent,
            utilization_mean_percent=round(fmean(loads), 1) if loads else None,
            memory_used_mib=last.memory_used_mib,
            memory_total_mib=last.memory_total_mib,
            power_w=last.power_w,
            power_limit_w=last.power_limit_w,
            temperature_c=last.temperature_c,
            sm_clock_mhz=last.sm_clock_mhz,
            max_sm_clock_mhz=last.max_sm_clock_mhz,
            slowdowns=None if last.slowdowns is None else tuple(sorted(last.slowdowns)),
            pcie_received_gb_per_s=pcie.received_gb_per_s if pcie else None,
            pcie_sent_gb_per_s=pcie.sent_gb_per_s if pcie else None,
            pcie_gen=last.pcie_gen,
            pcie_width=last.pcie_width,
            corrected_new=_more(gpu.first.corrected, last.corrected),
            uncorrected_new=_more(gpu.first.uncorrected, last.uncorrected),
            xids=tuple(TopXid(xid=xid, count=count) for xid, count in sorted(xids.items())),
            processes=tuple(self._process(gpu, pid) for pid in self._pids(gpu)),
        )

    def _process(self, gpu: _Gpu, pid: int) -> TopProcess:
        owner = self._owners.get(pid)
        memory = self._apps[gpu.identity.uuid, pid][0]
        if owner is None:
            return TopProcess(pid=pid, memory_mib=memory)
        return TopProcess(
            pid=pid,
            memory_mib=memory,
            user=owner.user,
            name=owner.name,
            container=owner.container,
            slurm_job=owner.slurm_job,
        )


def _more(first: int | None, last: int | None) -> int | None:
    return None if first is None or last is None else max(0, last - first)


def _now(ago_s: float = 0.0) -> str:
    return datetime.fromtimestamp(time.time() - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
