"""Checks on containers: the driver's files for them, and engines that lose GPUs or never get them."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import PurePosixPath

from packaging.version import Version

from gpunode.checks.compare import About, at_most, failed, faultless, parsed_version, passed, skipped, warned
from gpunode.checks.driver import same_version
from gpunode.checks.packages import present, upstream
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.facts.containers import CdiSpec, ContainerDevices
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
TOOLKIT_SOURCE = "catalog (libraries.yml, container_toolkit)"
KIND = "nvidia.com/gpu"
REGENERATE = (
    "Run nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml to regenerate it (as nvidia-cdi-refresh.service "
    "does)."
)


CDI_BY_DEFAULT = Version("29")
"""From this version on Docker answers --gpus with CDI (moby/moby pull request 50228)."""


@registry.check(
    "container.toolkit",
    needs=("packages",),
    means="The four packages of NVIDIA's container toolkit are installed in one version.",
    remedy="Install all four in one version: nvidia-container-toolkit, nvidia-container-toolkit-base, "
    "libnvidia-container-tools, libnvidia-container1.",
    state="observe",
    actions=("run_role:nvidia_container_toolkit",),
)
def toolkit(node: NodeFacts) -> Iterator[CheckResult]:
    by_name = {package.name: package for package in node.packages or () if package.name in TOOLKIT and present(package)}
    if not by_name:
        raise Skip("no package of NVIDIA's container toolkit is installed")
    versions = sorted({upstream(package) for package in by_name.values()})
    broken = [f"{name} ({package.state})" for name, package in by_name.items() if not package.installed]
    words = listed([f"{name} {upstream(package)}" for name, package in sorted(by_name.items())])
    yield faultless(
        f"{counted(len(by_name), 'package')} at {versions[0]}",
        {
            f"not completely installed: {listed(broken)}": broken,
            f"{len(versions)} versions: {words}": len(versions) > 1,
        },
        expected=1 if len(versions) > 1 and not broken else None,
        measured=listed(versions),
        source=TOOLKIT_SOURCE,
    )


def has_toolkit(node: NodeFacts) -> bool:
    """Return True if NVIDIA's container toolkit is on the node, as a package or a program."""
    return "nvidia-ctk" in (node.tool_versions or {}) or any(
        package.name.startswith("nvidia-container-toolkit") and package.installed for package in node.packages or ()
    )


@registry.check(
    "container.runtime",
    needs=("docker", "containers", "tool_versions", "packages"),
    needs_gpu=True,
    means="Where Docker runs and the container toolkit is installed, the daemon has the runtime nvidia "
    "configured and was restarted since.",
    remedy="nvidia-ctk runtime configure --runtime=docker, then systemctl restart docker on an idle node.",
    state="drain",
    actions=("run_role:nvidia_container_toolkit", "restart_service:docker.service"),
)
def runtime(node: NodeFacts) -> Iterator[CheckResult]:
    docker, settings = node.docker, node.containers
    if docker is None:
        raise Skip("no Docker daemon runs here")
    if not has_toolkit(node):
        raise Skip("NVIDIA's container toolkit is not installed: containers get no GPU")
    has = listed(docker.runtimes)
    if "nvidia" in docker.runtimes:
        yield passed(f"Docker {docker.version} has the runtime nvidia", expected="nvidia", measured=has)
    elif settings is not None and settings.docker_path.startswith("/var/snap/"):
        yield failed(
            f"Docker is a snap, which reads {settings.docker_path}, and not /etc/docker/daemon.json",
            expected="nvidia",
            measured=has,
            remedy=f"nvidia-ctk runtime configure --runtime=docker --config={settings.docker_path} && snap restart "
            "docker. Or Docker from its package: snap remove docker, then role docker.",
            source="canonical/docker-snap issue 148",
            actions=("fix_configuration",),
        )
    elif settings is not None and "nvidia" in settings.docker_runtimes:
        message = "daemon.json has the runtime nvidia, the running daemon has not: it was not restarted"
        yield failed(message, expected="nvidia", measured=has)
    else:
        yield failed(f"Docker {docker.version} does not have the runtime nvidia", expected="nvidia", measured=has)


@registry.check(
    "container.cdi",
    needs=("cdi_specs", "loaded_driver", "device_nodes", "docker"),
    needs_gpu=True,
    means="The CDI specification lists the libraries of this driver, its devices by the numbers that they have now, "
    "and only existing files. An outdated one breaks every new container, and so does a missing one where Docker "
    "(29 and later) needs it for --gpus.",
    remedy=REGENERATE,
    state="drain",
    actions=("run_role:nvidia_container_toolkit",),
)
def cdi(node: NodeFacts) -> Iterator[CheckResult]:
    specs = [spec for spec in node.cdi_specs or () if spec.kind == KIND]
    if not specs and _cdi_needed(node):
        yield failed(
            f"no CDI specification of GPUs, which Docker {node.docker.version if node.docker else ''} needs for --gpus",
            expected=KIND,
            measured="none",
            source="moby/moby pull request 50228",
        )
    elif not specs:
        yield skipped("no CDI specification of GPUs")
    for spec in specs:
        yield _spec(spec, node).at(spec.path)


@registry.check(
    "container.cdi-single",
    needs=("cdi_specs",),
    needs_gpu=True,
    means="One CDI specification defines the GPUs. With two in different directories one hides the other; with "
    "two in one directory containers get no devices.",
    remedy="Keep /var/run/cdi/nvidia.yaml, which nvidia-cdi-refresh.service writes, and remove the others, or "
    "run the role nvidia_container_toolkit.",
    state="drain",
    actions=("run_role:nvidia_container_toolkit",),
)
def cdi_single(node: NodeFacts) -> Iterator[CheckResult]:
    specs = [spec for spec in node.cdi_specs or () if spec.kind == KIND]
    if not specs:
        raise Skip("no CDI specification of GPUs")
    paths = listed([spec.path for spec in specs])
    bad, fault = f"{paths}: engines use the one in the last directory and ignore the rest", Status.WARN
    for spec, other in combinations(specs, 2):
        both = sorted(set(spec.devices) & set(other.devices))
        if both and PurePosixPath(spec.path).parent == PurePosixPath(other.path).parent:
            fault = Status.FAIL
            bad = f"{paths}: two in one folder define {listed(both, most=3)}, and engines refuse it"
            break
    yield at_most(len(specs), 1, f"{specs[0].path} alone", bad, fault=fault, unit="specifications")


def _cdi_needed(node: NodeFacts) -> bool:
    """Return True if Docker answers --gpus with CDI: since that version, where the toolkit is installed."""
    version = parsed_version(node.docker.version) if node.docker is not None else None
    return version is not None and version >= CDI_BY_DEFAULT and has_toolkit(node)


def moved_devices(spec: CdiSpec, node: NodeFacts) -> list[str]:
    """Return the devices of a specification that have other numbers now."""
    numbers = {file.path: (file.major, file.minor) for file in node.device_nodes or () if file.kind == "character"}
    return [
        f"{device.path} {device.major}:{device.minor} (now {numbers[device.path][0]}:{numbers[device.path][1]})"
        for device in spec.nodes
        if device.path in numbers and numbers[device.path] != (device.major, device.minor)
    ]


def _spec(spec: CdiSpec, node: NodeFacts) -> CheckResult:
    # Containers receive the libraries on disk; another check compares those with the module.
    driver = node.driver_library_version or (node.loaded_driver.version if node.loaded_driver else None)
    names = listed(spec.driver_versions)
    stale = [version for version in spec.driver_versions if driver is not None and not same_version(version, driver)]
    if stale:
        message = f"generated for driver {listed(stale)}; {driver} is installed"
        return failed(message, expected=driver, measured=names or None)
    moved = moved_devices(spec, node)
    if moved:
        message = f"{counted(len(moved), 'device')} with other numbers: {listed(moved, most=3)}"
        source = "NVIDIA/nvidia-container-toolkit issue 1934"
        return failed(message, expected=0, measured=len(moved), source=source)
    if spec.missing:
        message = f"{counted(len(spec.missing), 'file')} listed in it are missing: {listed(spec.missing, most=3)}"
        return failed(message, expected=0, measured=len(spec.missing))
    if not spec.devices:
        return failed("names no device", measured=0)
    message = f"names {counted(len(spec.devices), 'device')} and driver {names or 'of no version'}"
    return passed(message, expected=driver, measured=names or None)


NOTICE = "NVIDIA/nvidia-docker issue 1730 (notice of the toolkit's makers)"
NO_CGROUPS = "NVIDIA/nvidia-container-toolkit issue 381"
CONFIG = "/etc/nvidia-container-runtime/config.toml"
LEGACY_UNTIL = Version("1.18")
"""From this version on the toolkit's mode ``auto`` describes the devices to the engine (just-in-time CDI)."""
LINKS = (
    "nvidia-ctk system create-dev-char-symlinks --create-all creates the links of /dev/char, by which runc names the "
    "devices to systemd, until the next boot; then docker run --device nvidia.com/gpu=all (CDI, role "
    "nvidia_container_toolkit) in place of the toolkit's hook."
)


@registry.check(
    "container.cgroups",
    needs=("docker", "containers", "tool_versions", "device_nodes", "packages"),
    needs_gpu=True,
    means="The container toolkit lets containers of Docker open the GPUs, and a reload of systemd keeps that: with "
    "systemd as cgroup driver, without CDI and without links in /dev/char, systemctl daemon-reload takes the GPUs from "
    "running containers (NVML: Unknown Error).",
    remedy=f"{LINKS} Then recreate running containers.",
    state="observe",
    actions=("run_role:nvidia_container_toolkit",),
)
def cgroups(node: NodeFacts) -> Iterator[CheckResult]:
    docker, settings = node.docker, node.containers
    if docker is None or settings is None:
        raise Skip("no Docker daemon runs here")
    if not has_toolkit(node):
        raise Skip("NVIDIA's container toolkit is not installed: containers get no GPU")
    if settings.toolkit_mode == "cdi":
        yield passed("the toolkit's mode is cdi: the engine sets up the devices", measured="cdi")
        return
    if settings.toolkit_no_cgroups:
        yield failed(
            f"no-cgroups = true in {CONFIG} is for rootless engines: Docker runs as root, and its containers may not "
            "open the GPUs",
            expected=False,
            measured=True,
            source=NO_CGROUPS,
            remedy="nvidia-ctk config --set nvidia-container-cli.no-cgroups=false --in-place; then recreate "
            "containers.",
            actions=("fix_configuration",),
        )
        return
    linked = [device for device in node.device_nodes or () if device.kind == "character"]
    lacking = [device.path for device in linked if device.linked is False]
    if docker.cgroup_driver == "systemd" and lacking and _legacy(node):
        yield warned(
            f"a daemon-reload takes the GPUs from running containers: cgroup driver systemd, toolkit mode "
            f"{settings.toolkit_mode or 'auto'}, no link in /dev/char for {listed(lacking, most=3)}",
            expected=len(linked),
            measured=len(linked) - len(lacking),
            unit="links",
            source=NOTICE,
        )
    else:
        yield passed(f"cgroup driver {docker.cgroup_driver}, toolkit mode {_mode(node)}")


def _mode(node: NodeFacts) -> str:
    return (node.containers.toolkit_mode if node.containers else None) or "auto"


def _legacy(node: NodeFacts) -> bool:
    """Return True if the toolkit allows devices behind the engine's back; False if its version is unknown."""
    if _mode(node) != "auto":
        return _mode(node) == "legacy"
    version = parsed_version((node.tool_versions or {}).get("nvidia-ctk"))
    return version is not None and version < LEGACY_UNTIL


@registry.check(
    "container.devices-kept",
    needs=("container_devices",),
    needs_gpu=True,
    means="systemd knows the GPUs of every running container in a cgroup that it manages. Those that it does not know "
    "are refused to the container after systemctl daemon-reload, which apt runs too.",
    remedy="Recreate the container (docker rm -f, docker run): it then gets its GPUs back. Before the next one: "
    + LINKS,
    state="observe",
    actions=("run_role:nvidia_container_toolkit",),
)
def devices_kept(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.container_devices:
        raise Skip("no container with a GPU runs in a cgroup that systemd manages")
    at_risk = [container for container in node.container_devices if not container.allowed]
    lost = [container.scope for container in at_risk if _reloaded_since(container)]
    about: About = {"expected": 0, "measured": len(at_risk), "unit": "containers", "source": NOTICE}
    if lost:
        message = f"{counted(len(lost), 'container')} lost the GPUs with systemd's latest reload: {_short(lost)}"
        yield failed(message, **about)
    elif at_risk:
        message = f"the next daemon-reload takes the GPUs from {_short([container.scope for container in at_risk])}"
        yield warned(message, **about)
    else:
        yield passed(f"systemd knows the GPUs of {counted(len(node.container_devices), 'container')}", **about)


def _reloaded_since(container: ContainerDevices) -> bool:
    if container.started_us is None or container.reloaded_us is None:
        return False
    return container.reloaded_us > container.started_us


def _short(scopes: list[str]) -> str:
    """Return the names of scopes with the first twelve characters of the number, as engines print it."""
    parts = (scope.removesuffix(".scope").rpartition("-") for scope in scopes)
    return listed([f"{engine}-{number[:12]}" for engine, _, number in parts], most=3)


@registry.check(
    "container.containerd",
    needs=("units", "containers", "cdi_specs", "tool_versions"),
    needs_gpu=True,
    means="Where the kubelet uses containerd, containerd has the runtime nvidia, or CDI with a specification of the "
    "GPUs: pods get no GPU without.",
    remedy="nvidia-ctk runtime configure --runtime=containerd && systemctl restart containerd (running pods go on).",
    state="drain",
    actions=("run_role:nvidia_container_toolkit", "restart_service:containerd.service"),
)
def containerd(node: NodeFacts) -> Iterator[CheckResult]:
    active = {unit.name for unit in node.units or () if unit.active == "active"}
    settings = node.containers
    if "kubelet.service" not in active or "containerd.service" not in active or settings is None:
        raise Skip("no kubelet with containerd runs here")
    cdi = settings.containerd_cdi if settings.containerd_cdi is not None else _cdi_by_default(node)
    if settings.containerd_has_nvidia:
        yield passed("containerd has the runtime nvidia", expected="nvidia", measured="nvidia")
    elif cdi and any(spec.kind == KIND for spec in node.cdi_specs or ()):
        yield passed("containerd has CDI, with a specification of the GPUs", measured="cdi")
    else:
        reason = "CDI has no specification of the GPUs" if cdi else "CDI is off"
        message = f"containerd has no runtime nvidia, and {reason}: pods get no GPU"
        yield failed(message, expected="nvidia", measured="none", source="NVIDIA/gpu-operator issue 594")


CDI_IN_CONTAINERD = Version("2.0")
"""From this version on containerd has CDI unless it is switched off (containerd 2.0, docs/cri/config.md)."""


def _cdi_by_default(node: NodeFacts) -> bool:
    version = parsed_version((node.tool_versions or {}).get("containerd"))
    return version is not None and version >= CDI_IN_CONTAINERD
