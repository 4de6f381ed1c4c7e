"""Plain ``nvidia-smi``: the table for people, and ``-L``."""

from __future__ import annotations

import time

from . import smi_mig
from .node import NodeSnapshot, SimulatedGpu, numbers
from .readings import ecc_counts, memory, power_w, temperature_c
from .values import LOST

NEWER_PROCESS_COLUMNS = 570
RULE_WITH_CORNER = 575
COMPUTE_MODES = {"Default": "Default", "Exclusive_Process": "E. Process", "Prohibited": "Prohibited"}


class Widths:
    """Column widths: 545 and later have wider tables than 535, which are wider than those before."""

    def __init__(self, branch: int) -> None:
        self.left, self.middle, self.right = (41, 24, 22) if branch >= 545 else (41, 22, 22)
        if branch < 530:
            self.left = 31
        self.total = self.left + self.middle + self.right + 2


def table(node: NodeSnapshot, gpus: list[SimulatedGpu]) -> str:
    """Return the table with the processes below it."""
    branch = numbers(node.driver)[0]
    wide = Widths(branch)
    rule = f"+{'-' * wide.left}+{'-' * wide.middle}+{'-' * wide.right}+"
    lines = [time.strftime("%a %b %e %H:%M:%S %Y").ljust(31), f"+{'-' * wide.total}+", _head(node, wide)]
    lines.append(rule if branch >= RULE_WITH_CORNER else "|" + rule[1:])
    lines += _titles(wide, branch)
    lines.append(f"|{'=' * wide.left}+{'=' * wide.middle}+{'=' * wide.right}|")
    for gpu in gpus:
        lines += [*_gpu(gpu, wide), rule]
    if any(gpu.mig for gpu in gpus):
        lines += ["", *_mig(gpus, wide)]
    return "\n".join([*lines, "", *_processes(gpus, wide, branch)]) + "\n"


def listing(gpus: list[SimulatedGpu]) -> str:
    """Return the output of ``nvidia-smi -L``."""
    lines = []
    for gpu in gpus:
        if gpu.lost:
            lines.append(lost_message(gpu))
        else:
            lines.append(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
            for index, (instance, profile) in enumerate(smi_mig.devices(gpu)):
                name = f"MIG {profile.name}".ljust(16)
                lines.append(f"  {name}Device {index:2}: (UUID: {smi_mig.uuid(gpu, instance)})")
    return "\n".join(lines) + "\n"


def lost_message(gpu: SimulatedGpu) -> str:
    """Return nvidia-smi's message for a GPU that has fallen off the bus."""
    return (
        f"Unable to determine the device handle for GPU{gpu.index}: {gpu.bus_id[4:]}: GPU is lost.  "
        "Reboot the system to recover this GPU"
    )


def _head(node: NodeSnapshot, wide: Widths) -> str:
    first = 13 if wide.left == 31 else 23
    second = 15 if wide.middle == 24 else 13
    text = f" NVIDIA-SMI {node.driver.ljust(first)}Driver Version: {node.driver.ljust(second)}CUDA Version: {node.cuda}"
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


def _gpu(gpu: SimulatedGpu, wide: Widths) -> list[str]:
    cells = _cells(gpu)
    fill = 4 if wide.middle == 24 else 0
    power = f"{cells['power']} / {cells['limit'].rjust(fill + 1 if fill else 0)}"
    usage = f"{cells['used']} / {cells['total'].rjust(9 if fill else 0)}"
    if gpu.lost:
        usage = LOST
    if wide.left == 31:
        first = f" {gpu.index:3}  {_short(gpu.name, 18).ljust(20)}{cells['persistence']} "
        second = (
            f"{cells['fan'].rjust(4)}  {cells['temperature'].rjust(4)}  {cells['state'].rjust(4)} {power.rjust(13)}"
        )
    else:
        first = f" {gpu.index:3}  {_short(gpu.name, 25).ljust(31)}{cells['persistence']} "
        second = f" {cells['fan'].ljust(3)}{cells['temperature'].rjust(6)}{cells['state'].rjust(6)}{power.rjust(24)} "
    bus = f"{' ' * (wide.middle - 21)}{gpu.bus_id} Off "
    compute = f"{cells['load'].rjust(8)} {cells['compute'].rjust(12)} "
    return [
        f"|{first.ljust(wide.left)}|{bus}|{cells['ecc'].rjust(wide.right - 1)} |",
        f"|{second.ljust(wide.left)}|{usage.rjust(wide.middle - 1)} |{compute}|",
        f"|{' ' * wide.left}|{' ' * wide.middle}|{cells['mig'].rjust(wide.right - 1)} |",
    ]


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."


def _cells(gpu: SimulatedGpu) -> dict[str, str]:
    frame = memory(gpu)
    errors = str(ecc_counts(gpu)["volatile/dram_uncorrectable"]) if gpu.ecc else "Off" if gpu.has_ecc else "N/A"
    mig = "N/A"
    if gpu.can_mig:
        mig = ("Enabled" if gpu.mig_pending else "Disabled") + ("*" if gpu.mig_pending != gpu.mig else "")
    cells = {
        "persistence": "On " if gpu.persistence else "Off",
        "fan": "N/A",
        "temperature": f"{temperature_c(gpu)}C",
        "state": "P0" if gpu.busy else str(gpu.get("idle_pstate", "P0")),
        "power": f"{power_w(gpu):.0f}W",
        "limit": f"{gpu.power_limit_w:.0f}W",
        "used": f"{frame['used']}MiB",
        "total": f"{frame['total']}MiB",
        "ecc": "On" if gpu.mig else errors,
        "load": "N/A" if gpu.mig else "100%" if gpu.busy else "0%",
        "compute": COMPUTE_MODES[gpu.compute_mode],
        "mig": mig,
    }
    unknown = ("fan", "temperature", "state", "power", "limit", "ecc", "load", "compute")
    return {**cells, **dict.fromkeys(unknown, "ERR!")} if gpu.lost else cells


def _mig(gpus: list[SimulatedGpu], wide: Widths) -> list[str]:
    middle = wide.total - 55
    newer = wide.middle == 24
    usage = ("Shared Memory-Usage", "Shared BAR1-Usage") if newer else ("Memory-Usage", "BAR1-Usage")
    engines = (
        (" CE ENC  DEC  OFA  JPG ", "        Shared         ")
        if newer
        else (
            " CE ENC DEC OFA JPG    ",
            "      Shared           ",
        )
    )
    return [
        f"+{'-' * wide.total}+",
        f"| MIG devices:{' ' * (wide.total - 13)}|",
        f"+------------------+{'-' * middle}+-----------+-----------------------+",
        f"| GPU  GI  CI  MIG |{usage[0].rjust(middle - 1)} |        Vol|{engines[1]}|",
        f"|      ID  ID  Dev |{usage[1].rjust(middle - 1)} | SM     Unc|{engines[0]}|",
        f"|                  |{' ' * middle}|        ECC|                       |",
        f"|==================+{'=' * middle}+===========+=======================|",
        *(_mig_rows(gpus, middle) or [f"|  No MIG devices found{' ' * (wide.total - 22)}|", f"+{'-' * wide.total}+"]),
    ]


def _mig_rows(gpus: list[SimulatedGpu], middle: int) -> list[str]:
    lines = []
    for gpu in gpus:
        for index, (instance, profile) in enumerate(smi_mig.devices(gpu)):
            usage = f"0MiB / {int(profile.gib * 1024):5}MiB    ".rjust(middle)
            engines = f" {profile.ce:2}   0 {profile.dec:4} {profile.ofa:4} {profile.jpeg:4} "
            lines += [
                f"|{gpu.index:3} {instance['id']:4}   0 {index:3}  |{usage}|{profile.sms:3}      0 |{engines}|",
                f"|                  |{' ' * middle}|           |                       |",
                f"+------------------+{'-' * middle}+-----------+-----------------------+",
            ]
    return lines


def _processes(gpus: list[SimulatedGpu], wide: Widths, branch: int) -> list[str]:
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
    processes = [(gpu, entry) for gpu in gpus for entry in gpu.processes]
    for gpu, entry in processes:
        pid, kind = str(entry["pid"]).rjust(16 if newer else 10), entry.get("type", "C")
        start = f"  {gpu.index:3}   N/A  N/A{pid}      {kind}   "
        used = f"{entry.get('memory_mib', 0)}MiB ".rjust(14)
        name = str(entry.get("name", ""))[: wide.total - len(start) - len(used)]
        lines.append(f"|{start}{name.ljust(wide.total - len(start) - len(used))}{used}|")
    if not processes:
        lines.append(f"|  No running processes found{' ' * (wide.total - 28)}|")
    return [*lines, f"+{'-' * wide.total}+"]
