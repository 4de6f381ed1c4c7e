"""Decisions of the role rdma before its plan: the path to GPU memory, requirements of GDRCopy, GDS and DOCA-OFED."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version as Number

from gpunode.catalog import load
from gpunode.catalog.driver_rules import DMA_BUF_KERNEL, against_gpudirect, kernel_number
from gpunode.facts import NodeFacts
from gpunode.provisioning.state import NodeState
from gpunode.stack import Stack

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
