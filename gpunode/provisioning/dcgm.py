"""The role dcgm: its packages for the driver's CUDA, in one version, the packages they replace, and the daemon."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import upstream_version
from gpunode.errors import UsageError
from gpunode.provisioning.context import Context
from gpunode.provisioning.departures import departures
from gpunode.provisioning.driver_files import GPU_CONDITION
from gpunode.provisioning.engines import gpu_users
from gpunode.provisioning.locks import plugin
from gpunode.provisioning.manifest import (
    AptChange,
    DnfChange,
    ManagedFile,
    ManagedFolder,
    Manifest,
    UnitState,
    no_package_manager,
)
from gpunode.provisioning.node_stack import of_context
from gpunode.provisioning.state import Look, NodeState
from gpunode.stack import Stack

ROLE = "dcgm"
UNIT, OLD_UNIT = "nvidia-dcgm.service", "dcgm.service"
PREFERENCES = "/etc/apt/preferences.d/gpunode-dcgm.pref"
DROP_IN = "/etc/systemd/system/nvidia-dcgm.service.d/gpunode.conf"
MEMORY = "/var/lib/gpunode/dcgm"
BEFORE = f"{MEMORY}/packages-before"
MARKER = "/run/gpunode/dcgm-restart"
"""A new DCGM waits for a restart of its daemon. The file is removed by the next boot, which makes the restart
unnecessary.
"""
LOCK_MARK = "gpunode (role dcgm)"
LOOK = Look(paths=(PREFERENCES, DROP_IN, DROP_IN.rpartition("/")[0], MEMORY), contents=(BEFORE, MARKER))
CONDITION = f"""\
# Managed by gpunode (role dcgm): without an NVIDIA GPU on the PCI bus DCGM is skipped, not failed.
[Unit]
After=nvidia-persistenced.service nvidia-fabricmanager.service

[Service]
{GPU_CONDITION}"""
STEM = "datacenter-gpu-manager-4"
CORE, CLOSED = f"{STEM}-core", f"{STEM}-proprietary"
PARTS = re.compile(rf"{STEM}-(?:(?:proprietary|multinode)-)?cuda([0-9]+)")
"""Packages that are built for one CUDA major."""
DCGM_3 = re.compile(r"datacenter-gpu-manager(-[a-z]+)?")
"""Names of DCGM 3. The exporter still has such a name: the version decides."""


@dataclass(frozen=True, slots=True)
class DcgmPackages:
    """The packages of DCGM 4 for a node; empty ``names`` if there are none."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    """Shell pattern of the one version of all of them."""
    purge: tuple[str, ...] = ()
    why_not: str | None = None

    @property
    def install(self) -> tuple[str, ...]:
        """Return ``NAME=PATTERN`` of each package."""
        return tuple(f"{name}={self.pattern}" for name in self.names)


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role."""
    if state.manager is None:
        return no_package_manager(ROLE)
    if settings["state"] == "absent":
        return _absent(state, settings)
    if context.settings_of("nvidia_driver")["state"] != "present":
        return Manifest(role=ROLE)
    stack = of_context(state.facts, context).stack
    installed = context.planned.installed(state.installed)
    found = dcgm_packages(
        stack, state.installed, str(settings["version"]), bool(settings["proprietary"]), str(settings["source"])
    )
    if state.apt is None:
        # The epoch of the rpm packages is not recorded.
        found = replace(found, pattern=re.sub(r"^([0-9]+:)?", "*", found.pattern))
    unit, old = state.unit(UNIT), state.unit(OLD_UNIT)
    drop_in = ManagedFile(path=DROP_IN, content=CONDITION, phase="after")
    if not found.names:
        notes = (found.why_not,) if found.why_not else ()
        return Manifest(role=ROLE, notes=notes, files=(drop_in,) if unit else (), values={"state": "present"})
    files = [drop_in]
    if state.apt is not None:
        # The installed version is known after the transaction: the pattern then names it.
        there = installed.get(CORE, "")
        pattern = re.sub(r"-[^-]*$", "-*", there) if fnmatchcase(there, found.pattern) else found.pattern
        files.append(ManagedFile(path=PREFERENCES, content=preferences(pattern), phase="after"))
    runnable = state.facts.loaded_driver is not None and bool(state.facts.gpus_on_bus)
    busy = [] if context.settings_of("preflight")["gpunode_allow_busy"] else gpu_users(state.facts)
    waits = state.contents.get(MARKER) is not None and unit is not None and (runnable or unit.active == "active")
    units = []
    # In check mode the transaction would have installed it by now.
    if unit is not None or CORE in installed:
        requested = "restarted" if waits and not busy else "started" if runnable else None
        units = [*([UnitState(name=OLD_UNIT, enabled=False, state="stopped")] if old else [])]
        units.append(UnitState(name=UNIT, enabled=True, state=requested))
    held_back = waits and bool(busy)
    return Manifest(
        role=ROLE,
        files=tuple(files),
        folders=(ManagedFolder(path=MEMORY),),
        packages=_packages(state, settings, stack, found),
        units=tuple(units),
        notes=(f"the new DCGM waits for a restart of {UNIT}: {'; '.join(busy)}",) if held_back else (),
        restarts={UNIT: "a new DCGM is installed"} if held_back else {},
        values={"state": "present", "marker": MARKER, "unit": unit is not None},
    )


def preferences(pattern: str) -> str:
    """Return apt's preferences that pin all packages to one version."""
    return (
        "# Managed by gpunode (role dcgm): all parts of DCGM come in this one version.\n"
        f"Package: {STEM}-*\nPin: version {pattern}\nPin-Priority: 1001\n"
    )


def _packages(
    state: NodeState, settings: Mapping[str, Any], stack: Stack | None, found: DcgmPackages
) -> AptChange | DnfChange:
    never = tuple(row.name for row in stack.packages if row.component == "driver") if stack is not None else ()
    wait = int(settings["lock_wait_s"])
    if state.apt is None:
        return DnfChange(
            install=(*found.install, *plugin(state.dnf)),
            remove=found.purge,
            never=never,
            hold=(f"{STEM}-*",),
            lock_mark=LOCK_MARK,
            memory=BEFORE,
            lock_wait_s=wait,
        )
    return AptChange(
        install=found.install,
        purge=found.purge,
        never=never,
        hold=(f"{STEM}-*",),
        memory=BEFORE,
        files={PREFERENCES: preferences(found.pattern)},
        lock_wait_s=wait,
    )


def _absent(state: NodeState, settings: Mapping[str, Any]) -> Manifest:
    packages, leaving = departures(
        state, (f"{STEM}-*",), memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"]), lock_mark=LOCK_MARK
    )
    unit, goes = state.unit(UNIT), f"{CORE} must be removed" in leaving
    return Manifest(
        role=ROLE,
        files=tuple(
            ManagedFile(path=path, content=None, phase="after") for path in (PREFERENCES, DROP_IN, BEFORE, MARKER)
        ),
        folders=tuple(
            ManagedFolder(path=path, state="absent_if_empty", phase="after")
            for path in (DROP_IN.rpartition("/")[0], MEMORY)
        ),
        packages=packages,
        units=(UnitState(name=UNIT, enabled=False, state="stopped"),) if unit is not None and goes else (),
        due_reasons=tuple(leaving),
        values={"state": "absent", "unit": unit is not None},
    )


def dcgm_packages(
    stack: Stack | None,
    installed: Mapping[str, str],
    version: str = "keep",
    proprietary: bool = True,
    source: str = "auto",
) -> DcgmPackages:
    """Return the packages of DCGM for a node. Raises UsageError for a malformed version.

    ``installed`` is name to version. ``version``: ``keep`` (the installed one, else the newest in the repository),
    ``newest`` (the newest in the catalog), or an exact one. ``proprietary``: with NVIDIA's closed parts, which apt
    only recommends. ``source``: ``auto`` (the driver's) or ``nvidia`` (NVIDIA's repository with a driver of the
    distribution).
    """
    names, pattern, why_not = _planned(stack, source)
    if not names:
        return DcgmPackages(why_not=why_not)
    if version == "keep":
        # On a node without DCGM the repository decides the version: the catalog does not list its point releases.
        pattern = re.sub(r"-[^-]*$", "-*", installed[CORE]) if CORE in installed else re.sub(r"[^:]+$", "4.*", pattern)
    elif version != "newest":
        if re.fullmatch(r"[0-9]+([.][0-9]+)+", version) is None:
            raise UsageError(f"dcgm_version: {version} is not a version (examples: keep, newest, 4.6.0)")
        pattern = re.sub(r"[^:]+$", f"{version}-*", pattern)
    every = f"{STEM}-cuda-all" in installed
    closed = [CLOSED, *(name.replace(STEM, CLOSED) for name in names)] if proprietary else []
    requested = [CORE, *names, *closed]
    going = [name for name in installed if DCGM_3.fullmatch(name) and _major(installed[name]) < 4]
    going += [name for name in installed if PARTS.fullmatch(name) and not every and not _fits(name, names)]
    going += [name for name in installed if name.startswith(CLOSED) and not proprietary]
    # Packages that are installed in addition, such as -dev and -multinode, follow: all have one version.
    requested += sorted(name for name in installed if name.startswith(f"{STEM}-") and name not in {*requested, *going})
    return DcgmPackages(tuple(requested), pattern, tuple(sorted(set(going))))


def _planned(stack: Stack | None, source: str) -> tuple[list[str], str, str | None]:
    """Return (packages for the driver's CUDA, pattern of versions, why there are none)."""
    if stack is None:
        return [], "", "no stack is planned"
    rows = [package for package in stack.packages if package.component == "dcgm"]
    if rows:
        return [row.name for row in rows], rows[0].version or "*", None
    if source != "nvidia":
        text = stack.reasons["dcgm"].text if "dcgm" in stack.reasons else "the stack has none"
        return [], "", f"{text} (dcgm_source: nvidia takes it from NVIDIA's repository)"
    if stack.cuda.native is None:
        return [], "", f"the CUDA of driver branch {stack.driver.branch} is not known, and DCGM's parts are for one"
    row = max(load().dcgm.values(), key=lambda each: int(each.id))
    return [f"{STEM}-cuda{stack.cuda.native.split('.')[0]}"], f"{row.epoch}:{row.latest}-*", None


def _major(version: str) -> int:
    found = re.match(r"[0-9]+", upstream_version(version))
    return int(found[0]) if found else 0


def _fits(name: str, names: list[str]) -> bool:
    """Return whether a package is for a requested CUDA major."""
    found = PARTS.fullmatch(name)
    return found is not None and f"{STEM}-cuda{found[1]}" in names
