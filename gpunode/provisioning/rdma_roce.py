"""RoCE interfaces of the role rdma: flow control (PFC), code points (DSCP) and RDMA CM's traffic class.

dcb-pfc(8), dcb-app(8), dcb-dcbx(8): iproute2. mlx5 trusts code points once the table has one, and restarts the port's
link when PFC changes: drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c. Traffic class: ABI/testing/configfs-rdma_cm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpunode.errors import UsageError
from gpunode.facts.network import IbPort, Nic
from gpunode.provisioning.context import Context
from gpunode.provisioning.engines import gpu_users
from gpunode.provisioning.manifest import ManagedFile, NodeCommand, UnitState, file_reasons
from gpunode.provisioning.role import Texts
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.templates import program
from gpunode.text import listed

if TYPE_CHECKING:
    from gpunode.provisioning.rdma import RdmaSettings

UNIT_FILE = "/etc/systemd/system/gpunode-roce@.service"
PROGRAM = "/usr/local/lib/gpunode/roce"
MEMORY = "/run/gpunode/roce-*.json"
"""Of each interface that was set since the boot."""
DCB = "/usr/sbin/dcb"
INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}")
_SET = re.compile(rf"/run/gpunode/roce-({INTERFACE.pattern})\.json")
_UNIT = re.compile(r"gpunode-roce@([A-Za-z0-9_.\\-]{1,60})\.service")


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


def plan(state: NodeState, settings: RdmaSettings, context: Context, text: Texts) -> RocePlan:
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
    refusals = [f"roce: {problem}" for name in names for problem in _problems(state, settings, name)]
    if names and state.kind(DCB) == "absent":
        refusals = [f"roce: {DCB} is not installed: it comes with iproute2 5.11 and newer"]
    if refusals:
        return RocePlan(refusals=tuple(refusals))
    unit = ManagedFile(path=UNIT_FILE, content=None, phase="after")
    tool = ManagedFile(path=PROGRAM, content=None, phase="after")
    if names:
        body = text("gpunode-roce.service.j2", program=PROGRAM, words=_words(settings), tos=settings.roce_tos)
        unit = unit.model_copy(update={"content": body})
        tool = tool.model_copy(update={"content": program("rdma", "roce"), "mode": "0755"})
    again = any(True for file in (unit, tool) for _ in file_reasons(file, state))
    differ = {name: listed([*_differences(state, settings, name)]) for name in names}
    units = [
        UnitState(name=unit_of(name), enabled=True, state="reloaded", reason=differ[name] or "its settings changed")
        if again or differ[name]
        else UnitState(name=unit_of(name), enabled=True, state="started")
        for name in names
    ]
    gone = restored(state, context, names)
    if again and not settings.roce_pfc:
        # What an earlier run set, and this one does not request, is restored: perhaps PFC.
        links = [name for name in names if name in _recorded(state)]
    else:
        links = [name for name in names if _flow_control_differs(_nic(state, name), settings)]
    busy = [] if context.allow_busy or not links else gpu_users(state.facts)
    return RocePlan(
        files=(unit, tool),
        units=(*gone.units, *units),
        commands=gone.commands,
        pending=gone.pending,
        refusals=(*gone.refusals, *(_refused(links, busy) if busy else ())),
        notes=(
            f"PFC of {listed(links)} changes: mlx5 restarts the link for it, and connections over it, Ansible's too, "
            "wait some seconds",
        )
        if links
        else (),
    )


def restored(state: NodeState, context: Context, keep: tuple[str, ...] = ()) -> RocePlan:
    """Return how to restore the interfaces that were set and are not among ``keep``."""
    recorded = _recorded(state)
    units = {
        match[1].replace(r"\x2d", "-") for unit in state.facts.units or () if (match := _UNIT.fullmatch(unit.name))
    }
    leaving = sorted({name for name in recorded | units if INTERFACE.fullmatch(name)} - set(keep))
    active = [name for name in leaving if name in recorded and state.kind(PROGRAM) == "file"]
    busy = [] if context.allow_busy or not active else gpu_users(state.facts)
    return RocePlan(
        units=tuple(UnitState(name=unit_of(name), enabled=False, state="stopped", phase="before") for name in leaving),
        commands=(NodeCommand(argv=("/usr/bin/python3", "-I", PROGRAM, "restore", *active), phase="before"),)
        if active
        else (),
        pending=tuple(f"{name}: flow control and code points have to be restored" for name in active),
        refusals=_refused(active, busy) if busy else (),
    )


def _recorded(state: NodeState) -> set[str]:
    """Return the interfaces that were set since the boot: there are files with their values from before."""
    return {match[1] for path, file in state.files.items() if file.kind == "file" and (match := _SET.fullmatch(path))}


def _refused(names: list[str], busy: list[str]) -> tuple[str, ...]:
    why = f"roce: PFC of {listed(names)} changes, which restarts the link, and {busy[0]}"
    return (f"{why}: run this again later, or set gpunode_allow_busy: true",)


def _words(settings: RdmaSettings) -> str:
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


def _problems(state: NodeState, settings: RdmaSettings, name: str) -> Iterator[str]:
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


def _differences(state: NodeState, settings: RdmaSettings, name: str) -> Iterator[str]:
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
