"""The role nvidia_fabric: the services of a board's NVLink fabric, in the driver's version."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from gpunode.provisioning import node_stack
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, Manifest, NodeCommand, UnitState
from gpunode.provisioning.role import PackageSettings, Role, Texts, Value, option
from gpunode.provisioning.running_driver import (
    FABRIC_MANAGER,
    IMEX,
    gpus_in_use,
    installed_driver,
    manager_version,
    must_be_idle,
    pci_ids,
)
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import completed
from gpunode.provisioning.transaction import Transaction
from gpunode.stack import Stack
from gpunode.stack.model import PackageChoice

NVLSM = "nvlsm.service"
MODULES = "/etc/modules-load.d/gpunode-nvidia-fabric.conf"
CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
IMEX_NODES = "/etc/nvidia-imex/nodes_config.cfg"
MARKER = "/run/gpunode/fabric-restart"
"""Names of the services with new settings that wait for a restart."""
COMPONENTS = ("fabric-manager", "nscq", "nvsdm", "nvlsm", "imex")
_MARK = "# Managed by gpunode (role nvidia_fabric):"
_OURS = re.compile(r"(nvidia-fabric-?manager|libnvidia-nscq|libnvsdm|nvidia-imex)(-[0-9]+)?|nvlsm")


def drop_in(unit: str) -> str:
    """Return the path of the role's drop-in of a unit."""
    return f"/etc/systemd/system/{unit}.d/gpunode.conf"


DROP_INS = tuple(map(drop_in, (FABRIC_MANAGER, NVLSM, IMEX)))


class FabricSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): the services that the board requires are installed and run. V(absent): they are removed, as with "
        "the driver.",
    )
    manager_config: dict[str, Value] = option(
        {}, "Settings of the fabric manager, such as C(LOG_LEVEL: 4); other lines of its file are not changed."
    )
    imex_group: str = option(
        "", "Inventory group of the hosts of one NVLink domain (racks with IMEX). Empty: IMEX is not started."
    )
    imex_nodes: tuple[str, ...] = option(
        (), "IP addresses of the domain's nodes, the same on each of them. Empty: those of O(nvidia_fabric_imex_group)."
    )
    imex_address: str = option(
        "", "IP address of this host in its NVLink domain, if C(ansible_host) is not one, or of another network."
    )


ROLE = Role(
    name="nvidia_fabric",
    title="Install and run the services of a board's NVLink fabric",
    about=(
        "Fabric manager, NSCQ, NVSDM, the NVLink subnet manager and IMEX, as the board requires and in the driver's "
        "version.",
        "Removes everything with O(nvidia_fabric_state=absent).",
    ),
    settings=FabricSettings,
    for_gpus=True,
    reads=("gpus", "nvidia_tools"),
    files=(MODULES, *DROP_INS),
    folders=tuple(path.rpartition("/")[0] for path in DROP_INS),
    packages=("infiniband-diags",),
    restart_mark=MARKER,
    more=Look(paths=(IMEX_NODES,), contents=(CONFIG, IMEX_NODES)),
)


@ROLE.present
def present(state: NodeState, settings: FabricSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    if context.settings_of("nvidia_driver")["state"] == "absent":
        return ROLE.gone(state, settings, context)
    resolved = node_stack.of_context(state.facts, context)
    if resolved.stack is None or resolved.problems:
        return Manifest(role=ROLE.name, refusals=resolved.problems)
    fabric = Fabric(state, settings, context, resolved.stack)
    refusals = tuple(fabric.refusals)
    if refusals:
        return Manifest(role=ROLE.name, refusals=refusals)
    return Manifest(
        role=ROLE.name,
        files=tuple(fabric.files),
        packages=fabric.packages,
        modules=fabric.modprobe,
        units=tuple(fabric.units),
        notes=tuple(fabric.notes),
        reboot_reasons=(fabric.mismatch,) if fabric.mismatch else (),
        restarts=dict.fromkeys(fabric.restarts, "its settings changed") if fabric.busy else {},
        restart_mark=MARKER if fabric.restarts else None,
        restart_text=fabric.waiting,
        problems=tuple(fabric.problems),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the packages that have the driver's version: they are removed with it in any case."""
    installed = tuple(sorted(name for name in state.installed if _OURS.fullmatch(name)))
    failed = [
        unit.name for unit in state.facts.units or () if unit.name in {FABRIC_MANAGER, IMEX} and unit.active == "failed"
    ]
    going = {"remove": installed}
    # Before the packages, as rpm would keep a copy.
    marked = (state.contents.get(IMEX_NODES) or "").startswith(_MARK)
    nodes = (ManagedFile(path=IMEX_NODES, content=None),) if marked else ()
    return manifest.updated(
        files=(*nodes, *manifest.files),
        packages=manifest.packages and manifest.packages.model_copy(update=going),
        units=ROLE.stopped(state, FABRIC_MANAGER, IMEX) if installed else (),
        # A unit that failed is listed until it is reset, also without its file; for another one systemctl fails.
        commands=(NodeCommand(argv=("systemctl", "reset-failed", *failed), may_fail=True),) if failed else (),
        pending_reasons=(*manifest.pending_reasons, *(f"{name} has failed" for name in failed)),
    )


@dataclass(frozen=True)
class Fabric:
    """The needs of a board's fabric, and its current state."""

    state: NodeState
    settings: FabricSettings
    context: Context
    stack: Stack

    @property
    def text(self) -> Texts:
        """Return the function that renders a template of the role."""
        return ROLE.texts(self.context)

    @cached_property
    def rows(self) -> list[PackageChoice]:
        """Return the stack's packages of the fabric."""
        return [row for row in self.stack.packages if row.component in COMPONENTS]

    @cached_property
    def driver(self) -> str:
        """Return the release of the installed driver; empty if there is none."""
        return installed_driver(self.state.facts)

    def name(self, row: PackageChoice) -> str:
        """Return the package of a row: an installed one takes precedence over the default name."""
        installed = self.context.planned.installed(self.state.installed)
        return next((name for name in (row.name, *row.alternatives) if name in installed), row.name)

    @cached_property
    def closure(self) -> tuple[str, ...]:
        """Return packages with the driver's version."""
        return tuple(self.name(row) for row in self.rows if row.with_driver)

    @property
    def requested(self) -> tuple[str, ...]:
        """Return the requested packages, those with a version as NAME=PATTERN: the installed driver's, else the
        planned.
        """
        word = self.stack.driver.constraint
        exact = [
            f"{self.name(row)}={row.version.replace(word, self.driver or word)}" for row in self.rows if row.version
        ]
        return (*exact, *(self.name(row) for row in self.rows if not row.version))

    @property
    def packages(self) -> Transaction | None:
        if not self.rows:
            return None
        if self.state.manager == "dnf":
            # With dnf, the role nvidia_driver installs and locks the closure.
            free = tuple(self.name(row) for row in self.rows if not row.with_driver)
            if all(name in self.state.installed for name in (*self.closure, *free)):
                return None
            return Transaction(
                manager="dnf",
                bound=self.closure,
                constraint=self.driver or self.stack.driver.constraint,
                install=free,
                never=self._foreign,
                memory=ROLE.record,
                lock_wait_s=self.settings.lock_wait_s,
            )
        return ROLE.transaction(self.state, self.settings, self.requested, never=self._foreign, hold=self.closure)

    @property
    def _foreign(self) -> tuple[str, ...]:
        """Return the patterns of the rest of the driver, which belongs to the role nvidia_driver."""
        names = [row.name for row in self.stack.packages if row.component == "driver"]
        return tuple(name for name in names if name not in self.closure)

    @property
    def manager_wanted(self) -> bool:
        return self.stack.fabric_manager is not None

    @property
    def imex_wanted(self) -> bool:
        return self.stack.imex is not None

    @cached_property
    def ids(self) -> dict[str, list[str]]:
        return pci_ids(self.state.facts)

    @property
    def switch_ids(self) -> list[str]:
        """Return the PCI ids of the board: fifth-generation NVSwitches are not on the PCI bus, so the GPUs' ids are
        used.
        """
        return self.ids["switches"] or (self.ids["gpus"] if self.manager_wanted else self.ids["known_switches"])

    def has(self, unit: str) -> bool:
        """Return whether a unit is installed."""
        return self.state.unit(unit) is not None

    @cached_property
    def files(self) -> tuple[ManagedFile, ...]:
        """Return the files; the record of a restart before the settings that require it."""
        mark = (ManagedFile(path=MARKER, content=self.waiting, phase="after"),) if self.restarts else ()
        return (*mark, *self.conditions, *self.written)

    @property
    def waiting(self) -> str:
        """Return the record of the services that wait for a restart."""
        return f"{' '.join(self.restarts)}\n"

    @property
    def conditions(self) -> Iterator[ManagedFile]:
        """Yield the drop-ins. A fabric manager that the board does not need stays, and is skipped without a failure."""
        conditions = (
            (FABRIC_MANAGER, self.manager_wanted or self.has(FABRIC_MANAGER), self.switch_ids),
            (NVLSM, self.has(NVLSM), self.switch_ids),
            (IMEX, self.imex_wanted or self.has(IMEX), self.ids["gpus"]),
        )
        for unit, holds, needs in conditions:
            if holds:
                yield ManagedFile(path=drop_in(unit), content=self.text("condition.conf.j2", ids=needs), phase="after")
        if self.modules:
            yield ManagedFile(path=MODULES, content=self.text("modules.conf.j2", modules=self.modules), phase="after")

    @cached_property
    def written(self) -> tuple[ManagedFile, ...]:
        """Return the files with settings that the services read when they start."""
        nodes = None
        if self.imex_wanted and self.settings.imex_nodes and (self.has(IMEX) or not self.context.check):
            text = self.text("nodes_config.cfg.j2", addresses=self.settings.imex_nodes)
            nodes = ManagedFile(path=IMEX_NODES, content=text, phase="after")
        return tuple(filter(None, (self.configured, nodes)))

    @cached_property
    def configured(self) -> ManagedFile | None:
        """Return the fabric manager's file with the requested settings; None if there are none, or no file."""
        text = self.state.contents.get(CONFIG)
        if not self.settings.manager_config or text is None:
            return None
        return ManagedFile(
            path=CONFIG,
            content=merged(text, self.settings.manager_config),
            **self.state.attributes(CONFIG),
            phase="after",
            expect_sha256=hashlib.sha256(text.encode()).hexdigest(),
        )

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.stack.nvlsm.kernel_modules) if self.stack.nvlsm else ()

    @property
    def modprobe(self) -> tuple[str, ...]:
        """Return modules that the fabric manager needs and that are not loaded."""
        loaded = self.state.facts.modules or ()
        return tuple(name for name in self.modules if name not in loaded) if self.ids["gpus"] else ()

    @property
    def refusals(self) -> Iterator[str]:
        pattern = self.stack.driver.constraint
        # In check mode the driver does not exist yet if it is installed in the same play.
        if self.rows and not self.context.check and not (self.driver and fnmatchcase(self.driver, pattern)):
            yield (
                "the fabric manager must carry the driver's version: "
                f"{self.driver or 'no driver'} is installed, {pattern} is planned: run the role nvidia_driver first"
            )
        text = self.state.contents.get(CONFIG)
        known = set(re.findall(r"(?m)^\s*#?\s*([A-Z][A-Z0-9_]*)\s*=", text or ""))
        unknown = [name for name in self.settings.manager_config if name not in known]
        if text is not None and unknown:
            yield f"nvidia_fabric_manager_config: {', '.join(unknown)} is not in {CONFIG}"

    # --- the services

    @property
    def loaded(self) -> str:
        driver = self.state.facts.loaded_driver
        return driver.version or "" if driver else ""

    @property
    def mismatch(self) -> str:
        """Return why the fabric manager cannot run with the loaded module; empty if it can, or none is requested."""
        version = manager_version(self.state)
        if not self.manager_wanted or not self.loaded or version in ("", self.loaded):
            return ""
        return f"the fabric manager is {version}, module {self.loaded} is loaded"

    @property
    def runnable(self) -> bool:
        """Return whether the services can start: with another driver loaded they cannot before a reboot."""
        return bool(self.loaded) and self.loaded == self.driver and not self.mismatch

    @property
    def services(self) -> list[str]:
        """Return installed services that the board needs."""
        rows = (
            (FABRIC_MANAGER, self.manager_wanted),
            (NVLSM, self.manager_wanted),
            (IMEX, self.imex_wanted and bool(self.settings.imex_nodes)),
        )
        return [unit for unit, requested in rows if requested and self.has(unit)]

    @property
    def units(self) -> Iterator[UnitState]:
        for name in self.services:
            restarts = name in self.restarts and not self.busy
            yield UnitState(
                name=name, enabled=True, state="restarted" if restarts else "started" if self.runnable else None
            )

    @property
    def busy(self) -> bool:
        """Return whether a restart would end processes on the GPUs."""
        return gpus_in_use(self.state.facts) and must_be_idle(self.context)

    @cached_property
    def restarts(self) -> tuple[str, ...]:
        """Return running services with settings that change, or changed in a run that did not restart them."""
        waiting = (self.state.contents.get(MARKER) or "").split()
        names = []
        for file in self.written:
            actual = self.state.files.get(file.path)
            unit = self.state.unit(FABRIC_MANAGER if file.path == CONFIG else IMEX)
            differs = actual is None or actual.sha256 != hashlib.sha256(file.data or b"").hexdigest()
            if unit is not None and unit.active == "active" and (differs or unit.name in waiting) and self.runnable:
                names.append(unit.name)
        return tuple(names)

    @property
    def problems(self) -> Iterator[str]:
        """Yield why the fabric does not work after all changes: a service that is skipped or ended has not failed."""
        for unit in filter(None, map(self.state.unit, self.services)):
            if self.runnable and unit.name == FABRIC_MANAGER and unit.active != "active":
                yield f"{unit.name} does not run ({unit.active}): see journalctl -u {unit.name}"

    @property
    def notes(self) -> Iterator[str]:
        if self.mismatch:
            yield self.mismatch
        if self.busy and self.restarts:
            yield f"new settings wait for a restart of {', '.join(self.restarts)}: the GPUs are in use"


def merged(text: str, settings: Mapping[str, Value]) -> str:
    """Return a file of NAME=VALUE lines with some set: in the last line of a name, else after its comment."""
    lines = completed(text).split("\n")[:-1]
    for name, value in settings.items():
        line = f"{name}={value}"
        set_at = [number for number, row in enumerate(lines) if re.match(rf"\s*{re.escape(name)}\s*=", row)]
        told_at = [number for number, row in enumerate(lines) if re.match(rf"\s*#\s*{re.escape(name)}\s*=", row)]
        if set_at:
            lines[set_at[-1]] = line
        else:
            lines.insert(told_at[-1] + 1 if told_at else len(lines), line)
    return "\n".join(lines) + "\n"
