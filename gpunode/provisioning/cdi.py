"""The node's one CDI specification: its file, whether it is current, and other specifications that contradict it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpunode.checks.containers import moved_devices
from gpunode.facts import NodeFacts
from gpunode.facts.containers import CdiSpec
from gpunode.provisioning.templates import around, completed

GPU_KIND = "nvidia.com/gpu"
SPECIFICATION = "/var/run/cdi/nvidia.yaml"
REFRESH_ENV = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
OUTPUT = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"
FLAGS = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
NO_GIDS = "no-additional-gids-for-device-nodes"
BEGIN = "# BEGIN gpunode (role nvidia_container_toolkit): an engine here cannot read CDI 0.7.0"
END = "# END gpunode"


@dataclass(frozen=True, slots=True)
class RefreshEnvironment:
    """The environment of nvidia-cdi-refresh.service."""

    text: str
    output: str
    """The unit's output file."""


def refresh_environment(text: str | None, old_cdi: bool) -> RefreshEnvironment:
    """Return the unit's environment for the engines of the node.

    With ``old_cdi`` the flag that omits ``additionalGids`` is set in a block of ours, in addition to a user's flags;
    without, the block is removed. Raises UsageError if a mark of the block is lost.
    """
    others = around(REFRESH_ENV, text or "", BEGIN, END)
    values = dict(re.findall(r"(?m)^\s*(\w+)=[\"']?([^\"'\n]*)", others))
    flags = [flag for flag in values.get(FLAGS, "").split(",") if flag]
    if old_cdi and NO_GIDS not in flags:
        others = f"{completed(others)}{BEGIN}\n{FLAGS}={','.join([*flags, NO_GIDS])}\n{END}\n"
    output = values.get(OUTPUT, "").strip()
    return RefreshEnvironment(others, output or SPECIFICATION)


def refresh_reason(node: NodeFacts, output: str = SPECIFICATION) -> str | None:
    """Return why the specification has to be rewritten, None if it is current.

    Without a loaded driver there is nothing to describe; with a loaded module of another release the unit fails, and
    runs at the boot that is required then.
    """
    if node.loaded_driver is None or node.driver_library_version not in (None, node.loaded_driver.version):
        return None
    spec = next((spec for spec in node.cdi_specs or () if _canonical(spec.path) == _canonical(output)), None)
    installed = node.driver_library_version or node.loaded_driver.version
    if spec is None:
        return f"{output} does not exist"
    if any(version != installed for version in spec.driver_versions):
        return f"{output} was generated for driver {', '.join(spec.driver_versions)}; {installed} is installed"
    moved = moved_devices(spec, node)
    if moved:
        return f"{output} has devices with other numbers: {', '.join(moved[:3])}"
    if spec.missing:
        return f"{output} names missing files: {', '.join(spec.missing[:3])}"
    if not spec.devices:
        return f"{output} lists no device"
    return None


def stale_specifications(specs: Iterable[CdiSpec] | None, kept: str = SPECIFICATION) -> list[str]:
    """Return the specifications of NVIDIA's GPUs other than the one that the toolkit's unit maintains.

    Of two folders the later one takes precedence, so an old file in /etc/cdi is used whenever the unit's is missing; of
    two in one folder engines use neither. Those of other vendors and other kinds are not listed.
    """
    paths = (spec.path for spec in specs or () if spec.kind == GPU_KIND)
    return sorted(path for path in paths if _canonical(path) != _canonical(kept))


def _canonical(path: str) -> str:
    return path.replace("/var/run/", "/run/")
