"""Checks on the host's processors: all are online, and NUMA matches the platform."""

import re
from collections.abc import Iterator

from gpunode.checks.compare import failed, passed, skipped
from gpunode.checks.machine import is_container, is_guest, platforms
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.host import CpuSets
from gpunode.facts.node import NodeFacts
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
