"""``nvidia-smi --query-gpu=… --format=csv`` with its fields, and the other queries."""

from __future__ import annotations

import time
from collections.abc import Callable

from .node import NodeSnapshot, SimulatedGpu
from .readings import clocks, ecc_counts, fabric, maximum_clocks, reasons, remapped
from .values import DEPRECATED, switch, values, yes

NA = "[N/A]"
REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
    "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost",
)  # fmt: skip
# Bits of clocks_event_reasons.active.
BITS = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80,
}  # fmt: skip
ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_serial": "serial",
    "gpu_bus_id": "pci.bus_id",
    "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory",
    "clocks.video": "clocks.current.video",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "clocks.applications.gr": "clocks.applications.graphics",
    "clocks.applications.mem": "clocks.applications.memory",
    "clocks.default_applications.gr": "clocks.default_applications.graphics",
    "clocks.default_applications.mem": "clocks.default_applications.memory",
    "retired_pages.sbe": "retired_pages.single_bit_ecc.count",
    "retired_pages.dbe": "retired_pages.double_bit.count",
    "inforom.image": "inforom.img",
}
LINK = "pci/pci_gpu_link_info"
# Fields that are a line of -q: the path of its tags.
PATHS = {
    "name": "product_name",
    "serial": "serial",
    "uuid": "uuid",
    "pci.bus_id": "pci/pci_bus_id",
    "pcie.link.gen.current": f"{LINK}/pcie_gen/current_link_gen",
    "pcie.link.gen.gpucurrent": f"{LINK}/pcie_gen/device_current_link_gen",
    "pcie.link.gen.max": f"{LINK}/pcie_gen/max_link_gen",
    "pcie.link.gen.gpumax": f"{LINK}/pcie_gen/max_device_link_gen",
    "pcie.link.gen.hostmax": f"{LINK}/pcie_gen/max_host_link_gen",
    "pcie.link.width.current": f"{LINK}/link_widths/current_link_width",
    "pcie.link.width.max": f"{LINK}/link_widths/max_link_width",
    "display_mode": "display_mode",
    "display_attached": "display_attached",
    "display_active": "display_active",
    "persistence_mode": "persistence_mode",
    "addressing_mode": "addressing_mode",
    "accounting.mode": "accounting_mode",
    "accounting.buffer_size": "accounting_mode_buffer_size",
    "driver_model.current": "driver_model/current_dm",
    "driver_model.pending": "driver_model/pending_dm",
    "vbios_version": "vbios_version",
    "inforom.img": "inforom_version/img_version",
    "inforom.oem": "inforom_version/oem_object",
    "inforom.ecc": "inforom_version/ecc_object",
    "inforom.pwr": "inforom_version/pwr_object",
    "gpu_recovery_action": "gpu_recovery_action",
    "gom.current": "gpu_operation_mode/current_gom",
    "gom.pending": "gpu_operation_mode/pending_gom",
    "fan.speed": "fan_speed",
    "pstate": "performance_state",
    "memory.total": "fb_memory_usage/total",
    "memory.reserved": "fb_memory_usage/reserved",
    "memory.used": "fb_memory_usage/used",
    "memory.free": "fb_memory_usage/free",
    "compute_mode": "compute_mode",
    "utilization.gpu": "utilization/gpu_util",
    "utilization.memory": "utilization/memory_util",
    "utilization.encoder": "utilization/encoder_util",
    "utilization.decoder": "utilization/decoder_util",
    "utilization.jpeg": "utilization/jpeg_util",
    "utilization.ofa": "utilization/ofa_util",
    "encoder.stats.sessionCount": "encoder_stats/session_count",
    "encoder.stats.averageFps": "encoder_stats/average_fps",
    "encoder.stats.averageLatency": "encoder_stats/average_latency",
    "ecc.mode.current": "ecc_mode/current_ecc",
    "ecc.mode.pending": "ecc_mode/pending_ecc",
    "retired_pages.single_bit_ecc.count": "retired_pages/multiple_single_bit_retirement/retired_count",
    "retired_pages.double_bit.count": "retired_pages/double_bit_retirement/retired_count",
    "retired_pages.pending": "retired_pages/pending_retirement",
    "temperature.gpu": "temperature/gpu_temp",
    "temperature.gpu.tlimit": "temperature/gpu_temp_tlimit",
    "temperature.memory": "temperature/memory_temp",
    "power.draw": "gpu_power_readings/average_power_draw",
    "power.draw.average": "gpu_power_readings/average_power_draw",
    "power.draw.instant": "gpu_power_readings/instant_power_draw",
    "power.limit": "gpu_power_readings/current_power_limit",
    "enforced.power.limit": "gpu_power_readings/current_power_limit",
    "power.default_limit": "gpu_power_readings/default_power_limit",
    "power.min_limit": "gpu_power_readings/min_power_limit",
    "power.max_limit": "gpu_power_readings/max_power_limit",
    "edpp_multiplier": "edpp_multiplier",
    "clocks.applications.graphics": "applications_clocks/graphics_clock",
    "clocks.applications.memory": "applications_clocks/mem_clock",
    "clocks.default_applications.graphics": "default_applications_clocks/graphics_clock",
    "clocks.default_applications.memory": "default_applications_clocks/mem_clock",
    "mig.mode.current": "mig_mode/current_mig",
    "mig.mode.pending": "mig_mode/pending_mig",
    "c2c.mode": "c2c_mode",
    "protected_memory.total": "cc_protected_memory_usage/total",
    "protected_memory.used": "cc_protected_memory_usage/used",
    "protected_memory.free": "cc_protected_memory_usage/free",
    "platform.module_id": "platformInfo/module_id",
}
MODULE_POWER = (
    "power.draw.average", "power.draw.instant", "power.limit", "enforced.power.limit", "power.default_limit",
    "power.min_limit", "power.max_limit",
)  # fmt: skip
_PROFILE = ("primary_floor_act_window_multiplier", "primary_floor_tar_window_multiplier")
# Fields of power smoothing to their units.
SMOOTHING = {
    "delayed_power_smoothing_supported": "",
    "primary_power_floor": "W",
    "secondary_power_floor": "W",
    "min_primary_floor_activation_offset": "W",
    "min_primary_floor_activation_point": "W",
    "window_multiplier": "ms",
    **{f"{kind}.secondary_power_floor": "W" for kind in ("curr_profile", "admin_override")},
    **{f"{kind}.{name}": "" for kind in ("curr_profile", "admin_override") for name in _PROFILE},
    **{f"{kind}.primary_floor_act_offset": "W" for kind in ("curr_profile", "admin_override")},
}
UNITS = {
    "fan.speed": "%",
    "edpp_multiplier": "%",
    **{f"module.{key}": "W" for key in MODULE_POWER},
    **{f"power_smoothing.{key}": unit for key, unit in SMOOTHING.items() if unit},
    **{f"memory.{key}": "MiB" for key in ("total", "reserved", "used", "free")},
    **{f"protected_memory.{key}": "MiB" for key in ("total", "used", "free")},
    **{f"utilization.{key}": "%" for key in ("gpu", "memory", "encoder", "decoder", "jpeg", "ofa")},
    **{f"power.{key}": "W" for key in ("draw", "draw.average", "draw.instant", "limit", "default_limit")},
    **{f"power.{key}": "W" for key in ("min_limit", "max_limit")},
    "enforced.power.limit": "W",
    "used_gpu_memory": "MiB",
    **{f"clocks.{kind}.{key}": "MHz" for kind in ("current", "max") for key in ("graphics", "sm", "memory")},
    "clocks.current.video": "MHz",
    **{f"clocks.{kind}applications.{key}": "MHz" for kind in ("", "default_") for key in ("graphics", "memory")},
    **{
        f"clocks_event_reasons_counters.{name}": "us"
        for name in (
            "sw_power_cap",
            "sync_boost",
            "sw_thermal_slowdown",
            "hw_thermal_slowdown",
            "hw_power_brake_slowdown",
        )
    },
}
COUNTER_TAGS = {
    "sw_thermal_slowdown": "sw_therm_slowdown",
    "hw_thermal_slowdown": "hw_therm_slowdown",
    "hw_power_brake_slowdown": "hw_power_brake",
}

# Fields of real drivers that the simulator does not support: they read [N/A].
NOT_HERE = frozenset({
    "hostname", "dramEncryption.mode.current", "dramEncryption.mode.pending",
    "vgpu_driver_capability.heterogenous_multivGPU", "vgpu_device_capability.fractional_multiVgpu",
    "vgpu_device_capability.heterogeneous_timeSlice_profile", "vgpu_device_capability.heterogeneous_timeSlice_sizes",
    "vgpu_device_capability.homogeneous_placements", "vgpu_device_capability.mig_timeSlicing",
    "vgpu_device_capability.mig_timeSlicing_mode", *(f"module.{key}" for key in MODULE_POWER),
    *(f"power_smoothing.{key}" for key in SMOOTHING),
})  # fmt: skip


class UnknownFieldError(ValueError):
    """A field that nvidia-smi does not support."""


def query_gpu(node: NodeSnapshot, gpus: list[SimulatedGpu], fields: list[str], options: set[str]) -> str:
    """Return the CSV of ``--query-gpu``; ``options``: ``csv``, ``noheader``, ``nounits``. Raises UnknownFieldError."""
    names = [canonical(field) for field in fields]
    stamp = _stamp()
    rows = [[_value(node, gpu, name, stamp) for name in names] for gpu in gpus]
    return table(names, rows, options)


def table(names: list[str], rows: list[list[str]], options: set[str]) -> str:
    """Return CSV with header and units, unless the options omit them."""
    lines = []
    if "noheader" not in options:
        lines.append(", ".join(f"{name} [{UNITS[name]}]" if name in UNITS else name for name in names))
    for row in rows:
        cells = [_fitted(name, cell, "nounits" in options) for name, cell in zip(names, row)]
        lines.append(", ".join(cells))
    return "".join(line + "\n" for line in lines)


def _fitted(name: str, cell: str, bare: bool) -> str:
    unit = UNITS.get(name)
    if unit and bare and cell.endswith(unit):
        return cell[: -len(unit)].strip()
    return cell


def canonical(field: str) -> str:
    """Return the name that the header prints."""
    name = ALIASES.get(field, field)
    branch_name = name.replace("clocks_throttle_reasons.", "clocks_event_reasons.")
    if branch_name in PATHS or branch_name in _SPECIAL or branch_name in NOT_HERE or _is_family(branch_name):
        return name
    raise UnknownFieldError(field)


def _is_family(name: str) -> bool:
    family, _, rest = name.partition(".")
    if family == "clocks":
        kind, _, which = rest.partition(".")
        return kind in ("current", "max") and which in ("graphics", "sm", "memory", "video")
    if family == "clocks_event_reasons":
        return rest in (*REASONS, "active", "supported")
    if family == "clocks_event_reasons_counters":
        return f"{family}.{rest}" in UNITS
    if family == "ecc":
        return name.startswith(("ecc.errors.corrected.", "ecc.errors.uncorrected."))
    if family == "remapped_rows":
        return rest in (*_REMAPPED, *(f"histogram.{key}" for key in ("max", "high", "partial", "low", "none")))
    return family == "fabric" and (rest in ("state", "status", "cliqueId", "clusterUuid") or rest.startswith("health."))


def _value(node: NodeSnapshot, gpu: SimulatedGpu, name: str, stamp: str) -> str:
    if name == "timestamp":
        return stamp
    if gpu.lost and name not in ("index", "count", "driver_version", "pci.bus_id"):
        return "[GPU is lost]" if name not in ("name", "uuid", "serial") else {"name": gpu.name}.get(name, gpu.uuid)
    key = name.replace("clocks_throttle_reasons.", "clocks_event_reasons.")
    if key in PATHS:
        text = values(gpu).get(PATHS[key], NA)
        if key.startswith(("pcie.link.width", "temperature")):
            text = text.rstrip("xC ")
        if key == "edpp_multiplier":
            text = text.replace("%", " %")
        return f"[{DEPRECATED}]" if text == DEPRECATED else "[N/A]" if text == "N/A" else text
    if key in _SPECIAL:
        return _SPECIAL[key](node, gpu)
    return _family(gpu, key)


def _family(gpu: SimulatedGpu, key: str) -> str:
    family, _, rest = key.partition(".")
    if family == "clocks":
        kind, _, which = rest.partition(".")
        return f"{(clocks(gpu) if kind == 'current' else maximum_clocks(gpu))[which]} MHz"
    if family == "clocks_event_reasons":
        if rest in ("active", "supported"):
            active = sum(bit for name, bit in BITS.items() if reasons(gpu)[name])
            return f"0x{active if rest == 'active' else 0x1FF:016X}"
        return "Active" if reasons(gpu)[rest] else "Not Active"
    if family == "clocks_event_reasons_counters":
        tag = COUNTER_TAGS.get(rest, rest)
        return values(gpu).get(f"clocks_event_reasons_counters/clocks_event_reasons_counters_{tag}", NA)
    if family == "ecc":
        return _ecc(gpu, key)
    if family == "remapped_rows":
        return _remapped(gpu, rest)
    if family == "fabric":
        return fabric(gpu).get(rest, "N/A")
    return NA


_REMAPPED = {
    "correctable": "correctable",
    "correctable_inactive": "",
    "uncorrectable": "uncorrectable",
    "uncorrectable_inactive": "",
    "pending": "pending",
    "failure": "failure",
}


def _remapped(gpu: SimulatedGpu, rest: str) -> str:
    if not gpu.get("remap_banks") or gpu.mig:
        return NA
    if rest.startswith("histogram."):
        which = rest.partition(".")[2]
        text = values(gpu).get(f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{which}", NA)
        return text.partition(" ")[0]
    value = remapped(gpu).get(_REMAPPED[rest], 0)
    return yes(value) if isinstance(value, bool) else str(value)


def _ecc(gpu: SimulatedGpu, key: str) -> str:
    """Return the value of ``ecc.errors.uncorrected.volatile.total`` and similar fields."""
    _, _, kind, period, location = (*key.split(".", 4), "", "", "")[:5]
    if not gpu.ecc:
        return NA
    ending = "correctable" if kind == "corrected" else "uncorrectable"
    counts = ecc_counts(gpu)
    dram, sram = counts.get(f"{period}/dram_{ending}", 0), counts.get(f"{period}/sram_{ending}", 0)
    by_location = {"device_memory": dram, "dram": dram, "sram": sram, "total": dram + sram}
    if location in by_location:
        return str(by_location[location])
    if location == "sram.thresholdExceeded":
        return "No"
    return "0" if location.startswith("sram.") else NA


def _stamp() -> str:
    now = time.time()
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"


def _pci_part(number: int) -> Callable[[NodeSnapshot, SimulatedGpu], str]:
    def part(_node: NodeSnapshot, gpu: SimulatedGpu) -> str:
        domain, bus, rest = gpu.bus_id.split(":")
        return "0x" + (domain[4:], bus, rest.partition(".")[0])[number]

    return part


def _hexadecimal(path: str) -> Callable[[NodeSnapshot, SimulatedGpu], str]:
    return lambda _node, gpu: "0x" + values(gpu)[path]


_SPECIAL: dict[str, Callable[[NodeSnapshot, SimulatedGpu], str]] = {
    "timestamp": lambda _node, _gpu: _stamp(),
    "driver_version": lambda node, _gpu: node.driver,
    "kmd_version": lambda node, _gpu: node.driver,
    "count": lambda node, _gpu: str(len(node.gpus)),
    "index": lambda _node, gpu: str(gpu.index),
    "compute_cap": lambda _node, gpu: str(gpu.get("compute_capability", NA)),
    "pci.domain": _pci_part(0),
    "pci.bus": _pci_part(1),
    "pci.device": _pci_part(2),
    "pci.device_id": _hexadecimal("pci/pci_device_id"),
    "pci.sub_device_id": _hexadecimal("pci/pci_sub_system_id"),
    "pci.baseClass": lambda _node, _gpu: "0x3",
    "pci.subClass": lambda _node, _gpu: "0x2",
    "inforom.checksum_validation": lambda _node, _gpu: "valid",
    "power.management": lambda _node, gpu: f"[{DEPRECATED}]" if gpu.node_is_since(590) else switch(True),
    "gsp.mode.current": lambda _node, gpu: "Enabled" if gpu.is_since("turing") else NA,
    "gsp.mode.default": lambda _node, gpu: "Enabled" if gpu.is_since("turing") else NA,
    "platform.slot_number": lambda _node, _gpu: "0",
    "platform.tray_index": lambda _node, _gpu: "0",
    "platform.host_id": lambda _node, _gpu: "1",
    "platform.peer_type": lambda _node, _gpu: "Direct Connected",
    "platform.gpu_fabric_guid": lambda _node, _gpu: "0x0000000000000000",
    "platform.chassis_serial_number": lambda _node, _gpu: "",
}


def query_apps(gpus: list[SimulatedGpu], fields: list[str], options: set[str]) -> str:
    """Return the CSV of ``--query-compute-apps``. Raises UnknownFieldError."""
    readers: dict[str, Callable[[SimulatedGpu, dict[str, object]], str]] = {
        "timestamp": lambda _gpu, _entry: _stamp(),
        "gpu_name": lambda gpu, _entry: gpu.name,
        "gpu_bus_id": lambda gpu, _entry: gpu.bus_id,
        "gpu_serial": lambda gpu, _entry: str(gpu.get("serial", NA)),
        "gpu_uuid": lambda gpu, _entry: gpu.uuid,
        "pid": lambda _gpu, entry: str(entry["pid"]),
        "process_name": lambda _gpu, entry: str(entry.get("name", "")),
        "used_gpu_memory": lambda _gpu, entry: f"{entry.get('memory_mib', 0)} MiB",
    }
    names = [{"name": "process_name", "used_memory": "used_gpu_memory"}.get(field, field) for field in fields]
    for field, name in zip(fields, names):
        if name not in readers:
            raise UnknownFieldError(field)
    rows = [[readers[name](gpu, entry) for name in names] for gpu in gpus for entry in gpu.processes]
    return table(names, rows, options)


def query_pages(gpus: list[SimulatedGpu], fields: list[str], options: set[str]) -> str:
    """Return the CSV of ``--query-retired-pages``: a line for each cause, without pages. Raises UnknownFieldError."""
    known = {
        "timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "retired_pages.address",
        "retired_pages.timestamp", "retired_pages.cause",
    }  # fmt: skip
    twice = [gpu for gpu in gpus for _ in range(2)]
    causes = {number: ("Single Bit ECC", "Double Bit ECC")[number % 2] for number in range(len(twice))}
    return _like_gpu(twice, fields, known, options, causes)


def _like_gpu(
    gpus: list[SimulatedGpu], fields: list[str], known: set[str], options: set[str], causes: dict[int, str]
) -> str:
    stamp = _stamp()
    for field in fields:
        if field not in known:
            raise UnknownFieldError(field)
    rows = []
    for number, gpu in enumerate(gpus):
        cells = []
        for field in fields:
            if field.startswith("retired_pages."):
                cells.append(causes[number] if field.endswith("cause") else NA)
            else:
                cells.append(_value(gpu.node, gpu, ALIASES.get(field, field), stamp))
        rows.append(cells)
    return table(fields, rows, options)
