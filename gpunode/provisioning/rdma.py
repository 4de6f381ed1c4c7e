"""The role rdma: programs and kernel modules of RDMA, and the path by which adapters reach GPU memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.provisioning import node_stack
from gpunode.provisioning.context import Context
from gpunode.provisioning.cuda import DRIVER_PACKAGES
from gpunode.provisioning.departures import departures
from gpunode.provisioning.manifest import AptChange, DnfChange, ManagedFile, ManagedFolder, Manifest
from gpunode.provisioning.state import Look, NodeState
from gpunode.stack import Stack
from gpunode.tuning.kernel import in_container

ROLE = "rdma"
MODULES = "/etc/modules-load.d/gpunode-rdma.conf"
MEMORY = "/var/lib/gpunode/rdma"
BEFORE = f"{MEMORY}/packages-before"
LOOK = Look(paths=(MODULES, MEMORY), contents=(BEFORE,))
USER_SPACE = {
    "apt": ("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags"),
    "dnf": ("rdma-core", "libibverbs", "libibverbs-utils", "librdmacm-utils", "infiniband-diags"),
}
"""Binary packages of rdma-core: its debian/control and redhat/rdma-core.spec."""


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return what the role changes on a node."""
    if settings["state"] == "keep":
        return Manifest(role=ROLE)
    if state.apt is None and state.dnf is None:
        return Manifest(role=ROLE, refusals=("no-package-manager: the role rdma installs with apt or dnf",))
    if settings["state"] == "absent":
        return _absent(state, settings)
    stack = _stack(state, context)
    modules = _fabric_modules(stack)
    live = _not_loaded(state, modules)
    return Manifest(
        role=ROLE,
        files=(ManagedFile(path=MODULES, content=modules_text(modules) if modules else None, phase="after"),),
        folders=(ManagedFolder(path=MEMORY),),
        packages=_packages(state, settings),
        due_reasons=tuple(f"module {name} is not loaded" for name in live),
        values={"state": "present", "modprobe": live},
    )


def modules_text(names: tuple[str, ...]) -> str:
    """Return the list of modules that are loaded at boot."""
    head = "# Managed by gpunode (role rdma): what RDMA needs and nothing else loads.\n"
    return head + "".join(f"{name}\n" for name in names)


def _stack(state: NodeState, context: Context) -> Stack | None:
    if context.settings_of("nvidia_driver")["state"] != "present":
        return None
    return node_stack.of_context(state.facts, context).stack


def _fabric_modules(stack: Stack | None) -> tuple[str, ...]:
    """Return what boards with fifth-generation NVLink need: their switches are managed over InfiniBand's datagrams."""
    return tuple(stack.nvlsm.kernel_modules) if stack is not None and stack.nvlsm is not None else ()


def _not_loaded(state: NodeState, modules: tuple[str, ...]) -> list[str]:
    """Return the modules to load now; none in a container, whose kernel is the host's."""
    if in_container(state.facts) and not state.facts.simulated:
        return []
    return [name for name in modules if name not in (state.facts.modules or ())]


def _packages(state: NodeState, settings: Mapping[str, Any]) -> AptChange | DnfChange:
    wait = int(settings["lock_wait_s"])
    if state.apt is None:
        return DnfChange(install=USER_SPACE["dnf"], never=DRIVER_PACKAGES, memory=BEFORE, lock_wait_s=wait)
    return AptChange(install=USER_SPACE["apt"], never=DRIVER_PACKAGES, memory=BEFORE, lock_wait_s=wait)


def _absent(state: NodeState, settings: Mapping[str, Any]) -> Manifest:
    names = USER_SPACE["dnf" if state.apt is None else "apt"]
    packages, leaving = departures(state, names, memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"]))
    return Manifest(
        role=ROLE,
        files=tuple(ManagedFile(path=path, content=None, phase="after") for path in (MODULES, BEFORE)),
        folders=(ManagedFolder(path=MEMORY, state="absent_if_empty", phase="after"),),
        packages=packages,
        due_reasons=tuple(leaving),
        values={"state": "absent"},
    )
