"""Current measurements and counters of a simulated GPU, as numbers."""

from __future__ import annotations

from .node import SimulatedGpu

THROTTLES = ("sw_power_cap", "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons other than the load that hold clocks down, each possible as a fault."""


def clocks(gpu: SimulatedGpu) -> dict[str, int]:
    """Return the current clocks in MHz: graphics, sm, memory, video."""
    idle = gpu.get("idle_clocks_mhz") or {}
    top = maximum_clocks(gpu)
    sm = top["sm"] if gpu.busy else int(idle.get("graphics", top["sm"]))
    memory = top["memory"] if gpu.busy else int(idle.get("memory", top["memory"]))
    locked = gpu.now.get("locked_sm_clock_mhz")
    if locked:
        sm = min(max(sm, int(locked[0])), int(locked[1]))
    if gpu.now.get("locked_memory_clock_mhz"):
        memory = int(gpu.now["locked_memory_clock_mhz"][1])
    if gpu.fault("throttle") and gpu.busy:
        sm = sm // 2
    video = top.get("video") or sm
    return {"graphics": sm, "sm": sm, "memory": memory, "video": video if gpu.busy else int(idle.get("video", video))}


def maximum_clocks(gpu: SimulatedGpu) -> dict[str, int]:
    """Return the maximum clocks in MHz."""
    sm = int(gpu.get("max_sm_clock_mhz", 0))
    video = int(gpu.get("video_clock_mhz", 0))
    return {"graphics": sm, "sm": sm, "memory": int(gpu.get("max_memory_clock_mhz", 0)), "video": video}


def application_clocks(gpu: SimulatedGpu, default: bool = False) -> tuple[int, int]:
    """Return the application clocks (memory, graphics) in MHz."""
    top = maximum_clocks(gpu)
    chosen = None if default else gpu.now.get("application_clocks_mhz")
    if chosen:
        return int(chosen[0]), int(chosen[1])
    usual = gpu.get("application_clocks_mhz") or {}
    return int(usual.get("memory", top["memory"])), int(usual.get("graphics", top["sm"]))


def reasons(gpu: SimulatedGpu) -> dict[str, bool]:
    """Return which throttle reasons are active, by their short names."""
    fault = gpu.fault("throttle") or {}
    which = str(fault.get("reason", "hw_thermal_slowdown")) if fault else ""
    return {
        "gpu_idle": not gpu.busy and not fault,
        "applications_clocks_setting": False,
        "sw_power_cap": which == "sw_power_cap",
        "hw_slowdown": which in ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"),
        "hw_thermal_slowdown": which == "hw_thermal_slowdown",
        "hw_power_brake_slowdown": which == "hw_power_brake_slowdown",
        "sync_boost": False,
        "sw_thermal_slowdown": which == "sw_thermal_slowdown",
        "display_clocks_setting": False,
    }


def memory(gpu: SimulatedGpu) -> dict[str, int]:
    """Return memory in MiB: total, reserved, used, free."""
    total = int(gpu.get("memory_total_mib", 0))
    reserved = int(gpu.get("memory_reserved_mib", total // 150))
    used = sum(int(entry.get("memory_mib", 0)) for entry in gpu.processes) + (1 if gpu.persistence else 0)
    return {"total": total, "reserved": reserved, "used": used, "free": total - reserved - used}


def ecc_counts(gpu: SimulatedGpu) -> dict[str, int]:
    """Return the error counts by ``volatile/dram_uncorrectable`` and so on."""
    counts = {
        f"{period}/{location}": 0
        for period in ("volatile", "aggregate")
        for location in ("sram_correctable", "sram_uncorrectable", "dram_correctable", "dram_uncorrectable")
    }
    kept = gpu.kept.get("ecc_errors") or {}
    counts["aggregate/dram_correctable"] += int(kept.get("corrected", 0))
    counts["aggregate/dram_uncorrectable"] += int(kept.get("uncorrected", 0))
    fault = gpu.fault("ecc-uncorrected")
    if fault:
        number = int(fault.get("count", 1))
        counts["volatile/dram_uncorrectable"] += number
        counts["aggregate/dram_uncorrectable"] += number
    return counts


def remapped(gpu: SimulatedGpu) -> dict[str, int | bool]:
    """Return remapped rows: correctable, uncorrectable, pending, failure."""
    kept = gpu.kept.get("remapped") or {}
    pending = gpu.fault("remap-pending") is not None
    return {
        "correctable": int(kept.get("correctable", 0)),
        "uncorrectable": int(kept.get("uncorrectable", 0)) + (1 if pending else 0),
        "pending": bool(kept.get("pending")) or pending,
        "failure": bool(kept.get("failure")),
    }


def temperature_c(gpu: SimulatedGpu) -> int:
    """Return the chip's temperature: idle, busy, or hot by the fault."""
    if gpu.fault("throttle"):
        return int((gpu.get("temperatures_c") or {}).get("slowdown", int(gpu.get("tlimit_base_c", 87)) + 2))
    return 59 if gpu.busy else 31 + gpu.number % 4


def utilization_percent(gpu: SimulatedGpu) -> tuple[int, int]:
    """Return the utilization of GPU and memory: of the load that is set, else by whether it is busy."""
    load = gpu.fault("load")
    if load:
        return int(load["utilization"]), int(load["memory"])
    return (100, 11) if gpu.busy else (0, 0)


def pcie_mb_per_s(gpu: SimulatedGpu) -> tuple[int, int]:
    """Return the PCIe rates: received and sent."""
    load = gpu.fault("load") or {}
    return int(load.get("received", 0)), int(load.get("sent", 0))


def power_w(gpu: SimulatedGpu) -> float:
    """Return the power draw: of the load that is set, idle, or most of the limit."""
    load = gpu.fault("load")
    if load:
        return round(gpu.power_limit_w * int(load["power"]) / 100, 2)
    if gpu.busy:
        return round(gpu.power_limit_w * 0.9, 2)
    return float(gpu.get("idle_power_w", max(gpu.power_limit_w * 0.1, 1.0)))


def fabric(gpu: SimulatedGpu) -> dict[str, str]:
    """Return state, status, clique and cluster of a GPU behind NVSwitches; empty for others."""
    if not gpu.in_fabric:
        return {}
    known = gpu.node.running.get("fabric") or {}
    if gpu.fault("fabric-not-completed") or known.get("state") != "Completed":
        return {"state": "In Progress"}
    return {
        "state": "Completed",
        "status": str(known.get("status", "Success")),
        "cliqueId": "0",
        "clusterUuid": "00000000-0000-0000-0000-000000000000",
    }
