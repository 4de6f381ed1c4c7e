"""Installed software: packages, modules, libraries, containers' tools."""

from typing import Any

from gpunode.facts.models.base import Fact


class Package(Fact):
    """One package of the node's package database, as far as it belongs to the GPU stack."""

    name: str
    version: str
    architecture: str
    source: str
    """Name of the source package."""
    maintainer: str
    installed: bool
    """False for what is half-installed or removed with its configuration left."""
    state: str
    """The package manager's own words: ``install ok installed``."""
    held: bool
    published: str | None = None
    """The origin (``nvidia``, ``ubuntu`` …) whose repository lists exactly this version; None where the package
    manager's lists were not asked, or hold it no more."""


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
    """What ``modinfo`` says of the nvidia module on disk for one kernel."""

    kernel: str
    path: str
    version: str | None
    vermagic: str | None
    flavour: str | None
    """``open`` or ``proprietary``, from the licence."""
    signed: bool


class LibraryFile(Fact):
    """One file of a library that must exist once: libcuda, libnvidia-ml, libnccl, libcudnn."""

    name: str
    """Without ending: ``libcuda``."""
    path: str
    """As the linker's cache or a well-known folder has it."""
    file: str
    """What the path leads to."""
    version: str | None
    """From the file's name: ``580.95.05``, ``2.27.3``; None for ``libcuda.so.1`` that is no link."""
    in_cache: bool
    """The dynamic linker's cache knows it."""
    used: bool
    """The one that the linker gives to a program of the machine's own architecture."""
    bits: int | None = None
    """32 or 64, where the cache says so."""


class DockerDaemon(Fact):
    """What ``docker info`` says."""

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
    """``/etc/docker/daemon.json``, secrets covered; None where there is no such file."""
    docker_runtimes: tuple[str, ...]
    docker_default_runtime: str | None
    toolkit_mode: str | None
    """``mode`` in ``/etc/nvidia-container-runtime/config.toml``: ``auto``, ``cdi``, ``legacy``."""
    toolkit_no_cgroups: bool | None
    containerd_has_nvidia: bool | None
    """containerd's configuration names the runtime ``nvidia``; None where containerd has no configuration."""


class CdiSpec(Fact):
    """One CDI specification in ``/etc/cdi`` or ``/var/run/cdi``: what containers are given as devices."""

    path: str
    size_bytes: int
    cdi_version: str | None
    kind: str | None
    """``nvidia.com/gpu``."""
    devices: tuple[str, ...]
    """``0``, ``1``, ``all``, ``GPU-...``."""
    driver_versions: tuple[str, ...]
    """Versions in the names of the driver's libraries that it mounts: one, and that of the driver."""
    missing: tuple[str, ...]
    """Files and devices of the host that it names and that are not there."""
