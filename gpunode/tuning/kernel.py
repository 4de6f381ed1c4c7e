"""Kernel settings of a node: memory, network buffers, processors, and the command line."""

from collections.abc import Iterator

from gpunode.facts import NodeFacts
from gpunode.tuning.model import LeftAlone, Setting, Traits

KERNEL_VM = "Linux documentation: admin-guide/sysctl/vm.rst"
KERNEL_IOMMU = "Linux documentation: admin-guide/kernel-parameters.txt"
OURS = "our choice"
BUFFER_DELAY_MS = 10
"""A connection's buffer holds the data of a link for this time: a round trip in a data centre with queues."""
BUFFER_LEAST_MBIT_PER_S = 10_000
BUFFER_MOST = 256 << 20
NEIGHBOURS = (1024, 2048, 4096)
"""Minimum values of gc_thresh1 to 3 that are set; the kernel's own are 128, 512 and 1024."""
NEIGHBOURS_MOST = 1 << 20
MAP_COUNT = 1048576
GUESTS_WITH_HOST_KERNEL = frozenset(
    {"docker", "podman", "lxc", "lxc-libvirt", "systemd-nspawn", "openvz", "container-other", "wsl", "proot", "pouch"}
)
"""systemd-detect-virt's names of containers: their kernel is the host's."""


def settings(node: NodeFacts, traits: Traits, *, fleet: int) -> Iterator[Setting | LeftAlone]:
    """Yield all settings of the kernel."""
    yield from _memory(node, traits)
    yield from _buffers(node)
    yield from _neighbours(node, fleet)
    yield from _processors(node, traits)
    yield _command_line(node)


def in_container(node: NodeFacts) -> bool:
    """Return whether the node's kernel is that of a host around it."""
    return node.virtualization in GUESTS_WITH_HOST_KERNEL


def is_guest(node: NodeFacts) -> bool:
    """Return whether the node is not known to be bare metal."""
    return node.virtualization != "none"


def _memory(node: NodeFacts, traits: Traits) -> Iterator[Setting | LeftAlone]:
    several = len(node.numa or ()) > 1
    yield Setting(
        name="vm.swappiness",
        value=str(traits.swappiness),
        reason="file caches are reclaimed before the memory of a job is swapped out",
        source=f"{KERNEL_VM}; the number is {OURS}",
    )
    yield Setting(
        name="vm.max_map_count",
        value=str(MAP_COUNT),
        reason="many loader processes and memory-mapped files of a data set; 65530 are the kernel's default",
        source=f"{KERNEL_VM}; the number is {OURS}",
    )
    if several:
        reason = (
            "each process stays on its NUMA node"
            if traits.zone_reclaim
            else ("file caches may use the other NUMA node")
        )
        yield Setting(name="vm.zone_reclaim_mode", value=str(int(traits.zone_reclaim)), reason=reason, source=KERNEL_VM)
        yield Setting(
            name="kernel.numa_balancing",
            value="0",
            reason="the launcher binds jobs; automatic page migration causes faults and conflicts with pinned memory",
            source=f"Azure/azhpc-images; {OURS}",
        )
    else:
        for name in ("vm.zone_reclaim_mode", "kernel.numa_balancing"):
            yield LeftAlone(
                name=name,
                reason="one NUMA node" if node.numa else f"NUMA nodes could not be read: {node.gap('numa') or '-'}",
            )
    yield Setting(
        name="transparent_hugepage",
        value=traits.hugepages,
        reason="programs that request huge pages get them; others are not delayed by compaction"
        if traits.hugepages == "madvise"
        else "large arrays of few long processes: every mapping gets huge pages",
        source=f"Linux documentation: admin-guide/mm/transhuge.rst; {OURS} by profile",
    )


def _buffers(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    names = ("net.core.rmem_max", "net.core.wmem_max", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")
    speed = max((nic.speed_mbit_per_s or 0 for nic in node.nics or () if nic.state == "up"), default=0)
    if node.nics is None or speed < BUFFER_LEAST_MBIT_PER_S:
        reason = (
            f"network interfaces could not be read: {node.gap('nics') or '-'}"
            if node.nics is None
            else "no interface reports 10 Gbit/s or more"
        )
        yield from (LeftAlone(name=name, reason=reason) for name in names)
        return
    needed = speed * 1000 * BUFFER_DELAY_MS // 8
    ceiling = min(BUFFER_MOST, 1 << (needed - 1).bit_length())
    source = f"Linux documentation: networking/ip-sysctl.rst; {BUFFER_DELAY_MS} ms are {OURS}"
    for name in names:
        # Minimum and default of tcp_rmem and tcp_wmem stay the kernel's.
        first = {"net.ipv4.tcp_rmem": "4096 131072 ", "net.ipv4.tcp_wmem": "4096 16384 "}.get(name, "")
        yield Setting(
            name=name,
            value=f"{first}{ceiling}",
            reason=f"{speed // 1000} Gbit/s for {BUFFER_DELAY_MS} ms, to the next power of two, at most "
            f"{BUFFER_MOST >> 20} MiB",
            source=source,
        )


def _neighbours(node: NodeFacts, fleet: int) -> Iterator[Setting | LeftAlone]:
    names = tuple(f"net.ipv4.neigh.default.gc_thresh{number}" for number in (1, 2, 3))
    # Each neighbour may be known on every interface.
    interfaces = max(1, sum(nic.state == "up" for nic in node.nics or ()))
    entries = min(NEIGHBOURS_MOST, max(0, fleet) * interfaces)
    if entries <= 128:
        reason = (
            "the size of the fleet is not set"
            if fleet <= 0
            else f"{fleet} nodes on {interfaces} interfaces fit the kernel's table"
        )
        yield from (LeftAlone(name=name, reason=reason) for name in names)
        return
    base = max(NEIGHBOURS[0], 1 << (entries - 1).bit_length())
    for factor, name in zip((1, 2, 4), names, strict=True):
        yield Setting(
            name=name,
            value=str(base * factor),
            reason=f"{fleet} nodes on {interfaces} interfaces are {entries} neighbours: none is evicted while in use",
            source="Linux documentation: networking/ip-sysctl.rst; linux-system-roles/hpc sets them too",
        )


def _processors(node: NodeFacts, traits: Traits) -> Iterator[Setting | LeftAlone]:
    governor, latency = "cpu_governor", "cpu_idle_latency_us"
    frequency = node.cpu_frequency
    if in_container(node):
        reason = "in a container processors are the host's"
        yield from (LeftAlone(name=name, reason=reason) for name in (governor, latency))
        return
    if frequency is None or not frequency.governors:
        why = node.gap("cpu_frequency") if frequency is None else None
        yield LeftAlone(name=governor, reason=why or "firmware or hypervisor controls the clock, not the kernel")
    elif traits.saves_power:
        yield LeftAlone(name=governor, reason="the node is often idle: processors may reduce their clock")
    else:
        yield Setting(
            name=governor,
            value="performance",
            reason="GPUs do not wait for processor clocks to rise",
            source=f"Linux documentation: admin-guide/pm/cpufreq.rst; {OURS} by profile",
        )
    if traits.idle_latency_us is None:
        yield LeftAlone(name=latency, reason="deep idle states leave power for busy cores")
    elif is_guest(node):
        yield LeftAlone(name=latency, reason="the hypervisor controls idle states")
    else:
        yield Setting(
            name=latency,
            value=str(traits.idle_latency_us),
            reason="requests and messages wait for a core to wake up: deeper idle states are disabled",
            source=f"Linux documentation: admin-guide/pm/cpuidle.rst; the number is {OURS}",
        )


def _command_line(node: NodeFacts) -> Setting | LeftAlone:
    """Return ``iommu=pt`` if DMA of a bare-metal machine is translated page by page."""
    name = "command_line"
    if is_guest(node):
        return LeftAlone(name=name, reason="a guest: its hypervisor translates addresses")
    if node.iommu is None:
        return LeftAlone(name=name, reason=f"the IOMMU could not be read: {node.gap('iommu') or '-'}")
    if not node.iommu.units:
        return LeftAlone(name=name, reason="no IOMMU is enabled")
    kinds = set(node.iommu.group_types.values())
    if not any(kind.startswith("DMA") for kind in kinds) and "iommu=pt" not in (node.command_line or "").split():
        return LeftAlone(name=name, reason="no device's addresses are translated by the IOMMU")
    return Setting(
        name=name,
        value="iommu=pt",
        reason="the IOMMU translates each DMA of the host's own devices; passed through, GPUs and NICs reach memory "
        "directly",
        source=KERNEL_IOMMU,
    )
