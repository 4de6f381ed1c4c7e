"""Fields of ``nvidia-smi --query-gpu``: other names, the -q line of each, units."""

from __future__ import annotations

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
    "encoder.stats.sessionCount": "encoder.stats.sessionCount",
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
