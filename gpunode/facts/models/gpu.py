"""The loaded driver, its GPUs, and the settings of the role gpu_settings."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from gpunode.facts.models.base import Fact


class LoadedDriver(Fact):
    """The NVIDIA kernel module in memory, from ``/proc/driver/nvidia/version`` or ``/sys/module/nvidia``."""

    version: str
    flavour: str | None


# /proc/PID/comm truncates names to 15 characters.
_DAEMONS = frozenset({"nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "nvidia-imex", "nvlsm", "dcgm-exporter"})


class GpuUsage(Fact):
    """Utilization and power of one GPU at one moment."""

    VOLATILE = frozenset({"utilization_percent", "memory_utilization_percent", "power_w"})

    pci_bus_id: str
    utilization_percent: float | None
    memory_utilization_percent: float | None
    power_w: float | None


class GpuProcess(Fact):
    """One process that holds a GPU."""

    pid: int
    name: str | None
    type: str | None
    """As nvidia-smi prints it: ``C``, ``G``, ``C+G``, ``M+C``; None if nvidia-smi does not list the process."""
    user: str | None = None
    gpu: str | None = None
    """``gpu3``; None if unknown."""
    devices: tuple[str, ...] = ()
    """The device files that it holds, as far as they could be read."""

    @property
    def title(self) -> str:
        """Return the process for a message: ``python3 (pid 4242, alice)``."""
        return f"{self.name or '?'} (pid {self.pid}, {self.user or '?'})"

    @property
    def computes(self) -> bool:
        """Return True for a process that makes a GPU busy: a compute process, or one with CUDA's memory device open."""
        if self.type is not None:
            return "C" in self.type
        return self.name not in _DAEMONS and any(device.startswith("/dev/nvidia-uvm") for device in self.devices)


class ToolRun(Fact):
    """How one of NVIDIA's tools ended on the node."""

    answers: str
    """The field of NodeFacts that is read from its output."""
    command: str
    """As messages name it: ``nvidia-smi -q -x``."""
    exit_status: int
    ended: Literal["exit", "signal", "timeout", "slow", "not-run", "missing"]
    """``slow``: ended when the time for the whole probe was used up, before its own limit."""
    signal: str | None = None
    """``SIGSEGV``; None if no signal ended the command."""
    reason: str = ""
    """The probe's reason for ending the command or for not running it."""

    @property
    def failure(self) -> str | None:
        """Return what is wrong with the run, apart from its exit status; None if the command ended by itself."""
        match self.ended:
            case "signal":
                return f"{self.command} crashed ({self.signal}, exit status {self.exit_status})"
            case "timeout" | "slow":
                return f"{self.command} did not answer{f' ({self.reason})' if self.reason else ''}"
            case "not-run":
                return f"{self.command} was not run{f' ({self.reason})' if self.reason else ''}"
        return None


class DriverGpu(Fact):
    """A GPU as the loaded module lists it in ``/proc/driver/nvidia/gpus``, without any of NVIDIA's tools."""

    VOLATILE = frozenset({"minor"})

    slot: str
    model: str | None
    uuid: str | None
    minor: int | None
    """Number of ``/dev/nvidiaN``."""
    excluded: bool | None
    """Excluded from use by NVreg_ExcludedGpus."""
    firmware: str | None


Clock = Annotated[StrictInt, Field(ge=0, le=100_000)]
Text = Annotated[str, Field(max_length=400)]


class GpuSelector(Fact):
    """The GPUs that a rule applies to: exactly one of the two fields is set."""

    indexes: Annotated[tuple[StrictInt, ...], Field(max_length=256)] | None = None
    pci_ids: Annotated[tuple[Text, ...], Field(max_length=256)] | None = None


class GpuRule(Fact):
    """One rule of the role gpu_settings; None: not requested."""

    gpus: Literal["all"] | GpuSelector
    sm_clock_mhz: (
        Literal["max", "default"] | Clock | Annotated[list[Clock], Field(min_length=2, max_length=2)] | None
    ) = None
    memory_clock_mhz: (
        Literal["max", "default"] | Clock | Annotated[list[Clock], Field(min_length=2, max_length=2)] | None
    ) = None
    application_clocks_mhz: Literal["default"] | dict[Literal["memory", "graphics"], Clock] | None = None
    power_limit: (
        Literal["max", "default"] | Annotated[str, Field(pattern=r"^[0-9.]{1,8}%$")] | StrictInt | StrictFloat | None
    ) = None
    compute_mode: Literal["default", "exclusive_process", "prohibited"] | None = None
    ecc: StrictBool | None = None
    mig: StrictBool | Annotated[list[Text], Field(max_length=8)] | None = None
    accounting: StrictBool | None = None


class GpuSetting(Fact):
    """The result of one setting of one GPU, as the unit of gpu_settings reported it."""

    value: Any
    result: Literal["applied", "kept", "pending", "busy", "refused"]
    message: Text


class GpuSettings(Fact):
    """The settings that the role gpu_settings requests, and the report of its unit in this boot."""

    rules: Annotated[tuple[GpuRule, ...], Field(max_length=256)]
    reported: (
        Annotated[dict[Text, Annotated[dict[Text, GpuSetting], Field(max_length=32)]], Field(max_length=256)] | None
    )
    """UUID, setting, entry; None: the unit reported nothing since the boot."""
    current: bool
    """True if the report is about these rules."""

    def plain_rules(self) -> list[dict[str, Any]]:
        """Return the rules in the form of the settings file."""
        return [rule.model_dump(exclude_none=True) for rule in self.rules]


class DeviceNode(Fact):
    """One of ``/dev/nvidia*``; folders such as ``/dev/nvidia-caps`` are listed with their content."""

    VOLATILE = frozenset({"created_s"})

    path: str
    kind: str
    """``character``, ``folder``, ``file``: a regular file in place of a device is a fault."""
    mode: str
    """Octal: ``0666``."""
    user: str
    group: str
    major: int | None
    minor: int | None
    created_s: int | None = None
    """Seconds from the boot to its creation; None: an older probe, or no device."""
    linked: bool | None = None
    """True if ``/dev/char`` has a link to it, by which runc passes it to systemd; None as above."""
