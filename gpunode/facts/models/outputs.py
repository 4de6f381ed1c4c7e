"""Models of the output of other tools than nvidia-smi: the shapes of ``gpunode parse KIND``."""

from typing import Literal

from pydantic import Field

from gpunode.facts.models import Fact, RareFact

Number = int | float
Matrix = tuple[tuple[Number | None, ...], ...]
Outcome = Literal["pass", "fail", "warn", "skip", "error"]


class NcclDevice(RareFact):
    """The GPU of one rank."""

    rank: int
    host: str
    device: int
    pci_bus_id: str | None
    name: str | None


class Placement(RareFact):
    """One measurement of a row."""

    time_us: float | None
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None
    wrong: int | None


class OldPlacement(Placement):
    """One measurement in logs before 2.12, which print the magnitude of the error."""

    error: float | None


class NcclRow(RareFact):
    """One message size of a run."""

    size_bytes: int
    count: int
    datatype: str
    out_of_place: Placement | OldPlacement | None
    in_place: Placement | OldPlacement | None


class NcclRun(RareFact):
    """One run of a program of nccl-tests."""

    version: str | None
    """Of nccl-tests."""
    nccl_version: str | None
    collective: str | None
    datatype: str | None
    ranks: int | None
    """None if no list of ranks is printed."""
    nodes: int | None
    gpus_per_node: int | None
    devices: tuple[NcclDevice, ...]
    rows: tuple[NcclRow, ...]
    avg_busbw_gb_per_s: float | None
    """As printed."""
    max_busbw_gb_per_s: float | None
    """Over both placements."""
    wrong_total: int | None
    out_of_bounds: int | None
    """The count of the closing line."""
    complete: bool
    """True if the closing lines are present."""
    ok: bool
    """True if the run is complete, rows were read, and no wrong value, abort or FAILED was found."""
    messages: tuple[str, ...]
    """Warnings of NCCL, errors of tests and launchers, and lines that could not be attributed."""


class NcclTests(RareFact):
    """A log of nccl-tests."""

    runs: tuple[NcclRun, ...]


class NvbandwidthTest(RareFact):
    """One test of nvbandwidth."""

    name: str | None
    """None for a test that the text waives without its name."""
    status: Literal["passed", "waived", "failed", "error"]
    unit: str | None
    """As printed: ``GB/s`` (10^9), ``ns``."""
    matrix: Matrix | None
    sum: Number | None
    min: Number | None
    """As printed, else computed from the cells (without the 0.00 of the diagonal)."""
    max: Number | None


class Nvbandwidth(RareFact):
    """The output of nvbandwidth."""

    version: str | None
    driver_version: str | None
    tests: tuple[NvbandwidthTest, ...]


class BandwidthSize(RareFact):
    """The figure of one size in one direction."""

    direction: Literal["host_to_device", "device_to_host", "device_to_device"]
    size_bytes: int
    gb_per_s: float


class BandwidthTest(RareFact):
    """The CUDA sample bandwidthTest; figures are those of the largest size."""

    device: str | None
    host_to_device_gb_per_s: float | None
    device_to_host_gb_per_s: float | None
    device_to_device_gb_per_s: float | None
    passed: bool | None = Field(alias="pass")
    sizes: tuple[BandwidthSize, ...]


class P2pBandwidth(RareFact):
    """The CUDA sample p2pBandwidthLatencyTest: matrices by row and column of the GPUs' numbers; None: not printed."""

    devices: tuple[str, ...]
    p2p_access: tuple[tuple[bool, ...], ...] | None
    unidirectional_gb_per_s: Matrix | None
    unidirectional_no_p2p_gb_per_s: Matrix | None
    bidirectional_gb_per_s: Matrix | None
    bidirectional_no_p2p_gb_per_s: Matrix | None
    latency_us: Matrix | None
    latency_no_p2p_us: Matrix | None
    cpu_latency_us: Matrix | None
    cpu_latency_no_p2p_us: Matrix | None


class DcgmGpu(RareFact):
    """The outcome of a test on one GPU."""

    gpu: int
    status: Outcome
    messages: tuple[str, ...]


class DcgmTest(RareFact):
    """One test of ``dcgmi diag``."""

    name: str | None
    category: str | None
    status: Outcome
    messages: tuple[str, ...]
    """Messages that belong to no GPU."""
    gpus: tuple[DcgmGpu, ...]
    """Empty if no ids are printed."""


class DcgmDiag(RareFact):
    """The output of ``dcgmi diag``."""

    dcgm_version: str | None
    driver_version: str | None
    level: int | None
    """From an echoed command: the output does not contain it."""
    overall: Outcome
    """The worst of fail > error > warn > pass; skip only if all tests are skipped."""
    tests: tuple[DcgmTest, ...]


class LogProcess(Fact):
    """The process that a line of the kernel's log names."""

    pid: int | None
    name: str | None


class LogEvent(Fact):
    """One line of the kernel's log about an error of a GPU."""

    kind: Literal["xid", "sxid", "nvrm", "nouveau"]
    xid: int | None
    pci_bus_id: str | None
    time: str | None
    """As printed."""
    process: LogProcess | None
    message: str
    meaning: str | None
    severity: str | None
    """Of an Xid from the catalogue; an SXid prints its own (``fatal``, ``non-fatal``)."""
    action: str | None


class Dmesg(Fact):
    """The kernel's log."""

    events: tuple[LogEvent, ...] = ()


class LspciLink(Fact):
    """The PCIe link of a device."""

    speed_gt_per_s: Number | None
    width: int | None
    speed_max_gt_per_s: Number | None
    width_max: int | None


class LspciDevice(Fact):
    """One device of ``lspci``."""

    slot: str
    """As printed."""
    device_class: str | None = Field(alias="class")
    class_id: str | None
    vendor_id: str | None
    device_id: str | None
    subsystem_id: str | None
    description: str | None
    link: LspciLink | None
    """None without ``-vv``, without root, and for a device without a PCIe link."""
    kernel_driver: str | None


class Lspci(Fact):
    """The output of ``lspci``."""

    devices: tuple[LspciDevice, ...]


class IbstatPort(Fact):
    """One port of an adapter."""

    port: int
    state: str | None
    """``Active``, ``Down``."""
    physical_state: str | None
    rate_gbit_per_s: Number | None
    lid: int | None
    guid: str | None
    """Of the port, as printed; ibstatus prints none."""
    link_layer: str | None


class IbstatAdapter(Fact):
    """One channel adapter."""

    name: str
    type: str | None
    firmware: str | None
    ports: tuple[IbstatPort, ...]


class Ibstat(Fact):
    """The output of ``ibstat`` or ``ibstatus``."""

    cas: tuple[IbstatAdapter, ...]
    messages: tuple[str, ...]


class NumactlNode(Fact):
    """One NUMA node with its processors."""

    node: int
    cpus: tuple[int, ...]
    memory_total_mib: int | None
    memory_free_mib: int | None


class Numactl(Fact):
    """The output of ``numactl --hardware``."""

    nodes: tuple[NumactlNode, ...]
    distances: tuple[tuple[int, ...], ...]
    """In the order of the nodes; empty if numactl prints none."""


class LscpuNode(Fact):
    """One NUMA node of ``lscpu``."""

    node: int
    cpus: str | None
    """As printed (``0-31,64-95``); None for a node that has memory only."""


class Lscpu(Fact):
    """The output of ``lscpu``."""

    architecture: str | None
    model_name: str | None
    cpus: int | None
    sockets: int | None
    """None if lscpu prints ``-``."""
    cores_per_socket: int | None
    threads_per_core: int | None
    nodes: tuple[LscpuNode, ...]


class DriverVersion(Fact):
    """``/proc/driver/nvidia/version``."""

    version: str
    flavour: Literal["open", "proprietary"]
    gcc: str | None
    """The compiler's version; None for another compiler."""
    built: str | None
    """The date as printed, in the language of the builder's locale."""
