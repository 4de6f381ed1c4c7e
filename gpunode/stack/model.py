"""What is asked, what is answered: Request and NodePicture in, Stack or Conflict out.

Versions are text; GPUs, systems and platforms are keys of the catalog. A field of a Stack that is None carries its
reason in ``Stack.reasons`` under the field's name, like every other choice.
"""

from datetime import date
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Literal["gpunode.stack/1"] = "gpunode.stack/1"

Origin = Literal["nvidia", "ubuntu", "debian"]
Flavour = Literal["open", "proprietary"]
Arch = Literal["x86_64", "aarch64"]


class StackModel(BaseModel):
    """Base: immutable, closed. Its validator is built when the first one is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Request(StackModel):
    """The wishes. None: no wish, the resolver's preference decides."""

    source: Origin | None = None
    driver: str | None = None
    """A branch (``580``: an installed release of it stays), its newest release (``580-latest``), a release
    (``580.95.05``), a range (``>=580,<595``), ``lts``, ``production``, ``newest`` or ``keep``."""
    cuda: str | None = None
    """What containers must be able to run: ``13.0`` or ``13.0.2``."""
    toolkit: str | None = None
    """On the host: ``12.9``; None: none."""
    kernel_module: Flavour | None = None
    framework: str | None = None
    """A framework release whose wheels must run: ``pytorch==2.9``, ``tensorflow==2.20``."""
    kernel_policy: Literal["hold", "follow"] | None = None
    """Whether the kernel moves where the distribution signed the modules: the role's ``nvidia_driver_kernel_policy``.
    """
    past_eol: Literal["warn", "refuse"] = "warn"
    """What rule R13 does with a branch whose end of life has passed."""


class GpuGroup(StackModel):
    """GPUs of one kind in the node."""

    label: str
    """As the user typed it, or the model's name."""
    models: tuple[str, ...] = Field(min_length=1)
    """Keys of the catalog's GPUs that it may be; more than one for a family name (``V100``)."""
    count: int | None = None
    """None: not said."""


class InstalledPackage(StackModel):
    """A package of the GPU stack that is on the node."""

    name: str
    version: str
    origin: str | None
    """Who published it; None where the catalog cannot tell."""
    closure: str | None = None
    """The driver closure it belongs to; None where it may have a version of its own."""


class Installed(StackModel):
    """The driver that the node's package database holds."""

    version: str | None = None
    """Release without epoch and revision; None where no driver package is installed or they disagree."""
    flavour: Flavour | None = None
    packages: tuple[InstalledPackage, ...] = ()
    runfile: str | None = None
    """The uninstaller that a ``.run`` file of the driver left: a driver that no package database knows."""

    @property
    def present(self) -> bool:
        """A driver is on the node."""
        return bool(self.closure or self.runfile)

    @property
    def closure(self) -> tuple[InstalledPackage, ...]:
        """The packages that must carry the driver's version."""
        return tuple(package for package in self.packages if package.closure is not None)

    @property
    def origins(self) -> tuple[str, ...]:
        """Publishers of the driver closure, sorted; unknown ones as ``unknown origin``, a ``.run`` file as itself."""
        found = {package.origin or "unknown origin" for package in self.closure}
        return tuple(sorted(found | ({"a .run file"} if self.runfile else set())))


class NodePicture(StackModel):
    """A node as far as the resolver needs it. None: not known or not said, any would do."""

    os: str | None = None
    """Key of the catalog's systems: ``ubuntu-24.04``."""
    arch: Arch | None = None
    kernel: str | None = None
    """Release of the kernel that the module is for: ``6.8.0-60-generic``."""
    kernel_images: tuple[str, ...] = ()
    """Installed meta packages of kernel images (``linux-image-generic-hwe-24.04``), that of the newest kernel first."""
    gpus: tuple[GpuGroup, ...] = ()
    unknown_gpus: tuple[str, ...] = ()
    """PCI ids of GPUs on the node that the catalog does not have: nothing can be decided for it."""
    platform: str | None = None
    """Key of the catalog's platforms; its GPUs count as the node's then."""
    nvswitch: bool | None = None
    """NVSwitches seen on the PCI bus; None: the bus was not seen."""
    secure_boot: bool | None = None
    nouveau: bool | None = None
    """The nouveau module is loaded."""
    loaded_version: str | None = None
    """Release of the NVIDIA module in memory."""
    installed: Installed | None = None
    observed: bool = False
    """Seen on a machine: its GPUs and its system are facts, and no offer changes them."""
    notes: tuple[str, ...] = ()
    """What was seen and could not be placed in the catalog."""


class Reason(StackModel):
    """Why a field is as it is."""

    rule: str
    """Id of a rule, or ``wish``, ``installed``, ``preference``, ``catalog``."""
    text: str


class Warn(StackModel):
    """What the user should know about a stack that holds."""

    rule: str
    text: str


class PackageChoice(StackModel):
    """One package, exactly as the node's package manager knows it."""

    name: str
    version: str | None
    """Pattern of the version (``580.178.04-*``); None: the repository sets it."""
    component: str
    alternatives: tuple[str, ...] = ()
    """Names to take in its place where the repository does not have it, the first that exists."""
    with_driver: bool = False
    """Belongs to the driver closure: must have the same version as the driver."""


class Driver(StackModel):
    """The driver release."""

    branch: int
    version: str | None
    """The exact release; None where only the repository can say."""
    constraint: str
    """Shell pattern of releases that satisfy the decision: ``580.178.04`` or ``580.*``."""
    decided_by: Literal["wish", "catalog", "repository", "installed"]
    type: Literal["LTSB", "PB", "NFB"] | None
    variant: str | None
    """Kind of package set: ``headless``, ``compute`` …"""


class Module(StackModel):
    """The kernel module."""

    flavour: Flavour
    build: Literal["dkms", "precompiled"]
    kernel_flavour: str | None = None
    """``generic``, ``generic-hwe-24.04``, ``aws``, ``azure``, ``gcp`` …: only for precompiled modules."""
    kernel_packages: tuple[str, ...] = ()
    """Kernel and module packages that must move together from now on."""


class Cuda(StackModel):
    """What containers may run."""

    wished: str | None
    native: str | None
    """The newest CUDA with full support: the driver's own, or less where the GPU's last CUDA is older."""
    newest: str | None
    """The newest CUDA that minor-version compatibility reaches (no PTX JIT of newer toolkits there)."""
    oldest: str | None
    """The oldest CUDA that knows every GPU of the node."""
    support: Literal["native", "minor-version", "forward-compat"] | None
    """How the wished CUDA is reached; None without a wish."""


class Library(StackModel):
    """A component with a version of its own."""

    version: str | None
    """None: the repository sets it."""
    packages: tuple[str, ...]


class Service(StackModel):
    """A component that must carry the driver's version, or belongs to the board."""

    version: str | None
    """``None``: a version of its own that the repository sets."""
    same_as_driver: bool
    packages: tuple[str, ...]
    kernel_modules: tuple[str, ...] = ()
    """To be loaded before it starts."""


class Preference(StackModel):
    """One stanza of an apt preferences file."""

    packages: tuple[str, ...]
    pin: str
    priority: int


class Pin(StackModel):
    """How the decision is held."""

    mechanism: Literal["preferences", "module-stream", "versionlock", "addlock"]
    preferences: tuple[Preference, ...] = ()
    """Our own apt preferences."""
    pattern: str | None = None
    """Module stream, or what is locked."""


class Restart(StackModel):
    """What must be restarted before the stack is in force."""

    kind: Literal["none", "load-module", "reload-module", "reboot"]
    """``reload-module``: on an idle node the module can be exchanged, otherwise a reboot."""


class Frameworks(StackModel):
    """Newest framework releases whose published wheels run on this stack, with their CUDA."""

    pytorch: str | None
    pytorch_cuda: str | None
    tensorflow: str | None
    tensorflow_cuda: str | None


class Stack(StackModel):
    """One matched set. Every field below ``gpus`` has its reason in ``reasons``."""

    schema_name: Literal["gpunode.stack/1"] = Field(SCHEMA, alias="schema")
    os: str
    arch: Arch
    kernel: str | None
    platform: str | None
    gpus: tuple[str, ...]
    """The node's GPUs as text: ``8x H100 SXM5 80GB``."""

    source: Origin
    driver: Driver
    module: Module
    cuda: Cuda
    cuda_compat: Library | None
    toolkit: Library | None
    cudnn: Library | None
    nccl: Library | None
    dcgm: Library | None
    container_toolkit: Library | None
    fabric_manager: Service | None
    nscq: Service | None
    nvsdm: Service | None
    nvlsm: Service | None
    imex: Service | None
    gpudirect_rdma: bool | None
    frameworks: Frameworks | None
    packages: tuple[PackageChoice, ...]
    """All packages to have, in the order in which they are named above."""
    remove: tuple[str, ...]
    """Installed packages that must go first."""
    pin: Pin | None
    restart: Restart
    eol: date | None
    kept: bool
    """The node already has this driver."""

    warnings: tuple[Warn, ...]
    reasons: dict[str, Reason]

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """The document of schema ``gpunode.stack/1``."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


class Term(StackModel):
    """One thing that was asked or seen: the parts of which a conflict is made."""

    name: str
    """``gpu``, ``platform``, ``os``, ``arch``, ``kernel``, ``installed``, ``source``, ``driver``, ``cuda``,
    ``toolkit``, ``kernel-module``, ``framework``, ``past-eol``."""
    value: str
    given: Literal["wish", "node"]

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


class Clash(StackModel):
    """A rule that does not hold, in words about this case."""

    rule: str
    text: str


class NearbyStack(StackModel):
    """A stack near the request, and what to change for it."""

    change: tuple[str, ...]
    """In words: ``--cuda 12.9 instead of 13.0``."""
    summary: str
    """``580 proprietary with CUDA 12.9``."""
    stack: Stack


class Conflict(StackModel):
    """No stack holds: the smallest set of terms that cannot hold together, why, and the nearest stacks that do."""

    terms: tuple[Term, ...]
    clashes: tuple[Clash, ...]
    offers: tuple[NearbyStack, ...]

    @property
    def message(self) -> str:
        """One line."""
        asked = " + ".join(str(term) for term in self.terms)
        return f"conflict between {asked}:  " + "; ".join(clash.text for clash in self.clashes)
