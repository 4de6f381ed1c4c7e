"""Models of nvidia-smi's output: the shapes of ``gpunode parse nvidia-smi-…``.

A value that is absent, unknown or not supported is None. Units are part of the names.
"""

from typing import Generic, TypeVar

from pydantic import Field

from gpunode.facts.models import Fact, RareFact

Number = int | float
DocumentT = TypeVar("DocumentT", bound=Fact)


class ToolError(Fact):
    """The error that a tool reported."""

    kind: str
    """``driver-library-mismatch``, ``no-devices``, ``driver-not-loaded``, ``library-missing``, ``gpu-lost``,
    ``nvml-unknown``, ``permission``, ``other``."""
    message: str
    """The first line of the error as printed."""
    nvml_version: str | None = None


class Failure(Fact):
    """The error that a tool printed in place of its output."""

    error: ToolError


class Smi(Fact, Generic[DocumentT]):
    """An answer of nvidia-smi: exactly one of ``document`` and ``error_kind`` is set."""

    VOLATILE = frozenset({"messages"})

    document: DocumentT | None = None
    error_kind: str | None = None
    error_message: str | None = None
    error_nvml_version: str | None = None
    exit_status: int = 0
    messages: tuple[str, ...] = ()
    """Lines that nvidia-smi printed beside its output, on either stream: ``WARNING: infoROM is corrupted at gpu …``."""


class Ecc(Fact):
    """ECC of a GPU; the counters are sums of the counters that the driver's generation splits."""

    COUNTERS = frozenset(
        {
            *("volatile_corrected", "volatile_uncorrected", "aggregate_corrected", "aggregate_uncorrected"),
            *("volatile_sram_corrected", "aggregate_sram_corrected", "aggregate_sram_uncorrected"),
        }
    )

    enabled: bool | None = None
    pending: bool | None = None
    volatile_corrected: int | None = None
    volatile_uncorrected: int | None = None
    aggregate_corrected: int | None = None
    aggregate_uncorrected: int | None = None
    volatile_sram_corrected: int | None = None
    """Of on-chip memory; this and the next two are part of the sums. None: not reported apart (before Ampere)."""
    aggregate_sram_corrected: int | None = None
    aggregate_sram_uncorrected: int | None = None
    sram_threshold_exceeded: bool | None = None


class RetiredPages(Fact):
    """Memory pages that are retired."""

    COUNTERS = frozenset({"single_bit", "double_bit"})

    single_bit: int | None = None
    double_bit: int | None = None
    pending: bool | None = None


class RemappedRows(Fact):
    """Memory rows that are remapped."""

    COUNTERS = frozenset({"correctable", "uncorrectable"})

    correctable: int | None = None
    uncorrectable: int | None = None
    pending: bool | None = None
    failure: bool | None = None


class SmiPcie(Fact):
    """The PCIe link of a GPU as its driver reports it."""

    VOLATILE = frozenset({"gen_current"})
    COUNTERS = frozenset({"replays"})

    gen_current: int | None = None
    gen_max: int | None = None
    """Supported by GPU and host together."""
    gen_max_device: int | None = None
    """Supported by the GPU alone."""
    width_current: Number | None = None
    width_max: Number | None = None
    replays: int | None = None


class SmiClocks(Fact):
    """Clocks of a GPU in MHz."""

    sm: Number | None = None
    memory: Number | None = None
    graphics: Number | None = None


class ApplicationClocks(Fact):
    """Clocks in MHz that the driver offers to applications."""

    graphics: Number | None = None
    memory: Number | None = None


class SupportedClocks(Fact):
    """The memory clocks in MHz, and the lowest graphics clock; the highest is among the maximum clocks."""

    memory: tuple[Number, ...] = ()
    graphics_min: Number | None = None


class FabricHealth(Fact):
    """Health of a GPU's connection to the NVLink fabric, as printed."""

    summary: str | None = None
    bandwidth: str | None = None
    route_recovery: str | None = None
    route_unhealthy: str | None = None
    access_timeout_recovery: str | None = None
    incorrect_configuration: str | None = None


class SmiFabric(Fact):
    """A GPU's connection to the NVLink fabric."""

    state: str | None = None
    status: str | None = None
    clique_id: int | None = None
    cluster_uuid: str | None = None
    health: FabricHealth = FabricHealth()


class SmiMigDevice(Fact):
    """A MIG device of a GPU."""

    index: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_total_mib: Number | None = None


class SmiProcess(Fact):
    """A process that uses a GPU."""

    pid: int
    name: str | None = None
    type: str | None = None
    """``C``, ``G``, ``C+G``, ``M+C``."""
    memory_used_mib: Number | None = None


class SmiGpu(Fact):
    """One GPU of ``nvidia-smi -q``."""

    VOLATILE = frozenset(
        {
            "index",
            "minor_number",
            "performance_state",
            "temperature_c",
            "memory_temperature_c",
            "tlimit_c",
            "power_w",
            "clocks_mhz",
            "throttle_reasons",
            "memory_used_mib",
            "utilization_percent",
            "memory_utilization_percent",
            "processes",
        }
    )

    index: int
    """The position in the output."""
    pci_bus_id: str | None = None
    """``0000:1a:00.0``, as sysfs writes it."""
    pci_device_id: str | None = None
    """``10de:2330``."""
    pci_subsystem_id: str | None = None
    name: str | None = None
    uuid: str | None = None
    serial: str | None = None
    architecture: str | None = None
    vbios_version: str | None = None
    gsp_firmware_version: str | None = None
    minor_number: int | None = None
    """Number of ``/dev/nvidiaN``."""
    persistence_mode: bool | None = None
    mig_mode: bool | None = None
    mig_mode_pending: bool | None = None
    compute_mode: str | None = None
    accounting_mode: bool | None = None
    addressing_mode: str | None = None
    virtualization_mode: str | None = None
    """``None``, ``Pass-Through``, ``VGPU``, ``Host VGPU`` …; None: not reported."""
    performance_state: str | None = None
    ecc: Ecc = Ecc()
    retired_pages: RetiredPages = RetiredPages()
    remapped_rows: RemappedRows = RemappedRows()
    pcie: SmiPcie = SmiPcie()
    temperature_c: Number | None = None
    memory_temperature_c: Number | None = None
    slowdown_temperature_c: Number | None = None
    """None if the driver prints only offsets (T.Limit)."""
    slowdown_tlimit_c: Number | None = None
    tlimit_c: Number | None = None
    memory_max_temperature_c: Number | None = None
    power_w: Number | None = None
    """The power draw, else its average, else the instantaneous value."""
    power_limit_w: Number | None = None
    """In force."""
    power_default_limit_w: Number | None = None
    power_min_limit_w: Number | None = None
    power_max_limit_w: Number | None = None
    clocks_mhz: SmiClocks = SmiClocks()
    max_clocks_mhz: SmiClocks = SmiClocks()
    application_clocks_mhz: ApplicationClocks = ApplicationClocks()
    default_application_clocks_mhz: ApplicationClocks = ApplicationClocks()
    supported_clocks_mhz: SupportedClocks = SupportedClocks()
    throttle_reasons: tuple[str, ...] | None = None
    """The active ones by the XML's names (``sw_power_cap``); empty: none is active."""
    memory_total_mib: Number | None = None
    memory_used_mib: Number | None = None
    utilization_percent: Number | None = None
    memory_utilization_percent: Number | None = None
    """Of the time, in which memory was read or written."""
    fabric: SmiFabric = SmiFabric()
    recovery_action: str | None = None
    """As printed: the text ``None`` is a value; None: not reported."""
    reset_required: bool | None = None
    drain_and_reset_recommended: bool | None = None
    mig_devices: tuple[SmiMigDevice, ...] = ()
    processes: tuple[SmiProcess, ...] | None = None
    """None: no list was printed."""
    errors: tuple[str, ...] = ()
    """Texts of fields that report a fault, as printed: ``GPU is lost``."""


class SmiLog(Fact):
    """``nvidia-smi -q``, as XML or as text."""

    driver_version: str | None = None
    cuda_version: str | None = None
    attached_gpus: int | None = None
    gpus: tuple[SmiGpu, ...] = ()
    messages: tuple[str, ...] = ()
    """Lines around the listing."""


class TableGpu(RareFact):
    """One GPU of the table of plain ``nvidia-smi``."""

    index: int | None
    """As printed: the indexes have a gap at a lost GPU."""
    name: str | None = None
    """As truncated in the table."""
    pci_bus_id: str | None = None
    persistence_mode: bool | None = None
    temperature_c: Number | None = None
    performance_state: str | None = None
    power_w: Number | None = None
    power_limit_w: Number | None = None
    memory_used_mib: Number | None = None
    memory_total_mib: Number | None = None
    utilization_percent: Number | None = None
    ecc_uncorrected: int | None = None
    compute_mode: str | None = None
    mig_mode: bool | None = None
    mig_mode_pending: bool | None = None
    """True for ``Enabled*``: it takes effect with the next reset."""


class TableProcess(RareFact):
    """One process of the table."""

    gpu: int
    pid: int
    name: str | None = None
    type: str | None = None
    memory_used_mib: Number | None = None


class SmiTable(RareFact):
    """The table of plain ``nvidia-smi``."""

    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[TableGpu, ...] = ()
    processes: tuple[TableProcess, ...] | None = None
    """None: no list was printed."""
    errors: tuple[str, ...] = ()
    """Messages outside the table, and ``GPU 0 fan: ERR!`` for each such cell."""


class SmiQuery(RareFact):
    """``nvidia-smi --query-gpu=… --format=csv``."""

    columns: tuple[str, ...]
    rows: tuple[dict[str, int | float | str | None], ...] = ()
    messages: tuple[str, ...] = ()


class ListedMigDevice(RareFact):
    """One MIG device of ``nvidia-smi -L``."""

    name: str
    """Its profile."""
    index: int
    uuid: str


class ListedGpu(RareFact):
    """One GPU of ``nvidia-smi -L``."""

    index: int
    name: str | None = None
    uuid: str | None = None
    """None for drivers up to 304, which print a serial number instead."""
    mig_devices: tuple[ListedMigDevice, ...] = ()


class SmiList(RareFact):
    """``nvidia-smi -L``."""

    gpus: tuple[ListedGpu, ...]
    messages: tuple[str, ...] = ()


class Topology(Fact):
    """``nvidia-smi topo -m``: labels as printed; no element has a link with itself."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...] = ()
    nic_names: dict[str, str] = Field(default_factory=dict)
    """``{"NIC0": "mlx5_0"}``; empty if the columns are labelled with the device names."""
    links: dict[str, dict[str, str]] = Field(default_factory=dict)
    """``{"GPU0": {"GPU1": "NV18", "NIC0": "PXB"}}``."""
    cpu_affinity: dict[str, str | None] = Field(default_factory=dict)
    """``{"GPU0": "0-51,104-155"}``; None if it is not printed or was truncated."""
    numa_affinity: dict[str, str | None] = Field(default_factory=dict)
    messages: tuple[str, ...] = ()


class PeerAccess(Fact):
    """``nvidia-smi topo -p2p r``."""

    gpus: tuple[str, ...]
    links: dict[str, dict[str, str]]
    """``{"GPU0": {"GPU1": "OK"}}``; OK, CNS, NS …"""


class NvlinkLink(Fact):
    """One NVLink of a GPU."""

    VOLATILE = frozenset({"active"})
    COUNTERS = frozenset({"errors"})

    link: int
    state: str | None = None
    """``active``, ``inactive``, ``sleep``, ``unsupported``; None in a listing of errors."""
    active: bool | None = None
    """None also for a link that sleeps."""
    speed_gb_per_s: Number | None = None
    """In one direction."""
    errors: dict[str, Number | None] = Field(default_factory=dict)
    """Counters by name, and rates of bit errors; empty in a listing of states."""


class NvlinkGpu(Fact):
    """The NVLinks of one GPU."""

    VOLATILE = frozenset({"index", "message"})

    index: int
    name: str | None = None
    uuid: str | None = None
    links: tuple[NvlinkLink, ...] = ()
    message: str | None = None
    """Printed in place of links."""
    all_inactive: bool | None = None
    """None: not reported."""


class Nvlink(Fact):
    """``nvidia-smi nvlink --status`` or ``-e``."""

    gpus: tuple[NvlinkGpu, ...] = ()
