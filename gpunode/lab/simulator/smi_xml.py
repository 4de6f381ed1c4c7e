"""``nvidia-smi -q -x``."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape  # xml.sax loads an HTTP client, a third of this tool's run time

from . import smi_mig
from .layout import LayoutRow, rows
from .node import NodeSnapshot, SimulatedGpu
from .readings import application_clocks, maximum_clocks
from .values import values
from .versions import numbers

DTD = ((590, "v13"), (525, "v12"), (0, "v11"))


def document(node: NodeSnapshot, gpus: list[SimulatedGpu]) -> str:
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
        lines += _block(gpu, rows(node.driver, gpu.traits), values(gpu), "", 2)
        lines.append("\t</gpu>\n")
    return "\n".join([*lines, "</nvidia_smi_log>\n"])


def _block(gpu: SimulatedGpu, layout: list[LayoutRow], texts: dict[str, str], path: str, depth: int) -> list[str]:
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
                *_block(gpu, row.below, texts, where + "/", depth + 1),
                f"{tabs}</{row.tag}>",
            ]
        elif texts.get(where) == "" and row.tag == "retired_pagelist":
            lines += [f"{tabs}<{row.tag}>", f"{tabs}</{row.tag}>"]
        else:
            lines.append(f"{tabs}<{row.tag}>{escape(texts.get(where, 'N/A'), quote=False)}</{row.tag}>")
    return lines


def _mig_devices(gpu: SimulatedGpu) -> list[str]:
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


def _supported_clocks(gpu: SimulatedGpu) -> list[str]:
    memory, _ = application_clocks(gpu, default=True)
    top = maximum_clocks(gpu)["sm"]
    if not memory or not top:
        return ["N/A"]
    clocks = [f"\t<supported_graphics_clock>{clock} MHz</supported_graphics_clock>" for clock in range(top, 209, -15)]
    return ["<supported_mem_clock>", f"\t<value>{memory} MHz</value>", *clocks, "</supported_mem_clock>"]


def _processes(gpu: SimulatedGpu) -> list[str]:
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
    "mig_devices": _mig_devices,
    "supported_clocks": _supported_clocks,
    "processes": _processes,
    "accounted_processes": lambda _gpu: [],
}
