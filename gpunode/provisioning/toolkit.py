"""NVIDIA's container toolkit on a node: its version, and its keys in the engines' configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpunode.catalog import load
from gpunode.provisioning.daemon_json import Document
from gpunode.provisioning.engines import EngineSupport
from gpunode.stack.model import Library

RUNTIME: Document = {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}


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
