"""The role rdma: programs and kernel modules of RDMA and the path between adapters and GPU memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, field_validator

from gpunode.errors import UsageError
from gpunode.frozen import Frozen
from gpunode.provisioning import node_stack, rdma_parts
from gpunode.provisioning.context import Context
from gpunode.provisioning.cuda import DRIVER_PACKAGES
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeQuery,
    UnitState,
)
from gpunode.provisioning.rdma_parts import (
    PART_PACKAGES,
    PARTS,
    PEERMEM,
    PROFILE,
    REPLACED,
    USER_SPACE,
    OptionalPart,
    Path,
    doca_problems,
    headers_of,
    part_problems,
    path_of,
    unbuilt,
)
from gpunode.provisioning.repository import PackageRepository, RepositoryFiles, repository_files, repository_paths
from gpunode.provisioning.role import PackageSettings, Role, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import mark_of
from gpunode.provisioning.transaction import Transaction, installed_by_role
from gpunode.stack import Stack
from gpunode.tuning.kernel import in_container

MODULES = "/etc/modules-load.d/gpunode-rdma.conf"
MARKER = "/run/gpunode/rdma-reboot"
"""DOCA's modules wait for a boot. The file is removed by that boot."""
SOURCES, KEY, YUM, RPM_KEY = repository_paths("doca")
PREFERENCES = "/etc/apt/preferences.d/gpunode-doca.pref"
OPENIBD = "openibd.service"
NAMES = "/etc/udev/rules.d/60-rdma-persistent-naming.rules"
"""Replaces rdma-core's rule file of the same name (udev(7)); its modes: kernel-boot/rdma-persistent-naming.rules."""
MODES = {"kernel": "NAME_KERNEL", "pci": "NAME_PCI", "guid": "NAME_GUID"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_SLOT = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
DOCA_FILES = (SOURCES, KEY, PREFERENCES, YUM, RPM_KEY)
# DOCA's repository has a dkms of its own; azhpc-images (install_doca.sh) keeps the distribution's in the same way.
PIN = {"packages": ["dkms"], "pin": "release l=DOCA-HOST*", "priority": -1}


class RdmaSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is installed or removed. V(present): RDMA is set up. V(absent): everything that the role "
        "installed is removed.",
    )
    source: Literal["distribution", "doca"] = option(
        "distribution",
        "V(distribution): rdma-core of the distribution. V(doca): NVIDIA's DOCA-OFED; DKMS builds its kernel modules.",
    )
    doca_url: str = option(
        "", "URL of the directory of a DOCA release for this system. Empty: doca-ofed from the configured sources."
    )
    doca_key: str = option(
        "",
        "Key that signs that repository: a file on the controller, or an https URL. Required with O(rdma_doca_url).",
        no_log=False,
    )
    gpudirect: Literal["auto", "dma-buf", "peermem", "off"] = option(
        "auto",
        "How adapters reach GPU memory. V(auto) is dma-buf where driver, GPUs and kernel support it, else "
        "nvidia-peermem where it can register with the kernel.",
    )
    names: Literal["keep", "kernel", "pci", "guid"] = option(
        "keep",
        "Names of RDMA devices from the next boot on. V(keep): the rule of rdma-core. V(pci): by PCI location "
        "(C(ibp26s0), C(rocep26s0)). V(guid): by GUID. V(kernel): C(mlx5_0), in the order in which drivers find them.",
    )
    fixed_names: dict[str, str] = option(
        {}, "Names of single RDMA devices, with the PCI address of each (C(0000:1a:00.0)); before O(rdma_names)."
    )
    roce_interfaces: tuple[str, ...] = option(
        (), "Network interfaces that get the RoCE settings. Empty: none is changed, and earlier ones are restored."
    )
    roce_pfc: tuple[Annotated[StrictInt, Field(ge=0, le=7)], ...] = option(
        (), "Priorities (0 to 7) with flow control (PFC), as on the switches; the others have none. Empty: not changed."
    )
    roce_dscp: dict[int, int] = option(
        {}, "Priorities of code points (DSCP), as on the switches: C({26: 3, 48: 6}). Empty: not changed."
    )
    roce_tos: Annotated[StrictInt, Field(ge=0, le=255)] = option(
        0,
        "Traffic class that RDMA CM gives new connections of these interfaces: the code point times four, plus 2 for "
        "ECN (V(106) for 26). V(0): not changed. NCCL has its own (C(NCCL_IB_TC), O(ml_environment_nccl)).",
    )
    gdrcopy: bool = option(False, "Install GDRCopy and load its module.")
    gds: bool = option(False, "Install nvidia-fs, the kernel module of GPUDirect Storage, and load it.")

    @field_validator("fixed_names")
    @classmethod
    def _names_and_addresses(cls, value: dict[str, str]) -> dict[str, str]:
        for name, slot in value.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name} is not a name of a device: letters, digits, - and _, 32 at most")
            if not _SLOT.fullmatch(slot):
                raise ValueError(f"{name}: {slot} is not a PCI address (example: 0000:1a:00.0)")
        if len(set(value.values())) < len(value):
            raise ValueError("a PCI address has two names")
        return value

    @field_validator("roce_interfaces")
    @classmethod
    def _interfaces(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not rdma_parts.ROCE_INTERFACE.fullmatch(name):
                raise ValueError(f"{name!r} is not a name of a network interface")
        return tuple(dict.fromkeys(value))

    @field_validator("roce_pfc")
    @classmethod
    def _priorities(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("roce_dscp", mode="before")
    @classmethod
    def _code_points(cls, value: Any) -> Any:
        for code, priority in value.items() if isinstance(value, dict) else ():
            # JSON has texts as keys.
            if not re.fullmatch("[0-9]|[1-5][0-9]|6[0-3]", str(code)):
                raise ValueError(f"{code} is not a code point (0 to 63)")
            if isinstance(priority, bool) or not re.fullmatch("[0-7]", str(priority)):
                raise ValueError(f"{code}: {priority} is not a priority (0 to 7)")
        return value


class Undo(Frozen):
    """What reverts the transaction that installs DOCA."""

    files: tuple[ManagedFile, ...]
    packages: Transaction


class RdmaResult(Frozen):
    """What the role's own tasks read."""

    undo: Undo | None = None
    """None: DOCA was installed before, or is not requested."""
    problem: str | None = None
    """Why DOCA's installed modules are not those of the running kernel."""


ROLE = Role(
    name="rdma",
    title="Set up RDMA and the path between adapters and GPU memory",
    about=(
        "Programs and kernel modules of RDMA from the distribution or from DOCA-OFED, modules at boot, nvidia-peermem "
        "where dma-buf does not do, GDRCopy and GPUDirect Storage on request.",
        "Restores the previous state with O(rdma_state=absent).",
    ),
    settings=RdmaSettings,
    reads=("builds", "gpus"),
    result=RdmaResult,
    files=(MODULES, *DOCA_FILES, NAMES, rdma_parts.ROCE_UNIT_FILE, rdma_parts.ROCE_PROGRAM),
    folders=(rdma_parts.ROCE_PROGRAM.rpartition("/")[0],),
    packages=(*dict.fromkeys((*USER_SPACE["apt"], *USER_SPACE["dnf"])), PROFILE, *PART_PACKAGES),
    restart_mark=MARKER,
    more=Look(paths=(rdma_parts.DCB,), globs=(rdma_parts.ROCE_MEMORY,), contents=(MODULES, KEY, RPM_KEY, NAMES)),
)


@dataclass
class Draft:
    """A plan of the role under construction."""

    state: NodeState
    settings: RdmaSettings
    context: Context
    stack: Stack | None
    manager: Literal["apt", "dnf"]
    files: list[ManagedFile] = field(default_factory=list)
    questions: dict[str, NodeQuery] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    """Requested packages."""

    @property
    def unbuilt(self) -> str | None:
        """Return why DOCA's installed modules are not those of the running kernel; None if they are."""
        return unbuilt(self.state.facts) if self.doca and PROFILE in self.state.installed else None

    @property
    def doca(self) -> bool:
        """Return whether DOCA-OFED is requested."""
        return self.settings.source == "doca"

    @property
    def installed(self) -> dict[str, str]:
        """Return the installed packages, in check mode with those of the previous roles."""
        return self.context.planned.installed(self.state.installed)

    @property
    def parts(self) -> list[OptionalPart]:
        """Return the requested optional parts."""
        return [part for part in PARTS if getattr(self.settings, part.setting)]

    def answer(self, name: str, names: Sequence[str], files: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the answer on the availability of packages in the node's repositories; None if it is not known yet."""
        answer = self.context.answers.get(name)
        if answer is None:
            body = {"names": sorted(names), "files": {**self.context.planned.files, **files}}
            self.questions[name] = NodeQuery(kind="package_offers", body=body)
        return answer


@ROLE.present
def present(state: NodeState, settings: RdmaSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    driver = context.settings_of("nvidia_driver")["state"] == "present"
    stack = node_stack.of_context(state.facts, context).stack if driver else None
    draft = Draft(state, settings, context, stack, state.package_manager)
    archive = _repository(draft)
    path = path_of(state.facts, draft.stack, settings.gpudirect, settings.source)
    draft.refusals += [path.problem] if path.problem else []
    names = _names(draft)
    roce = rdma_parts.roce_plan(state, settings, context, ROLE.texts(context))
    draft.refusals += roce.refusals
    if not draft.questions and not draft.refusals:
        _packages(draft, archive)
    if draft.questions or draft.refusals:
        return Manifest(role=ROLE.name, questions=draft.questions, refusals=tuple(draft.refusals))
    fabric = tuple(draft.stack.nvlsm.kernel_modules) if draft.stack is not None and draft.stack.nvlsm else ()
    chosen = (*fabric, *([PEERMEM] if path.kind == "peermem" else ()), *(part.module for part in draft.parts))
    loadable = _to_load(draft, fabric, chosen)
    # A module that cannot be loaded would fail at every boot: the run that loads nvidia-peermem lists it.
    available = {*loadable, *(state.facts.modules or ()), *(state.contents.get(MODULES) or "").split()}
    modules = tuple(name for name in chosen if name != PEERMEM or name in available)
    text = ROLE.texts(context)("modules.conf.j2", modules=modules) if modules else None
    texts = {**archive.texts, **({PREFERENCES: _pins(context)} if archive.files else {})}
    change = ROLE.transaction(state, settings, draft.requested, never=DRIVER_PACKAGES, files=texts)
    unit = state.unit(OPENIBD)
    return Manifest(
        role=ROLE.name,
        files=(*draft.files, ManagedFile(path=MODULES, content=text, phase="after"), *names, *roce.files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=change,
        modules=loadable,
        units=(*((UnitState(name=OPENIBD, enabled=True),) if unit is not None and draft.doca else ()), *roce.units),
        commands=roce.commands,
        pending_reasons=roce.pending,
        notes=(*draft.notes, *_notes(draft, path), *roce.notes),
        reboot_reasons=("DOCA-OFED's kernel modules are loaded at the next boot",) if _waits(state) else (),
        restart_mark=MARKER if draft.doca and PROFILE not in state.installed else None,
        result=RdmaResult(undo=_undo(draft, change), problem=draft.unbuilt),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal; packages of the distribution that DOCA-OFED has too return to the distribution's version."""
    roce = rdma_parts.roce_restored(state, context)
    if roce.refusals:
        return Manifest(role=ROLE.name, refusals=roce.refusals)
    packages = manifest.packages
    if packages is not None and packages.manager == "apt":
        packages = packages.model_copy(update={"restore": REPLACED})
    loaded = [name for name in (PEERMEM, *(part.module for part in PARTS)) if name in (state.facts.modules or ())]
    configured = state.files[MODULES].kind == "file"
    notes = [f"module {name} stays loaded until the next boot" for name in loaded if configured]
    if f"{PROFILE} must be removed" in manifest.pending_reasons:
        notes.append("DOCA-OFED's modules stay loaded until the next boot")
    files = tuple(file for file in manifest.files if file.path != NAMES or not _of_the_site(state))
    return manifest.updated(
        files=files,
        packages=packages,
        units=roce.units,
        commands=roce.commands,
        pending_reasons=(*manifest.pending_reasons, *roce.pending),
        notes=tuple(notes),
        result=RdmaResult(),
    )


def _of_the_site(state: NodeState) -> bool:
    """Return whether the file of device names is there, and not the role's."""
    return mark_of(ROLE.name) not in (state.contents.get(NAMES) or mark_of(ROLE.name))


def _names(draft: Draft) -> tuple[ManagedFile, ...]:
    """Return the rules that name RDMA devices; a file of the site is kept, or refused."""
    names, fixed = draft.settings.names, draft.settings.fixed_names
    requested = names != "keep" or bool(fixed)
    if _of_the_site(draft.state):
        if requested:
            draft.refusals.append(
                f"names: {NAMES} exists and is not of this role: remove it, or rdma_names and rdma_fixed_names"
            )
        return ()
    text = None
    if requested:
        mode = MODES.get(names, "NAME_FALLBACK")
        text = ROLE.texts(draft.context)("names.rules.j2", mode=mode, fixed=sorted(fixed.items()))
    if (draft.state.contents.get(NAMES) or None) != text:
        draft.notes.append(
            "RDMA devices get their names at the next boot: lists of them (NCCL_IB_HCA, gres.conf) change then"
        )
    for name, slot in sorted(fixed.items()):
        now = next((device.name for device in draft.state.facts.infiniband or () if device.slot == slot), None)
        if now is None:
            draft.notes.append(f"rdma_fixed_names: {name}: no RDMA device at {slot}")
        elif now != name:
            draft.notes.append(f"RDMA device {now} at {slot} is named {name} at the next boot")
    return (ManagedFile(path=NAMES, content=text, phase="after"),)


def _repository(draft: Draft) -> RepositoryFiles:
    """Return the files of DOCA's repository; refuse an invalid one."""
    url, key = draft.settings.doca_url, draft.settings.doca_key
    if not draft.doca or not url:
        draft.files += [ManagedFile(path=path, content=None) for path in DOCA_FILES]
        return RepositoryFiles()
    if not url.startswith(("http://", "https://", "file:/")) or url != "".join(url.split()):
        raise UsageError(f"rdma_doca_url: {url} is not a valid URL (example: https://HOST/doca/3.2.1/OS/ARCH)")
    if not key:
        raise UsageError(
            "rdma_doca_key: set the key that signs the repository, a file on the controller or an https URL: gpunode "
            "has no fingerprint to verify it with"
        )
    archive = repository_files(
        PackageRepository(ROLE.name, "NVIDIA's DOCA-OFED", "doca", url, key, variable="rdma_doca_key", suite="./"),
        draft.state,
        draft.context,
    )
    draft.questions |= archive.questions or {}
    draft.refusals += archive.refusals
    draft.files += archive.files
    if draft.manager == "apt":
        draft.files.append(ManagedFile(path=PREFERENCES, content=_pins(draft.context)))
    return archive


def _pins(context: Context) -> str:
    return ROLE.texts(context)("preferences.pref.j2", why="dkms stays the one that builds the driver.", pins=[PIN])


def _packages(draft: Draft, archive: RepositoryFiles) -> None:
    """Select the packages for the node, as far as its repositories have them."""
    names = USER_SPACE[draft.manager]
    if draft.doca:
        headers = headers_of(draft.state)
        names = (PROFILE, *([headers] if headers else ()))
    groups = [*((name,) for name in names), *(group for part in draft.parts for group in part.packages[draft.manager])]
    missing = [name for group in groups if not draft.installed.keys() & set(group) for name in group]
    offered: Mapping[str, Any] = {}
    if missing:
        answer = draft.answer("offers", missing, archive.texts)
        if answer is None:
            return
        problem = answer.get("error")
        if problem and not draft.doca:
            draft.refusals.append(f"package-manager: {problem}")
            return
        offered = answer.get("offered") or {}
        if draft.doca:
            draft.refusals += doca_problems(draft.state, offered, str(problem) if problem else None)
    for name in names:
        if name in draft.installed or name in offered:
            draft.requested.append(name)
        elif name == "rdma-core":
            draft.refusals.append("no-rdma-core: no configured repository has rdma-core")
        elif not draft.doca:
            draft.notes.append(f"{name}: no configured repository has it; the others were installed")
    for part in draft.parts:
        _part(draft, part, offered)


def _part(draft: Draft, part: OptionalPart, offered: Mapping[str, Any]) -> None:
    """Add an optional part, or refuse it by name."""
    installed = draft.installed
    chosen = [
        next((name for name in names if name in installed), None)
        or next((name for name in names if name in offered), None)
        for names in part.packages[draft.manager]
    ]
    versions = [str(installed.get(name) or (offered.get(name) or [""])[0]) for name in chosen if name]
    draft.refusals += part_problems(part, draft.state.facts, draft.stack, versions)
    lacking = [" or ".join(names) for names, name in zip(part.packages[draft.manager], chosen, strict=True) if not name]
    if lacking:
        draft.refusals.append(
            f"{part.setting}: rdma_{part.setting} is true, and no configured repository has {' and '.join(lacking)}: "
            "add one (role nvidia_repository, or a repository of the site)"
        )
    draft.requested += [name for name in chosen if name]


def _to_load(draft: Draft, fabric: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to load now; none in a container, which uses the host's kernel."""
    facts = draft.state.facts
    if in_container(facts) and not facts.simulated:
        return ()
    ready = set(fabric) if facts.gpus_on_bus else set()
    if facts.loaded_driver is not None:
        # If requested, loading is tried while ib_core is not loaded yet.
        may = facts.peer_memory or (facts.peer_memory is None and draft.settings.gpudirect == "peermem")
        ready |= {PEERMEM} if may and not _waits(draft.state) else set()
        ready |= {part.module for part in PARTS if set(part.names(draft.manager)) & draft.state.installed.keys()}
    return tuple(name for name in modules if name in ready and name not in (facts.modules or ()))


def _waits(state: NodeState) -> bool:
    return state.contents.get(MARKER) is not None


def _notes(draft: Draft, path: Path) -> list[str]:
    notes = []
    if path.kind is None and draft.settings.gpudirect == "auto" and draft.state.facts.gpus_on_bus:
        notes.append(f"GPU memory is reached through main memory: {path.why}")
    if path.kind == "peermem" and draft.doca and not draft.state.facts.peer_memory:
        notes.append(
            "nvidia-peermem is loaded by the first run after the boot with DOCA-OFED's modules; the driver's modules "
            "must be built after DOCA-OFED is installed, to register with its interface"
        )
    notes += [draft.unbuilt] if draft.unbuilt else []
    if not draft.doca and PROFILE in draft.installed:
        notes.append(f"{PROFILE} is installed and stays: rdma_state: absent removes what this role installed of it")
    return notes


def _undo(draft: Draft, change: Transaction) -> Undo | None:
    """Return what reverts the transaction that installed DOCA; None if it was installed before, or is not requested."""
    before = draft.state.installed.keys() - installed_by_role(draft.state, ROLE.record)
    if not draft.doca or PROFILE in before:
        return None
    paths = [file.path for file in draft.files if draft.state.files[file.path].kind == "absent"]
    new = tuple(name for name in change.install if name not in before)
    back = Transaction(
        manager=change.manager,
        state="absent",
        remove_new=new,
        restore=REPLACED if change.manager == "apt" else (),
        memory=ROLE.record,
    )
    return Undo(files=tuple(ManagedFile(path=path, content=None) for path in (*paths, MARKER)), packages=back)
