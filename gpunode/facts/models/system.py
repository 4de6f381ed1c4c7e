"""Operating system, kernels, units and system settings."""

from pydantic import Field

from gpunode.facts.models.base import Fact


class OperatingSystem(Fact):
    """The operating system, from os-release."""

    id: str
    version_id: str | None
    codename: str | None
    pretty_name: str | None
    id_like: tuple[str, ...] = ()


class Kernel(Fact):
    """One kernel of the node: installed, running, or both."""

    release: str
    package: str | None
    """The installed package that contains its image, else its headers; None if no package does (a container's host, a
    kernel built by hand)."""
    running: bool
    newest: bool
    """True for the newest kernel with an image; if none has one (a container), for the newest with headers."""
    headers: bool
    """True if ``/lib/modules/RELEASE/build`` leads to a tree that a module can be built against."""
    image: bool = True
    """True if the kernel itself is installed, not only its headers."""


class OwnName(Fact):
    """The node's own name."""

    name: str
    addresses: tuple[str, ...]
    """What ``/etc/hosts`` has for it, in its order."""


class Slurm(Fact):
    """GPUs in Slurm's configuration on this node."""

    folder: str
    configured: int | None
    """GPUs of this node by slurm.conf; None: it names none."""
    device_files: int | None
    """GPU device files of this node by gres.conf; None: it names none, as with AutoDetect."""
    autodetect: str | None
    """``nvml``, ``nvidia`` …"""
    constrains_devices: bool
    """True if jobs can open the GPUs that they were given, and no others."""


class NextBoot(Fact):
    """The kernel that the boot loader starts next."""

    kernel: str
    """Its release; it may be a kernel that is not installed."""
    loader: str
    """``grub`` or ``systemd-boot``."""
    entry: str
    """Title or name of the menu's entry."""
    setting: str
    """What chose it: a file, ``saved_entry in grubenv``, a variable of the firmware."""
    arguments: str
    """The kernel's command line, without what GRUB fills in."""


class ModuleBlock(Fact):
    """A line of modprobe.d that keeps one of the driver's modules from loading."""

    place: str
    """``/etc/modprobe.d/off.conf:3``."""
    text: str
    module: str
    always: bool
    """True for ``alias nvidia off`` and ``install nvidia /bin/false``; False for ``blacklist``, which programs that
    load it by its name do not heed."""


class Unit(Fact):
    """One systemd unit."""

    VOLATILE = frozenset({"sub", "since", "started_s"})
    COUNTERS = frozenset({"restarts"})

    name: str
    load: str
    active: str
    sub: str
    enabled: str | None = None
    since: str | None = None
    """Time of its last change of state, as systemd prints it (``Fri 2026-11-20 09:00:01 UTC``); None if it never
    changed."""
    restarts: int | None = None
    """Number of automatic restarts since the unit was last started manually."""
    started_s: float | None = None
    """Seconds from the boot to its latest start; None if it was never active."""
    limits: dict[str, str] = Field(default_factory=dict)
    """``{"memlock": "infinity", "nofile": "1048576"}``: the hard limits of a service's processes."""


class Limit(Fact):
    """One line of ``/etc/security/limits.conf`` or ``limits.d``, in the order in which PAM reads them."""

    path: str
    domain: str
    """``*``, ``root``, ``@group``, ``alice``."""
    type: str
    """``soft``, ``hard``, or ``-`` for both."""
    item: str
    """``memlock``, ``nofile`` …"""
    value: str


class Limits(Fact):
    """Resource limits of processes."""

    defaults: dict[str, str] | None
    """systemd's hard limits for its services: ``{"memlock": "8388608", "nofile": "524288"}``; None without systemd."""
    settings: tuple[Limit, ...]
    """Limits of sessions that PAM opens (ssh, su)."""


class EnvironmentSetting(Fact):
    """One variable for debugging or tuning that is set for the whole system. Other variables are not collected."""

    path: str
    """The file, or ``systemd`` for the environment that services inherit."""
    name: str
    value: str


class BootSetting(Fact):
    """One kernel setting that the next boot applies, in the order in which files are read: the last of a name takes
    effect."""

    path: str
    name: str
    """``vm.swappiness``, or ``transparent_hugepage``."""
    value: str


class AutomaticUpdates(Fact):
    """Upgrades that the system installs automatically."""

    tool: str
    """``unattended-upgrades`` or ``dnf-automatic``."""
    enabled: bool
    """Switched on: for apt ``APT::Periodic::Unattended-Upgrade`` above 0, for dnf ``apply_updates`` or its timer."""
    origins: tuple[str, ...] = ()
    """Repositories from which packages are upgraded, as configured; empty for dnf, which uses all repositories."""
    kept_back: tuple[str, ...] = ()
    """Patterns of packages that are excluded."""
    reboots: bool = False


class PendingUpdate(Fact):
    """A security update of a package that is excluded from automatic upgrades."""

    package: str
    installed: str
    version: str
    since: str
    """Time at which the node first found the update, with its time zone."""


class FailedRevert(Fact):
    """A change that the node could not revert yet, after no new login had confirmed it."""

    change: str
    """Name of the change: the role that made it."""
    reasons: tuple[str, ...]


class Repository(Fact):
    """One package source that concerns the GPU stack or containers."""

    path: str
    uri: str
    """Without user and password."""
    suite: str | None
    enabled: bool


class ForeignInstall(Fact):
    """Files left by another installer than the package manager."""

    kind: str
    """``driver-runfile``, ``cuda-runfile``, ``nvidia-docker``."""
    path: str
    note: str | None = None
    """A version, if the file contains one."""


class TimeSync(Fact):
    """The clock."""

    VOLATILE = frozenset({"offset_s"})

    synchronized: bool | None
    """True if the kernel reports a synchronized clock. None if this could not be determined."""
    service: str | None
    """The active unit: ``chrony.service``, ``systemd-timesyncd.service`` …; None if there is none."""
    offset_s: float | None = None
    """chrony's estimate of the clock's offset."""
    timezone: str | None = None


class Process(Fact):
    """A process that waits in the kernel and cannot be killed (state D), found twice in a row."""

    pid: int
    name: str
    waits_in: str | None = None
    """The kernel's function, if root may read it."""


class KernelEvent(Fact):
    """One line of the kernel's log that reports an error."""

    kind: str
    """``xid``, ``sxid``, ``nvrm``, ``nouveau``, ``aer`` (PCI Express), ``oom`` (a process was killed), ``mce``,
    ``lockup``, ``hung-task``, ``oops``, ``file-system``, ``module-rejected``, ``uvm`` (nvidia-uvm reports an error)."""
    message: str
    time: str | None = None
    """As printed."""
    xid: int | None = None
    """The number of an Xid or SXid."""
    pci_bus_id: str | None = None
    """``0000:1a:00.0``."""
    pid: int | None = None
    process: str | None = None
    fatal: bool | None = None
    """For ``aer``: uncorrected. For ``sxid``: as the driver prints it. None if the line does not contain it."""


class BootLog(Fact):
    """Xids and SXids of a boot before this one."""

    began: str | None
    """Time of the boot's first line; None if that line is no longer kept."""
    events: tuple[KernelEvent, ...]


class KernelLog(Fact):
    """The kernel's log of this boot, filtered on the node."""

    source: str
    """``journal`` or ``dmesg``."""
    complete: bool
    """True if the log starts at the boot. Otherwise older events may have been lost."""
    simulated: bool = False
    """True for the log of a lab node's simulated hardware, as opposed to that of the host's kernel."""
    events: tuple[KernelEvent, ...]
