"""Operating system, kernels, units, and how the system is set."""

from pydantic import Field

from gpunode.facts.models.base import Fact


class OperatingSystem(Fact):
    """From os-release."""

    id: str
    version_id: str | None
    codename: str | None
    pretty_name: str | None
    id_like: tuple[str, ...] = ()


class Kernel(Fact):
    """One kernel of the node: installed, running, or both."""

    release: str
    package: str | None
    """The installed package that carries its image, else its headers; None where it belongs to none (a container's
    host, a hand-built one)."""
    running: bool
    newest: bool
    """The newest among those with an image; where none has one (a container), among those with headers."""
    headers: bool
    """``/lib/modules/RELEASE/build`` leads to a tree that a module can be built against."""
    image: bool = True
    """The kernel itself is installed, not its headers alone."""


class Unit(Fact):
    """One systemd unit."""

    name: str
    load: str
    active: str
    sub: str
    enabled: str | None = None
    since: str | None = None
    """When its state last changed, as systemd prints it (``Fri 2026-11-20 09:00:01 UTC``); None where it never did."""
    restarts: int | None = None
    """How often systemd started it again by itself since it was started by hand."""
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
    """What processes may use."""

    defaults: dict[str, str] | None
    """systemd's hard limits for its services: ``{"memlock": "8388608", "nofile": "524288"}``; None without systemd."""
    settings: tuple[Limit, ...]
    """For what users start over PAM (ssh, su)."""


class EnvironmentSetting(Fact):
    """One variable for debugging or tuning that is set for the whole system. Other variables are not collected."""

    path: str
    """The file, or ``systemd`` for the environment that services inherit."""
    name: str
    value: str


class BootSetting(Fact):
    """One kernel setting that the next boot sets, in the order in which files are read: the last of a name wins."""

    path: str
    name: str
    """``vm.swappiness``, or ``transparent_hugepage``."""
    value: str


class AutomaticUpdates(Fact):
    """Upgrades that the system makes by itself."""

    tool: str
    """``unattended-upgrades`` or ``dnf-automatic``."""
    enabled: bool
    """Switched on: for apt ``APT::Periodic::Unattended-Upgrade`` above 0, for dnf ``apply_updates`` or its timer."""
    origins: tuple[str, ...] = ()
    """Whose packages are upgraded, as the configuration has it; empty for dnf, which takes all repositories."""
    kept_back: tuple[str, ...] = ()
    """Patterns of packages that are left alone."""
    reboots: bool = False


class PendingUpdate(Fact):
    """A security update of a package that is kept from automatic upgrades."""

    package: str
    installed: str
    version: str
    since: str
    """When the node first saw that one waits, with its time zone."""


class Repository(Fact):
    """One source of packages that has to do with the GPU stack or with containers."""

    path: str
    uri: str
    """Without user and password."""
    suite: str | None
    enabled: bool


class ForeignInstall(Fact):
    """What another installer than the package manager left."""

    kind: str
    """``driver-runfile``, ``cuda-runfile``, ``nvidia-docker``."""
    path: str
    note: str | None = None
    """A version, where the file tells one."""


class TimeSync(Fact):
    """The clock."""

    synchronized: bool | None
    """The kernel says that something keeps its clock right. None where that could not be seen."""
    service: str | None
    """The unit that is active: ``chrony.service``, ``systemd-timesyncd.service`` …; None where there is none."""
    offset_s: float | None = None
    """chrony's estimate of how far the clock is off."""
    timezone: str | None = None


class Process(Fact):
    """A process that waits in the kernel and cannot be killed (state D), seen twice in a row."""

    pid: int
    name: str
    waits_in: str | None = None
    """The kernel's function, where root may see it."""


class KernelEvent(Fact):
    """One line of the kernel's log that tells of an error."""

    kind: str
    """``xid``, ``sxid``, ``nvrm``, ``nouveau``, ``aer`` (PCI Express), ``oom`` (a process was killed), ``mce``."""
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
    """For ``aer``: uncorrected. For ``sxid``: as the driver says. None where the line does not say."""


class BootLog(Fact):
    """Xids and SXids of a boot before this one."""

    began: str | None
    """Time of the boot's first line; None where that line is no longer kept."""
    events: tuple[KernelEvent, ...]


class KernelLog(Fact):
    """The kernel's log of this boot, filtered on the node."""

    source: str
    """``journal`` or ``dmesg``."""
    complete: bool
    """It reaches back to the boot. Where it does not, older events may have been lost."""
    simulated: bool = False
    """It is the log of a lab node's simulated hardware, not that of the host's kernel."""
    events: tuple[KernelEvent, ...]
