"""NVIDIA's container toolkit on a node: its version, its keys in daemon.json, and the node's one CDI specification."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpunode.catalog import load
from gpunode.checks.containers import moved_devices
from gpunode.facts import NodeFacts
from gpunode.facts.containers import CdiSpec
from gpunode.provisioning.daemon_json import Document
from gpunode.provisioning.engines import EngineSupport
from gpunode.provisioning.templates import around, completed
from gpunode.stack.model import Library

RUNTIME: Document = {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}
GPU_KIND = "nvidia.com/gpu"
SPECIFICATION = "/var/run/cdi/nvidia.yaml"
REFRESH_ENV = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
OUTPUT = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"
FLAGS = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
NO_GIDS = "no-additional-gids-for-device-nodes"
BEGIN = "# BEGIN gpunode (role nvidia_container_toolkit): an engine here cannot read CDI 0.7.0"
END = "# END gpunode"


@dataclass(frozen=True, slots=True)
class ToolkitRequest:
    """The toolkit of a node."""

    version: str | None
    """None: none is installed, and an installed one is not changed."""
    packages: tuple[str, ...]
    replaces: tuple[str, ...]
    """Packages that it replaces."""
    repository: str
    """NVIDIA's own, up to ``libnvidia-container``."""
    key: str
    fingerprints: tuple[str, ...]


def toolkit_request(version: str, installed: Mapping[str, str], planned: Library | None) -> ToolkitRequest:
    """Return the toolkit of a node.

    ``version`` is ``keep`` (the installed one if all packages have it, else the stack's), ``stack``, ``none`` or
    exact. ``installed`` is name to version, ``planned`` the ``container_toolkit`` of the resolved stack. For a stack
    without one there is none, unless the toolkit is installed or an exact version is requested.
    """
    catalog = load()
    row = next(iter(catalog.container_toolkit.values()))
    packages = next(each.names for each in catalog.packages.values() if each.component == "container-toolkit")
    have = {re.sub(r"-[^-]*$", "", installed.get(name, "")) for name in packages}
    current = next(iter(have)) if len(have) == 1 else ""
    resolved = (planned.version if planned else None) or ""
    by_word = {"keep": current or resolved or _newest(have), "stack": resolved or current, "none": ""}
    return ToolkitRequest(
        version=by_word.get(version, version) or None,
        packages=(planned.packages if planned else None) or tuple(packages),
        replaces=tuple(row.replaces),
        repository=row.repository.removesuffix("/stable"),
        key=row.key,
        fingerprints=tuple(row.fingerprints),
    )


def _newest(versions: Iterable[str]) -> str:
    """Return the newest version of packages in several versions: nothing is downgraded."""
    known = [version for version in versions if re.fullmatch(r"\d+(\.\d+)+", version)]
    return max(known, key=lambda version: [int(part) for part in version.split(".")], default="")


def toolkit_daemon(
    engine: EngineSupport, cdi: bool, default_runtime: bool, cgroup_driver: str | None, present: Document
) -> Document:
    """Return the keys of daemon.json with which containers get GPUs, as ``nvidia-ctk runtime configure`` writes them.

    ``cgroup_driver`` is the running daemon's, ``present`` the current file. An engine without CDI and with systemd's
    cgroup driver is moved to cgroupfs: at ``systemctl daemon-reload`` systemd rewrites the devices of its containers,
    and does not know those that the runtime's hook added. A driver that the user set is kept.
    """
    features = present.get("features")
    switched_off = isinstance(features, Mapping) and features.get("cdi") is False
    values: Document = {"runtimes": RUNTIME}
    if cdi and (engine.cdi == "feature" or (engine.cdi == "default" and switched_off)):
        values["features"] = {"cdi": True}
    if default_runtime:
        values["default-runtime"] = "nvidia"
    options = present.get("exec-opts")
    chosen = isinstance(options, list) and any(
        str(option).startswith("native.cgroupdriver=systemd") for option in options
    )
    cgroupfs = isinstance(options, list) and "native.cgroupdriver=cgroupfs" in options
    if engine.cdi == "none" and not chosen and (cgroupfs or cgroup_driver == "systemd"):
        values["exec-opts"] = ["native.cgroupdriver=cgroupfs"]
    return values


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
