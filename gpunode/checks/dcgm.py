"""The check on DCGM's versions: its programs, its running host engine, and its plugins for the driver's CUDA."""

import re
from collections.abc import Iterator

from gpunode.catalog import load
from gpunode.checks.compare import failed, passed
from gpunode.checks.installed import present
from gpunode.checks.registry import CheckResult, Skip, registry
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

_PLUGINS = re.compile(r"datacenter-gpu-manager-4-(?:proprietary-)?cuda(\d{1,3})")
GUIDE = "docs.nvidia.com/datacenter/dcgm, installation: the packages of the driver's CUDA"


@registry.check(
    "dcgm.versions",
    needs=("packages", "nvidia_tool_versions", "dcgm_engine", "loaded_driver"),
    partial=True,
    needs_gpu=True,
    means="dcgmi and the running host engine have one version, and DCGM's plugins are those of the driver's CUDA.",
    remedy="systemctl restart nvidia-dcgm starts the installed version; apt-get install "
    "datacenter-gpu-manager-4-cuda13 (cuda12 for drivers before 580) installs the plugins; role dcgm does both.",
    state="observe",
    actions=("restart_service:nvidia-dcgm.service", "run_role:dcgm"),
)
def versions(node: NodeFacts) -> Iterator[CheckResult]:
    tools = node.nvidia_tool_versions or {}
    installed = {
        match[1] for package in node.packages or () if present(package) and (match := _PLUGINS.fullmatch(package.name))
    }
    cuda = _cuda(node)
    if "dcgmi" not in tools and not installed:
        raise Skip("DCGM is not installed")
    seen = {"dcgmi": tools.get("dcgmi"), "the program nv-hostengine": tools.get("nv-hostengine")}
    programs = {name: version for name, version in {**seen, "the running engine": node.dcgm_engine}.items() if version}
    versions_here = sorted(set(programs.values()))
    measured = listed(versions_here) or None
    if len(versions_here) > 1:
        words = listed([f"{name} {version}" for name, version in programs.items()])
        source = "NVIDIA/DCGM issue 314"
        yield failed(f"{len(versions_here)} versions: {words}", measured=measured, source=source)
    elif installed and cuda is not None and cuda not in installed:
        have = listed(sorted(f"cuda{major}" for major in installed))
        message = f"the plugins are those of {have}, the driver has CUDA {cuda}: diagnostics do not start"
        yield failed(message, expected=f"cuda{cuda}", measured=have, source=GUIDE)
    else:
        plugins = f", plugins of {listed(sorted(f'cuda{major}' for major in installed))}" if installed else ""
        yield passed(f"DCGM {measured or 'without programs'}{plugins}", measured=measured)


def _cuda(node: NodeFacts) -> str | None:
    """Return the major version of the CUDA in the driver; None if it is unknown."""
    driver = node.loaded_driver
    reported = node.smi.document.cuda_version if node.smi and node.smi.document else None
    branch = load().branches.get(driver.version.split(".", maxsplit=1)[0]) if driver and driver.version else None
    version = reported or (branch.native_cuda if branch else None)
    return version.split(".", maxsplit=1)[0] if version else None
