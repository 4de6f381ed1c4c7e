"""The lines of ``nvidia-smi -q`` for a GPU, by driver version: one table for the XML and for the text.

A row is ``tag | label | versions | condition``, indented by its depth in the tree. With ``-`` as the tag the line is
only in the text, with ``-`` as the label the tag is only in the XML. ``580-`` is from branch 580 on, ``-565`` up to
branch 565, ``535.129-`` from that release on. A condition is a trait of the GPU (``gpu.Gpu.traits``), with ``!`` its
absence. If captures of real machines show a row only from some branch on, the branch captured before does not have it;
between two captures the older layout is assumed.
"""

from __future__ import annotations

from typing import NamedTuple  # dataclasses loads inspect, a fourth of nvidia-smi's run time

from .node import in_range, numbers

LAYOUT = """\
product_name | Product Name
product_brand | Product Brand
product_architecture | Product Architecture | 510-
display_mode | Display Mode
display_attached | Display Attached | 580-
display_active | Display Active
persistence_mode | Persistence Mode
addressing_mode | Addressing Mode | 535-
mig_mode | MIG Mode
  current_mig | Current
  pending_mig | Pending
mig_devices | -
accounting_mode | Accounting Mode
accounting_mode_buffer_size | Accounting Mode Buffer Size
driver_model | Driver Model
  current_dm | Current
  pending_dm | Pending
serial | Serial Number
uuid | GPU UUID
pdi | GPU PDI | 580-
minor_number | Minor Number
vbios_version | VBIOS Version
multigpu_board | MultiGPU Board
board_id | Board ID
board_part_number | Board Part Number | 525-
gpu_part_number | GPU Part Number
gpu_fru_part_number | FRU Part Number | 535-
gpu_module_id | Module ID | -565
platformInfo | Platform Info | 570-
  chassis_serial_number | Chassis Serial Number
  slot_number | Slot Number
  tray_index | Tray Index
  host_id | Host ID
  peer_type | Peer Type
  module_id | Module Id
  gpu_fabric_guid | GPU Fabric GUID
inforom_version | Inforom Version
  img_version | Image Version
  oem_object | OEM Object
  ecc_object | ECC Object
  pwr_object | Power Management Object
inforom_bbx_flush | Inforom BBX Object Flush | 535.129-
  latest_timestamp | Latest Timestamp
  latest_duration | Latest Duration
gpu_operation_mode | GPU Operation Mode
  current_gom | Current
  pending_gom | Pending
gsp_firmware_version | GSP Firmware Version | -545
c2c_mode | GPU C2C Mode | 550-
gpu_virtualization_mode | GPU Virtualization Mode
  virtualization_mode | Virtualization Mode
  host_vgpu_mode | Host VGPU Mode
  vgpu_heterogeneous_mode | vGPU Heterogeneous Mode | 550-
gpu_reset_status | GPU Reset Status | 535-570
  reset_required | Reset Required
  drain_and_reset_recommended | Drain and Reset Recommended
gpu_recovery_action | GPU Recovery Action | 570-
gsp_firmware_version | GSP Firmware Version | 550-
ibmnpu | IBMNPU
  relaxed_ordering_mode | Relaxed Ordering Mode
pci | PCI
  pci_bus | Bus
  pci_device | Device
  pci_domain | Domain
  pci_base_class | Base Classcode | 550-
  pci_sub_class | Sub Classcode | 550-
  pci_device_id | Device Id
  pci_bus_id | Bus Id
  pci_sub_system_id | Sub System Id
  pci_gpu_link_info | GPU Link Info
    pcie_gen | PCIe Generation
      max_link_gen | Max
      current_link_gen | Current
      device_current_link_gen | Device Current | 525-
      max_device_link_gen | Device Max | 525-
      max_host_link_gen | Host Max | 525-
    link_widths | Link Width
      max_link_width | Max
      current_link_width | Current
  pci_bridge_chip | Bridge Chip
    bridge_chip_type | Type
    bridge_chip_fw | Firmware
  replay_counter | Replays Since Reset
  replay_rollover_counter | Replay Number Rollovers
  tx_util | Tx Throughput
  rx_util | Rx Throughput
  atomic_caps_inbound | Atomic Caps Inbound | 525-545
  atomic_caps_outbound | Atomic Caps Outbound | 525-
  atomic_caps_inbound | Atomic Caps Inbound | 550-
fan_speed | Fan Speed
performance_state | Performance State
clocks_throttle_reasons | Clocks Throttle Reasons | -530
  clocks_throttle_reason_gpu_idle | Idle
  clocks_throttle_reason_applications_clocks_setting | Applications Clocks Setting
  clocks_throttle_reason_sw_power_cap | SW Power Cap
  clocks_throttle_reason_hw_slowdown | HW Slowdown
  clocks_throttle_reason_hw_thermal_slowdown | >HW Thermal Slowdown
  clocks_throttle_reason_hw_power_brake_slowdown | >HW Power Brake Slowdown
  clocks_throttle_reason_sync_boost | Sync Boost
  clocks_throttle_reason_sw_thermal_slowdown | SW Thermal Slowdown
  clocks_throttle_reason_display_clocks_setting | Display Clock Setting
clocks_event_reasons | Clocks Event Reasons | 535-
  clocks_event_reason_gpu_idle | Idle
  clocks_event_reason_applications_clocks_setting | Applications Clocks Setting
  clocks_event_reason_sw_power_cap | SW Power Cap
  clocks_event_reason_hw_slowdown | HW Slowdown
  clocks_event_reason_hw_thermal_slowdown | >HW Thermal Slowdown
  clocks_event_reason_hw_power_brake_slowdown | >HW Power Brake Slowdown
  clocks_event_reason_sync_boost | Sync Boost
  clocks_event_reason_sw_thermal_slowdown | SW Thermal Slowdown
  clocks_event_reason_display_clocks_setting | Display Clock Setting
clocks_event_reasons_counters | Clocks Event Reasons Counters | 580-
  clocks_event_reasons_counters_sw_power_cap | SW Power Capping
  clocks_event_reasons_counters_sync_boost | Sync Boost
  clocks_event_reasons_counters_sw_therm_slowdown | SW Thermal Slowdown
  clocks_event_reasons_counters_hw_therm_slowdown | HW Thermal Slowdown
  clocks_event_reasons_counters_hw_power_brake | HW Power Braking
sparse_operation_mode | Sparse Operation Mode | 535.161-545 | hopper
sparse_operation_mode | Sparse Operation Mode | 550-
fb_memory_usage | FB Memory Usage
  total | Total
  reserved | Reserved | 510-
  used | Used
  free | Free
bar1_memory_usage | BAR1 Memory Usage
  total | Total
  used | Used
  free | Free
cc_protected_memory_usage | Conf Compute Protected Memory Usage | 535-
  total | Total
  used | Used
  free | Free
compute_mode | Compute Mode
utilization | Utilization
  gpu_util | Gpu | -580
  gpu_util | GPU | 590-
  memory_util | Memory
  encoder_util | Encoder
  decoder_util | Decoder
  jpeg_util | JPEG | 535-
  ofa_util | OFA | 535-
encoder_stats | Encoder Stats
  session_count | Active Sessions
  average_fps | Average FPS
  average_latency | Average Latency
fbc_stats | FBC Stats
  session_count | Active Sessions
  average_fps | Average FPS
  average_latency | Average Latency
dram_encryption_mode | DRAM Encryption Mode | 570-
  current_dram_encryption | Current
  pending_dram_encryption | Pending
ecc_mode | ECC Mode
  current_ecc | Current
  pending_ecc | Pending
ecc_errors | ECC Errors
  volatile | Volatile
    single_bit | Single Bit | | bits
      device_memory | Device Memory
      register_file | Register File
      l1_cache | L1 Cache
      l2_cache | L2 Cache
      texture_memory | Texture Memory
      texture_shm | Texture Shared
      cbu | CBU
      total | Total
    double_bit | Double Bit | | bits
      device_memory | Device Memory
      register_file | Register File
      l1_cache | L1 Cache
      l2_cache | L2 Cache
      texture_memory | Texture Memory
      texture_shm | Texture Shared
      cbu | CBU
      total | Total
    sram_correctable | SRAM Correctable | | !bits
    sram_uncorrectable | SRAM Uncorrectable | -535.129 | !bits
    sram_uncorrectable_parity | SRAM Uncorrectable Parity | 535.161- | !bits
    sram_uncorrectable_secded | SRAM Uncorrectable SEC-DED | 535.161- | !bits
    dram_correctable | DRAM Correctable | | !bits
    dram_uncorrectable | DRAM Uncorrectable | | !bits
  aggregate | Aggregate
    single_bit | Single Bit | | bits
      device_memory | Device Memory
      register_file | Register File
      l1_cache | L1 Cache
      l2_cache | L2 Cache
      texture_memory | Texture Memory
      texture_shm | Texture Shared
      cbu | CBU
      total | Total
    double_bit | Double Bit | | bits
      device_memory | Device Memory
      register_file | Register File
      l1_cache | L1 Cache
      l2_cache | L2 Cache
      texture_memory | Texture Memory
      texture_shm | Texture Shared
      cbu | CBU
      total | Total
    sram_correctable | SRAM Correctable | | !bits
    sram_uncorrectable | SRAM Uncorrectable | -535.129 | !bits
    sram_uncorrectable_parity | SRAM Uncorrectable Parity | 535.161- | !bits
    sram_uncorrectable_secded | SRAM Uncorrectable SEC-DED | 535.161- | !bits
    dram_correctable | DRAM Correctable | | !bits
    dram_uncorrectable | DRAM Uncorrectable | | !bits
    sram_threshold_exceeded | SRAM Threshold Exceeded | 535.161- | !bits
  aggregate_uncorrectable_sram_sources | Aggregate Uncorrectable SRAM Sources | 535.161- | !bits
    sram_l2 | SRAM L2
    sram_sm | SRAM SM
    sram_microcontroller | SRAM Microcontroller
    sram_pcie | SRAM PCIE
    sram_other | SRAM Other
  channel_repair_pending | Channel Repair Pending | 580- | !bits
  tpc_repair_pending | TPC Repair Pending | 580- | !bits
  unrepairable_memory | Unrepairable Memory | 590- | !bits
retired_pages | Retired Pages
  multiple_single_bit_retirement | -
    retired_count | -
    retired_pagelist | -
  double_bit_retirement | -
    retired_count | -
    retired_pagelist | -
  - | Single Bit ECC
  - | Double Bit ECC
  pending_blacklist | Pending Page Blacklist
  pending_retirement | -
remapped_rows | Remapped Rows | | !remapper
remapped_rows | Remapped Rows | | remapper
  remapped_row_corr | Correctable Error
  remapped_row_corr_inactive | Inactive Correctable Error | 595-
  remapped_row_unc | Uncorrectable Error
  remapped_row_unc_inactive | Inactive Uncorrectable Error | 595-
  remapped_row_pending | Pending
  remapped_row_failure | Remapping Failure Occurred
  row_remapper_histogram | Bank Remap Availability Histogram
    row_remapper_histogram_max | Max
    row_remapper_histogram_high | High
    row_remapper_histogram_partial | Partial
    row_remapper_histogram_low | Low
    row_remapper_histogram_none | None
temperature | Temperature
  gpu_temp | GPU Current Temp
  gpu_temp_tlimit | GPU T.Limit Temp | 525-
  gpu_temp_max_threshold | GPU Shutdown Temp | | !tlimit
  gpu_temp_slow_threshold | GPU Slowdown Temp | | !tlimit
  gpu_temp_max_gpu_threshold | GPU Max Operating Temp | | !tlimit
  gpu_temp_max_tlimit_threshold | GPU Shutdown T.Limit Temp | | tlimit
  gpu_temp_slow_tlimit_threshold | GPU Slowdown T.Limit Temp | | tlimit
  gpu_temp_max_gpu_tlimit_threshold | GPU Max Operating T.Limit Temp | | tlimit
  gpu_target_temperature | GPU Target Temperature
  memory_temp | Memory Current Temp
  gpu_temp_max_mem_threshold | Memory Max Operating Temp | | !tlimit
  gpu_temp_max_mem_tlimit_threshold | Memory Max Operating T.Limit Temp | | tlimit
supported_gpu_target_temp | -
  gpu_target_temp_min | -
  gpu_target_temp_max | -
power_readings | Power Readings | -530
  power_state | -
  power_management | Power Management
  power_draw | Power Draw
  power_limit | Power Limit
  default_power_limit | Default Power Limit
  enforced_power_limit | Enforced Power Limit
  min_power_limit | Min Power Limit
  max_power_limit | Max Power Limit
gpu_power_readings | GPU Power Readings | 535-
  power_state | -
  power_draw | Power Draw | -565
  average_power_draw | Average Power Draw | 570-
  instant_power_draw | Instantaneous Power Draw | 570-
  current_power_limit | Current Power Limit
  requested_power_limit | Requested Power Limit
  default_power_limit | Default Power Limit
  min_power_limit | Min Power Limit
  max_power_limit | Max Power Limit
gpu_memory_power_readings | GPU Memory Power Readings@ | 550-
  power_draw | Power Draw | -565
  average_power_draw | Average Power Draw | 570-
  instant_power_draw | Instantaneous Power Draw | 570-
module_power_readings | Module Power Readings | 535-
  power_state | -
  power_draw | Power Draw | -565
  average_power_draw | Average Power Draw | 570-
  instant_power_draw | Instantaneous Power Draw | 570-
  current_power_limit | Current Power Limit
  requested_power_limit | Requested Power Limit
  default_power_limit | Default Power Limit
  min_power_limit | Min Power Limit
  max_power_limit | Max Power Limit
power_smoothing | Power Smoothing | 570-
power_profiles | Workload Power Profiles | 570-
  power_profile_requested_profiles | Requested Profiles
  power_profile_enforced_profiles | Enforced Profiles
edpp_multiplier | EDPp Multiplier | 590-
clocks | Clocks
  graphics_clock | Graphics
  sm_clock | SM
  mem_clock | Memory
  video_clock | Video
applications_clocks | Applications Clocks
  graphics_clock | Graphics
  mem_clock | Memory
default_applications_clocks | Default Applications Clocks
  graphics_clock | Graphics
  mem_clock | Memory
deferred_clocks | Deferred Clocks | 525-
  mem_clock | Memory
max_clocks | Max Clocks
  graphics_clock | Graphics
  sm_clock | SM
  mem_clock | Memory
  video_clock | Video
max_customer_boost_clocks | Max Customer Boost Clocks
  graphics_clock | Graphics
clock_policy | Clock Policy
  auto_boost | Auto Boost
  auto_boost_default | Auto Boost Default
voltage | Voltage | -580
  graphics_volt | Graphics
fabric | Fabric | 525-
  state | State
  status | Status
  cliqueId | CliqueId | 550-
  clusterUuid | ClusterUUID | 550-
  health | Health | 550-
    summary | Summary | 590-
    bandwidth | Bandwidth
    route_recovery_in_progress | Route Recovery in progress | 570-
    route_unhealthy | Route Unhealthy | 570-
    access_timeout_recovery | Access Timeout Recovery | 570-
    incorrect_configuration | Incorrect Configuration | 590-
    partition_assigned | Partition Assigned | 595-
supported_clocks | -
processes | Processes
accounted_processes | -
capabilities | Capabilities | 560-
  egm | EGM
"""


class LayoutRow(NamedTuple):
    """One line of the layout with the lines below it."""

    tag: str
    label: str
    versions: str
    condition: str
    below: list[LayoutRow]


def rows(version: str, traits: frozenset[str]) -> list[LayoutRow]:
    """Return the rows that this driver version prints for a GPU with these traits, in order."""
    return _chosen(_ROWS, numbers(version), traits)


def _chosen(candidates: list[LayoutRow], version: tuple[int, ...], traits: frozenset[str]) -> list[LayoutRow]:
    chosen = []
    for row in candidates:
        trait = row.condition.lstrip("!")
        fits = not trait or (trait in traits) != row.condition.startswith("!")
        if fits and in_range(row.versions, version):
            chosen.append(row._replace(below=_chosen(row.below, version, traits)))
    return chosen


def _parsed(text: str) -> list[LayoutRow]:
    top: list[LayoutRow] = []
    open_rows = [top]
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        cells = [cell.strip() for cell in line.split("|")]
        tag, label, versions, condition = [*cells, "", ""][:4]
        row = LayoutRow(tag, label, versions, condition, [])
        del open_rows[depth + 1 :]
        open_rows[depth].append(row)
        open_rows.append(row.below)
    return top


_ROWS = _parsed(LAYOUT)
