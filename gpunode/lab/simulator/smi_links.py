"""Links of the GPUs: ``nvidia-smi nvlink --status`` and ``-e``, ``topo -m`` and ``-p2p r``, ``dmon -s t``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

from . import state
from .node import NodeSnapshot, SimulatedGpu
from .readings import fabric, pcie_mb_per_s

COUNTERS = ("Replay Errors", "Recovery Errors", "CRC Errors")
COUNTERS_OF_NVLINK_5 = (
    ("Tx packets", "0"),
    ("Tx bytes", "0"),
    ("Rx packets", "0"),
    ("Rx bytes", "0"),
    ("Malformed packet Errors", "0"),
    ("Buffer overrun Errors", "0"),
    ("Rx Errors", "0"),
    ("Rx remote Errors", "0"),
    ("Rx General Errors", "0"),
    ("Local link integrity Errors", "0"),
    ("Tx discards", "0"),
    ("Link recovery successful events", "0"),
    ("Link recovery failed events", "0"),
    ("Total link recovery events", "0"),
    ("Effective Errors", "0"),
    ("Effective BER", "15e-255"),
    ("Symbol Errors", "0"),
    ("Symbol BER", "15e-255"),
)
IN_MIG = "Nvlink queries are not supported for Devices in MIG mode"
NONE = "Device does not have or support Nvlink"
ALL_INACTIVE = "NVML: Unable to retrieve NVLink information as all links are inActive"


def status(gpus: list[SimulatedGpu]) -> str:
    """Return the output of ``nvlink --status``: the speed of each link, or that it is inactive."""
    return _listing(gpus, _status)


def errors(gpus: list[SimulatedGpu]) -> str:
    """Return the output of ``nvlink -e``: error counters."""
    return _listing(gpus, _errors)


def _listing(gpus: list[SimulatedGpu], of_link: Callable[[SimulatedGpu, int], list[str]]) -> str:
    lines = []
    for gpu in gpus:
        if gpu.lost:
            lines.append(f"Unable to determine the device handle for GPU {gpu.sysfs_id}: GPU is lost")
            continue
        lines.append(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
        if gpu.mig:
            lines.append(IN_MIG)
        elif not gpu.links:
            lines.append(NONE)
        elif all(gpu.link_is_down(link) for link in range(gpu.links)):
            lines.append(ALL_INACTIVE)
        else:
            for link in range(gpu.links):
                lines += [f"\t {line}" for line in of_link(gpu, link)]
    return "\n".join(lines) + "\n"


def _status(gpu: SimulatedGpu, link: int) -> list[str]:
    speed = f"{float(gpu.get('nvlink_speed_gb_per_s', 25)):.3f}".rstrip("0").rstrip(".")
    return [f"Link {link}: " + ("<inactive>" if gpu.link_is_down(link) else f"{speed} GB/s")]


def _errors(gpu: SimulatedGpu, link: int) -> list[str]:
    if gpu.is_since("blackwell"):
        return [f"Link {link}: {name}: {value}" for name, value in COUNTERS_OF_NVLINK_5]
    return [f"Link {link}: {name}: 0" for name in COUNTERS]


LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PEER_LEGEND = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def matrix(node: NodeSnapshot) -> str:
    """Return the output of ``topo -m``: GPUs, NICs, and the CPUs near each GPU."""
    links = renumbered(node)
    nics = [str(nic.get("name")) for nic in node.hardware.get("nics") or []]
    labels = [f"GPU{gpu.index}" for gpu in node.gpus] + [f"NIC{number}" for number in range(len(nics))]
    head = "\t\x1b[4m" + "\t".join([*labels, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"
    lines = [head]
    by_label = {f"GPU{gpu.index}": gpu for gpu in node.gpus}
    for label in labels:
        cells = [" X " if other == label else link(links, label, other) for other in labels]
        row = "\t".join([label, *cells])
        gpu = by_label.get(label)
        if gpu:
            numa = gpu.get("numa_node", 0)
            row += f"\t{affinity(node, gpu)}\t{numa}\t\tN/A"
        else:
            row += "\t\t\t\t"
        lines.append(row.rstrip("\t") if gpu is None else row)
    text = "\n".join(lines) + "\n" + LEGEND
    if nics:
        text += "\nNIC Legend:\n\n" + "".join(f"  NIC{number}: {name}\n" for number, name in enumerate(nics))
    return text + "\n"


def renumbered(node: NodeSnapshot) -> dict[str, dict[str, str]]:
    """Return the description's topology under the names that the tool prints."""
    topology: dict[str, dict[str, str]] = node.hardware.get("topology") or {}
    names = {f"GPU{gpu.number}": f"GPU{gpu.index}" for gpu in node.gpus}
    return {
        names.get(label, label): {names.get(other, other): how for other, how in row.items() if _is_seen(other, names)}
        for label, row in topology.items()
        if _is_seen(label, names)
    }


def _is_seen(label: str, names: dict[str, str]) -> bool:
    return label in names or not label.startswith("GPU")


def link(links: dict[str, dict[str, str]], label: str, other: str) -> str:
    """Return how two elements are linked; the description may list the pair in one order only."""
    return (links.get(label) or {}).get(other) or (links.get(other) or {}).get(label) or "SYS"


def affinity(node: NodeSnapshot, gpu: SimulatedGpu) -> str:
    """Return the CPUs near the GPU: from sysfs, else from the description."""
    described = gpu.get("cpu_affinity")
    if described:
        return str(described)
    file = state.ROOT / f"sys/devices/system/node/node{gpu.get('numa_node', 0)}/cpulist"
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return str((node.hardware.get("cpu") or {}).get("cpulist", "0"))


def peers(node: NodeSnapshot) -> str:
    """Return the output of ``topo -p2p r``: whether one GPU may read another's memory."""
    links = renumbered(node)
    labels = [f"GPU{gpu.index}" for gpu in node.gpus]
    lines = [" \t" + "\t".join(labels)]
    for gpu in node.gpus:
        row = [f" GPU{gpu.index}"]
        for other in node.gpus:
            row.append("X" if other is gpu else _peer(gpu, other, link(links, row[0].strip(), f"GPU{other.index}")))
        lines.append("\t".join(row))
    return "\n".join(lines) + "\n" + PEER_LEGEND


def _peer(gpu: SimulatedGpu, other: SimulatedGpu, how: str) -> str:
    joined = re.fullmatch(r"NV\d+", how) is not None
    if gpu.mig or other.mig:
        return "NS"
    if joined:
        return "NS" if fabric(gpu).get("state") == "In Progress" else "OK"
    if how == "SYS":
        return "CNS" if not gpu.get("peer_access", True) else "OK"
    return "OK" if gpu.get("peer_access", True) else "NS"


HEADER = "# gpu  rxpci  txpci \n# Idx   MB/s   MB/s \n"


class UnsimulatedError(ValueError):
    """Arguments that the simulator does not support."""


def run(argv: list[str], look: Callable[[], NodeSnapshot]) -> int:
    """Print rows until ended, or ``-c`` times; return the exit code."""
    options = dict(zip(argv[::2], argv[1::2]))
    numbers = {key: value for key, value in options.items() if key != "-s"}
    known = set(options) <= {"-s", "-d", "-c"} and options.get("-s") == "t" and len(argv) % 2 == 0
    if not known or not all(value.isdigit() for value in numbers.values()):
        raise UnsimulatedError
    left = int(options["-c"]) if "-c" in options else None
    sys.stdout.write(HEADER)
    while left is None or left > 0:
        for gpu in look().gpus:
            received, sent = pcie_mb_per_s(gpu)
            shown = ("-", "-") if gpu.lost else (str(received), str(sent))
            sys.stdout.write(f"{gpu.index:5d}  {shown[0]:>5}  {shown[1]:>5} \n")
        sys.stdout.flush()
        left = left - 1 if left is not None else None
        if left != 0:
            time.sleep(int(options.get("-d", "1")))
    return 0
