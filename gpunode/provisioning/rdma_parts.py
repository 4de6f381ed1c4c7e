"""Parts of the role rdma: the path to GPU memory, requirements of GDRCopy, GDS and DOCA-OFED, and RoCE interfaces.

RoCE: flow control (PFC), code points (DSCP) and RDMA CM's traffic class. dcb-pfc(8), dcb-app(8), dcb-dcbx(8): iproute2.
mlx5 trusts code points once the table has one, and restarts the port's link when PFC changes:
drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c. Traffic class: ABI/testing/configfs-rdma_cm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import Version as Number

from gpunode.catalog import load
from gpunode.catalog.driver_rules import DMA_BUF_KERNEL, against_gpudirect, kernel_number
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.facts.network import IbPort, Nic
from gpunode.provisioning.context import Context
from gpunode.provisioning.engines import gpu_users
from gpunode.provisioning.manifest import ManagedFile, NodeCommand, UnitState, file_reasons
from gpunode.provisioning.role import Texts
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.templates import program
from gpunode.stack import Stack
from gpunode.text import listed

if TYPE_CHECKING:
    from gpunode.provisioning.rdma import RdmaSettings

PEERMEM = "nvidia_peermem"
USER_SPACE = {
    "apt": ("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags"),
    "dnf": ("rdma-core", "libibverbs", "libibverbs-utils", "librdmacm-utils", "infiniband-diags"),
}
"""Binary packages of rdma-core: its debian/control and redhat/rdma-core.spec."""
REPLACED = (
    *USER_SPACE["apt"],
    "ibacm",
    "libibmad5",
    "libibnetdisc5",
    "libibumad3",
    "libibverbs1",
    "librdmacm1",
    "perftest",
    "srptools",
)
"""Packages of the distribution that DOCA-OFED has too, in versions of its own."""
PROFILE = "doca-ofed"
"""The profile of DOCA-Host that corresponds to MLNX_OFED: docs.nvidia.com/doca, DOCA profiles."""
DOCA_MODULES = ("mlnx-ofed-kernel", "mlnx-ofa_kernel")
"""Names of DOCA's RDMA modules in DKMS: azhpc-images, refresh_ofed_dkms.sh; the second, rpm's, is not sure."""
HEADERS = {"apt": "linux-headers-{}", "dnf": "kernel-devel-{}"}
NEEDS_OPEN = Number("2.17.5")
"""The first nvidia-fs that needs the open kernel modules: catalog (sources.yml, gds)."""
ROCE_UNIT_FILE = "/etc/systemd/system/gpunode-roce@.service"
ROCE_PROGRAM = "/usr/local/lib/gpunode/roce"
ROCE_MEMORY = "/run/gpunode/roce-*.json"
"""Of each interface that was set since the boot."""
DCB = "/usr/sbin/dcb"
ROCE_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}")
_SET = re.compile(rf"/run/gpunode/roce-({ROCE_INTERFACE.pattern})\.json")
_UNIT = re.compile(r"gpunode-roce@([A-Za-z0-9_.\\-]{1,60})\.service")


@dataclass(frozen=True)
class OptionalPart:
    """An optional part with a kernel module of its own."""

    setting: str
    title: str
    packages: Mapping[str, tuple[tuple[str, ...], ...]]
    """By package manager; possible names of each package, of which the first available is used."""
    module: str

    def names(self, manager: str) -> tuple[str, ...]:
        """Return all possible names of its packages."""
        return tuple(name for names in self.packages[manager] for name in names)


PARTS = (
    OptionalPart(
        "gdrcopy",
        "GDRCopy",
        # github.com/NVIDIA/gdrcopy, packages/. NVIDIA publishes files, not a repository: a site adds them to its own.
        {"apt": (("gdrdrv-dkms",), ("libgdrapi",)), "dnf": (("gdrcopy-kmod",), ("gdrcopy",))},
        "gdrdrv",
    ),
    OptionalPart(
        "gds",
        "GDS",
        # NVIDIA's CUDA repositories have both, Debian's non-free only the second (packages.debian.org).
        {"apt": (("nvidia-fs", "nvidia-fs-dkms"),), "dnf": (("nvidia-fs", "nvidia-fs-dkms"),)},
        "nvidia_fs",
    ),
)
PART_PACKAGES = tuple(
    dict.fromkeys(name for part in PARTS for names in part.packages.values() for each in names for name in each)
)


@dataclass(frozen=True)
class Path:
    """How adapters access GPU memory."""

    kind: str | None
    """``dma-buf``, ``peermem``; None: through main memory."""
    why: str
    problem: str | None = None
    """Why the request is refused."""


def path_of(facts: NodeFacts, stack: Stack | None, requested: str, source: str) -> Path:
    """Return the path to GPU memory by the resolver's rule (R19-gdr), and the kernel's support for nvidia-peermem."""
    if requested == "off":
        return Path(None, "rdma_gpudirect is off")
    named = requested != "auto"
    if stack is None or not facts.gpus_on_bus:
        why = "the node has no GPU" if not facts.gpus_on_bus else "no driver is planned"
        return Path(None, why, f"gpudirect: rdma_gpudirect is {requested}: {why}" if named else None)
    hardware = _against(facts)
    if hardware:
        return Path(None, hardware, f"gpudirect-hardware: rdma_gpudirect is {requested}: {hardware}" if named else None)
    reason = stack.reasons["gpudirect_rdma"].text
    dma_buf = stack.gpudirect_rdma
    if dma_buf is None:  # The resolver plans for installed kernels; for others the running one is used.
        kernel = kernel_number(facts.running_kernel)
        dma_buf = kernel is not None and kernel >= DMA_BUF_KERNEL
    if requested != "peermem" and dma_buf:
        return Path("dma-buf", reason)
    if requested == "dma-buf":
        return Path(None, reason, f"gpudirect-dma-buf: rdma_gpudirect is dma-buf: {reason}")
    # DOCA-OFED has the interface by which nvidia-peermem registers; kernels of distributions may or may not.
    if source == "doca" or facts.peer_memory:
        return Path("peermem", reason if requested == "auto" else "rdma_gpudirect is peermem")
    if facts.peer_memory is None:
        why = f"{reason}; whether nvidia-peermem can register with this kernel is unknown until ib_core is loaded"
        return Path("peermem", why) if named else Path(None, why)
    why = "the kernel's RDMA has no peer memory interface (ib_register_peer_memory_client), which DOCA-OFED brings"
    text = f"gpudirect-peermem: rdma_gpudirect is peermem: {why}: set rdma_source: doca"
    return Path(None, f"{reason}; {why}", text if named else None)


def _against(facts: NodeFacts) -> str:
    """Return why the node's GPUs do not support GPUDirect RDMA, with any software; empty if they may."""
    models = load().models_of((device.pci_id, device.subsystem_id) for device in facts.gpus_on_bus or ())
    return "; ".join(against_gpudirect(models))


def part_problems(part: OptionalPart, facts: NodeFacts, stack: Stack | None, versions: Sequence[str]) -> Iterator[str]:
    """Yield why a part is refused on this node; ``versions`` are the installed or available ones."""
    head = f"{part.setting}: rdma_{part.setting} is true: "
    if stack is None or not facts.gpus_on_bus:
        yield f"{head}{part.title} needs an NVIDIA driver, and none is planned for this node"
        return
    hardware = _against(facts)
    if hardware:
        yield f"{head}{hardware}"
    if part.setting == "gds" and stack.module.flavour != "open" and any(map(_needs_open, versions)):
        yield (
            f"{head}nvidia-fs {NEEDS_OPEN} and newer needs the open kernel modules, this node's are "
            f"{stack.module.flavour}: set nvidia_driver_flavour: open where the GPUs allow it"
        )


def _needs_open(version: str) -> bool:
    """Return whether a version of nvidia-fs needs the open modules: ``2.13.5~11.8.0-5`` does not."""
    match = re.match(r"(?:[0-9]+:)?([0-9]+(?:\.[0-9]+)*)", version)
    return match is None or Number(match[1]) >= NEEDS_OPEN


def headers_of(state: NodeState) -> str | None:
    """Return the package with the running kernel's headers; None if they are installed."""
    running = next((kernel for kernel in state.facts.kernels or () if kernel.running), None)
    if running is None or running.headers or state.manager is None:
        return None
    return HEADERS[state.manager].format(running.release)


def unbuilt(facts: NodeFacts) -> str | None:
    """Return why DOCA's modules are not those of the running kernel; None if they are, or unknown to DKMS."""
    running = facts.running_kernel
    modules = [module for module in facts.dkms or () if module.name in DOCA_MODULES]
    built = [module for module in modules if module.kernel == running and module.state.startswith("installed")]
    if not modules or running is None or built:
        return None
    module = f"{modules[0].name} {modules[0].version}"
    return f"doca-kernel: DKMS did not build {module} for the running kernel {running}: use another DOCA release"


def doca_problems(state: NodeState, offered: Mapping[str, Any], problem: str | None) -> Iterator[str]:
    """Yield why DOCA-OFED cannot be installed; ``problem`` is why the package manager could not be queried."""
    system = state.facts.os
    name = (system and (system.pretty_name or f"{system.id} {system.version_id}")) or "this system"
    if problem is not None:
        yield f"doca-unreachable: {problem}: rdma_doca_url must be the directory of a DOCA release for {name}"
        return
    if PROFILE not in state.installed and PROFILE not in offered:
        yield (
            f"doca-not-offered: no configured repository has {PROFILE} for {name}: set rdma_doca_url to the directory "
            "of a DOCA release for it, or install NVIDIA's doca-host first"
        )
    headers = headers_of(state)
    if PROFILE not in state.installed and headers is not None and headers not in offered:
        yield (
            f"doca-kernel: DOCA-OFED builds its modules with DKMS, and for the running kernel there are no headers: "
            f"{headers} is neither installed nor offered: boot a kernel of the distribution first"
        )
    manager = state.apt or state.dnf
    key = manager.key if manager is not None else None
    if state.facts.secure_boot and PROFILE not in state.installed and not (key is not None and key.enrolled):
        yield (
            "doca-secure-boot: secure boot is on, and the key that signs modules built by DKMS is not known to be "
            "enrolled: after a reboot the node would have no network adapters"
        )


@dataclass(frozen=True)
class RocePlan:
    """The part of the role's manifest for RoCE."""

    files: tuple[ManagedFile, ...] = ()
    units: tuple[UnitState, ...] = ()
    commands: tuple[NodeCommand, ...] = ()
    pending: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def unit_of(interface: str) -> str:
    """Return the unit of an interface: systemd.unit(5) escapes ``-``."""
    escaped = interface.replace("-", r"\x2d")
    return f"gpunode-roce@{escaped}.service"


def roce_plan(state: NodeState, settings: RdmaSettings, context: Context, text: Texts) -> RocePlan:
    """Return how to set the requested interfaces, and restore those that are not requested any more.

    Raises UsageError for interfaces without a setting, and settings without an interface.
    """
    requested = [name for name in ("pfc", "dscp", "tos") if getattr(settings, f"roce_{name}")]
    names = settings.roce_interfaces
    if bool(names) != bool(requested):
        raise UsageError(
            f"rdma_roce_interfaces: no interface has the settings {listed([f'rdma_roce_{name}' for name in requested])}"
            if requested
            else "rdma_roce_interfaces: set rdma_roce_pfc, rdma_roce_dscp or rdma_roce_tos for them"
        )
    refusals = [f"roce: {problem}" for name in names for problem in _roce_problems(state, settings, name)]
    if names and state.kind(DCB) == "absent":
        refusals = [f"roce: {DCB} is not installed: it comes with iproute2 5.11 and newer"]
    if refusals:
        return RocePlan(refusals=tuple(refusals))
    unit = ManagedFile(path=ROCE_UNIT_FILE, content=None, phase="after")
    tool = ManagedFile(path=ROCE_PROGRAM, content=None, phase="after")
    if names:
        body = text(
            "gpunode-roce.service.j2", program=ROCE_PROGRAM, words=_roce_values(settings), tos=settings.roce_tos
        )
        unit = unit.model_copy(update={"content": body})
        tool = tool.model_copy(update={"content": program("rdma", "roce"), "mode": "0755"})
    again = any(True for file in (unit, tool) for _ in file_reasons(file, state))
    differ = {name: listed([*_roce_differences(state, settings, name)]) for name in names}
    units = [
        UnitState(name=unit_of(name), enabled=True, state="reloaded", reason=differ[name] or "its settings changed")
        if again or differ[name]
        else UnitState(name=unit_of(name), enabled=True, state="started")
        for name in names
    ]
    gone = roce_restored(state, context, names)
    if again and not settings.roce_pfc:
        # What an earlier run set, and this one does not request, is restored: perhaps PFC.
        links = [name for name in names if name in _roce_recorded(state)]
    else:
        links = [name for name in names if _flow_control_differs(_nic(state, name), settings)]
    busy = [] if context.allow_busy or not links else gpu_users(state.facts)
    return RocePlan(
        files=(unit, tool),
        units=(*gone.units, *units),
        commands=gone.commands,
        pending=gone.pending,
        refusals=(*gone.refusals, *(_roce_refusals(links, busy) if busy else ())),
        notes=(
            f"PFC of {listed(links)} changes: mlx5 restarts the link for it, and connections over it, Ansible's too, "
            "wait some seconds",
        )
        if links
        else (),
    )


def roce_restored(state: NodeState, context: Context, keep: tuple[str, ...] = ()) -> RocePlan:
    """Return how to restore the interfaces that were set and are not among ``keep``."""
    recorded = _roce_recorded(state)
    units = {
        match[1].replace(r"\x2d", "-") for unit in state.facts.units or () if (match := _UNIT.fullmatch(unit.name))
    }
    leaving = sorted({name for name in recorded | units if ROCE_INTERFACE.fullmatch(name)} - set(keep))
    active = [name for name in leaving if name in recorded and state.kind(ROCE_PROGRAM) == "file"]
    busy = [] if context.allow_busy or not active else gpu_users(state.facts)
    return RocePlan(
        units=tuple(UnitState(name=unit_of(name), enabled=False, state="stopped", phase="before") for name in leaving),
        commands=(NodeCommand(argv=("/usr/bin/python3", "-I", ROCE_PROGRAM, "restore", *active), phase="before"),)
        if active
        else (),
        pending=tuple(f"{name}: flow control and code points have to be restored" for name in active),
        refusals=_roce_refusals(active, busy) if busy else (),
    )


def _roce_recorded(state: NodeState) -> set[str]:
    """Return the interfaces that were set since the boot: there are files with their values from before."""
    return {match[1] for path, file in state.files.items() if file.kind == "file" and (match := _SET.fullmatch(path))}


def _roce_refusals(names: list[str], busy: list[str]) -> tuple[str, ...]:
    why = f"roce: PFC of {listed(names)} changes, which restarts the link, and {busy[0]}"
    return (f"{why}: run this again later, or set gpunode_allow_busy: true",)


def _roce_values(settings: RdmaSettings) -> str:
    """Return the arguments of the program."""
    arguments = {
        "pfc": ",".join(map(str, settings.roce_pfc)),
        "dscp": ",".join(f"{code}:{priority}" for code, priority in sorted(settings.roce_dscp.items())),
        "tos": settings.roce_tos,
    }
    return " ".join(f"{name}={value}" for name, value in arguments.items() if value)


def _nic(state: NodeState, name: str) -> Nic | None:
    return next((nic for nic in state.facts.nics or () if nic.name == name), None)


def _ports(state: NodeState, nic: Nic) -> list[IbPort]:
    """Return the RDMA ports of the interface's adapter."""
    return [port for card in state.facts.infiniband or () if nic.slot and card.slot == nic.slot for port in card.ports]


def _roce_problems(state: NodeState, settings: RdmaSettings, name: str) -> Iterator[str]:
    """Yield why an interface cannot be set."""
    nic = _nic(state, name)
    if nic is None:
        names = listed([nic.name for nic in state.facts.nics or ()]) or "none"
        yield f"{name} is not a network interface of this node's hardware; there are: {names}"
    elif nic.pfc is None:
        yield (
            f"dcb reports no flow control of {name}: it is not the Ethernet interface of an RDMA adapter, is a virtual "
            f"function, or its driver has no DCB ({nic.driver or 'unknown'}): see dcb pfc show dev {name}"
        )
    elif nic.dcbx is not None and "host" not in nic.dcbx:
        yield (
            f"firmware or an LLDP agent sets {name} (DCBX: {listed(nic.dcbx) or 'none'}), not the host: switch "
            f"that off first (dcb dcbx set dev {name} host ieee; mlnx_qos -d os; ethtool --set-priv-flags {name} "
            "fw-lldp-agent off)"
        )
    elif settings.roce_tos and not _ports(state, nic):
        yield f"rdma_roce_tos: {name} has no RDMA device"


def _flow_control_differs(nic: Nic | None, settings: RdmaSettings) -> bool:
    return nic is not None and bool(settings.roce_pfc) and set(nic.pfc or ()) != set(settings.roce_pfc)


def _roce_differences(state: NodeState, settings: RdmaSettings, name: str) -> Iterator[str]:
    """Yield how an interface differs from the settings."""
    nic = _nic(state, name)
    if nic is None:
        return
    if _flow_control_differs(nic, settings):
        yield f"PFC is on {listed(map(str, nic.pfc or ())) or 'no priority'}"
    for code, priority in settings.roce_dscp.items():
        now = [entry for entry in nic.dscp or () if entry.partition(":")[0] == str(code)]
        if now != [f"{code}:{priority}"]:
            yield f"DSCP {code} has {listed([entry.partition(':')[2] for entry in now]) or 'no priority'}"
    if settings.roce_tos and any(port.cm_tos != settings.roce_tos for port in _ports(state, nic)):
        yield "RDMA CM has another traffic class"
