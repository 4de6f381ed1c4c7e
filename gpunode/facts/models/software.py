"""Installed software: packages, kernel modules, libraries, container tools."""

from typing import Any

from gpunode.facts.models.base import Fact


class Package(Fact):
    """One package of the node's package database that belongs to the GPU stack."""

    VOLATILE = frozenset({"published"})

    name: str
    version: str
    architecture: str
    source: str
    """Name of the source package."""
    maintainer: str
    installed: bool
    """False for a package that is half-installed, or removed with its configuration left."""
    state: str
    """As the package manager prints it: ``install ok installed``."""
    held: bool
    published: str | None = None
    """The origin (``nvidia``, ``ubuntu`` …) of the repository that lists exactly this version; None if the package
    manager's lists were not queried or no longer contain it."""


class DkmsModule(Fact):
    """One line of ``dkms status``. ``kernel`` is None for a module that was added and never built."""

    name: str
    version: str
    kernel: str | None
    architecture: str | None
    state: str
    """``added``, ``built``, ``installed``; the warning that dkms appends is cut off."""
    note: str | None = None


class ModuleFile(Fact):
    """The answer of ``modinfo`` about the nvidia module on disk, for one kernel."""

    kernel: str
    path: str
    version: str | None
    vermagic: str | None
    flavour: str | None
    """``open`` or ``proprietary``, from the licence."""
    signed: bool
    size: int | None = None
    """In bytes."""
    preferred: bool | None = None
    """True if it is the file that modprobe loads, by modules.dep; None: unknown."""


class ModuleImage(Fact):
    """A GPU module in an initramfs."""

    path: str
    size: int | None


class Initramfs(Fact):
    """The initramfs of one kernel that has a GPU module on disk."""

    kernel: str
    path: str
    newer: bool
    """True if it was written after the kernel's GPU module was installed: whatever it has of it is as on disk."""
    modules: tuple[ModuleImage, ...] | None
    """The GPU modules of an older one; None if it was not listed."""
    reason: str | None = None
    """Why an older one was not listed."""


class LibraryFile(Fact):
    """One file of a library that must exist once (libcuda, libnvidia-ml, libnccl, libcudnn), or an empty one of the
    driver's others."""

    name: str
    """Without suffix: ``libcuda``."""
    path: str
    """As listed in the linker's cache, or in a well-known folder."""
    file: str
    """The target of the path."""
    version: str | None
    """From the file's name: ``580.95.05``, ``2.27.3``; None for a ``libcuda.so.1`` that is not a link."""
    in_cache: bool
    """True if the dynamic linker's cache lists it."""
    used: bool
    """True for the file that the linker loads for a program of the machine's own architecture."""
    bits: int | None = None
    """32 or 64, if the cache has it."""
    size: int | None = None
    """Of the file, in bytes; None: an older probe collected it."""


class DockerDaemon(Fact):
    """The answer of ``docker info``."""

    version: str | None
    runtimes: tuple[str, ...]
    default_runtime: str | None
    cgroup_driver: str | None
    cgroup_version: str | None
    storage_driver: str | None
    live_restore: bool | None


class ContainerSettings(Fact):
    """Configuration files of container engines."""

    docker: dict[str, Any] | None
    """``/etc/docker/daemon.json`` with secrets masked; None if the file does not exist."""
    docker_runtimes: tuple[str, ...]
    docker_default_runtime: str | None
    toolkit_mode: str | None
    """``mode`` in ``/etc/nvidia-container-runtime/config.toml``: ``auto``, ``cdi``, ``legacy``."""
    toolkit_no_cgroups: bool | None
    containerd_has_nvidia: bool | None
    """True if containerd's configuration names the runtime ``nvidia``; None if containerd has no configuration."""
    containerd_cdi: bool | None = None
    """``enable_cdi`` in containerd's configuration; None if it is not set."""
    docker_path: str = "/etc/docker/daemon.json"
    """The file that Docker reads: the snap has another."""


class CdiNode(Fact):
    """One device of a CDI specification that has its numbers in it."""

    path: str
    major: int
    minor: int | None


class ContainerDevices(Fact):
    """One running container with GPUs, in a cgroup that systemd manages."""

    scope: str
    """``docker-ID.scope``."""
    allowed: bool
    """True if the scope lists the GPUs' devices. Otherwise the next reload of systemd refuses them to the container."""
    started_us: int | None
    """Microseconds from the boot to the container's start."""
    reloaded_us: int | None
    """Microseconds from the boot to systemd's latest reload; None: systemd does not report it (before 250)."""


class Needrestart(Fact):
    """Settings of needrestart, which apt calls after an upgrade."""

    mode: str | None
    """``a``: restarts services by itself; ``i``: asks; ``l``: lists; None: not set."""
    spared: tuple[str, ...]
    """Patterns of services that it never restarts, as its configuration has them."""


class CdiSpec(Fact):
    """One CDI specification in ``/etc/cdi`` or ``/var/run/cdi``: the devices that containers can request."""

    VOLATILE = frozenset({"size_bytes"})

    path: str
    size_bytes: int
    cdi_version: str | None
    kind: str | None
    """``nvidia.com/gpu``."""
    devices: tuple[str, ...]
    """``0``, ``1``, ``all``, ``GPU-...``."""
    driver_versions: tuple[str, ...]
    """Versions in the names of the driver libraries that it mounts; normally one, equal to the driver's."""
    missing: tuple[str, ...]
    """Files and devices of the host that it names and that do not exist."""
    nodes: tuple[CdiNode, ...] = ()
    """Devices with numbers; those without get the numbers that the host has."""
