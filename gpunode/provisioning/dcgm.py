"""The role dcgm: its packages for the driver's CUDA, in one version, the packages they replace, and the daemon."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from gpunode.catalog import load
from gpunode.catalog.origins import upstream_version
from gpunode.errors import UsageError
from gpunode.provisioning.context import Context
from gpunode.provisioning.engines import gpu_users
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.node_stack import of_context
from gpunode.provisioning.role import PackageSettings, Role, Texts, option
from gpunode.provisioning.state import NodeState
from gpunode.stack import Stack

UNIT, OLD_UNIT = "nvidia-dcgm.service", "dcgm.service"
PREFERENCES = "/etc/apt/preferences.d/gpunode-dcgm.pref"
DROP_IN = "/etc/systemd/system/nvidia-dcgm.service.d/gpunode.conf"
MARKER = "/run/gpunode/dcgm-restart"
STEM = "datacenter-gpu-manager-4"
CORE, CLOSED = f"{STEM}-core", f"{STEM}-proprietary"
PARTS = re.compile(rf"{STEM}-(?:(?:proprietary|multinode)-)?cuda([0-9]+)")
"""Packages that are built for one CUDA major."""
DCGM_3 = re.compile(r"datacenter-gpu-manager(-[a-z]+)?")
"""Names of DCGM 3. The exporter still has such a name: the version decides."""


class DcgmSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present", "V(present): DCGM is installed and runs. V(absent): what the role installed is removed."
    )
    version: str = option(
        "keep",
        "V(keep) (the installed DCGM 4; the repository's newest on a node without one), V(newest) (that the catalog "
        "knows), or an exact one such as V(4.6.0).",
    )
    source: Literal["auto", "nvidia"] = option(
        "auto",
        "V(auto) is the driver's source; the archives of Ubuntu and Debian have no DCGM. V(nvidia) is NVIDIA's "
        "repository, also with a driver of the distribution; the role nvidia_repository then keeps it on the node.",
    )
    proprietary: bool = option(
        True, "Install NVIDIA's closed parts, which the open ones only recommend: profiling metrics, some diagnostics."
    )


ROLE = Role(
    name="dcgm",
    title="Install, hold and run DCGM for the driver's CUDA",
    about=(
        "DCGM 4 in the packages for the driver's CUDA major; DCGM 3 is removed in the same transaction.",
        "Removes what it installed with O(dcgm_state=absent).",
    ),
    settings=DcgmSettings,
    for_gpus=True,
    reads=("gpus",),
    files=(PREFERENCES, DROP_IN),
    folders=(DROP_IN.rpartition("/")[0],),
    packages=(f"{STEM}-*",),
    locks=True,
    restart_mark=MARKER,
)


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


@ROLE.present
def present(state: NodeState, settings: DcgmSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    if context.settings_of("nvidia_driver")["state"] != "present":
        return Manifest(role=ROLE.name)
    stack = of_context(state.facts, context).stack
    installed = context.planned.installed(state.installed)
    selection = dcgm_packages(stack, state.installed, settings.version, settings.proprietary, settings.source)
    if state.manager == "dnf":
        # The epoch of the rpm packages is not recorded.
        selection = replace(selection, pattern=re.sub(r"^([0-9]+:)?", "*", selection.pattern))
    unit, old = state.unit(UNIT), state.unit(OLD_UNIT)
    text = ROLE.texts(context)
    drop_in = ManagedFile(path=DROP_IN, content=text("nvidia-dcgm.conf.j2"), phase="after")
    if not selection.names:
        notes = (selection.why_not,) if selection.why_not else ()
        return Manifest(role=ROLE.name, notes=notes, files=(drop_in,) if unit else ())
    files = [drop_in]
    if state.manager == "apt":
        # The installed version is known after the transaction: the pattern then names it.
        version = installed.get(CORE, "")
        pattern = re.sub(r"-[^-]*$", "-*", version) if fnmatchcase(version, selection.pattern) else selection.pattern
        files.append(ManagedFile(path=PREFERENCES, content=pinned(text, pattern), phase="after"))
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
        role=ROLE.name,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(
            state,
            settings,
            selection.install,
            remove=selection.purge,
            never=[row.name for row in stack.packages if row.component == "driver"] if stack is not None else (),
            hold=(f"{STEM}-*",),
            files={PREFERENCES: pinned(text, selection.pattern)},
        ),
        units=tuple(units),
        notes=(f"the new DCGM waits for a restart of {UNIT}: {'; '.join(busy)}",) if held_back else (),
        restarts={UNIT: "a new DCGM is installed"} if held_back else {},
        restart_mark=MARKER,
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the unit stopped if its package is removed."""
    goes = f"{CORE} must be removed" in manifest.pending_reasons
    return manifest.updated(units=ROLE.stopped(state, UNIT)) if goes else manifest


def pinned(text: Texts, pattern: str) -> str:
    """Return apt's preferences that pin all packages to one version."""
    pin = {"packages": [f"{STEM}-*"], "pin": f"version {pattern}", "priority": 1001}
    return text("preferences.pref.j2", why="all parts of DCGM come in this one version.", pins=[pin])


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
    match = re.match(r"[0-9]+", upstream_version(version))
    return int(match[0]) if match else 0


def _fits(name: str, names: list[str]) -> bool:
    """Return whether a package is for a requested CUDA major."""
    match = PARTS.fullmatch(name)
    return match is not None and f"{STEM}-cuda{match[1]}" in names
