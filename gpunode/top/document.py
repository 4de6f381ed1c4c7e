"""The documents of ``gpunode top``: what is known of all nodes at one time, as JSON and CSV."""

import csv
import io
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from gpunode.frozen import Frozen, FrozenByName
from gpunode.text import all_printable, printable_json

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
