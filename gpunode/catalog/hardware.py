"""Rows about machines: GPUs, their architectures, boards, faults and expected figures; and the limits that follow.

Limits are computed from the figures. GB/s: 10^9 bytes, in one direction.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from packaging.version import Version as Number
from pydantic import Field, ValidationInfo, field_validator

from gpunode.catalog.rows import Capability, NumberId, Part, PciId, Row, Version, Words

Arch = Literal["x86_64", "aarch64"]
Flavour = Literal["open", "proprietary"]
Modules = Literal["open", "proprietary", "either"]
"""The kernel modules that support a GPU: one flavour only, or either."""
Count = Annotated[int, Field(ge=1)]
FIRST_OPEN_BRANCH = 515
"""The first branch with open modules, and therefore with a README that lists device ids."""
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One lane after line coding, by PCIe generation."""
PCIE_PAYLOAD_BYTES = 256
PCIE_PACKET_BYTES = PCIE_PAYLOAD_BYTES + 24
"""A packet with its framing (4), header (16) and checksum (4): 5 to 7 words of four bytes without payload, according to
Intel's application note AN 708. 256 bytes of payload are what most servers negotiate; with 128 or 512 the share is 84
or 96 %."""
GEMM_SHARE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}
"""Peak rate of the tensor cores by type, as a multiple of the one for bf16."""
TENSOR_TYPES_SINCE = {"bf16": "8.0", "fp16": "7.0", "tf32": "8.0", "fp8": "8.9"}
"""The first compute capability with tensor cores for the type."""


class Architecture(Row):
    """One GPU architecture; section ``architectures``."""

    name: str
    compute_capabilities: Annotated[tuple[Capability, ...], Field(min_length=1)]
    modules: Modules
    first_cuda: Mapping[Capability, Version]
    """First toolkit that supports each compute capability."""
    last_cuda: int | None = None
    """The last CUDA major that supports it; None: all up to the newest."""
    first_branch: int | None = None
    """The first branch with support for all its models in every release; before it, and if it is None, a model needs a
    bound."""
    last_branch: int | None = None
    """The last driver branch that supports it; None: all up to the newest."""


class Chip(Row):
    """One GPU chip by its name in ``pci.ids``; section ``chips``."""

    architecture: str
    compute_capability: Capability


NVLINK_LINE_GB_PER_S: Mapping[int, float] = {2: 25.781, 3: 25.0, 4: 26.562, 5: 53.125}
"""Rate that nvidia-smi prints for one full link in one direction, by NVLink generation: its line rate, which is up to 6
% above the data sheet because of the link's coding. Printed by V100, A100, H100, H200 and B300; NVIDIA Health
Validation expects 26.562 of H100 and 53.125 of GB200 and GB300."""
_SAME_LINK = 0.1


class NvLink(Part):
    """One GPU's own NVLink. ``gb_per_s`` is the total of both directions and all links."""

    gen: int
    links: int
    gb_per_s: float
    form: Literal["sxm", "bridge", "module", "rack"]

    @property
    def sheet_gb_per_s(self) -> float:
        """Return the rate of one link in one direction by the data sheet."""
        return self.gb_per_s / self.links / 2

    @property
    def line_gb_per_s(self) -> float | None:
        """Return the rate of one link in one direction as nvidia-smi prints it; None if no such rate is known."""
        line = NVLINK_LINE_GB_PER_S.get(self.gen)
        return line if line is not None and abs(line / self.sheet_gb_per_s - 1) <= _SAME_LINK else None


class Pcie(Part):
    """One GPU's PCIe interface."""

    gen: int
    width: int


class Clocks(Part):
    """A pair of clocks as ``nvidia-smi`` prints them."""

    graphics: int
    memory: int


class Tflops(Part):
    """Peak rates without sparsity."""

    fp32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    clock_mhz: int | None = None
    """Clock of the SMs to which the rates refer; None: the maximum, as far as is known."""


class Gpu(Row):
    """One GPU model; section ``gpus``."""

    name: str
    families: Words = ()
    """Names that cover this model together with others: ``H100`` covers PCIe, SXM and NVL."""
    aliases: Words = ()
    """Names that users type for this model only."""
    product_names: Words = ()
    """Exactly as ``nvidia-smi`` prints them."""
    pci: Annotated[tuple[PciId, ...], Field(min_length=1)]
    subsystems: tuple[PciId, ...] = ()
    """Set only if another model has the same device id."""
    known_from: Literal["sources", "pci.ids"] = "sources"
    """``pci.ids``: only id, chip and name are known; figures and driver floors are not."""
    architecture: str
    compute_capability: Capability
    market: Literal["datacenter", "workstation", "consumer", "embedded"]
    form: Literal["pcie", "sxm", "nvl", "superchip", "soc"]
    hosts: tuple[Arch, ...] = ("x86_64", "aarch64")
    """CPU architectures of the machines that contain it."""
    memory_gb: float | None = None
    memory_mib: int | None = None
    """Total as ``nvidia-smi`` prints it."""
    memory_bandwidth_gb_per_s: float | None = None
    power_w: float | None = None
    """The model's default power limit; boards of OEMs may differ."""
    power_range_w: tuple[float, float] | None = None
    sm_clock_mhz: int | None = None
    """Maximum."""
    memory_clock_mhz: int | None = None
    application_clocks_mhz: Clocks | None = None
    """Defaults; drivers from 590 on answer "deprecated" to any query of them."""
    pcie: Pcie | None = None
    pcie_judged: bool = True
    """False if the printed PCIe link does not indicate health: GH200 shows gen4 x1."""
    nvlink: NvLink | None = None
    gpus_per_board: Count = 1
    gpudirect_rdma: bool = True
    """False: the hardware does not support GPUDirect RDMA with any driver."""
    mig_instances: int = 0
    """The most MIG instances; 0: no MIG."""
    fabric: Literal["none", "board", "rack"] = "none"
    """``board``: the board decides whether a fabric manager is needed (NVSwitch or not). ``rack``: its NVSwitches are
    in the rack and it needs IMEX instead."""
    modules: Modules
    """Default: the value of its architecture."""
    first_branch: int | None = None
    """The first branch with support in every release. Default: the value of its architecture."""
    last_branch: int | None = None
    """Default: the value of its architecture."""
    min_driver: Version | None = None
    """Documented floor."""
    first_listed: Mapping[int, Version | None] = {}
    """Per branch, the first release with a README that lists the device id among the GPUs of the open modules; None: no
    release of the branch that was read. Default: ``open_modules.tsv``, the earliest one of the model's ids."""
    omitted: tuple[Version, ...] = ()
    """Later releases of a branch with a README that omits the device id again."""
    later_boards: Mapping[PciId, Mapping[int, Version | None]] = {}
    """As ``first_listed``, by subsystem id: boards that are listed later than the first ones of the model."""
    tflops: Tflops | None = None

    def first_listed_on(self, branch: int) -> Version | Literal["from the start", "never", "unknown"]:
        """Return the first release of a branch with open modules that list this GPU.

        Branches that are newer than all that were read, and those that an overlay omits, are "from the start".
        """
        first = min((number for number, release in self.first_listed.items() if release), default=None)
        if first is None or (branch < first and first == FIRST_OPEN_BRANCH):
            return "unknown"
        if branch < first:
            return "never"
        if branch in self.first_listed:
            return self.first_listed[branch] or "never"
        return "from the start" if self.first_listed[max(self.first_listed)] else "unknown"

    @property
    def capability(self) -> Number:
        """Return the compute capability as a comparable number."""
        return Number(self.compute_capability)


class PciPart(Row):
    """An NVIDIA PCI function other than a GPU; section ``pci_parts``."""

    id: PciId
    name: str
    role: Literal["nvswitch", "bridge"]
    gen: int | None = None
    """NVLink generation."""


Service = Literal["fabric-manager", "nvlsm", "imex"]


class Platform(Row):
    """A board, a server or a cloud shape; section ``platforms``."""

    name: str
    kind: Literal["board", "server", "tray", "pcie", "cloud"]
    board: str | None = None
    """The platform inside, from which missing fields are inherited."""
    aliases: Words = ()
    gpus: Annotated[Mapping[str, Count], Field(min_length=1)]
    """GPU ids with their number."""
    hosts: tuple[Arch, ...] = ("x86_64",)
    nvswitch: PciId | None = None
    """The PCI id of its NVSwitches; None: it has none, or they are not on the PCI bus."""
    nvswitches: int = 0
    """NVSwitches on the board, whether or not they are on the PCI bus."""
    services: tuple[Service, ...] = ()
    """Services that must run on the node beside the driver."""
    kernel_modules: tuple[str, ...] = ()
    """Kernel modules that those services need."""
    nic_rate_gbit_per_s: int | None = None
    nics: int | None = None
    """Network ports meant for GPU traffic."""
    min_driver: Version | None = None
    numa_nodes: int | None = None
    """As the kernel counts them if the GPUs' memory is part of the system's; None: not documented."""
    virtual: bool = False
    """A virtual machine, for which PCIe paths are not evaluated."""

    @property
    def gpu_count(self) -> int:
        """Return the number of all GPUs."""
        return sum(self.gpus.values())


XidSeverity = Literal["critical", "high", "medium", "low", "info", "application", "unused"]
XIDS_FROM = Number("8.0")
"""The lowest compute capability (Ampere's) for which NVIDIA's catalogue of Xids applies."""


class OlderXid(Part):
    """Differences in the meaning of an Xid on GPUs before Ampere."""

    meaning: str | None = None
    severity: XidSeverity | None = None
    action: str | None = None


class Xid(Row):
    """One Xid error; section ``xids``. ``id`` is the number as text."""

    id: NumberId
    name: str
    """NVIDIA's mnemonic."""
    meaning: str
    severity: XidSeverity
    action: str
    """The recommended next step."""
    kind: Literal[
        "application", "memory", "nvlink", "bus", "firmware", "hardware", "power", "driver", "virtual", "information"
    ]
    follow: Words = ()
    """Xids that take precedence if they occur too."""
    cancelled_by: Words = ()
    """Xids that resolve the error that this one reports."""
    recovery_reported_since: int | None = None
    """Driver branch from which Xid 154 names the recovery action for it."""
    older: OlderXid | None = None
    """GPUs before Ampere; None: its meaning there is not documented."""

    @property
    def number(self) -> int:
        """Return the Xid's number."""
        return int(self.id)

    def on(self, compute_capability: str | None) -> "Xid":
        """Return the row as it applies to a GPU; one of unknown capability counts as Ampere or newer.

        The catalog contains every older GPU, so an unknown one is newer.
        """
        if compute_capability is None or Number(compute_capability) >= XIDS_FROM:
            return self
        if self.older is None:
            return self.model_copy(update={"unsure": {**self.unsure, "severity": "its sources begin with Ampere"}})
        return self.model_copy(update=self.older.model_dump(exclude_none=True))


class ExpectedFigure(Row):
    """One expected figure; section ``expectations``."""

    metric: Literal["all_reduce_busbw", "host_to_device", "peer_to_peer", "gemm_bf16", "gemm_fp8", "memory_bandwidth"]
    unit: Literal["GB/s", "TFLOPS"]
    value: float
    kind: Literal["floor", "measured"]
    """``floor``: a pass mark used in production. ``measured``: measured on a healthy machine."""
    band: Annotated[tuple[float, float | None] | None, Field(validate_default=True)] = None
    """Relative to ``value``: (-0.05, None) passes from 95 % on. A floor has none: it is its own lower bound."""
    gpu: str | None = None
    count: Count = 1
    """Number of GPUs in one node that take part."""
    nodes: Count = 1
    platform: str | None = None
    """Set if the figure applies to one platform only."""
    algorithm: str | None = None
    message_bytes: int | None = None
    """Message size from which the figure applies."""

    @field_validator("unit")
    @classmethod
    def _own_unit(cls, unit: str, info: ValidationInfo) -> str:
        """Refuse a metric in another unit than its own, in which measurements are compared."""
        metric = info.data.get("metric", "")
        metric_unit = "TFLOPS" if metric.startswith("gemm") else "GB/s"
        if metric and unit != metric_unit:
            raise ValueError(f"wrong unit: {metric} is stored in {metric_unit}")
        return unit

    @field_validator("band")
    @classmethod
    def _band_of_measured(
        cls, band: tuple[float, float | None] | None, info: ValidationInfo
    ) -> tuple[float, float | None] | None:
        """Refuse a measured figure without a band around it, and a floor with one."""
        kind = info.data.get("kind", "floor" if band is None else "measured")
        if (kind == "measured") != (band is not None):
            raise ValueError(f"{kind}: {'is missing' if band is None else 'has none'}")
        if band is not None and not -1 < band[0] <= 0 <= (band[1] or 0):
            raise ValueError("is relative: from above -1 to 0, and from 0 up")
        return band

    @property
    def lowest(self) -> float:
        """Return the lowest figure of a healthy machine."""
        return self.value if self.band is None else self.value * (1 + self.band[0])


class Band(Row):
    """The share of a physical limit that healthy machines reach; section ``bands``."""

    metric: Literal["copy", "peer", "on_device", "memory", "gemm", "busbw"]
    """``copy``: between host and GPU. ``busbw``: of any collective."""
    path: Literal["pcie", "nvlink", "nvswitch", "memory", "tensor", "network"]
    """The transport or unit to which the limit belongs."""
    share: float
    """Share of the limit that healthy machines reach, according to the sources."""
    message_bytes: int | None = None
    """Message size from which the share applies."""


def pcie_gb_per_s(gen: int | None, width: int | None) -> float | None:
    """Return the rate of a PCIe link after line coding; None if generation or width is unknown."""
    lane = PCIE_LANE_GB_PER_S.get(gen or 0)
    return None if lane is None or not width else lane * width


def pcie_payload_gb_per_s(gen: int | None, width: int | None) -> float | None:
    """Return the payload rate of a PCIe link, without packet headers; None as for ``pcie_gb_per_s``."""
    rate = pcie_gb_per_s(gen, width)
    return None if rate is None else rate * PCIE_PAYLOAD_BYTES / PCIE_PACKET_BYTES


def nvlink_gb_per_s(nvlink: NvLink, links: int | None = None) -> float:
    """Return the rate of ``links`` links of a GPU by the data sheet; None: all of them."""
    return nvlink.sheet_gb_per_s * (nvlink.links if links is None else links)


def tensor_tflops(gpu: Gpu, dtype: str) -> float | None:
    """Return the peak rate of matrix products without sparsity, by the data sheet; None if the catalog has none."""
    if gpu.tflops is None:
        return None
    if dtype == "fp32":
        return gpu.tflops.fp32
    first = TENSOR_TYPES_SINCE.get(dtype)
    peak = gpu.tflops.fp16 if dtype == "fp16" else gpu.tflops.bf16
    if first is None or peak is None or gpu.capability < Number(first):
        return None
    return peak * GEMM_SHARE[dtype]
