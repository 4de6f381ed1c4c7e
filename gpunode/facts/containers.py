"""Container engines: versions, settings, and the devices that they offer to containers."""

import json
import re
import tomllib
from typing import Any

from gpunode.facts.bundle_reader import BundleReader, first_line, whole
from gpunode.facts.driver import version_of
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact

_TOOLS = ("docker", "containerd", "podman", "runc", "crun", "nvidia-ctk")
_DAEMON_JSON = "/etc/docker/daemon.json"
_SNAP_JSON = "/var/snap/docker/current/config/daemon.json"
_CDI = re.compile(r"(?m)^\s*enable_cdi\s*=\s*(true|false)\b")
_TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
_CONTAINERD = "/etc/containerd/config.toml"
_CONTAINERD_DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"  # the toolkit's, from 1.18 on


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


def read_tool_versions(bundle: BundleReader) -> dict[str, str]:
    """Return the versions that the programs on disk print (``--version``); a daemon may still run an older one."""
    return {name: version for name in _TOOLS if (version := version_of(bundle, f"version-{name}")) is not None}


def read_docker(bundle: BundleReader) -> DockerDaemon | None:
    """Return the answer of the probe's ``docker info --format``; None if Docker is not installed or not running."""
    if not bundle.ran("docker-info"):
        bundle.require_finished("docker_daemon")
        if not bundle.ran("version-docker"):
            raise bundle.not_collected()
        return None
    runtimes: list[str] = []
    values: dict[str, Any] = {}
    for line in bundle.output("docker-info").splitlines():
        key, equals, text = line.partition("=")
        if not line.strip():
            continue
        try:
            value = json.loads(text[:4000]) if equals else None
        except ValueError:
            value = None
        if value is None:
            raise ParseError(f"expected NAME=JSON from docker info, found '{first_line(line)}'")
        if key == "runtime":
            runtimes.append(str(value))
        else:
            values[key] = value

    def text_of(key: str) -> str | None:
        value = values.get(key)
        return value if isinstance(value, str) and value else None

    if text_of("version") is None:
        raise ParseError("expected the server's version from docker info, found none: the daemon does not answer")
    live_restore = values.get("live_restore")
    return DockerDaemon(
        version=text_of("version"),
        runtimes=tuple(runtimes),
        default_runtime=text_of("default"),
        cgroup_driver=text_of("cgroup_driver"),
        cgroup_version=text_of("cgroup_version"),
        storage_driver=text_of("storage"),
        live_restore=live_restore if isinstance(live_restore, bool) else None,
    )


def read_containers(bundle: BundleReader) -> ContainerSettings:
    """Return the content of daemon.json and the toolkit's config.toml, and the probe's lines of containerd's
    configuration."""
    path = _settings_path(bundle)
    settings = _daemon_json(bundle, path)
    runtimes = settings.get("runtimes") if settings else None
    default = settings.get("default-runtime") if settings else None
    toolkit = _toolkit(bundle)
    runtime = toolkit.get("nvidia-container-runtime")
    command = toolkit.get("nvidia-container-cli")
    mode = runtime.get("mode") if isinstance(runtime, dict) else None
    no_cgroups = command.get("no-cgroups") if isinstance(command, dict) else None
    containerd = bundle.text(_CONTAINERD)
    if containerd is not None and bundle.has_file(_CONTAINERD_DROP_IN):
        containerd += bundle.text(_CONTAINERD_DROP_IN) or ""
    cdi = _CDI.search(containerd or "")
    return ContainerSettings(
        docker_path=path,
        containerd_cdi=None if cdi is None else cdi[1] == "true",
        docker=settings,
        docker_runtimes=tuple(runtimes) if isinstance(runtimes, dict) else (),
        docker_default_runtime=default if isinstance(default, str) else None,
        toolkit_mode=mode if isinstance(mode, str) else None,
        toolkit_no_cgroups=no_cgroups if isinstance(no_cgroups, bool) else None,
        containerd_has_nvidia=None if containerd is None else "nvidia" in containerd,
    )


def _settings_path(bundle: BundleReader) -> str:
    """Return the file that Docker reads: the snap's, if it exists and Docker is not installed as a package."""
    program = bundle.raw("version-docker")
    by_snap = bundle.has_file(_SNAP_JSON) and bundle.text(_SNAP_JSON) is not None
    return _SNAP_JSON if by_snap and program is not None and program.missing else _DAEMON_JSON


def _daemon_json(bundle: BundleReader, path: str) -> dict[str, Any] | None:
    text = bundle.text(path)
    if text is None:
        return None
    try:
        settings = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise ParseError(f"{path} is not JSON: '{first_line(text)}'") from None
    if not isinstance(settings, dict):
        raise ParseError(f"expected an object in {path}, found '{first_line(text)}'")
    return settings


def _toolkit(bundle: BundleReader) -> dict[str, Any]:
    text = bundle.text(_TOOLKIT)
    try:
        return tomllib.loads(text or "")
    except (ValueError, RecursionError):
        raise ParseError(f"{_TOOLKIT} is not TOML: '{first_line(text or '')}'") from None


def read_cdi_specs(bundle: BundleReader) -> tuple[CdiSpec, ...]:
    """Return the CDI specifications from the probe's lines: ``file PATH SIZE``, then ``KEY VALUE`` for its content."""
    specs: list[CdiSpec] = []
    values: dict[str, list[str]] = {}
    for line in reversed(bundle.look("cdi-specs")):
        key, _, rest = line.partition("\t")
        if key != "file":
            values.setdefault(key, []).append(rest)
            continue
        path, _, size = rest.partition("\t")
        if whole(size) is None:
            raise ParseError(f"expected a path and its size from the probe, found '{first_line(rest)}'")
        specs.append(
            CdiSpec(
                path=path,
                size_bytes=int(size),
                cdi_version=next(iter(values.get("cdiVersion", ())), None),
                kind=next(iter(values.get("kind", ())), None),
                devices=tuple(sorted(values.get("name", ()))),
                driver_versions=tuple(sorted(values.get("driver", ()))),
                missing=tuple(sorted(values.get("missing", ()))),
                nodes=tuple(_cdi_node(text) for text in sorted(values.get("node", ()))),
            )
        )
        values = {}
    return tuple(reversed(specs))


def _cdi_node(text: str) -> CdiNode:
    path, _, numbers = text.partition("\t")
    major, _, minor = numbers.partition("\t")
    if whole(major) is None:
        raise ParseError(f"expected a device and its numbers from the probe, found '{first_line(text)}'")
    return CdiNode(path=path, major=int(major), minor=whole(minor))


def read_container_devices(bundle: BundleReader) -> tuple[ContainerDevices, ...]:
    """Return the running containers with GPUs in scopes of systemd."""
    containers = []
    for scope, allowed, started, reloaded in bundle.rows("container-devices", 4):
        if allowed not in {"yes", "no"}:
            raise ParseError(f"expected yes or no for {first_line(scope)}, found '{first_line(allowed)}'")
        # systemd reports 0 for what did not happen.
        times = [number or None for number in (whole(started), whole(reloaded))]
        containers.append(
            ContainerDevices(scope=scope, allowed=allowed == "yes", started_us=times[0], reloaded_us=times[1])
        )
    return tuple(containers)


class ContainersFacts(FactArea):
    """Container engines and runtimes."""

    tool_versions: dict[str, str] | None = fact(read_tool_versions)
    """``{"docker": "28.5.1", "containerd": …, "podman": …, "runc": …, "crun": …, "nvidia-ctk": …}``: the programs
    on disk; a program that is not installed has no key."""
    docker: DockerDaemon | None = fact(
        read_docker, needs_root=True, none_means="Docker is not installed, or its daemon is not running"
    )
    containers: ContainerSettings | None = fact(read_containers)
    cdi_specs: tuple[CdiSpec, ...] | None = fact(read_cdi_specs)
    container_devices: tuple[ContainerDevices, ...] | None = fact(
        read_container_devices, needs_root=True, volatile=True
    )
    """Running containers with GPUs, if systemd manages their cgroups."""
