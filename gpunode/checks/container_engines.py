"""Checks on engines that lose GPUs or never get them: cgroups, /dev/char, containerd."""

from collections.abc import Iterator

from packaging.version import Version

from gpunode.checks.compare import About, failed, parsed_version, passed, warned
from gpunode.checks.containers import KIND, has_toolkit
from gpunode.checks.registry import CheckResult, Skip, registry
from gpunode.facts.containers import ContainerDevices
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

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
