"""``nvidia-smi -q`` as text, complete or with ``-d``."""

from __future__ import annotations

import time

from . import smi_mig
from .layout import LayoutRow, rows
from .node import NodeSnapshot, SimulatedGpu
from .readings import application_clocks, maximum_clocks
from .values import values
from .versions import numbers

# Blocks of the layout that -d SECTION prints.
SECTIONS = {
    "MEMORY": ("fb_memory_usage", "bar1_memory_usage", "cc_protected_memory_usage"),
    "UTILIZATION": ("utilization",),
    "ECC": ("ecc_mode", "ecc_errors"),
    "TEMPERATURE": ("temperature",),
    "POWER": ("power_readings", "gpu_power_readings", "gpu_memory_power_readings", "module_power_readings"),
    "CLOCK": (
        "clocks", "applications_clocks", "default_applications_clocks", "deferred_clocks", "max_clocks",
        "max_customer_boost_clocks", "clock_policy",
    ),
    "COMPUTE": ("compute_mode",),
    "PIDS": ("processes",),
    "PERFORMANCE": (
        "performance_state", "clocks_throttle_reasons", "clocks_event_reasons", "clocks_event_reasons_counters",
        "sparse_operation_mode",
    ),
    "SUPPORTED_CLOCKS": ("supported_clocks",),
    "PAGE_RETIREMENT": ("retired_pages",),
    "ACCOUNTING": ("accounting_mode", "accounting_mode_buffer_size"),
    "ENCODER_STATS": ("encoder_stats",),
    "FBC_STATS": ("fbc_stats",),
    "SUPPORTED_GPU_TARGET_TEMP": ("supported_gpu_target_temp",),
    "VOLTAGE": ("voltage",),
    "ROW_REMAPPER": ("remapped_rows",),
    "RESET_STATUS": ("gpu_reset_status", "gpu_recovery_action"),
    "GSP_FIRMWARE_VERSION": ("gsp_firmware_version",),
}  # fmt: skip
HEXADECIMAL = frozenset(
    f"pci/pci_{part}" for part in ("bus", "device", "domain", "base_class", "sub_class", "device_id", "sub_system_id")
)


def document(node: NodeSnapshot, gpus: list[SimulatedGpu], sections: list[str] | None = None) -> str:
    """Return the complete log; with ``sections`` (names of ``-d``) only these blocks."""
    width = label_width(node)
    lines = [
        "",
        "==============NVSMI LOG==============",
        "",
        _line("Timestamp", time.strftime("%a %b %e %H:%M:%S %Y"), 0, width),
        _line("Driver Version", node.driver, 0, width),
        _line("CUDA Version", node.cuda, 0, width),
        "",
        _line("Attached GPUs", str(len(node.gpus)), 0, width),
    ]
    selected = [tag for section in sections or () for tag in SECTIONS[section]]
    for gpu in gpus:
        layout = rows(node.driver, gpu.traits)
        if sections is not None:
            layout = [row for row in layout if row.tag in selected]
        lines.append(f"GPU {gpu.bus_id}")
        lines += _Writer(gpu, width, values(gpu)).block(layout, "", 1)
        if sections and "SUPPORTED_CLOCKS" in sections:
            lines += _supported_clocks(gpu, width)
        lines.append("")
    return "\n".join(lines) + "\n"


def label_width(node: NodeSnapshot) -> int:
    """Return the column of the colon."""
    return 55 if numbers(node.driver)[0] >= 590 else 42


def _line(label: str, value: str, depth: int, width: int) -> str:
    return f"{'    ' * depth}{label}".ljust(width) + f": {value}"


class _Writer:
    """Writer of one GPU's lines."""

    def __init__(self, gpu: SimulatedGpu, width: int, texts: dict[str, str]) -> None:
        self.gpu = gpu
        self.width = width
        self.texts = texts

    def block(self, layout: list[LayoutRow], path: str, depth: int) -> list[str]:
        """Return the rows of one level, each followed by the rows below it."""
        lines = []
        for row in layout:
            if row.tag == "mig_devices":
                lines += _mig_devices(self.gpu, self.width)
            if row.label == "-":
                continue
            where = path + (row.label if row.tag == "-" else row.tag)
            # In the layout a > indents a line by one step, and an @ is a blank at a label's end.
            deeper = depth + 1 if row.label.startswith(">") else depth
            label = row.label.replace("@", " ").lstrip(">")
            if where == "processes":
                lines += _processes(self.gpu, self.width)
            elif row.below:
                lines.append(f"{'    ' * depth}{label}")
                lines += self.block(row.below, where + "/", depth + 1)
            else:
                value = self.texts.get(where, "N/A")
                if where in HEXADECIMAL and value != "N/A":
                    value = f"0x{value}"
                lines.append(_line(label, value, deeper, self.width))
        return lines


def _mig_devices(gpu: SimulatedGpu, width: int) -> list[str]:
    lines = []
    for index, (instance, profile) in enumerate(smi_mig.devices(gpu)):
        total = int(profile.gib * 1024)
        counts = {
            "Multiprocessor": profile.sms,
            "Copy Engine": profile.ce,
            "Encoder": 0,
            "Decoder": profile.dec,
            "OFA": profile.ofa,
            "JPG": profile.jpeg,
        }
        lines += [
            "    MIG Device",
            _line("Index", str(index), 2, width),
            _line("GPU Instance ID", str(instance["id"]), 2, width),
            _line("Compute Instance ID", "0", 2, width),
            "        Device Attributes",
            "            Shared",
            *(_line(f"{name} count", str(count), 4, width) for name, count in counts.items()),
            "        ECC Errors",
            "            Volatile",
            _line("SRAM Uncorrectable", "0", 4, width),
            "        Shared FB Memory Usage",
            *(
                _line(name, f"{size} MiB", 3, width)
                for name, size in {"Total": total, "Reserved": 0, "Used": 0, "Free": total}.items()
            ),
        ]
    return lines


def _processes(gpu: SimulatedGpu, width: int) -> list[str]:
    if not gpu.processes:
        return [_line("Processes", "None", 1, width)]
    lines = ["    Processes"]
    for entry in gpu.processes:
        for label, value, depth in (
            ("GPU instance ID", "N/A", 2),
            ("Compute instance ID", "N/A", 2),
            ("Process ID", entry["pid"], 2),
            ("Type", entry.get("type", "C"), 3),
            ("Name", entry.get("name", ""), 3),
            ("Used GPU Memory", f"{entry.get('memory_mib', 0)} MiB", 3),
        ):
            lines.append(_line(label, str(value), depth, 42))
    return lines


def _supported_clocks(gpu: SimulatedGpu, width: int) -> list[str]:
    memory, _ = application_clocks(gpu, default=True)
    clocks = range(maximum_clocks(gpu)["sm"], 209, -15)
    return [
        "    Supported Clocks",
        _line("Memory", f"{memory} MHz", 2, width),
        *(_line("Graphics", f"{clock} MHz", 3, width) for clock in clocks),
    ]
