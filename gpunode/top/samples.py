"""Lines of a node's stream, as typed samples. They are a node's: bounded, and None for what is not as expected."""

import json
import re
from dataclasses import dataclass
from typing import Any

from gpunode.text import one_line

_FIELDS = (
    *(
        "index",
        "uuid",
        "pci.bus_id",
        "name",
        "utilization.gpu",
        "utilization.memory",
        "memory.used",
        "memory.total",
        "power.draw",
    ),
    *("enforced.power.limit", "temperature.gpu", "clocks.sm", "clocks.max.sm", "clocks_event_reasons.active"),
    *("pcie.link.gen.current", "pcie.link.width.current", "ecc.errors.corrected.volatile.total"),
    "ecc.errors.uncorrected.volatile.total",
)
GPU_FIELDS = (
    ",".join(_FIELDS),
    ",".join(name.replace("clocks_event_", "clocks_throttle_") for name in _FIELDS),
)
"""Fields of ``nvidia-smi --query-gpu``: today's names, and those of drivers before 535 (renamed there according to
utkuozdemir/nvidia_gpu_exporter#123)."""
_REASONS = {
    0x4: "power-limit",
    0x8: "hardware-slowdown",
    0x20: "heat-software",
    0x40: "heat",
    0x80: "power-brake",
}
"""Bits of ``nvmlClocksEventReasons`` in NVIDIA's nvml.h, without those that are no slowdown."""
_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,6})?")
_LOST = "[GPU is lost]"
_XID = re.compile(r"\] NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,20}\): (\d{1,6})\b")
_CONTAINER = re.compile(
    r"(?:docker|libpod|cri-containerd|crio|nerdctl|containerd)[-/]([0-9a-f]{64})\b|/([0-9a-f]{64})(?:/|$)"
)
_LXC = re.compile(r"/lxc(?:\.payload\.|/)([\w.-]{1,64})")
_SLURM = re.compile(r"/job_(\d{1,12})(?:/|$)")
INDEX_MOST = 255


@dataclass(frozen=True, slots=True)
class SampledGpu:
    """Which GPU a sample is about."""

    index: int
    uuid: str
    slot: str
    """Domain, bus and device in lower case, as the kernel's log has it: ``0000:1b:00``."""
    name: str


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of a GPU; None for a value that it does not report. ``at``: seconds of this machine's clock."""

    at: float
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    slowdowns: frozenset[str] | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class PcieSample:
    """PCIe rates of a GPU over 20 ms, from its own side; GB is 10^9."""

    at: float
    received_gb_per_s: float
    sent_gb_per_s: float


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """Who runs a process."""

    user: str
    name: str
    container: str | None
    slurm_job: str | None


def gpu_line(text: str, at: float) -> tuple[SampledGpu, GpuSample] | None:
    """Parse a GPU's values; None for a line of another form, such as a message of nvidia-smi."""
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != len(_FIELDS) or not cells[0].isascii() or not cells[0].isdigit() or int(cells[0]) > INDEX_MOST:
        return None
    values = dict(zip(_FIELDS, cells, strict=True))
    identity = SampledGpu(int(cells[0]), one_line(cells[1], 60), _slot(cells[2]), one_line(cells[3], 60))
    number = {name: _number(cell) for name, cell in values.items()}
    whole = {name: None if value is None else int(value) for name, value in number.items()}
    return identity, GpuSample(
        at=at,
        utilization_percent=number["utilization.gpu"],
        memory_utilization_percent=number["utilization.memory"],
        memory_used_mib=number["memory.used"],
        memory_total_mib=number["memory.total"],
        power_w=number["power.draw"],
        power_limit_w=number["enforced.power.limit"],
        temperature_c=number["temperature.gpu"],
        sm_clock_mhz=number["clocks.sm"],
        max_sm_clock_mhz=number["clocks.max.sm"],
        slowdowns=_slowdowns(values["clocks_event_reasons.active"]),
        pcie_gen=whole["pcie.link.gen.current"],
        pcie_width=whole["pcie.link.width.current"],
        corrected=whole["ecc.errors.corrected.volatile.total"],
        uncorrected=whole["ecc.errors.uncorrected.volatile.total"],
        lost=_LOST in cells,
    )


def _number(cell: str) -> float | None:
    return float(cell) if _NUMBER.fullmatch(cell) and cell.isascii() else None


def _slot(bus_id: str) -> str:
    return _short(bus_id.partition(".")[0])


def _short(slot: str) -> str:
    """Return a slot with four digits for its domain: nvidia-smi prints eight."""
    domain, colon, rest = slot.lower().partition(":")
    return one_line(f"{domain[-4:]}{colon}{rest}", 20)


def _slowdowns(cell: str) -> frozenset[str] | None:
    if not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
        return None
    return frozenset(name for bit, name in _REASONS.items() if int(cell, 16) & bit)


def pcie_line(text: str, at: float) -> tuple[int, PcieSample] | None:
    """Parse a row of ``nvidia-smi dmon -s t``: index, received and sent in MB/s; None for headers and ``-``."""
    cells = text.split()
    if len(cells) != 3 or any(_number(cell) is None for cell in cells) or float(cells[0]) > INDEX_MOST:
        return None
    return int(float(cells[0])), PcieSample(at, float(cells[1]) / 1000, float(cells[2]) / 1000)


def app_line(text: str) -> tuple[str, int, float | None] | None:
    """Parse a process on a GPU: the GPU's UUID, the process, its memory in MiB."""
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != 3 or not re.fullmatch(r"[0-9]{1,9}", cells[1]):
        return None
    return one_line(cells[0], 60), int(cells[1]), _number(cells[2])


def xid_line(text: str) -> tuple[str, int] | None:
    """Return the slot of the GPU and the Xid of a line of the kernel's log."""
    match = _XID.search(text)
    return (_short(match[1]), int(match[2])) if match else None


def owner_line(text: str) -> tuple[int, ProcessOwner] | None:
    """Parse who runs a process; container and Slurm job are in the path of its cgroup."""
    document = document_line(text)
    pid, group = document.get("pid"), document.get("cgroup")
    if not isinstance(pid, int) or not isinstance(group, str):
        return None
    container, lxc, job = _CONTAINER.search(group), _LXC.search(group), _SLURM.search(group)
    named = (container[1] or container[2])[:12] if container else lxc[1] if lxc else None
    user, name = (one_line(str(document.get(key, "?")), 32) for key in ("user", "name"))
    return pid, ProcessOwner(user, name, named, job[1] if job else None)


def document_line(text: str) -> dict[str, Any]:
    """Return the JSON object of a line; empty for anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def numbers_line(text: str, count: int) -> tuple[float, ...] | None:
    """Return the numbers of a line, separated by commas; None unless it has as many as expected."""
    numbers = [_number(cell.strip()) for cell in text.split(",", count)]
    return (
        tuple(number for number in numbers if number is not None)
        if len(numbers) == count and all(number is not None for number in numbers)
        else None
    )
