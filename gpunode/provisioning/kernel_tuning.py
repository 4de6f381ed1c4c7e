"""The role kernel_tuning: limits, kernel settings, processors, command line, and ACS, from the node's facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from gpunode.errors import UsageError
from gpunode.frozen import Frozen
from gpunode.provisioning import kernel_boot
from gpunode.provisioning.answers import docker_of
from gpunode.provisioning.context import Context
from gpunode.provisioning.engines import gpu_users, restart_obstacles
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, NodeQuery, UnitState, file_reasons
from gpunode.provisioning.role import Role, Settings, Texts, Value, option
from gpunode.provisioning.state import Look, NodeState, sysctl_path
from gpunode.tuning import tune_node
from gpunode.tuning.kernel import in_container, is_guest

SYSCTL = "/etc/sysctl.d/90-gpunode.conf"
LIMITS = "/etc/security/limits.d/90-gpunode.conf"
SYSTEM = "/etc/systemd/system.conf.d/90-gpunode.conf"
USER = "/etc/systemd/user.conf.d/90-gpunode.conf"
HUGEPAGES = "/etc/tmpfiles.d/gpunode-kernel-tuning.conf"
MODULES = "/etc/modprobe.d/gpunode-kernel-tuning.conf"
CPU_UNIT, ACS_UNIT = "gpunode-cpu.service", "gpunode-acs.service"
UNITS = "/etc/systemd/system"
PROGRAMS = "/usr/local/libexec/gpunode"
CPU_PROGRAM, ACS_PROGRAM = f"{PROGRAMS}/cpu-tuning", f"{PROGRAMS}/acs"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"
MARKER = "/run/gpunode/memlock-restart"
"""Services that were started before the new limit."""
DAEMON_JSON = "/etc/docker/daemon.json"
SETPCI = ("/usr/bin/setpci", "/usr/sbin/setpci", "/sbin/setpci")
VFIO = "/sys/bus/pci/drivers/vfio-pci/[0-9]*:*"
PROGRAM_OF = {CPU_UNIT: CPU_PROGRAM, ACS_UNIT: ACS_PROGRAM}
UNLIMITED = ("infinity", "18446744073709551615")
STARTERS = ("containerd.service", "docker.service", "slurmd.service", "kubelet.service")
"""Services that pass their limits on to jobs."""
BREAKS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "net.ipv4.ip_forward": (("0",), "networks of Docker and Podman"),
    "user.max_user_namespaces": (("0",), "rootless Podman and enroot"),
    "kernel.unprivileged_userns_clone": (("0",), "rootless Podman and enroot"),
    "kernel.yama.ptrace_scope": (("2", "3"), "profilers, debuggers and CMA of MPI"),
}
"""Values from hardening guides, and the features that need another value."""
SYSCTL_NAME = re.compile(r"[a-z0-9_]+(?:\.[A-Za-z0-9_*-]+)+")
MODULE_NAME = re.compile(r"[a-z0-9_-]{1,60}")


class KernelTuningSettings(Settings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present", "V(present): settings are applied and survive reboots. V(absent): the previous state is restored."
    )
    fleet_size: int = option(
        0, "Number of nodes on one network, which sets the size of the neighbor tables. V(0): kernel default."
    )
    sysctl: dict[str, Value] = option(
        {},
        "Kernel settings that extend or override the derived ones, such as { vm.swappiness: 1 }. V(null) removes a "
        "derived one.",
    )
    transparent_hugepages: Literal["auto", "keep", "always", "madvise", "never"] = option(
        "auto", "Transparent huge pages: V(auto) (by gpunode_profile), V(always), V(madvise), V(never), or V(keep)."
    )
    governor: Literal["auto", "keep", "performance", "powersave", "ondemand", "conservative", "schedutil"] = option(
        "auto", "Frequency governor of processors: V(auto) (by gpunode_profile), V(keep), or its name."
    )
    idle_latency_us: str = option(
        "auto",
        "Longest time, in microseconds, that an idle processor may take to wake up: V(auto) (by gpunode_profile), "
        "V(keep), or a number.",
    )
    iommu: Literal["auto", "pt", "keep"] = option(
        "auto",
        "V(auto): iommu=pt where the IOMMU of a bare machine translates each DMA. V(pt): always. V(keep): never.",
    )
    command_line: tuple[str, ...] = option(
        (), "Further arguments of the kernel command line. They take effect with the next boot."
    )
    module_options: dict[str, Value] = option(
        {},
        "Options of kernel modules for modprobe.d, such as { nvme: io_queue_depth=512 }. They take effect when a "
        "module is loaded.",
    )
    acs: Literal["keep", "off"] = option(
        "keep",
        "V(off): a unit clears ACS redirection on the bridges above GPUs and network adapters of a bare machine. "
        "V(keep): not changed.",
    )


class KernelTuningResult(Frozen):
    """What the role's own tasks do."""

    reexec: bool
    """systemd has to read its default limits again."""
    starters: tuple[str, ...] = ()
    """Services that then keep the old limit until they are restarted."""


ROLE = Role(
    name="kernel_tuning",
    title="Set limits, kernel, processors and command line of a GPU node",
    about=(
        "Limits of locked memory for logins and services, kernel settings, frequency governor and sleep of processors, "
        "transparent huge pages, the kernel's command line, and ACS, derived from the node and its profile.",
        "Restores the previous state with O(kernel_tuning_state=absent).",
    ),
    settings=KernelTuningSettings,
    reads=("engine", "gpus"),
    result=KernelTuningResult,
    files=(
        SYSCTL,
        LIMITS,
        SYSTEM,
        USER,
        HUGEPAGES,
        MODULES,
        CPU_PROGRAM,
        ACS_PROGRAM,
        f"{UNITS}/{CPU_UNIT}",
        f"{UNITS}/{ACS_UNIT}",
    ),
    folders=(PROGRAMS, SYSTEM.rpartition("/")[0], USER.rpartition("/")[0]),
    kernel=True,
    restart_mark=MARKER,
    more=Look(
        paths=(*SETPCI, *kernel_boot.LOOK.paths),
        globs=(VFIO, *kernel_boot.LOOK.globs),
        contents=(DAEMON_JSON, THP, *kernel_boot.LOOK.contents),
    ),
)


@ROLE.present
def present(state: NodeState, settings: KernelTuningSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for malformed settings."""
    common = context.settings_of("preflight")
    inside = in_container(state.facts)
    notes: list[str] = []
    tuning = tune_node(state.facts, common["gpunode_profile"], fleet=settings.fleet_size)
    derived = {setting.name: setting.value for setting in tuning.kernel}
    questions, sysctls = _sysctls(derived, settings.sysctl, state, context, notes)
    if questions:
        return Manifest(role=ROLE.name, questions=questions)
    hugepages = _chosen(settings.transparent_hugepages, derived.get("transparent_hugepage"))
    governor = _chosen(settings.governor, derived.get("cpu_governor"))
    latency = _latency(settings.idle_latency_us, derived.get("cpu_idle_latency_us"))
    if (governor or latency) and _tuned(state):
        notes.append("tuned.service controls governor and idle states of the processors: the role does not set them")
        governor = latency = None
    options = _module_options(settings.module_options)
    acs = settings.acs == "off" and not _acs_refused(state, notes)
    boot = kernel_boot.plan(state, _arguments(derived, settings), notes, ROLE.texts(context))
    values = {sysctl_path(name): value for name, value in sysctls.items()}
    if hugepages is not None and state.contents.get(THP) is not None:
        values[THP] = hugepages
    values = {} if inside else values
    reexec, units, restarts = _limits(state, context, notes)
    text = ROLE.texts(context)
    contents = {
        SYSCTL: text("sysctl.conf.j2", values=sysctls) if sysctls else None,
        LIMITS: text("limits.conf.j2"),
        SYSTEM: text("systemd.conf.j2"),
        USER: text("systemd.conf.j2"),
        HUGEPAGES: text("hugepages.conf.j2", path=THP, word=hugepages) if hugepages else None,
        MODULES: text("modprobe.conf.j2", options=options) if options else None,
        **_unit_files(CPU_UNIT, text, governor or latency, governor=governor or "", latency_us=latency or ""),
        **_unit_files(ACS_UNIT, text, acs),
    }
    managed = {path: ManagedFile(path=path, content=text, phase="after") for path, text in contents.items()}
    own_units = [
        *_own_unit(state, CPU_UNIT, managed, _runs_otherwise(state, governor)),
        *_own_unit(state, ACS_UNIT, managed, _redirects(state)),
    ]
    restarted = any(unit.state == "restarted" for unit in units)
    return Manifest(
        role=ROLE.name,
        files=(*managed.values(), *boot.files),
        folders=(ManagedFolder(path=ROLE.folder),),
        units=(*own_units, *units),
        kernel_values=values,
        kernel_memory=ROLE.kernel_memory,
        commands=boot.commands,
        notes=tuple(notes),
        reboot_reasons=boot.reboot_reasons,
        restarts=restarts,
        # A service that keeps its old limit keeps the mark of all.
        restart_mark=MARKER if restarted and not restarts else None,
        pending_reasons=(*_runtime_reasons(values, state, context), *boot.pending_reasons, *reexec),
        result=KernelTuningResult(reexec=bool(reexec), starters=_starters(state)),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with units that restore what they changed, and the boot loader's arguments."""
    units = (CPU_UNIT, ACS_UNIT)
    boot = kernel_boot.plan(state, (), [], ROLE.texts(context))
    return manifest.updated(
        files=(*manifest.files, *boot.files),
        units=tuple(_stopped(name) for name in units if state.files[f"{UNITS}/{name}"].kind == "file"),
        commands=boot.commands,
        reboot_reasons=boot.reboot_reasons,
        pending_reasons=(*manifest.pending_reasons, *boot.pending_reasons),
        result=KernelTuningResult(reexec=state.files[SYSTEM].kind == "file"),
    )


def _stopped(name: str) -> UnitState:
    """Return a unit of ours that stops while its program is there."""
    return UnitState(name=name, enabled=False, state="stopped", phase="before")


def _sysctls(
    derived: Mapping[str, str], requested: Mapping[str, Value], state: NodeState, context: Context, notes: list[str]
) -> tuple[dict[str, NodeQuery], dict[str, str]]:
    """Return (questions to ask first, settings by name): derived ones, with the user's additions, changes, removals."""
    sysctls = {name: value for name, value in derived.items() if "." in name}
    for name, value in requested.items():
        if SYSCTL_NAME.fullmatch(name) is None:
            raise UsageError(f"kernel_tuning_sysctl: {name!r} is not the name of a setting (example: vm.swappiness)")
        text = " ".join(str(value).split()) if value is not None else ""
        if len(text) > 200 or not text.isprintable():
            raise UsageError(f"kernel_tuning_sysctl: the value of {name} is not one line of text")
        sysctls.pop(name, None)
        if value is not None:
            sysctls[name] = text
        if text in BREAKS.get(name, ((), ""))[0]:
            notes.append(f"kernel_tuning_sysctl: {name} = {text} breaks {BREAKS[name][1]} on this node")
    if in_container(state.facts):
        return {}, sysctls
    known = state.facts.sysctl or {}
    unknown = sorted(name for name in sysctls if name not in known)
    if not unknown:
        return {}, sysctls
    paths = {name: sysctl_path(name) for name in unknown}
    if "sysctl" not in context.answers:
        return {"sysctl": NodeQuery(kind="contents", body={"paths": sorted(paths.values())})}, {}
    answer = context.answers["sysctl"]
    for name, path in paths.items():
        if answer.get(path) is None:
            notes.append(f"{SYSCTL}: {name}: the kernel has no such setting: it is skipped, the others are set")
            sysctls.pop(name)
    return {}, sysctls


def _runtime_reasons(values: Mapping[str, str], state: NodeState, context: Context) -> Iterator[str]:
    """Yield which settings of the running kernel differ."""
    reported = context.answers.get("sysctl", {})
    for path, value in values.items():
        name = path.removeprefix("/proc/sys/").replace("/", ".")
        text = (state.facts.sysctl or {}).get(name)
        if path == THP:
            name, text = path, state.facts.transparent_hugepages
        elif text is None and isinstance(reported.get(path), str):
            text = " ".join(reported[path].split())
        if text != value:
            yield f"{name} is {text or 'unknown'}, not {value}"


def _chosen(setting: str, derived: str | None) -> str | None:
    """Return a value: the setting's own, the derived one, or none."""
    return {"auto": derived, "keep": None}.get(setting, setting)


def _latency(setting: str, derived: str | None) -> str | None:
    if setting not in ("auto", "keep") and not (setting.isdigit() and int(setting) <= 100_000):
        raise UsageError(
            f"kernel_tuning_idle_latency_us: {setting} is not a number of microseconds (examples: auto, keep, 50)"
        )
    return _chosen(setting, derived)


def _tuned(state: NodeState) -> bool:
    unit = state.unit("tuned.service")
    return unit is not None and unit.active == "active"


def _module_options(options: Mapping[str, Value]) -> dict[str, str]:
    for module, words in options.items():
        text = str(words)
        if MODULE_NAME.fullmatch(module) is None or "\n" in text or not re.fullmatch(r"\s*(\w+=\S+\s*)+", text):
            raise UsageError(
                f"kernel_tuning_module_options: {module}: {text!r} is not NAME=VALUE (example: io_queue_depth=512)"
            )
    return {module: " ".join(str(words).split()) for module, words in options.items()}


def _arguments(derived: Mapping[str, str], settings: KernelTuningSettings) -> tuple[str, ...]:
    first = {"auto": derived.get("command_line"), "pt": "iommu=pt", "keep": None}[settings.iommu]
    words = [*([first] if first else []), *settings.command_line]
    for word in words:
        if not re.fullmatch(r"[A-Za-z0-9_.,:=@%/+-]{1,200}", word):
            raise UsageError(
                f"kernel_tuning_command_line: {word!r} is not a kernel argument (example: mitigations=auto)"
            )
    return tuple(dict.fromkeys(words))


def _acs_refused(state: NodeState, notes: list[str]) -> bool:
    """Return whether ACS stays enabled, and add the reason to ``notes``."""
    why = None
    if is_guest(state.facts):
        why = f"not bare metal (virtualization: {state.facts.virtualization or 'unknown'})"
    elif any(path.startswith("/sys/bus/pci/drivers/vfio-pci/") for path in state.files):
        why = "devices are bound to vfio-pci: without ACS a guest could reach other devices"
    elif all(state.files[path].kind not in ("file", "link") for path in SETPCI):
        why = "setpci is missing: install the package pciutils"
    if why is not None:
        notes.append(f"kernel_tuning_acs: off is refused: {why}; the other settings are applied")
    return why is not None


def _unit_files(name: str, text: Texts, present: object, **values: str) -> dict[str, str | None]:
    """Return the files of a unit of ours; None as text if they have to be removed."""
    program = PROGRAM_OF[name]
    unit = text(f"{name}.j2", program=program, **values) if present else None
    return {
        program: ROLE.program(program.rpartition("/")[2]) if present else None,
        f"{UNITS}/{name}": unit,
    }


def _runs_otherwise(state: NodeState, governor: str | None) -> bool:
    """Return whether a processor has another governor than the unit sets."""
    frequency = state.facts.cpu_frequency
    return bool(governor and frequency is not None and set(frequency.governors) - {governor})


def _redirects(state: NodeState) -> bool:
    """Return whether a bridge above a GPU or a network adapter still redirects traffic up to the processor."""
    adapters = [adapter for adapter in state.facts.pci_io or () if adapter.class_id.startswith(("0200", "0207"))]
    above = {port for device in (*(state.facts.gpus_on_bus or ()), *adapters) for port in device.ports}
    return any(bridge.redirects and bridge.slot in above for bridge in state.facts.pci_acs or ())


def _own_unit(state: NodeState, name: str, managed: Mapping[str, ManagedFile], otherwise: bool) -> Iterator[UnitState]:
    """Yield a unit of ours in its target state. If its conditions do not hold it is enabled, and skipped at boot."""
    path = f"{UNITS}/{name}"
    if managed[path].content is None:
        if state.files[path].kind == "file":
            yield _stopped(name)
        return
    stale = any(True for location in (path, PROGRAM_OF[name]) for _ in file_reasons(managed[location], state))
    yield UnitState(name=name, enabled=True, state="restarted" if stale or otherwise else None)


def _starters(state: NodeState) -> tuple[str, ...]:
    """Return the running services that pass their limits on."""
    units = (state.unit(name) for name in STARTERS)
    return tuple(unit.name for unit in units if unit is not None and unit.active == "active")


def _limits(state: NodeState, context: Context, notes: list[str]) -> tuple[list[str], list[UnitState], dict[str, str]]:
    """Return (why systemd has to reread its defaults, units to restart, deferred restarts)."""
    defaults = state.facts.limits.defaults if state.facts.limits is not None else None
    memlock = (defaults or {}).get("memlock")
    stale = [f"systemd's DefaultLimitMEMLOCK is {memlock}"] if memlock not in (None, *UNLIMITED) else []
    marked = [name for name in (state.contents.get(MARKER) or "").split() if name in STARTERS]
    waiting = [name for name in _starters(state) if name in marked]
    if not stale and not waiting:
        return [], [], {}
    busy = [] if context.settings_of("preflight")["gpunode_allow_busy"] else gpu_users(state.facts)
    if busy:
        notes.append(f"the new limit of locked memory applies to services later: {'; '.join(busy)}")
        return [], [], dict.fromkeys(waiting, "the new limit of locked memory")
    units = list[UnitState]()
    restarts: dict[str, str] = {}
    allowed = bool(context.settings_of("preflight")["gpunode_allow_busy"])
    for name in waiting:
        obstacles = _docker_obstacles(state) if name == "docker.service" else []
        if obstacles and not allowed:
            notes.append(f"{name} keeps its old limit of locked memory: {'; '.join(obstacles)}")
            restarts[name] = "the new limit of locked memory"
        else:
            units.append(UnitState(name=name, state="restarted"))
    return stale, units, restarts


def _docker_obstacles(state: NodeState) -> list[str]:
    docker = docker_of(state)
    if docker.silent:
        return [str(docker.in_use)]
    info = docker.info
    running, live_restore = (info.running, info.live_restore) if info is not None else (0, False)
    return restart_obstacles(running, live_restore, state.facts, state.contents.get(DAEMON_JSON))
