"""The host's hardware: firmware names, processors, memory."""

import re

from pydantic import Field

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.models.outputs import Lscpu, LscpuNode
from gpunode.facts.parsers import lscpu

_NODES = "/sys/devices/system/node/"
_EDAC = "/sys/devices/system/edac/mc/"
_DMI = "/sys/class/dmi/id/"
_CPUS = "/sys/devices/system/cpu/"
_FIRST_CORE = _CPUS + "cpu0/topology/thread_siblings_list"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_MEMINFO_LINE = re.compile(r"(?:Node [0-9]{1,6} )?([A-Za-z0-9_()]{1,40}):\s{1,40}([0-9]{1,18})(?: kB)?")
_ALLOWED = re.compile(r"(?m)^Cpus_allowed_list:[ \t]{1,9}(\S{0,4000})$")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_MOST_CPUS = 65536


class Machine(Fact):
    """The machine's names in the firmware (DMI). Serial numbers are not collected."""

    vendor: str | None
    product: str | None
    board: str | None
    bios_version: str | None
    bios_date: str | None


class CpuNode(LscpuNode):
    """The processors of one NUMA node, as lscpu lists them."""

    cpus: str
    """``0-31,64-95``; empty for a node that has memory only."""


class Cpu(Lscpu):
    """The processors, from ``lscpu``."""

    architecture: str
    cpus: int
    """Logical processors that are online."""
    nodes: tuple[CpuNode, ...] = ()


class CpuSets(Fact):
    """Numbers of the kernel's processors; ``possible`` counts hot-plug slots in addition to those that are
    ``present``."""

    online: tuple[int, ...]
    present: tuple[int, ...]
    possible: tuple[int, ...]
    smt: str | None
    """``on``, ``off``, ``forceoff``, ``notsupported``; None if the kernel has no such control."""
    first_core: tuple[int, ...] | None = None
    """Processors of the core of processor 0: ``(0, 64)``, ``(0, 1)``; None: an older probe, or unknown."""

    def core_of(self, cpu: int) -> int:
        """Return the core of a processor, by its first processor; every core is numbered as that of processor 0."""
        first = self.first_core or (0,)
        step = first[1] - first[0] if len(first) > 1 else 1
        return cpu // (step * len(first)) * step * len(first) + cpu % step


class CpuFrequency(Fact):
    """Frequency control of the processors. Empty dictionaries: the kernel does not control it (most virtual
    machines)."""

    driver: str | None
    """``intel_pstate``, ``acpi-cpufreq``, ``amd-pstate-epp`` …"""
    governors: dict[str, int]
    """``{"performance": 128}``: processors by governor."""
    preferences: dict[str, int]
    """``{"balance_performance": 128}``: processors by energy preference."""
    idle_latencies: dict[int, int] = Field(default_factory=dict)
    """``{133: 128}``: processors by the microseconds that they take to wake up from the deepest idle state in use.
    Empty: the kernel controls none."""


class NumaNode(Fact):
    """One NUMA node, from sysfs."""

    VOLATILE = frozenset({"memory_free_mib"})

    node: int
    cpus: str
    """``0-31,64-95``; empty for a node that has memory only."""
    memory_total_mib: int | None
    memory_free_mib: int | None
    distances: tuple[int, ...]
    """To each node, in ascending order of their numbers."""


class Memory(Fact):
    """Memory and swap, from ``/proc/meminfo``."""

    VOLATILE = frozenset({"available_mib", "swap_free_mib", "hugepages_free", "committed_mib"})

    total_mib: int
    available_mib: int | None
    swap_total_mib: int | None
    swap_free_mib: int | None
    hugepages_total: int | None
    hugepages_free: int | None
    hugepage_size_kib: int | None
    committed_mib: int | None = None


class MemoryController(Fact):
    """Error counts of one memory controller since boot (EDAC)."""

    COUNTERS = frozenset({"corrected", "uncorrected"})

    name: str
    """``mc0``."""
    model: str | None
    corrected: int | None
    uncorrected: int | None


def read_machine(bundle: BundleReader) -> Machine:
    """Return the names in ``/sys/class/dmi/id``; all None on a machine without DMI (many ARM machines, containers)."""
    names = ("sys_vendor", "product_name", "board_name", "bios_version", "bios_date")
    vendor, product, board, version, date = ((bundle.text(_DMI + name) or "").strip() or None for name in names)
    return Machine(vendor=vendor, product=product, board=board, bios_version=version, bios_date=date)


def read_cpu(bundle: BundleReader) -> Cpu:
    """Return the processors, from ``lscpu``."""
    parsed = lscpu.parse(bundle.output("lscpu"))
    if parsed.cpus is None or parsed.architecture is None:
        raise ParseError("lscpu reports no number of processors, or no architecture")
    nodes = [{"node": node.node, "cpus": node.cpus or ""} for node in parsed.nodes]
    return Cpu.model_validate(parsed.model_dump() | {"nodes": nodes})


def read_cpu_sets(bundle: BundleReader) -> CpuSets:
    """Return the sets of ``/sys/devices/system/cpu``, as Documentation/admin-guide/cputopology.rst defines them."""
    return CpuSets(
        online=_cpu_list(bundle, "online"),
        present=_cpu_list(bundle, "present"),
        possible=_cpu_list(bundle, "possible"),
        smt=(bundle.text(_CPUS + "smt/control") or "").strip() or None,
        first_core=_first_core(bundle),
    )


def _first_core(bundle: BundleReader) -> tuple[int, ...] | None:
    """Return the processors of the core of processor 0; None for a list in which the steps differ."""
    text = bundle.value(_FIRST_CORE)
    if text is None:
        return None
    numbers = cpu_numbers(text, _FIRST_CORE)
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return numbers if numbers == tuple(range(0, step * len(numbers), step)) else None


def _cpu_list(bundle: BundleReader, name: str) -> tuple[int, ...]:
    text = bundle.text(_CPUS + name)
    if text is None:
        raise UnknownFactError(f"{_CPUS}{name} is not there")
    return cpu_numbers(text.strip(), _CPUS + name)


def cpu_numbers(text: str, path: str) -> tuple[int, ...]:
    """Return the numbers of the kernel's list ``0-3,8``; raise ParseError for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        # The kernel's lists ascend; so the numbers are at most as many as the processors, whatever a node sends.
        if not (numbers[-1] if numbers else -1) < first <= last < _MOST_CPUS:
            raise ParseError(f"expected a list of processors in {path}, found '{first_line(text)}'")
        numbers += range(first, last + 1)
    return tuple(numbers)


def read_cpu_frequency(bundle: BundleReader) -> CpuFrequency:
    """Return governors and preferences, as the probe counts them in ``/sys/devices/system/cpu/cpufreq``."""
    counts: dict[str, dict[str, int]] = {}
    for name, value, number in bundle.rows("cpu-clocks", 3):
        if whole(number) is None or (name == "idle_latency_us" and whole(value) is None):
            pair = first_line(f"{value} {number}")
            raise ParseError(f"expected numbers of processors and microseconds, found '{pair}'")
        counts.setdefault(name, {})[value] = int(number)
    return CpuFrequency(
        driver=next(iter(counts.get("scaling_driver", ())), None),
        governors=counts.get("scaling_governor", {}),
        preferences=counts.get("energy_performance_preference", {}),
        idle_latencies={int(us): number for us, number in counts.get("idle_latency_us", {}).items()},
    )


def read_cpus_allowed(bundle: BundleReader) -> int:
    """Return the number of processors that the kernel lets the probe's own process run on."""
    path = "/proc/self/status"
    match = _ALLOWED.search(bundle.text(path) or "")
    if match is None:
        raise UnknownFactError(f"{path} has no list of processors")
    return len(cpu_numbers(match[1], path))


def read_numa(bundle: BundleReader) -> tuple[NumaNode, ...]:
    """Return the nodes in sysfs; empty for a kernel without NUMA, which has no such folder."""
    nodes = []
    for name in bundle.entries(_NODES) or ():
        node = whole(name.removeprefix("node"))
        if node is None:
            continue
        memory = _meminfo(bundle.value(f"{_NODES}{name}/meminfo") or "")
        distances = [whole(word) for word in (bundle.value(f"{_NODES}{name}/distance") or "").split()]
        nodes.append(
            NumaNode(
                node=node,
                cpus=bundle.value(f"{_NODES}{name}/cpulist") or "",
                memory_total_mib=_mib(memory.get("MemTotal")),
                memory_free_mib=_mib(memory.get("MemFree")),
                distances=tuple(number for number in distances if number is not None),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


def read_memory(bundle: BundleReader) -> Memory:
    """Return the sizes in ``/proc/meminfo`` (its kB are KiB)."""
    values = _meminfo(bundle.text("/proc/meminfo") or "")
    total = _mib(values.get("MemTotal"))
    if total is None:
        raise UnknownFactError("/proc/meminfo has no MemTotal")
    return Memory(
        total_mib=total,
        available_mib=_mib(values.get("MemAvailable")),
        swap_total_mib=_mib(values.get("SwapTotal")),
        swap_free_mib=_mib(values.get("SwapFree")),
        hugepages_total=values.get("HugePages_Total"),
        hugepages_free=values.get("HugePages_Free"),
        hugepage_size_kib=values.get("Hugepagesize"),
        committed_mib=_mib(values.get("Committed_AS")),
    )


def _meminfo(text: str) -> dict[str, int]:
    lines = (line[:200].strip() for line in text.splitlines())
    return {match[1]: int(match[2]) for line in lines if (match := _MEMINFO_LINE.fullmatch(line))}


def _mib(kib: int | None) -> int | None:
    return None if kib is None else kib // 1024


def read_memory_controllers(bundle: BundleReader) -> tuple[MemoryController, ...]:
    """Return the error counts since boot, from EDAC."""
    return tuple(
        MemoryController(
            name=name,
            model=bundle.value(f"{_EDAC}{name}/mc_name"),
            corrected=bundle.number(f"{_EDAC}{name}/ce_count"),
            uncorrected=bundle.number(f"{_EDAC}{name}/ue_count"),
        )
        for name in bundle.entries(_EDAC) or ()
    )


def read_transparent_hugepages(bundle: BundleReader) -> str:
    """Return the value in brackets; ``never`` for a kernel without them."""
    return bundle.chosen(_THP) or "never"


class HostFacts(FactArea):
    """The host's hardware."""

    machine: Machine | None = fact(read_machine)
    cpu: Cpu | None = fact(read_cpu)
    cpu_sets: CpuSets | None = fact(read_cpu_sets)
    cpu_frequency: CpuFrequency | None = fact(read_cpu_frequency)
    cpus_allowed: int | None = fact(read_cpus_allowed, volatile=True)
    """Logical processors that the probe could run on: fewer than ``cpu.cpus`` where a cpuset confines the
    session."""
    numa: tuple[NumaNode, ...] | None = fact(read_numa)
    memory: Memory | None = fact(read_memory)
    memory_controllers: tuple[MemoryController, ...] | None = fact(read_memory_controllers)
    """Empty if the kernel counts no errors (virtual machines, no EDAC driver)."""
    transparent_hugepages: str | None = fact(read_transparent_hugepages)
    """``always``, ``madvise``, ``never``."""
