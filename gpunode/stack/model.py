"""Input and output of the resolver: Request and NodePicture in, Stack or Conflict out.

Versions are text; GPUs, systems and platforms are keys of the catalog. A field of a Stack that is None has its reason
in ``Stack.reasons`` under the field's name, like every other choice.
"""

from datetime import date
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gpunode.catalog.hardware import Arch, Flavour
from gpunode.catalog.software import Origin

SCHEMA: Literal["gpunode.stack/1"] = "gpunode.stack/1"


class StackModel(BaseModel):
    """Base: immutable, without unknown fields. Its validator is built with the first instance."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Request(StackModel):
    """The requested settings. None: not requested; the resolver's preference decides."""

    source: Origin | None = None
    driver: str | None = None
    """A branch (``580``: an installed release of it stays), its newest release (``580-latest``), a release
    (``580.95.05``), a range (``>=580,<595``), ``lts``, ``production``, ``newest`` or ``keep``."""
    cuda: str | None = None
    """The CUDA that containers must be able to run: ``13.0`` or ``13.0.2``."""
    toolkit: str | None = None
    """The toolkit on the host: ``12.9``; None: none."""
    kernel_module: Flavour | None = None
    framework: str | None = None
    """A framework release with wheels that must run: ``pytorch==2.9``, ``tensorflow==2.20``."""
    kernel_policy: Literal["hold", "follow"] | None = None
    """Policy for the kernel if the distribution signed the modules: the role's ``nvidia_driver_kernel_policy``."""
    past_eol: Literal["warn", "refuse"] = "warn"
    """The result of rule R13 for a branch past its end of life."""


class GpuGroup(StackModel):
    """GPUs of one kind in the node."""

    label: str
    """As the user typed it, or the model's name."""
    models: tuple[str, ...] = Field(min_length=1)
    """Keys of the catalog's GPUs that it may be; more than one for a family name (``V100``)."""
    count: int | None = None
    """None: not specified."""


class InstalledPackage(StackModel):
    """A package of the GPU stack that is on the node."""

    name: str
    version: str
    origin: str | None
    """The publisher; None if the catalog cannot determine it."""
    closure: str | None = None
    """The driver closure it belongs to; None if it may have a version of its own."""


class Installed(StackModel):
    """The driver in the node's package database."""

    version: str | None = None
    """Release without epoch and revision; None if no driver package is installed or the packages disagree."""
    flavour: Flavour | None = None
    packages: tuple[InstalledPackage, ...] = ()
    runfile: str | None = None
    """The uninstaller of a driver's ``.run`` file: a driver that is not in the package database."""

    @property
    def present(self) -> bool:
        """Return True if a driver is on the node."""
        return bool(self.closure or self.runfile)

    @property
    def closure(self) -> tuple[InstalledPackage, ...]:
        """Return the packages that must have the driver's version."""
        return tuple(package for package in self.packages if package.closure is not None)

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the publishers of the driver closure, sorted; an unknown one as ``unknown origin``, a ``.run`` file as
        itself."""
        origins = {package.origin or "unknown origin" for package in self.closure}
        return tuple(sorted(origins | ({"a .run file"} if self.runfile else set())))


class NodePicture(StackModel):
    """The properties of a node that the resolver needs. None: unknown or not specified, any value is accepted."""

    os: str | None = None
    """Key of the catalog's systems: ``ubuntu-24.04``."""
    arch: Arch | None = None
    kernel: str | None = None
    """Release of the kernel that the module is for: ``6.8.0-60-generic``."""
    kernel_images: tuple[str, ...] = ()
    """Installed meta packages of kernel images (``linux-image-generic-hwe-24.04``), that of the newest kernel first."""
    gpus: tuple[GpuGroup, ...] = ()
    unknown_gpus: tuple[str, ...] = ()
    """PCI ids of GPUs on the node that the catalog does not have: no stack can be selected for it."""
    platform: str | None = None
    """Key of the catalog's platforms; the platform then defines the node's GPUs."""
    nvswitch: bool | None = None
    """True if NVSwitches are on the PCI bus; None: the bus could not be read."""
    secure_boot: bool | None = None
    nouveau: bool | None = None
    """True if the nouveau module is loaded."""
    loaded_version: str | None = None
    """Release of the NVIDIA module in memory."""
    installed: Installed | None = None
    observed: bool = False
    """True for a picture of a machine: its GPUs and its system are facts, and no nearby stack changes them."""
    notes: tuple[str, ...] = ()
    """Facts of the node that are not in the catalog."""


class Reason(StackModel):
    """The reason for the value of a field."""

    rule: str
    """Id of a rule, or ``wish``, ``installed``, ``preference``, ``catalog``."""
    text: str


class Warn(StackModel):
    """A warning about a stack."""

    rule: str
    text: str


class PackageChoice(StackModel):
    """One package, with its name in the node's package manager."""

    name: str
    version: str | None
    """Pattern of the version (``580.178.04-*``); None: the repository sets it."""
    component: str
    alternatives: tuple[str, ...] = ()
    """Alternative names if the repository does not have it; the first one that exists is used."""
    with_driver: bool = False
    """True if it belongs to the driver closure: it must have the same version as the driver."""


class Driver(StackModel):
    """The driver release."""

    branch: int
    version: str | None
    """The exact release; None if only the repository can decide it."""
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
    """Kernel and module packages that must be upgraded together."""


class Cuda(StackModel):
    """CUDA in containers."""

    wished: str | None
    native: str | None
    """The newest CUDA with full support: the driver's own, or an older one if the GPU's last CUDA is older."""
    newest: str | None
    """The newest CUDA by minor-version compatibility (without PTX JIT of newer toolkits)."""
    oldest: str | None
    """The oldest CUDA that supports every GPU of the node."""
    support: Literal["native", "minor-version", "forward-compat"] | None
    """How the requested CUDA is supported; None if none is requested."""


class Library(StackModel):
    """A component with a version of its own."""

    version: str | None
    """None: the repository sets it."""
    packages: tuple[str, ...]


class Service(StackModel):
    """A component that must have the driver's version, or belongs to the board."""

    version: str | None
    """``None``: a version of its own that the repository sets."""
    same_as_driver: bool
    packages: tuple[str, ...]
    kernel_modules: tuple[str, ...] = ()
    """Kernel modules that must be loaded before it starts."""


class Preference(StackModel):
    """One stanza of an apt preferences file."""

    packages: tuple[str, ...]
    pin: str
    priority: int


class Pin(StackModel):
    """The mechanism that holds the decision."""

    mechanism: Literal["preferences", "module-stream", "versionlock", "addlock"]
    preferences: tuple[Preference, ...] = ()
    """gpunode's own apt preferences."""
    pattern: str | None = None
    """Module stream, or the locked name."""


class Restart(StackModel):
    """The restart that activates the stack."""

    kind: Literal["none", "load-module", "reload-module", "reboot"]
    """``reload-module``: on an idle node the module can be replaced, otherwise a reboot is needed."""


class Frameworks(StackModel):
    """Newest framework releases with published wheels that run on this stack, with their CUDA."""

    pytorch: str | None
    pytorch_cuda: str | None
    tensorflow: str | None
    tensorflow_cuda: str | None


class Stack(StackModel):
    """One set of matching versions. Every field below ``gpus`` has its reason in ``reasons``."""

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
    """All packages to install, in the order of the fields above."""
    remove: tuple[str, ...]
    """Installed packages to remove first."""
    pin: Pin | None
    restart: Restart
    eol: date | None
    kept: bool
    """True if the node already has this driver."""

    warnings: tuple[Warn, ...]
    reasons: dict[str, Reason]

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """Return the document of schema ``gpunode.stack/1``."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


class Term(StackModel):
    """One requested value or fact: the parts of a conflict."""

    name: str
    """``gpu``, ``platform``, ``os``, ``arch``, ``kernel``, ``installed``, ``source``, ``driver``, ``cuda``,
    ``toolkit``, ``kernel-module``, ``framework``, ``past-eol``."""
    value: str
    given: Literal["wish", "node"]

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


class Clash(StackModel):
    """A rule that refuses, with its message for this case."""

    rule: str
    text: str


class NearbyStack(StackModel):
    """A stack near the request, and the change of the request that it needs."""

    change: tuple[str, ...]
    """As messages: ``--cuda 12.9 instead of 13.0``."""
    summary: str
    """``580 proprietary with CUDA 12.9``."""
    stack: Stack


class Conflict(StackModel):
    """A request without a stack: the smallest set of conflicting terms, the reasons, and the nearest stacks."""

    terms: tuple[Term, ...]
    clashes: tuple[Clash, ...]
    offers: tuple[NearbyStack, ...]

    @property
    def message(self) -> str:
        """Return the conflict in one line."""
        terms = " + ".join(str(term) for term in self.terms)
        return f"conflict between {terms}:  " + "; ".join(clash.text for clash in self.clashes)
