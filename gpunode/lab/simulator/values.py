"""Values of ``nvidia-smi -q`` for one GPU: path of XML tags to text. Lines without a value here read N/A."""

from __future__ import annotations

from .node import NAMES, SimulatedGpu
from .readings import (
    application_clocks,
    clocks,
    ecc_counts,
    fabric,
    maximum_clocks,
    memory,
    power_w,
    reasons,
    remapped,
    temperature_c,
    utilization_percent,
)

DEPRECATED = "Requested functionality has been deprecated"
LOST = "GPU is lost"
# What the driver has in its own memory and can report for a GPU that no longer answers.
REMEMBERED = (
    "product_", "display_", "persistence_mode", "addressing_mode", "mig_", "accounting_mode", "driver_model", "serial",
    "uuid", "pdi", "minor_number", "vbios", "multigpu", "board_", "gpu_part", "gpu_fru", "gpu_module", "platformInfo",
    "inforom_version", "gsp_", "c2c", "gpu_virtualization", "ibmnpu", "pci/pci_", "compute_mode", "gpu_operation",
)  # fmt: skip
NOT_REMEMBERED = ("pci/pci_gpu_link_info",)


def values(gpu: SimulatedGpu) -> dict[str, str]:
    """Return path to text, for the running driver version."""
    texts: dict[str, str] = {}
    for part in (_identity, _pci, _clocks, _reasons, _memory, _errors, _temperatures, _power, _fabric):
        texts.update(part(gpu))
    if gpu.lost:
        return {path: text if _is_remembered(path) else LOST for path, text in texts.items()}
    return texts


def _is_remembered(path: str) -> bool:
    return path.startswith(REMEMBERED) and not path.startswith(NOT_REMEMBERED)


def switch(on: bool) -> str:
    return "Enabled" if on else "Disabled"


def yes(on: object) -> str:
    return "Yes" if on else "No"


def _identity(gpu: SimulatedGpu) -> dict[str, str]:
    inforom = gpu.get("inforom") or {}
    modern = gpu.node_is_since(580)
    texts = {
        "product_name": gpu.name,
        "product_brand": gpu.get("brand", "Tesla" if gpu.name.startswith("Tesla") else "NVIDIA"),
        "product_architecture": NAMES.get(gpu.architecture, gpu.architecture.title()),
        "display_mode": DEPRECATED if modern else "Enabled",
        "display_attached": "Yes",
        "display_active": "Disabled",
        "persistence_mode": switch(gpu.persistence),
        "addressing_mode": "HMM" if gpu.node.flavour == "open" and gpu.is_since("turing") else "None",
        "accounting_mode": switch(bool(gpu.now.get("accounting", False))),
        "accounting_mode_buffer_size": "4000",
        "serial": str(gpu.get("serial", "N/A")),
        "uuid": gpu.uuid,
        "pdi": gpu.pdi,
        "minor_number": str(gpu.minor),
        "vbios_version": str(gpu.get("vbios_version", "N/A")),
        "multigpu_board": "No",
        "board_id": board_id(gpu),
        "board_part_number": str(gpu.get("board_part_number", "N/A")),
        "gpu_part_number": str(gpu.get("gpu_part_number", "N/A")),
        "gpu_module_id": str(gpu.get("module_id", gpu.number + 1)),
        "platformInfo/module_id": str(gpu.get("module_id", gpu.number + 1)),
        "inforom_version/img_version": str(gpu.get("inforom_version", "N/A")),
        "inforom_version/oem_object": str(inforom.get("oem", "N/A")),
        "inforom_version/ecc_object": str(inforom.get("ecc", "N/A")),
        "c2c_mode": str(gpu.get("c2c_mode", "N/A")),
        "gpu_virtualization_mode/virtualization_mode": str(gpu.get("virtualization_mode", "None")),
        "gpu_reset_status/reset_required": DEPRECATED if gpu.node_is_since(570) else "No",
        "gpu_reset_status/drain_and_reset_recommended": DEPRECATED if gpu.node_is_since(570) else "No",
        "gpu_recovery_action": _recovery_action(gpu),
        "performance_state": "P0" if gpu.busy else str(gpu.get("idle_pstate", "P0")),
        "compute_mode": gpu.compute_mode,
        "capabilities/egm": "disabled",
    }
    if gpu.is_since("turing"):
        texts["gsp_firmware_version"] = gpu.node.driver
    if gpu.can_mig:
        texts["mig_mode/current_mig"] = switch(gpu.mig)
        texts["mig_mode/pending_mig"] = switch(gpu.mig_pending)
    return texts


def board_id(gpu: SimulatedGpu) -> str:
    """Return ``0x1b00``: bus and device of the GPU's slot."""
    _, bus, rest = gpu.bus_id.split(":")
    return f"0x{int(bus, 16) << 8 | int(rest.partition('.')[0], 16):x}"


def _recovery_action(gpu: SimulatedGpu) -> str:
    if gpu.lost:
        return "Reboot"
    if gpu.fault("remap-pending") or gpu.fault("ecc-uncorrected") or (gpu.kept.get("remapped") or {}).get("pending"):
        return "GPU Reset"
    return "None"


def _pci(gpu: SimulatedGpu) -> dict[str, str]:
    domain, bus, rest = gpu.bus_id.split(":")
    vendor, device = str(gpu.entry["pci_device_id"]).split(":")
    subsystem_vendor, _, subsystem = str(gpu.entry.get("pci_subsystem_id") or "0000:0000").partition(":")
    narrow = gpu.fault("pcie-narrow") or {}
    generation, width = int(gpu.get("pcie_gen", 4)), int(gpu.get("pcie_width", 16))
    current_width = int(narrow.get("width", max(width // 2, 1))) if narrow else width
    current_generation = int(narrow.get("gen", generation)) if narrow else generation
    info = "pci/pci_gpu_link_info"
    texts = {
        "pci/pci_bus": bus,
        "pci/pci_device": rest.partition(".")[0],
        "pci/pci_domain": domain[4:],
        "pci/pci_base_class": "3",
        "pci/pci_sub_class": "2",
        "pci/pci_device_id": f"{device}{vendor}".upper(),
        "pci/pci_bus_id": gpu.bus_id,
        "pci/pci_sub_system_id": f"{subsystem}{subsystem_vendor}".upper(),
        f"{info}/pcie_gen/max_link_gen": str(generation),
        f"{info}/pcie_gen/current_link_gen": str(current_generation),
        f"{info}/pcie_gen/device_current_link_gen": str(current_generation),
        f"{info}/pcie_gen/max_device_link_gen": str(generation),
        f"{info}/pcie_gen/max_host_link_gen": str(generation),
        f"{info}/link_widths/max_link_width": f"{width}x",
        f"{info}/link_widths/current_link_width": f"{current_width}x",
        "pci/replay_counter": "0",
        "pci/replay_rollover_counter": "0",
        "pci/tx_util": "650 KB/s",
        "pci/rx_util": "606 KB/s",
    }
    if gpu.get("atomic_caps"):
        texts["pci/atomic_caps_outbound"] = texts["pci/atomic_caps_inbound"] = str(gpu.get("atomic_caps"))
    return texts


def _clocks(gpu: SimulatedGpu) -> dict[str, str]:
    now, top = clocks(gpu), maximum_clocks(gpu)
    tags = {"graphics": "graphics_clock", "sm": "sm_clock", "memory": "mem_clock", "video": "video_clock"}
    texts = {f"clocks/{tags[key]}": _mhz(value) for key, value in now.items()}
    texts.update({f"max_clocks/{tags[key]}": _mhz(value) for key, value in top.items()})
    texts["max_customer_boost_clocks/graphics_clock"] = _mhz(top["sm"])
    for block, default in (("applications_clocks", False), ("default_applications_clocks", True)):
        memory, graphics = application_clocks(gpu, default)
        texts[f"{block}/graphics_clock"] = DEPRECATED if gpu.node_is_since(590) else _mhz(graphics)
        texts[f"{block}/mem_clock"] = DEPRECATED if gpu.node_is_since(590) else _mhz(memory)
    return texts


def _mhz(clock: int) -> str:
    return f"{clock} MHz" if clock else "N/A"


def _reasons(gpu: SimulatedGpu) -> dict[str, str]:
    texts = {}
    for name, active in reasons(gpu).items():
        text = "Active" if active else "Not Active"
        texts[f"clocks_event_reasons/clocks_event_reason_{name}"] = text
        texts[f"clocks_throttle_reasons/clocks_throttle_reason_{name}"] = text
    for name in ("sw_power_cap", "sync_boost", "sw_therm_slowdown", "hw_therm_slowdown", "hw_power_brake"):
        texts[f"clocks_event_reasons_counters/clocks_event_reasons_counters_{name}"] = "0 us"
    if gpu.fault("throttle"):
        texts["clocks_event_reasons_counters/clocks_event_reasons_counters_hw_therm_slowdown"] = "5210045 us"
    if gpu.is_since("hopper"):
        texts["sparse_operation_mode"] = "Disabled"
    return texts


def _memory(gpu: SimulatedGpu) -> dict[str, str]:
    frame = memory(gpu)
    texts = {f"fb_memory_usage/{key}": f"{value} MiB" for key, value in frame.items()}
    if gpu.get("bar1_total_mib"):
        total = int(gpu.get("bar1_total_mib"))
        used = min(1 if gpu.persistence else 0, total)
        for key, value in {"total": total, "used": used, "free": total - used}.items():
            texts[f"bar1_memory_usage/{key}"] = f"{value} MiB"
    for key in ("total", "used", "free"):
        texts[f"cc_protected_memory_usage/{key}"] = "0 MiB"
    for key in ("session_count", "average_fps", "average_latency"):
        texts[f"encoder_stats/{key}"] = texts[f"fbc_stats/{key}"] = "0"
    if not gpu.mig:
        used, memory_used = utilization_percent(gpu)
        load = {"gpu": used, "memory": memory_used, "encoder": 0, "decoder": 0}
        if gpu.is_since("ampere"):
            load.update({"jpeg": 0, "ofa": 0})
        texts.update({f"utilization/{key}_util": f"{value} %" for key, value in load.items()})
    return texts


def _errors(gpu: SimulatedGpu) -> dict[str, str]:
    texts = {
        "ecc_errors/channel_repair_pending": "No",
        "ecc_errors/tpc_repair_pending": "No",
    }
    if gpu.is_since("hopper"):
        texts["ecc_errors/unrepairable_memory"] = "No"
    if gpu.has_ecc:
        texts["ecc_mode/current_ecc"] = switch(gpu.ecc)
        texts["ecc_mode/pending_ecc"] = switch(gpu.ecc_pending)
    if gpu.ecc:
        texts.update(_ecc(gpu))
    rows = remapped(gpu)
    if gpu.get("pages"):
        texts.update(_pages(rows))
    elif gpu.get("remap_banks") and not gpu.mig:
        texts.update(_rows(gpu, rows))
    return texts


def _ecc(gpu: SimulatedGpu) -> dict[str, str]:
    texts = {}
    counts = ecc_counts(gpu)
    for path, count in counts.items():
        period, _, location = path.partition("/")
        texts[f"ecc_errors/{period}/{location}"] = str(count)
        texts[f"ecc_errors/{period}/sram_uncorrectable_parity"] = "0"
        texts[f"ecc_errors/{period}/sram_uncorrectable_secded"] = "0"
        if not gpu.is_since("turing"):
            bit = "double_bit" if location.endswith("_uncorrectable") else "single_bit"
            if location.startswith("dram"):
                texts.update({f"ecc_errors/{period}/{bit}/{key}": str(count) for key in ("device_memory", "total")})
            else:
                texts.update({f"ecc_errors/{period}/{bit}/{key}": "0" for key in ("register_file", "l1_cache")})
                texts[f"ecc_errors/{period}/{bit}/l2_cache"] = "0"
                if bit == "double_bit" and gpu.is_since("volta"):
                    texts[f"ecc_errors/{period}/{bit}/cbu"] = "0"
    texts["ecc_errors/aggregate/sram_threshold_exceeded"] = "No"
    for location in ("l2", "sm", "microcontroller", "pcie", "other"):
        texts[f"ecc_errors/aggregate_uncorrectable_sram_sources/sram_{location}"] = "0"
    return texts


def _pages(rows: dict[str, int | bool]) -> dict[str, str]:
    single, double = str(rows["correctable"]), str(rows["uncorrectable"])
    return {
        "retired_pages/multiple_single_bit_retirement/retired_count": single,
        "retired_pages/multiple_single_bit_retirement/retired_pagelist": "",
        "retired_pages/double_bit_retirement/retired_count": double,
        "retired_pages/double_bit_retirement/retired_pagelist": "",
        "retired_pages/Single Bit ECC": single,
        "retired_pages/Double Bit ECC": double,
        "retired_pages/pending_blacklist": yes(rows["pending"]),
        "retired_pages/pending_retirement": yes(rows["pending"]),
    }


def _rows(gpu: SimulatedGpu, rows: dict[str, int | bool]) -> dict[str, str]:
    used = int(rows["correctable"]) + int(rows["uncorrectable"])
    banks = int(gpu.get("remap_banks"))
    histogram = {"max": banks - used, "high": used, "partial": 0, "low": 0, "none": 0}
    texts = {
        "remapped_rows/remapped_row_corr": str(rows["correctable"]),
        "remapped_rows/remapped_row_corr_inactive": "0",
        "remapped_rows/remapped_row_unc": str(rows["uncorrectable"]),
        "remapped_rows/remapped_row_unc_inactive": "0",
        "remapped_rows/remapped_row_pending": yes(rows["pending"]),
        "remapped_rows/remapped_row_failure": yes(rows["failure"]),
    }
    for name, count in histogram.items():
        texts[f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{name}"] = f"{count} bank(s)"
    return texts


def _temperatures(gpu: SimulatedGpu) -> dict[str, str]:
    now = temperature_c(gpu)
    texts = {"temperature/gpu_temp": f"{now} C"}
    offsets = gpu.get("tlimits_c") or {}
    limits = gpu.get("temperatures_c") or {}
    if offsets:
        texts["temperature/gpu_temp_tlimit"] = f"{int(gpu.get('tlimit_base_c', 87)) - now} C"
    names = {"shutdown": "max", "slowdown": "slow", "max_operating": "max_gpu", "memory": "max_mem"}
    for key, tag in names.items():
        if key in offsets:
            texts[f"temperature/gpu_temp_{tag}_tlimit_threshold"] = f"{offsets[key]} C"
        if key in limits:
            texts[f"temperature/gpu_temp_{tag}_threshold"] = f"{limits[key]} C"
    if "memory" in offsets or "memory" in limits:
        texts["temperature/memory_temp"] = f"{now + 8} C"
    return texts


def _power(gpu: SimulatedGpu) -> dict[str, str]:
    draw = f"{power_w(gpu):.2f} W"
    limit, default = f"{gpu.power_limit_w:.2f} W", f"{float(gpu.get('power_limit_w', 0)):.2f} W"
    smallest = f"{float(gpu.get('power_min_w', 0)):.2f} W" if gpu.get("power_min_w") else "N/A"
    largest = f"{float(gpu.get('power_max_w', gpu.get('power_limit_w', 0))):.2f} W"
    texts = {
        "power_readings/power_management": "Supported",
        "power_readings/power_draw": draw,
        "power_readings/power_limit": limit,
        "power_readings/enforced_power_limit": limit,
        "gpu_power_readings/power_draw": draw,
        "gpu_power_readings/average_power_draw": draw,
        "gpu_power_readings/instant_power_draw": draw,
        "gpu_power_readings/current_power_limit": limit,
        "gpu_power_readings/requested_power_limit": limit,
    }
    for block in ("power_readings", "gpu_power_readings"):
        texts[f"{block}/default_power_limit"] = default
        texts[f"{block}/min_power_limit"] = smallest
        texts[f"{block}/max_power_limit"] = largest
    for block in ("power_readings", "gpu_power_readings", "module_power_readings"):
        state = "P0" if gpu.busy else str(gpu.get("idle_pstate", "P0"))
        texts[f"{block}/power_state"] = DEPRECATED if gpu.node_is_since(590) else state
    if gpu.get("memory_power_w"):
        for key in ("power_draw", "average_power_draw"):
            texts[f"gpu_memory_power_readings/{key}"] = f"{float(gpu.get('memory_power_w')):.2f} W"
    if gpu.get("edpp_multiplier"):
        texts["edpp_multiplier"] = str(gpu.get("edpp_multiplier"))
    return texts


def _fabric(gpu: SimulatedGpu) -> dict[str, str]:
    return {f"fabric/{key}": value for key, value in fabric(gpu).items()}
