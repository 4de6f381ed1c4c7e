"""The host's hardware: firmware's names, processors, memory."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import Cpu, CpuFrequency, CpuNode, CpuSets, Machine, Memory, MemoryController, NumaNode
from gpunode.facts.parsers import lscpu
from gpunode.facts.seen import Seen, Unseen, first_line, whole

_NODES = "/sys/devices/system/node/"
_EDAC = "/sys/devices/system/edac/mc/"
_DMI = "/sys/class/dmi/id/"
_CPUS = "/sys/devices/system/cpu/"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_MEMINFO_LINE = re.compile(r"(?:Node [0-9]{1,6} )?([A-Za-z0-9_()]{1,40}):\s{1,40}([0-9]{1,18})(?: kB)?")
_ALLOWED = re.compile(r"(?m)^Cpus_allowed_list:[ \t]{1,9}(\S{0,4000})$")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_MOST_CPUS = 65536
_CHOSEN = re.compile(r"\[([a-z]{1,20})\]")


def machine(seen: Seen) -> Machine:
    """From ``/sys/class/dmi/id``; all None on a machine without DMI (many ARM ones, containers)."""
    names = ("sys_vendor", "product_name", "board_name", "bios_version", "bios_date")
    vendor, product, board, version, date = ((seen.text(_DMI + name) or "").strip() or None for name in names)
    return Machine(vendor=vendor, product=product, board=board, bios_version=version, bios_date=date)


def cpu(seen: Seen) -> Cpu:
    """From ``lscpu``."""
    parsed = lscpu.parse(seen.output("lscpu"))
    if parsed.cpus is None:
        raise ParseError("lscpu reports no number of processors")
    return Cpu(
        architecture=parsed.architecture,
        model_name=parsed.model_name,
        cpus=parsed.cpus,
        sockets=parsed.sockets,
        cores_per_socket=parsed.cores_per_socket,
        threads_per_core=parsed.threads_per_core,
        nodes=tuple(CpuNode(node=node.node, cpus=node.cpus or "") for node in parsed.nodes),
    )


def cpu_sets(seen: Seen) -> CpuSets:
    """From ``/sys/devices/system/cpu``; Documentation/admin-guide/cputopology.rst says what each set is."""
    return CpuSets(
        online=_cpu_list(seen, "online"),
        present=_cpu_list(seen, "present"),
        possible=_cpu_list(seen, "possible"),
        smt=(seen.text(_CPUS + "smt/control") or "").strip() or None,
    )


def _cpu_list(seen: Seen, name: str) -> tuple[int, ...]:
    text = seen.text(_CPUS + name)
    if text is None:
        raise Unseen(f"{_CPUS}{name} is not there")
    return _cpu_numbers(text.strip(), _CPUS + name)


def _cpu_numbers(text: str, path: str) -> tuple[int, ...]:
    """Return the numbers of the kernel's list ``0-3,8``; raise ParseError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        # The kernel's lists ascend: whatever a node sends, there are no more numbers than processors.
        if not (found[-1] if found else -1) < first <= last < _MOST_CPUS:
            raise ParseError(f"expected a list of processors in {path}, found '{first_line(text)}'")
        found += range(first, last + 1)
    return tuple(found)


def cpu_frequency(seen: Seen) -> CpuFrequency:
    """From the probe's count of ``/sys/devices/system/cpu/cpufreq``."""
    counts: dict[str, dict[str, int]] = {}
    for name, value, number in seen.rows("cpu-clocks", 3):
        if whole(number) is None:
            raise ParseError(f"expected a number of processors, found '{first_line(number)}'")
        counts.setdefault(name, {})[value] = int(number)
    return CpuFrequency(
        driver=next(iter(counts.get("scaling_driver", ())), None),
        governors=counts.get("scaling_governor", {}),
        preferences=counts.get("energy_performance_preference", {}),
    )


def cpus_allowed(seen: Seen) -> int:
    """Return the number of processors that the kernel lets the probe's own process run on."""
    path = "/proc/self/status"
    match = _ALLOWED.search(seen.text(path) or "")
    if match is None:
        raise Unseen(f"{path} has no list of processors")
    return len(_cpu_numbers(match[1], path))


def numa(seen: Seen) -> tuple[NumaNode, ...]:
    """From sysfs; a kernel without NUMA has no such folder and is one node's worth of nothing."""
    found = []
    for name in seen.entries(_NODES) or ():
        node = whole(name.removeprefix("node"))
        if node is None:
            continue
        memory = _meminfo(seen.value(f"{_NODES}{name}/meminfo") or "")
        distances = [whole(word) for word in (seen.value(f"{_NODES}{name}/distance") or "").split()]
        found.append(
            NumaNode(
                node=node,
                cpus=seen.value(f"{_NODES}{name}/cpulist") or "",
                memory_total_mib=_mib(memory.get("MemTotal")),
                memory_free_mib=_mib(memory.get("MemFree")),
                distances=tuple(number for number in distances if number is not None),
            )
        )
    return tuple(sorted(found, key=lambda node: node.node))


def memory(seen: Seen) -> Memory:
    """From ``/proc/meminfo``, whose kB are KiB."""
    values = _meminfo(seen.text("/proc/meminfo") or "")
    total = _mib(values.get("MemTotal"))
    if total is None:
        raise Unseen("/proc/meminfo has no MemTotal")
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


def memory_controllers(seen: Seen) -> tuple[MemoryController, ...]:
    """Error counts since boot, from EDAC."""
    return tuple(
        MemoryController(
            name=name,
            model=seen.value(f"{_EDAC}{name}/mc_name"),
            corrected=seen.number(f"{_EDAC}{name}/ce_count"),
            uncorrected=seen.number(f"{_EDAC}{name}/ue_count"),
        )
        for name in seen.entries(_EDAC) or ()
    )


def transparent_hugepages(seen: Seen) -> str:
    """The word in brackets; ``never`` for a kernel without them."""
    text = seen.text(_THP)
    if text is None:
        return "never"
    match = _CHOSEN.search(text)
    if not match:
        raise ParseError(f"expected a word in brackets in {_THP}, found '{first_line(text)}'")
    return match[1]
