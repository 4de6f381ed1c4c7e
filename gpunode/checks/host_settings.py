"""Checks on settings of firmware and kernel: processors, NUMA, IOMMU, ACS, kernel settings, NCCL's file."""

import re
from collections.abc import Iterator

from gpunode.checks.compare import at_most, equals, failed, passed, skipped, undetermined, warned
from gpunode.checks.links import GUEST, gpus_of
from gpunode.checks.machine import is_container, is_guest, platforms
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.host import CpuSets
from gpunode.facts.node import NodeFacts
from gpunode.facts.settings import EnvironmentSetting
from gpunode.text import counted, listed

KERNEL = "Linux, admin-guide/cputopology.rst"
HEALTH_VALIDATION = "NVIDIA Health Validation, cpu_count"
PLATFORMS = "catalog (platforms.yml)"
LIMITED = re.compile(r"(?:^|\s)((?:maxcpus|nr_cpus|nosmp)\S*)")
"""Options of the kernel that leave processors offline."""
MOST_OFFLINE = Threshold(
    "host.cpus-online.most-offline",
    0,
    "processors",
    "More processors that are present and not online are a fault.",
    source=HEALTH_VALIDATION,
)


@registry.check(
    "host.cpus-online",
    needs=("cpu_sets", "command_line", "virtualization"),
    means="Every present processor is online. Hot-plug slots (possible, not present), threads with SMT "
    "disabled, and processors excluded by the kernel command line are ignored.",
    remedy="chcpu -e LIST brings them online; journalctl -k shows why the kernel disabled one (machine checks).",
    actions=("restart_os", "replace_hardware"),
    state="drain",
    thresholds=(MOST_OFFLINE,),
)
def cpus_online(node: NodeFacts) -> Iterator[CheckResult]:
    sets = node.cpu_sets
    if sets is None or not sets.present:
        raise Undetermined("the kernel reports no processor that is present")
    offline = sorted(set(sets.present) - set(sets.online))
    status, why = _reason(node, sets, offline)
    places = len(set(sets.possible) - set(sets.present))
    hotplug = f"; {counted(places, 'place')} for hot-plug" if places else ""
    message = f"{len(sets.online)} of {len(sets.present)} processors are online{hotplug}{why}"
    yield CheckResult(
        status,
        message,
        expected=len(sets.present),
        measured=len(sets.online),
        unit="processors",
        source=f"{HEALTH_VALIDATION}; {KERNEL}",
    )


def _reason(node: NodeFacts, sets: CpuSets, offline: list[int]) -> tuple[Status, str]:
    if not offline:
        return Status.PASS, ""
    if sets.smt in {"off", "forceoff"} and 2 * len(offline) <= len(sets.present):
        return Status.PASS, f"; SMT is {sets.smt}"
    named = f": offline are {listed([str(cpu) for cpu in offline])}"
    limited = LIMITED.search(node.command_line or "")
    if limited:
        return Status.WARN, f"{named} ({limited[1]} on the kernel's command line)"
    if len(offline) <= MOST_OFFLINE.value:
        return Status.PASS, named
    # A guest's host adds and removes processors; added ones must be brought online in the guest.
    return (Status.WARN if is_guest(node) else Status.FAIL), named


@registry.check(
    "host.numa-nodes",
    needs=("pci", "numa", "cpu", "virtualization", "architecture"),
    needs_gpu=True,
    means="The kernel has as many NUMA nodes as the platform, else at least one with processors for each socket.",
    remedy="Check the firmware settings (node interleaving, NPS, SNC) and the kernel command line for numa=off; "
    "on Grace systems check the driver, which adds the GPUs' memory.",
    actions=("fix_configuration", "restart_os"),
    state="observe",
    bare_metal=True,
)
def numa_nodes(node: NodeFacts) -> Iterator[CheckResult]:
    if is_guest(node) or is_container(node):
        raise Skip("a virtual machine or a container: its host deals out the NUMA nodes")
    number = len(node.numa or ())
    with_cpus = sum(bool(entry.cpus) for entry in node.numa or ())
    expected = {row.numa_nodes for row in platforms(node) if row.numa_nodes is not None}
    if expected:
        yield _of_platform(number, with_cpus, max(expected))
        return
    sockets = node.cpu.sockets if node.cpu else None
    if sockets is None:
        yield skipped(f"{counted(number, 'node')}; lscpu reports no sockets to compare with")
    elif not number:
        message = "the kernel is without NUMA"
        yield CheckResult(
            Status.WARN if sockets > 1 else Status.PASS, message, expected=sockets, measured=0, unit="nodes"
        )
    else:
        even = with_cpus >= sockets and with_cpus % sockets == 0
        message = f"{counted(with_cpus, 'node')} with processors for {counted(sockets, 'socket')}"
        status = Status.PASS if even else Status.WARN
        yield CheckResult(status, message, expected=sockets, measured=with_cpus, unit="nodes", source="lscpu")


def _of_platform(number: int, with_cpus: int, expected: int) -> CheckResult:
    if number == expected:
        return passed(f"{number} nodes", expected=expected, measured=number, unit="nodes", source=PLATFORMS)
    if number == with_cpus and number:
        # With coherent driver-based memory management (CDMM, driver 580 and newer) the GPUs' memory is not a NUMA node.
        message = f"{counted(number, 'node')}, all with processors: the driver manages the GPUs' memory (CDMM)"
        return passed(message, expected=expected, measured=number, unit="nodes", source=PLATFORMS)
    message = f"{counted(number, 'node')}, this platform has {expected}"
    return failed(message, expected=expected, measured=number, unit="nodes", source=PLATFORMS)


PASSTHROUGH = "identity"
SOURCE = "sichek, gpud: P2P on bare metal"


def _no_peers(node: NodeFacts) -> str | None:
    """Return why the path between peers is not checked; None if it is."""
    if is_guest(node):
        return GUEST
    if node.architecture == "aarch64":
        return "this machine's GPUs reach memory through the SMMU (ATS): it belongs there"
    if len(node.gpus_on_bus or ()) < 2 and not node.infiniband:
        return "one GPU and no RDMA: no peer"
    return None


@registry.check(
    "host.iommu",
    needs=("pci", "iommu", "virtualization", "architecture", "infiniband"),
    needs_gpu=True,
    means="Addresses of GPUs are not translated on bare metal (IOMMU off, or in passthrough): translation "
    "routes every transfer between GPUs, and between GPU and network adapter, through the processor.",
    remedy="Add iommu=pt to the kernel's command line and reboot, or switch the IOMMU off in the firmware.",
    state="observe",
    actions=("fix_configuration",),
    bare_metal=True,
    architectures=("x86_64",),
)
def iommu(node: NodeFacts) -> Iterator[CheckResult]:
    reason = _no_peers(node)
    if reason is not None or node.iommu is None:
        raise Skip(reason or "not seen")
    if not node.iommu.units:
        yield passed("no IOMMU is enabled", expected=PASSTHROUGH, measured="off", source=SOURCE)
        return
    types = {}
    for component, device in gpus_of(node):
        if device.iommu_group is None:
            types[component] = "unknown"
        else:
            types[component] = node.iommu.group_types.get(device.iommu_group, "unknown")
    kinds = sorted(set(types.values()))
    translated = [f"{component} {kind}" for component, kind in types.items() if kind not in (PASSTHROUGH, "unknown")]
    if translated:
        message = f"addresses are translated: {listed(translated)}"
        yield warned(message, expected=PASSTHROUGH, measured=listed(kinds), source=SOURCE)
    elif "unknown" in kinds:
        yield undetermined("an IOMMU is enabled, and the kernel does not report its mode for the GPUs")
    else:
        message = "the IOMMU passes addresses of GPUs through"
        yield passed(message, expected=PASSTHROUGH, measured=listed(kinds), source=SOURCE)


@registry.check(
    "host.acs",
    needs=("pci", "pci_acs", "virtualization", "architecture", "infiniband"),
    needs_gpu=True,
    means="No bridge above a GPU sends traffic between peers up to the processor (ACS redirection) on bare metal.",
    remedy="Switch ACS off in the firmware, or for each bridge with setpci -s SLOT ECAP_ACS+6.w=0000 at every boot.",
    state="observe",
    actions=("fix_configuration",),
    bare_metal=True,
    architectures=("x86_64",),
)
def acs(node: NodeFacts) -> Iterator[CheckResult]:
    reason = _no_peers(node)
    if reason is not None:
        raise Skip(reason)
    above = {slot for device in node.gpus_on_bus or () for slot in device.ports}
    redirecting = sorted(bridge.slot for bridge in node.pci_acs or () if bridge.redirects and bridge.slot in above)
    good = f"{counted(len(above), 'bridge')} above GPUs, none redirects traffic"
    bad = f"{counted(len(redirecting), 'bridge')} above GPUs redirect traffic: {listed(redirecting)}"
    yield at_most(len(redirecting), 0, good, bad, fault=Status.WARN, unit="bridges", source=SOURCE)


SYSCTL_D = "sysctl.d(5), tmpfiles.d(5)"
NCCL_FILE = "/etc/nccl.conf"
NCCL_SOURCE = "catalog (sources.yml, nccl_env)"
LISTS = {"NCCL_SOCKET_IFNAME": "interface", "NCCL_OOB_NET_IFNAME": "interface", "NCCL_IB_HCA": "HCA"}


@registry.check(
    "host.kernel-settings",
    needs=("boot_settings", "boot_arguments", "sysctl", "transparent_hugepages", "command_line", "virtualization"),
    means="What files set at the next boot is what the running kernel has: nothing was typed in that is lost with the "
    "next boot, and nothing waits for one.",
    remedy="sysctl --system and systemd-tmpfiles --create apply the files; a value that is to stay belongs in "
    "kernel_tuning_sysctl (role kernel_tuning).",
    state="observe",
    actions=("fix_configuration",),
)
def kernel_settings(node: NodeFacts) -> Iterator[CheckResult]:
    if is_container(node):
        raise Skip("in a container the kernel is the host's")
    last = {setting.name: setting for setting in node.boot_settings or ()}
    live = {**(node.sysctl or {}), "transparent_hugepage": node.transparent_hugepages}
    judged = False
    for name, setting in last.items():
        now = live.get(name)
        if now is None:
            continue
        judged = True
        good = f"{now}, as {setting.path} sets it at boot"
        bad = f"{now} now, and {setting.value} after the next boot ({setting.path})"
        yield equals(now, setting.value, good, bad, fault=Status.WARN, component=name, source=SYSCTL_D)
    if node.boot_arguments:
        judged = True
        booted = (node.command_line or "").split()
        missing = [word for word in node.boot_arguments if word not in booted]
        yield at_most(
            len(missing),
            0,
            f"the kernel was booted with {listed(list(node.boot_arguments))}",
            f"the kernel was booted without {listed(missing)}: a reboot is pending",
            fault=Status.WARN,
            component="command line",
            expected=" ".join(node.boot_arguments),
            measured=node.command_line,
        )
    if not judged:
        yield skipped("no file sets a relevant kernel setting")


@registry.check(
    "host.nccl-conf",
    needs=("environment", "nics", "addressed", "infiniband"),
    means="The interfaces and HCAs in /etc/nccl.conf exist: NCCL does not start if none of a list exists, and "
    "silently ignores missing ones.",
    remedy="gpunode env -v shows what the node has; role ml_environment writes it (ml_environment_nccl).",
    state="drain",
    actions=("fix_configuration",),
)
def nccl_conf(node: NodeFacts) -> Iterator[CheckResult]:
    settings = [setting for setting in node.environment or () if setting.path == NCCL_FILE]
    named = [setting for setting in settings if setting.name in LISTS and not setting.value.startswith("^")]
    if not named:
        yield skipped(f"{NCCL_FILE} lists no interface and no HCA")
    for setting in named:
        yield _names(setting, names_on(node, setting.name))


def names_on(node: NodeFacts, name: str) -> list[str]:
    """Return the interfaces or HCAs of a node that a list of NCCL can name."""
    if LISTS[name] == "HCA":
        return sorted(device.name for device in node.infiniband or ())
    return sorted({nic.name for nic in node.nics or ()} | set(node.addressed or ()))


def missing_names(value: str, existing: list[str]) -> list[str]:
    """Return the names in a list of NCCL that match nothing. Without ``=`` a name is a prefix; ports are ignored."""
    exact = value.startswith("=")
    words = [word.split(":")[0] for word in value.removeprefix("=").split(",")]
    return [word for word in words if not any(name == word if exact else name.startswith(word) for name in existing)]


def _names(setting: EnvironmentSetting, existing: list[str]) -> CheckResult:
    gone = missing_names(setting.value, existing)
    has = listed(existing) or "none"
    return at_most(
        len(gone),
        0,
        f"{setting.value}: all exist",
        f"{setting.value} in {setting.path}: the node has no {LISTS[setting.name]} {listed(gone)}, it has {has}",
        fault=Status.FAIL if len(gone) == len(setting.value.split(",")) else Status.WARN,
        component=setting.name,
        expected=setting.value,
        measured=has,
        source=NCCL_SOURCE,
    )
