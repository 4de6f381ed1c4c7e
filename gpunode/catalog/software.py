"""Rows about software: driver branches, CUDA, libraries, operating systems and package names."""

import datetime
from collections.abc import Mapping
from typing import Annotated, Literal

from packaging.version import Version as Number
from pydantic import Field, ValidationInfo, field_validator

from gpunode.catalog.hardware import Arch, Flavour
from gpunode.catalog.rows import Capability, ImageDigest, NumberId, Part, Row, Version, When, Words, last_day

Origin = Literal["nvidia", "ubuntu", "debian"]
"""The source of a driver: NVIDIA's CUDA repository or the distribution's own archive."""
Family = Literal["deb", "rpm"]
Component = Literal[
    "driver",
    "fabric-manager",
    "nscq",
    "imex",
    "nvsdm",
    "nvlsm",
    "cuda-toolkit",
    "cuda-compat",
    "cudnn",
    "nccl",
    "dcgm",
    "container-toolkit",
]
BranchType = Literal["LTSB", "PB", "NFB"]
"""Long-term support, production, new feature."""


class Branch(Row):
    """One driver branch; section ``branches``. ``id`` is its number as text."""

    id: NumberId
    type: BranchType | None = None
    released: When | None = None
    eol_vendor: When | None = None
    """From NVIDIA's table of branches."""
    eol_computed: When | None = None
    """From endoflife.date: release plus one year, LTSB three. Not promised by NVIDIA."""
    superseded_by: int | None = None
    """A new-feature branch gets no more releases after the release of the next branch."""
    native_cuda: Version | None = None
    """The newest CUDA that the driver itself contains."""
    oldest_architecture: str
    """Key of ``architectures``; all later ones are supported too, if the branch is new enough for them."""
    modules: tuple[Flavour, ...]
    """Flavours that its packages contain."""
    kernel_floor: Version | None = None
    """The oldest kernel that its modules build against, either flavour."""
    default_modules: Flavour = "open"
    points: Annotated[Mapping[Version, When | None], Field(min_length=1)]
    """Known releases, oldest first."""

    @field_validator("points")
    @classmethod
    def _own_points(cls, points: Mapping[str, str | None], info: ValidationInfo) -> Mapping[str, str | None]:
        """Refuse a release of another branch: a plan would follow it there."""
        foreign = [version for version in points if version.split(".", maxsplit=1)[0] != info.data.get("id")]
        if foreign and "id" in info.data:
            raise ValueError(f"{foreign[0]} is not a release of branch {info.data['id']}")
        return points

    @property
    def number(self) -> int:
        """Return the branch as a number: 580."""
        return int(self.id)

    @property
    def latest(self) -> Version:
        """Return the newest known release."""
        return max(self.points, key=Number)

    @property
    def eol(self) -> datetime.date | None:
        """Return the last day of support: the earlier one if two sources differ; None if there is none."""
        days = [last_day(when) for when in (self.eol_vendor, self.eol_computed) if when]
        return min(days) if days else None

    @property
    def eol_promised(self) -> bool:
        """Return True if NVIDIA's own table has the end, as opposed to the rule of thumb."""
        return self.eol_vendor is not None


class CudaMajor(Row):
    """One CUDA major; section ``cuda_majors``. Any toolkit of it runs on drivers from ``floor`` on."""

    id: NumberId
    floor: Version
    branch: int
    min_compute_capability: Capability

    @property
    def number(self) -> int:
        """Return 13 for CUDA 13."""
        return int(self.id)


class Toolkit(Row):
    """One CUDA toolkit release; section ``toolkits``. ``id`` is its version."""

    id: Version
    label: str
    branch: int
    """The driver branch of the same CUDA, the first with full support."""
    driver: Version | None = None
    """Release notes, x86_64 and SBSA: full support, PTX JIT included. None: not published or not read."""
    runfile_driver: Version | None = None
    """The driver in the runfile; runfiles from 13.4 on have none."""
    recommended_driver: Version | None = None
    floor: Version | None = None
    """Set only if it differs from its major's."""
    driver_only: bool = False
    """A CUDA that a driver branch contains and that was never released as a toolkit: 12.7."""

    @property
    def major(self) -> int:
        """Return 13 for 13.0.2."""
        return int(self.id.split(".")[0])

    @property
    def series(self) -> str:
        """Return 13.0 for 13.0.2."""
        return ".".join(self.id.split(".")[:2])


class ForwardCompat(Row):
    """One cuda-compat package; section ``forward_compat``. ``id`` is the CUDA series: ``13.0``.

    Data-centre GPUs only; never lowers the CUDA version.
    """

    id: Version
    package: str
    works_on: tuple[int, ...]
    needless_on: tuple[int, ...] = ()
    """Branches that already contain that CUDA."""
    refused_on: tuple[int, ...] = ()
    """Branches that are newer than the package: error 803."""


class CudaBuild(Part):
    """A library built for one CUDA major."""

    floor: Version
    since: Version | None = None
    until: Version | None = None
    latest: Version | None = None
    """The newest release of this build, if it differs from the other builds'."""


class Cudnn(Row):
    """A range of cuDNN releases with the same requirements; section ``cudnn``."""

    since: Version
    until: Version | None = None
    """Inclusive; None: up to the newest."""
    latest: Version
    builds: Mapping[int, CudaBuild]
    """By CUDA major."""
    min_compute_capability: Capability


class Nccl(Row):
    """One NCCL release; section ``nccl``. ``id`` is its version."""

    id: Version
    cuda_majors: tuple[int, ...]
    builds: tuple[Version, ...] = ()
    """Toolkits of the deb and rpm builds: the package version ends in ``+cuda13.3``."""
    min_compute_capability: Mapping[int, Capability] = {}
    """By CUDA major, if it is above the major's own."""


class Dcgm(Row):
    """One DCGM series; section ``dcgm``."""

    latest: Version
    epoch: int = 1
    min_branch: int
    cuda_major_by_branch: Mapping[int, int] = {}
    """First branch → CUDA major of the package to install."""
    also_cuda_major: Mapping[int, int] = {}
    """CUDA major of the driver → major that must be installed too for a GPU below its compute capability."""
    systems: Words = ()


class ContainerToolkit(Row):
    """The NVIDIA Container Toolkit; section ``container_toolkit``."""

    id: Version
    released: When | None = None
    replaces: Words = ()
    """Packages that must be removed first."""
    repository: str
    key: str
    fingerprints: Words = ()
    """Fingerprints of the keys that may sign the repository."""


class ContainerEngine(Row):
    """CDI support of a container engine, by version; section ``container_engines``."""

    cdi: Version
    """First version with support for CDI."""
    cdi_default: Version
    """First version with CDI enabled by default."""
    additional_gids: Version
    """First version that reads specifications of CDI 0.7.0."""
    repository: str | None = None
    """The publisher's own repository, without the distribution's name."""
    key: str | None = None
    fingerprints: Words = ()
    """Fingerprints of the keys that may sign the repository."""
    rpm_key: str | None = None
    """The key of the publisher's rpm packages, if it differs."""
    rpm_fingerprints: Words = ()
    packages: Words = ()
    """Their names in the publisher's own repository."""


class FrameworkBuild(Part):
    """One CUDA build of a framework."""

    cudnn: Version | None = None
    nccl: Version | None = None


class Framework(Row):
    """One release series of PyTorch or TensorFlow; section ``frameworks``. ``id`` is ``pytorch-2.14``."""

    name: Literal["pytorch", "tensorflow"]
    version: Version
    released: When | None = None
    planned: When | None = None
    builds: Mapping[Version, FrameworkBuild] = {}
    """By CUDA series."""
    experimental: Mapping[Version, FrameworkBuild] = {}
    default_wheel: Mapping[str, Version] = {}
    """Versions that the wheel of a plain pip install pins: version, cuda, cudnn, nccl."""
    floor: Version | None = None
    """Driver floor as the framework documents it."""
    min_compute_capability: Capability | None = None
    """Set if the wheels exclude GPUs that their CUDA supports."""
    arches: tuple[Arch, ...] = ("x86_64", "aarch64")
    """CPU architectures with wheels for CUDA."""
    compile_min_compute_capability: Capability | None = None
    """Minimum for torch.compile. None: not looked up for this release."""


class ErrorMessage(Row):
    """An error text of a program; section ``messages``."""

    program: str
    pattern: str
    """A regular expression, matched without case."""
    means: str
    remedy: str
    checks: Words
    """Ids of checks that find the cause on a node, the most likely first."""
    fact: Literal["capability", "cuda"] | None = None
    """What is compared with a node's facts; None: only the checks are."""


class WheelArchitectures(Row):
    """Compute capabilities in one kind of PyTorch wheel; section ``wheels``."""

    framework: Literal["pytorch"]
    since: Version
    until: Version | None = None
    cuda: tuple[Version, ...]
    arch: Arch
    compute_capabilities: tuple[Capability, ...]
    ptx: Capability | None = None
    """The highest one is also included as PTX, for future GPUs."""


class WorkloadImage(Row):
    """A container image with a framework for CUDA; section ``workload_images``."""

    framework: Literal["pytorch", "tensorflow"] = "pytorch"
    image: str
    digest: ImageDigest | Literal["unpublished"] | None = None
    """Of the image in its registry. Unpublished: built by scripts/validator_image.py, and in no registry yet."""
    cuda: Version
    min_compute_capability: Capability
    arch: tuple[Arch, ...]

    @property
    def reference(self) -> str:
        """Return the name to pull: with the digest, which a registry cannot move to other content."""
        return f"{self.image}@{self.digest}" if self.digest else self.image


class Kubernetes(Row):
    """A component for Kubernetes; section ``kubernetes``."""

    version: Version
    min_driver: Version | None = None
    drivers: tuple[Version, ...] = ()
    default_driver: Version | None = None
    components: Mapping[str, str] = {}
    kubernetes: str | None = None


class OriginOffer(Part):
    """The packages of one origin for one operating system. A stack that depends on a bound of None has a warning."""

    repository: str | None = None
    """NVIDIA: the name of its directory. Distribution: its components."""
    first_branch: int | None = None
    """The oldest branch that was found there."""
    first_toolkit: Version | None = None
    """The oldest CUDA series with a toolkit that was found there."""
    last_branch: int | None = None
    missing: tuple[int, ...] = ()
    transitional: Mapping[int, int] = {}
    """Branches with empty packages that install another branch."""
    branches: tuple[int, ...] = ()
    """All branches with packages of the names that this catalog uses; empty: those between the bounds."""
    versions: Mapping[int, Mapping[Flavour, Words]] = {}
    """By branch and flavour of the modules: the versions of the packages in an archive, newest first. Flavours can be
    at different releases: the open modules have packages of their own."""
    arches: tuple[Arch, ...] = ("x86_64", "aarch64")
    absent: tuple[Component, ...] = ()
    """Components that this origin does not have."""


class System(Row):
    """One operating system; section ``systems``. ``id`` is ``ubuntu-24.04``."""

    name: str
    os: str
    """``ID`` of os-release."""
    version: str
    """``VERSION_ID`` of os-release, truncated to its significant part."""
    codename: str | None = None
    aliases: Words = ()
    like: Words = ()
    """Other values of ``ID`` that count as this system: Rocky and Alma as RHEL."""
    family: Family
    manager: Literal["apt", "dnf", "zypper", "tdnf"]
    modular: bool = False
    """True if dnf module streams exist."""
    supported: bool = False
    """True if gpunode's roles support it."""
    kernels: Mapping[str, str] = {}
    """Release → kernel that NVIDIA validated; others are known to work."""
    origins: Mapping[Origin, OriginOffer]


Variant = Literal["full", "headless", "compute", "precompiled"]


class PackageSet(Row):
    """Package names of one component for one origin, kind of system and range of branches; section ``packages``.

    Names and versions are templates for ``str.format`` over ``{branch}`` (580), ``{version}`` (580.95.05),
    ``{cuda}`` (13-0), ``{cuda_major}`` (13) and ``{kernel}`` (a kernel flavour: generic, aws …).
    """

    component: Component
    release: int | None = None
    """The component's own major, if the package names depend on it: cuDNN 8 and 9, DCGM 3 and 4."""
    origin: Origin | Literal["container-toolkit"]
    family: Family
    systems: Words = ()
    """Ids of ``systems``; empty: all systems of the family that this origin supports."""
    first_branch: int | None = None
    last_branch: int | None = None
    flavour: Flavour | None = None
    variant: Variant | None = None
    arches: tuple[Arch, ...] = ("x86_64", "aarch64")
    names: Words
    version: str | None = None
    """Version pattern; None if the component has versions of its own."""
    stream: str | None = None
    """dnf module stream to enable first."""
    with_driver: bool = False
    """Part of the driver closure: same version as the driver."""
    by_role: bool = True
    """False: the role does not install these packages."""


class Pinning(Row):
    """The mechanism that holds a version; section ``pinning``."""

    origin: Origin
    family: Family
    systems: Words = ()
    first_branch: int | None = None
    last_branch: int | None = None
    kind: Literal["preferences", "module-stream", "versionlock", "addlock"]
    pattern: str | None = None
    """For locks: the locked name."""


class KernelFlavour(Row):
    """Kernel packages that must be upgraded together with precompiled modules; section ``kernel_flavours``."""

    os: str
    suffix: str
    """End of ``uname -r``."""
    image: str
    headers: str
    modules: Mapping[Flavour, str]
    """Meta package of the precompiled modules, template over ``{branch}``."""
    kernels: Mapping[str, Version] = {}
    """Series of its kernels by system, if the image stays at one series: 6.8 of Ubuntu 24.04."""
    arches: tuple[Arch, ...] = ("x86_64", "aarch64")
    systems: Words = ()
