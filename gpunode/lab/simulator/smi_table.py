"""Plain ``nvidia-smi``: the table for people, and ``-L``."""

from __future__ import annotations

import time

from .gpu import Gpu
from .layout import numbers
from .node import Node
from .values import ecc_counts, memory, power_w, temperature_c

NEWER_PROCESS_COLUMNS = 575


class Widths:
    """Column widths: 545 and later have wider tables than 535, which are wider than those before."""

    def __init__(self, branch: int) -> None:
        self.left, self.middle, self.right = (41, 24, 22) if branch >= 545 else (41, 22, 22)
        if branch < 530:
            self.left = 31
        self.total = self.left + self.middle + self.right + 2


def table(node: Node, gpus: list[Gpu]) -> str:
    """The table with the processes below it."""
    branch = numbers(node.driver)[0]
    wide = Widths(branch)
    rule = f"+{'-' * wide.left}+{'-' * wide.middle}+{'-' * wide.right}+"
    lines = [time.strftime("%a %b %e %H:%M:%S %Y").ljust(31), f"+{'-' * wide.total}+", _head(node, wide)]
    lines.append(rule if branch >= NEWER_PROCESS_COLUMNS else "|" + rule[1:])
    lines += _titles(wide, branch)
    lines.append(f"|{'=' * wide.left}+{'=' * wide.middle}+{'=' * wide.right}|")
    for gpu in gpus:
        lines += [*_gpu(gpu, wide), rule]
    if any(gpu.mig for gpu in gpus):
        lines += ["", *_mig(wide)]
    return "\n".join([*lines, "", *_processes(gpus, wide, branch)]) + "\n"


def listing(gpus: list[Gpu]) -> str:
    """``nvidia-smi -L``."""
    lines = []
    for gpu in gpus:
        if gpu.lost:
            lines.append(lost_message(gpu))
        else:
            lines.append(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
    return "\n".join(lines) + "\n"


def lost_message(gpu: Gpu) -> str:
    """What nvidia-smi says where it cannot get at a GPU that has fallen off the bus."""
    return (
        f"Unable to determine the device handle for GPU{gpu.index}: {gpu.bus_id[4:]}: GPU is lost.  "
        "Reboot the system to recover this GPU"
    )


def _head(node: Node, wide: Widths) -> str:
    if wide.left == 31:
        text = f" NVIDIA-SMI {node.driver.ljust(12)} Driver Version: {node.driver.ljust(12)} CUDA Version: {node.cuda}"
    else:
        text = f" NVIDIA-SMI {node.driver.ljust(21)} Driver Version: {node.driver.ljust(14)} CUDA Version: {node.cuda}"
        if wide.middle == 24:
            text = text.replace(" CUDA Version", "  CUDA Version").replace(" Driver", "  Driver", 1)
            text = (
                f" NVIDIA-SMI {node.driver.ljust(22)}Driver Version: {node.driver.ljust(15)}CUDA Version: {node.cuda}"
            )
    return f"|{text.ljust(wide.total)}|"


def _titles(wide: Widths, branch: int) -> list[str]:
    if wide.left == 31:
        left = (" GPU  Name        Persistence-M", " Fan  Temp  Perf  Pwr:Usage/Cap", "")
    else:
        left = (" GPU  Name                 Persistence-M ", " Fan  Temp   Perf          Pwr:Usage/Cap ", "")
    middle = (" Bus-Id", "Memory-Usage ", "")
    right = (" Volatile Uncorr. ECC ", " GPU-Util  Compute M. ", "               MIG M. ")
    lines = []
    for number in range(3 if branch >= 450 else 2):
        text = middle[number]
        centre = f"{text}{'Disp.A '.rjust(wide.middle - len(text))}" if number == 0 else text.rjust(wide.middle)
        lines.append(f"|{left[number].ljust(wide.left)}|{centre}|{right[number]}|")
    return lines


def _gpu(gpu: Gpu, wide: Widths) -> list[str]:
    mode = "On " if gpu.persistence else "Off"
    frame = memory(gpu)
    usage = (
        f"{frame['used']}MiB / {str(frame['total']).rjust(6)}MiB"
        if wide.middle == 24
        else (f"{frame['used']}MiB / {frame['total']}MiB")
    )
    ecc = (
        "On"
        if gpu.mig
        else str(ecc_counts(gpu)["volatile/dram_uncorrectable"])
        if gpu.ecc
        else ("Off" if gpu.has_ecc else "N/A")
    )
    power = f"{power_w(gpu):.0f}W / {gpu.power_limit_w:4.0f}W"
    temperature, state = f"{temperature_c(gpu)}C", "P0" if gpu.busy else str(gpu.get("idle_pstate", "P0"))
    load = "N/A" if gpu.mig else "100%" if gpu.busy else "0%"
    fan = "N/A"
    mig = "N/A"
    if gpu.can_mig:
        mig = ("Enabled" if gpu.mig_pending else "Disabled") + ("*" if gpu.mig_pending != gpu.mig else "")
    compute = {"Default": "Default", "Exclusive_Process": "E. Process", "Prohibited": "Prohibited"}[gpu.compute_mode]
    if gpu.lost:
        fan = temperature = state = ecc = load = "ERR!"
        power, usage, compute = "ERR! /  ERR!", "GPU is lost", "ERR!"
    name = gpu.name if len(gpu.name) <= 25 else gpu.name[:22] + "..."
    if wide.left == 31:
        short = gpu.name if len(gpu.name) <= 18 else gpu.name[:15] + "..."
        first = f" {gpu.index:3}  {short.ljust(20)}{mode} "
        second = f"{fan:>4}  {temperature:>4}  {state:>4} {power:>14}"
    else:
        first = (
            f" {gpu.index:3}  {name.ljust(31)}{mode}  "
            if wide.middle == 24
            else f" {gpu.index:3}  {name.ljust(31)}{mode}  "
        )
        second = f" {fan:<4}{temperature:>6} {state:>5}{power:>23} "
    bus = f" {gpu.bus_id} Off " if wide.middle == 22 else f"   {gpu.bus_id} Off "
    return [
        f"|{first[: wide.left].ljust(wide.left)}|{bus}|{ecc.rjust(wide.right - 1)} |",
        f"|{second[: wide.left].ljust(wide.left)}|{usage.rjust(wide.middle - 1)} |{load.rjust(8)} {compute.rjust(12)} |",
        f"|{' ' * wide.left}|{' ' * wide.middle}|{mig.rjust(wide.right - 1)} |",
    ]


def _mig(wide: Widths) -> list[str]:
    return [
        f"+{'-' * wide.total}+",
        f"| MIG devices:{' ' * (wide.total - 13)}|",
        f"|{'=' * wide.total}|",
        f"|  No MIG devices found{' ' * (wide.total - 22)}|",
        f"+{'-' * wide.total}+",
    ]


def _processes(gpus: list[Gpu], wide: Widths, branch: int) -> list[str]:
    newer = branch >= NEWER_PROCESS_COLUMNS
    title = (
        "  GPU   GI   CI              PID   Type   Process name"
        if newer
        else ("  GPU   GI   CI        PID   Type   Process name")
    )
    lines = [
        f"+{'-' * wide.total}+",
        f"| Processes:{' ' * (wide.total - 11)}|",
        f"|{title}{'GPU Memory '.rjust(wide.total - len(title))}|",
        f"|{'        ID   ID'}{'Usage      '.rjust(wide.total - 15)}|",
        f"|{'=' * wide.total}|",
    ]
    found = [(gpu, entry) for gpu in gpus for entry in gpu.processes]
    for gpu, entry in found:
        pid, kind = str(entry["pid"]).rjust(16 if newer else 10), entry.get("type", "C")
        start = f"  {gpu.index:3}   N/A  N/A{pid}      {kind}   "
        used = f"{entry.get('memory_mib', 0)}MiB ".rjust(14)
        name = str(entry.get("name", ""))[: wide.total - len(start) - len(used)]
        lines.append(f"|{start}{name.ljust(wide.total - len(start) - len(used))}{used}|")
    if not found:
        lines.append(f"|  No running processes found{' ' * (wide.total - 28)}|")
    return [*lines, f"+{'-' * wide.total}+"]
