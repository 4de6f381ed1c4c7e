"""One GPU of ``nvidia-smi -q``, from the XML or the text: the shape of ``gpunode parse nvidia-smi-xml``.

Each field names its locations in the output of all driver generations: XML tags and the text's labels, in the spelling
of ``smi_base.label_of``.
"""

from gpunode.facts.models.smi import (
    ApplicationClocks,
    Ecc,
    FabricHealth,
    Number,
    RemappedRows,
    RetiredPages,
    SmiClocks,
    SmiFabric,
    SmiGpu,
    SmiLog,
    SmiMigDevice,
    SmiPcie,
    SmiProcess,
    SupportedClocks,
)
from gpunode.facts.parsers.smi_base import TreeLabel
from gpunode.facts.parsers.values import (
    bus_id,
    device_and_vendor,
    flag,
    integer,
    is_nothing,
    mebibytes,
    quantity,
    text_or_none,
    unbracketed,
    version,
)

NOT_LISTED = "attached GPUs are listed"
"""The end of the message about GPUs that are counted but not listed."""
_FAULTS = frozenset({"err!", "unknown error", "gpu is lost", "gpu requires reset", "reset required"})
_HARD_FAULTS = frozenset({"gpu is lost", "gpu requires reset"})
_HARMLESS = frozenset(
    {
        "accounting_mode",
        "accounting_mode_buffer_size",
        "addressing_mode",
        "atomic_caps_inbound",
        "atomic_caps_outbound",
        "c2c_mode",
        "gpu_c2c_mode",
        "device_max",
        "display_active",
        "display_attached",
        "display_mode",
        "egm",
        "host_max",
        "host_vgpu_mode",
        "latest_duration",
        "latest_timestamp",
        "max_device_link_gen",
        "max_host_link_gen",
        "relaxed_ordering_mode",
        "sparse_operation_mode",
        "vgpu_heterogeneous_mode",
    }
)
"""Fields in which drivers print ``Unknown Error`` for healthy GPUs, because the host or the platform does not provide
the value."""

_DRAWS = ("power_draw", "average_power_draw", "instant_power_draw", "instantaneous_power_draw")
_LIMITS = ("enforced_power_limit", "current_power_limit", "power_limit")
_REASON_PREFIXES = ("clocks_throttle_reason_", "clocks_event_reason_")
_REASON_NAMES = {"idle": "gpu_idle", "display_clock_setting": "display_clocks_setting"}


def document(root: TreeLabel, gpus: list[SmiGpu], messages: list[str]) -> SmiLog:
    """Return the whole answer: the head's fields, the GPUs, and what nvidia-smi printed beside them."""
    attached = integer(root.get("attached_gpus"))
    if attached is not None and attached != len(gpus):
        messages = [*messages, f"{len(gpus)} of {attached} {NOT_LISTED}"]
    return SmiLog(
        driver_version=version(root.get("kmd_version")) or version(root.get("driver_version")),
        cuda_version=version(root.get("cuda_umd_version")) or version(root.get("cuda_version")),
        attached_gpus=attached,
        gpus=tuple(gpus),
        messages=tuple(messages),
    )


def gpu(node: TreeLabel, index: int, printed_bus_id: str | None) -> SmiGpu:
    """Return one GPU; ``printed_bus_id`` is the one of its heading, ``index`` its position in the output."""
    serial = text_or_none(node.get("serial", "serial_number"))
    temperature, power = node.child("temperature"), node.child("gpu_power_readings", "power_readings")
    return SmiGpu(
        index=index,
        pci_bus_id=bus_id(node.get("pci/pci_bus_id", "pci/bus_id")) or bus_id(printed_bus_id),
        pci_device_id=device_and_vendor(node.get("pci/pci_device_id", "pci/device_id")),
        pci_subsystem_id=device_and_vendor(node.get("pci/pci_sub_system_id", "pci/sub_system_id")),
        name=text_or_none(node.get("product_name")),
        uuid=text_or_none(node.get("uuid", "gpu_uuid")),
        serial=None if serial == "0" else serial,
        architecture=text_or_none(node.get("product_architecture")),
        vbios_version=text_or_none(node.get("vbios_version")),
        gsp_firmware_version=text_or_none(node.get("gsp_firmware_version")),
        minor_number=integer(node.get("minor_number")),
        persistence_mode=flag(node.get("persistence_mode")),
        mig_mode=flag(node.get("mig_mode/current_mig", "mig_mode/current")),
        mig_mode_pending=flag(node.get("mig_mode/pending_mig", "mig_mode/pending")),
        compute_mode=text_or_none(node.get("compute_mode")),
        accounting_mode=flag(node.get("accounting_mode")),
        addressing_mode=_printed(node.get("addressing_mode")),
        virtualization_mode=_printed(node.get("gpu_virtualization_mode/virtualization_mode")),
        performance_state=text_or_none(node.get("performance_state")),
        ecc=_ecc(node),
        retired_pages=_retired_pages(node.child("retired_pages")),
        remapped_rows=_remapped_rows(node.child("remapped_rows")),
        pcie=_pcie(node.child("pci")),
        temperature_c=quantity(temperature.get("gpu_temp", "gpu_current_temp", "gpu"), "C"),
        memory_temperature_c=quantity(temperature.get("memory_temp", "memory_current_temp"), "C"),
        slowdown_temperature_c=quantity(temperature.get("gpu_temp_slow_threshold", "gpu_slowdown_temp"), "C"),
        slowdown_tlimit_c=quantity(temperature.get("gpu_temp_slow_tlimit_threshold", "gpu_slowdown_t_limit_temp"), "C"),
        tlimit_c=quantity(temperature.get("gpu_temp_tlimit", "gpu_t_limit_temp"), "C"),
        memory_max_temperature_c=quantity(
            temperature.get("gpu_temp_max_mem_threshold", "memory_max_operating_temp"), "C"
        ),
        power_w=_first_watts(power, _DRAWS),
        power_limit_w=_first_watts(power, _LIMITS),
        power_default_limit_w=_watts(power.first_below("default_power_limit")),
        power_min_limit_w=_watts(power.first_below("min_power_limit")),
        power_max_limit_w=_watts(power.first_below("max_power_limit")),
        clocks_mhz=_clocks(node.child("clocks")),
        max_clocks_mhz=_clocks(node.child("max_clocks")),
        application_clocks_mhz=_application_clocks(node.child("applications_clocks")),
        default_application_clocks_mhz=_application_clocks(node.child("default_applications_clocks")),
        supported_clocks_mhz=_supported_clocks(node.child("supported_clocks")),
        throttle_reasons=_throttle_reasons(node.child("clocks_event_reasons", "clocks_throttle_reasons")),
        memory_total_mib=mebibytes(node.get("fb_memory_usage/total", "memory_usage/total")),
        memory_used_mib=mebibytes(node.get("fb_memory_usage/used", "memory_usage/used")),
        utilization_percent=quantity(node.get("utilization/gpu_util", "utilization/gpu"), "%"),
        memory_utilization_percent=quantity(node.get("utilization/memory_util", "utilization/memory"), "%"),
        fabric=_fabric(node.child("fabric")),
        recovery_action=_printed(node.get("gpu_recovery_action")),
        reset_required=flag(node.get("gpu_reset_status/reset_required")),
        drain_and_reset_recommended=flag(node.get("gpu_reset_status/drain_and_reset_recommended")),
        mig_devices=tuple(_mig_device(device) for device in _mig_device_nodes(node)),
        processes=_processes(node),
        errors=_errors(node),
    )


def _printed(text: str | None) -> str | None:
    """Return the value as printed; ``None`` is a value here and ``N/A`` is not."""
    return "None" if text is not None and text.strip() == "None" else text_or_none(text)


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ecc(node: TreeLabel) -> Ecc:
    errors = node.child("ecc_errors")
    return Ecc(
        enabled=flag(node.get("ecc_mode/current_ecc", "ecc_mode/current")),
        pending=flag(node.get("ecc_mode/pending_ecc", "ecc_mode/pending")),
        volatile_corrected=_ecc_count(errors.child("volatile"), "corrected"),
        volatile_uncorrected=_ecc_count(errors.child("volatile"), "uncorrected"),
        aggregate_corrected=_ecc_count(errors.child("aggregate"), "corrected"),
        aggregate_uncorrected=_ecc_count(errors.child("aggregate"), "uncorrected"),
        volatile_sram_corrected=integer(errors.get("volatile/sram_correctable")),
        aggregate_sram_corrected=integer(errors.get("aggregate/sram_correctable")),
        aggregate_sram_uncorrected=_sram_uncorrected(errors.child("aggregate")),
        sram_threshold_exceeded=flag(errors.get("aggregate/sram_threshold_exceeded")),
    )


def _ecc_count(period: TreeLabel, kind: str) -> int | None:
    """Return the printed total if there is one, else the sum of the known parts."""
    bits = period.child("single_bit" if kind == "corrected" else "double_bit")
    total = integer(bits.get("total"))
    if total is not None:
        return total
    if bits.children:
        return _sum([integer(part.value) for part in bits.children])
    if kind == "corrected":
        return _sum([integer(period.get("sram_correctable")), integer(period.get("dram_correctable"))])
    return _sum([_sram_uncorrected(period), integer(period.get("dram_uncorrectable"))])


def _sram_uncorrected(period: TreeLabel) -> int | None:
    """Return the errors of on-chip memory: as one number, or from driver 535 on as two."""
    sram = integer(period.get("sram_uncorrectable"))
    if sram is not None:
        return sram
    parity = integer(period.get("sram_uncorrectable_parity"))
    return _sum([parity, integer(period.get("sram_uncorrectable_secded", "sram_uncorrectable_sec_ded"))])


def _any(flags: list[bool | None]) -> bool | None:
    known = [value for value in flags if value is not None]
    return any(known) if known else None


def _retired_pages(node: TreeLabel) -> RetiredPages:
    pending = (
        "pending",
        "pending_blacklist",
        "pending_retirement",
        "pending_page_blacklist",
        "pending_page_retirement",
    )
    return RetiredPages(
        single_bit=integer(node.get("multiple_single_bit_retirement/retired_count", "single_bit_ecc")),
        double_bit=integer(node.get("double_bit_retirement/retired_count", "double_bit_ecc")),
        pending=_any([flag(node.get(label)) for label in pending]),
    )


def _remapped_rows(node: TreeLabel) -> RemappedRows:
    return RemappedRows(
        correctable=integer(node.get("remapped_row_corr", "correctable_error")),
        uncorrectable=integer(node.get("remapped_row_unc", "uncorrectable_error")),
        pending=flag(node.get("remapped_row_pending", "pending")),
        failure=flag(node.get("remapped_row_failure", "remapping_failure_occurred")),
    )


def _pcie(pci: TreeLabel) -> SmiPcie:
    link = pci.child("pci_gpu_link_info", "gpu_link_info")
    generation = link.child("pcie_gen", "pcie_generation")
    width = link.child("link_widths", "link_width")
    return SmiPcie(
        gen_current=integer(generation.get("current_link_gen", "current")),
        gen_max=integer(generation.get("max_link_gen", "max")),
        gen_max_device=integer(generation.get("max_device_link_gen", "device_max")),
        width_current=quantity(width.get("current_link_width", "current"), "x"),
        width_max=quantity(width.get("max_link_width", "max"), "x"),
        replays=integer(pci.get("replay_counter", "replays_since_reset")),
    )


def _watts(text: str | None) -> Number | None:
    return quantity(text, "W")


def _first_watts(power: TreeLabel, labels: tuple[str, ...]) -> Number | None:
    """Return the first of the values that is a number."""
    values = (_watts(power.first_below(label)) for label in labels)
    return next((value for value in values if value is not None), None)


def _megahertz(node: TreeLabel, *labels: str) -> Number | None:
    return quantity(node.get(*labels), "MHz")


def _clocks(node: TreeLabel) -> SmiClocks:
    return SmiClocks(
        sm=_megahertz(node, "sm_clock", "sm"),
        memory=_megahertz(node, "mem_clock", "memory"),
        graphics=_megahertz(node, "graphics_clock", "graphics"),
    )


def _application_clocks(node: TreeLabel) -> ApplicationClocks:
    return ApplicationClocks(
        graphics=_megahertz(node, "graphics_clock", "graphics"), memory=_megahertz(node, "mem_clock", "memory")
    )


def _supported_clocks(node: TreeLabel) -> SupportedClocks:
    """Return the memory clocks and the lowest graphics clock; the highest is among the maximum clocks."""
    blocks = node.all("supported_mem_clock")
    graphics = [quantity(clock.value, "MHz") for block in blocks for clock in block.all("supported_graphics_clock")]
    memory = (quantity(block.get("value"), "MHz") for block in blocks)
    return SupportedClocks(
        memory=tuple(sorted(clock for clock in memory if clock is not None)),
        graphics_min=min((clock for clock in graphics if clock is not None), default=None),
    )


def _throttle_reasons(node: TreeLabel) -> tuple[str, ...] | None:
    """Return the active reasons; None if the block is absent, ``N/A``, or has a value for none of them."""
    active = []
    known = False
    for leaf in node.leaves():
        state = flag(leaf.value)
        known = known or state is not None
        if state:
            name = leaf.label
            for prefix in _REASON_PREFIXES:
                name = name.removeprefix(prefix)
            active.append(_REASON_NAMES.get(name, name))
    return tuple(active) if known else None


def _fabric(node: TreeLabel) -> SmiFabric:
    health = node.child("health")
    return SmiFabric(
        state=text_or_none(node.get("state")),
        status=text_or_none(node.get("status")),
        clique_id=integer(node.get("cliqueid", "clique_id")),
        cluster_uuid=text_or_none(node.get("clusteruuid", "cluster_uuid")),
        health=FabricHealth(
            summary=_printed(health.get("summary")),
            bandwidth=_printed(health.get("bandwidth")),
            route_recovery=_printed(health.get("route_recovery_in_progress", "route_recovery")),
            route_unhealthy=_printed(health.get("route_unhealthy")),
            access_timeout_recovery=_printed(health.get("access_timeout_recovery")),
            incorrect_configuration=_printed(health.get("incorrect_configuration")),
        ),
    )


def _mig_device_nodes(node: TreeLabel) -> list[TreeLabel]:
    return node.child("mig_devices").all("mig_device") + node.all("mig_device")


def _mig_device(node: TreeLabel) -> SmiMigDevice:
    return SmiMigDevice(
        index=integer(node.get("index")),
        gpu_instance_id=integer(node.get("gpu_instance_id")),
        compute_instance_id=integer(node.get("compute_instance_id")),
        memory_total_mib=mebibytes(node.get("fb_memory_usage/total", "shared_fb_memory_usage/total")),
    )


def _processes(node: TreeLabel) -> tuple[SmiProcess, ...] | None:
    """Return the processes; None if no list was printed, or if the driver has none (``Not Supported``)."""
    if not node.has("processes", "compute_processes"):
        return None
    block = node.child("processes", "compute_processes")
    if not block.children and block.value is not None and unbracketed(block.value) not in {"", "None"}:
        return None
    return tuple(process for entry in block.all("process_info") if (process := _process(entry)))


def _process(node: TreeLabel) -> SmiProcess | None:
    pid = integer(node.get("pid", "process_id"))
    if pid is None:
        return None
    return SmiProcess(
        pid=pid,
        name=text_or_none(node.get("process_name", "name")),
        type=text_or_none(node.get("type")),
        memory_used_mib=mebibytes(node.get("used_memory", "used_gpu_memory")),
    )


def _errors(node: TreeLabel) -> tuple[str, ...]:
    """Return the distinct texts of fields that report a fault, in order, as printed but without brackets."""
    texts: dict[str, None] = {}
    for leaf in node.leaves():
        if leaf.value is None or not is_nothing(leaf.value):
            continue
        text = unbracketed(leaf.value)
        word = text.lower()
        if word in _HARD_FAULTS or (word in _FAULTS and leaf.label not in _HARMLESS):
            texts[text] = None
    return tuple(texts)
