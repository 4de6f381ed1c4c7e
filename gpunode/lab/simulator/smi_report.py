"""``nvidia-smi -q``: as text, complete or with ``-d``, and as XML."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape  # xml.sax loads an HTTP client, a third of this tool's run time

from . import smi_mig
from .layout import LayoutRow, rows
from .node import NodeSnapshot, SimulatedGpu, numbers
from .readings import application_clocks, maximum_clocks
from .values import values

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


def text_document(node: NodeSnapshot, gpus: list[SimulatedGpu], sections: list[str] | None = None) -> str:
    """Return the complete log; with ``sections`` (names of ``-d``) only these blocks."""
    width = label_width(node)
    lines = [
        "",
        "==============NVSMI LOG==============",
        "",
        _text_line("Timestamp", time.strftime("%a %b %e %H:%M:%S %Y"), 0, width),
        _text_line("Driver Version", node.driver, 0, width),
        _text_line("CUDA Version", node.cuda, 0, width),
        "",
        _text_line("Attached GPUs", str(len(node.gpus)), 0, width),
    ]
    selected = [tag for section in sections or () for tag in SECTIONS[section]]
    for gpu in gpus:
        layout = rows(node.driver, gpu.traits)
        if sections is not None:
            layout = [row for row in layout if row.tag in selected]
        lines.append(f"GPU {gpu.bus_id}")
        lines += _TextWriter(gpu, width, values(gpu)).block(layout, "", 1)
        if sections and "SUPPORTED_CLOCKS" in sections:
            lines += _text_supported_clocks(gpu, width)
        lines.append("")
    return "\n".join(lines) + "\n"


def label_width(node: NodeSnapshot) -> int:
    """Return the column of the colon."""
    return 55 if numbers(node.driver)[0] >= 590 else 42


def _text_line(label: str, value: str, depth: int, width: int) -> str:
    return f"{'    ' * depth}{label}".ljust(width) + f": {value}"


class _TextWriter:
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
                lines += _text_mig_devices(self.gpu, self.width)
            if row.label == "-":
                continue
            where = path + (row.label if row.tag == "-" else row.tag)
            # In the layout a > indents a line by one step, and an @ is a blank at a label's end.
            deeper = depth + 1 if row.label.startswith(">") else depth
            label = row.label.replace("@", " ").lstrip(">")
            if where == "processes":
                lines += _text_processes(self.gpu, self.width)
            elif row.below:
                lines.append(f"{'    ' * depth}{label}")
                lines += self.block(row.below, where + "/", depth + 1)
            else:
                value = self.texts.get(where, "N/A")
                if where in HEXADECIMAL and value != "N/A":
                    value = f"0x{value}"
                lines.append(_text_line(label, value, deeper, self.width))
        return lines


def _text_mig_devices(gpu: SimulatedGpu, width: int) -> list[str]:
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
            _text_line("Index", str(index), 2, width),
            _text_line("GPU Instance ID", str(instance["id"]), 2, width),
            _text_line("Compute Instance ID", "0", 2, width),
            "        Device Attributes",
            "            Shared",
            *(_text_line(f"{name} count", str(count), 4, width) for name, count in counts.items()),
            "        ECC Errors",
            "            Volatile",
            _text_line("SRAM Uncorrectable", "0", 4, width),
            "        Shared FB Memory Usage",
            *(
                _text_line(name, f"{size} MiB", 3, width)
                for name, size in {"Total": total, "Reserved": 0, "Used": 0, "Free": total}.items()
            ),
        ]
    return lines


def _text_processes(gpu: SimulatedGpu, width: int) -> list[str]:
    if not gpu.processes:
        return [_text_line("Processes", "None", 1, width)]
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
            lines.append(_text_line(label, str(value), depth, 42))
    return lines


def _text_supported_clocks(gpu: SimulatedGpu, width: int) -> list[str]:
    memory, _ = application_clocks(gpu, default=True)
    clocks = range(maximum_clocks(gpu)["sm"], 209, -15)
    return [
        "    Supported Clocks",
        _text_line("Memory", f"{memory} MHz", 2, width),
        *(_text_line("Graphics", f"{clock} MHz", 3, width) for clock in clocks),
    ]


DTD = ((590, "v13"), (525, "v12"), (0, "v11"))


def xml_document(node: NodeSnapshot, gpus: list[SimulatedGpu]) -> str:
    """Return the whole document for these GPUs."""
    branch = numbers(node.driver)[0]
    dtd = next(name for first, name in DTD if branch >= first)
    lines = [
        '<?xml version="1.0" ?>',
        f'<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_{dtd}.dtd">',
        "<nvidia_smi_log>",
        f"\t<timestamp>{time.strftime('%a %b %e %H:%M:%S %Y')}</timestamp>",
        f"\t<driver_version>{node.driver}</driver_version>",
        f"\t<cuda_version>{node.cuda}</cuda_version>",
        f"\t<attached_gpus>{len(node.gpus)}</attached_gpus>",
    ]
    for gpu in gpus:
        lines.append(f'\t<gpu id="{gpu.bus_id}">')
        lines += _xml_block(gpu, rows(node.driver, gpu.traits), values(gpu), "", 2)
        lines.append("\t</gpu>\n")
    return "\n".join([*lines, "</nvidia_smi_log>\n"])


def _xml_block(gpu: SimulatedGpu, layout: list[LayoutRow], texts: dict[str, str], path: str, depth: int) -> list[str]:
    lines = []
    tabs = "\t" * depth
    for row in layout:
        if row.tag == "-":
            continue
        where = f"{path}{row.tag}"
        special = _SPECIAL.get(where)
        if special:
            lines += [f"{tabs}<{row.tag}>", *(f"{tabs}\t{line}" for line in special(gpu)), f"{tabs}</{row.tag}>"]
        elif row.below:
            lines += [
                f"{tabs}<{row.tag}>",
                *_xml_block(gpu, row.below, texts, where + "/", depth + 1),
                f"{tabs}</{row.tag}>",
            ]
        elif texts.get(where) == "" and row.tag == "retired_pagelist":
            lines += [f"{tabs}<{row.tag}>", f"{tabs}</{row.tag}>"]
        else:
            lines.append(f"{tabs}<{row.tag}>{escape(texts.get(where, 'N/A'), quote=False)}</{row.tag}>")
    return lines


def _xml_mig_devices(gpu: SimulatedGpu) -> list[str]:
    lines = []
    for index, (instance, profile) in enumerate(smi_mig.devices(gpu)):
        total = int(profile.gib * 1024)
        lines += [
            "<mig_device>",
            f"\t<index>{index}</index>",
            f"\t<gpu_instance_id>{instance['id']}</gpu_instance_id>",
            "\t<compute_instance_id>0</compute_instance_id>",
            "\t<device_attributes>",
            "\t\t<shared>",
            f"\t\t\t<multiprocessor_count>{profile.sms}</multiprocessor_count>",
            f"\t\t\t<copy_engine_count>{profile.ce}</copy_engine_count>",
            "\t\t\t<encoder_count>0</encoder_count>",
            f"\t\t\t<decoder_count>{profile.dec}</decoder_count>",
            f"\t\t\t<ofa_count>{profile.ofa}</ofa_count>",
            f"\t\t\t<jpg_count>{profile.jpeg}</jpg_count>",
            "\t\t</shared>",
            "\t</device_attributes>",
            "\t<fb_memory_usage>",
            f"\t\t<total>{total} MiB</total>",
            "\t\t<reserved>0 MiB</reserved>",
            "\t\t<used>0 MiB</used>",
            f"\t\t<free>{total} MiB</free>",
            "\t</fb_memory_usage>",
            "</mig_device>",
        ]
    return lines or ["None"]


def _xml_supported_clocks(gpu: SimulatedGpu) -> list[str]:
    memory, _ = application_clocks(gpu, default=True)
    top = maximum_clocks(gpu)["sm"]
    if not memory or not top:
        return ["N/A"]
    clocks = [f"\t<supported_graphics_clock>{clock} MHz</supported_graphics_clock>" for clock in range(top, 209, -15)]
    return ["<supported_mem_clock>", f"\t<value>{memory} MHz</value>", *clocks, "</supported_mem_clock>"]


def _xml_processes(gpu: SimulatedGpu) -> list[str]:
    lines = []
    for entry in gpu.processes:
        lines += [
            "<process_info>",
            "\t<gpu_instance_id>N/A</gpu_instance_id>",
            "\t<compute_instance_id>N/A</compute_instance_id>",
            f"\t<pid>{entry['pid']}</pid>",
            f"\t<type>{entry.get('type', 'C')}</type>",
            f"\t<process_name>{escape(str(entry.get('name', '')), quote=False)}</process_name>",
            f"\t<used_memory>{entry.get('memory_mib', 0)} MiB</used_memory>",
            "</process_info>",
        ]
    return lines


_SPECIAL: dict[str, Callable[[SimulatedGpu], list[str]]] = {
    "mig_devices": _xml_mig_devices,
    "supported_clocks": _xml_supported_clocks,
    "processes": _xml_processes,
    "accounted_processes": lambda _gpu: [],
}
