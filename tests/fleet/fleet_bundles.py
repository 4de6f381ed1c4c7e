"""Bundles of many nodes, no two alike: one healthy simulated node, told apart as real nodes are."""

import json
import re
import sys
from pathlib import Path

from gpunode.checks import Status
from gpunode.report.model import worst

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from bundles import SLOTS, Edit, apply, findings, stdout, text, with_two_gpus

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.261\n"


def healthy(number: int, host: str) -> str:
    """The bundle of node ``number``: its own name, time, GPUs (uuid, serial, place on the bus) and readings."""
    document = with_two_gpus()
    document["host"] = host
    document["collected_at"] = f"2026-11-20T12:{number // 60 % 60:02d}:{number % 60:02d}Z"
    raw = json.dumps(document)
    for gpu, slot in reversed(list(enumerate(SLOTS))):
        old, new = slot[5:7], f"{0x10 + 0x60 * gpu + number % 0x50:02x}"
        for before, after in ((old, new), (old.upper(), new.upper())):
            raw = raw.replace(f"{before}:00.0", f"{after}:00.0").replace(f"<pci_bus>{before}<", f"<pci_bus>{after}<")
        raw = raw.replace(f"GPU-00000000-0000-4000-8000-{gpu:012x}", uuid(number, gpu))
        raw = raw.replace(f"{1650000000000 + gpu}", f"{1651000000000 + 16 * number + gpu}")
    raw = re.sub(r"<gpu_temp>\d+ C", f"<gpu_temp>{28 + number % 23} C", raw)
    return re.sub(r"<gpu_util>\d+ %", f"<gpu_util>{number % 5} %", raw)


def uuid(number: int, gpu: int) -> str:
    """Of one GPU of node ``number``."""
    return f"GPU-{number:08x}-0000-4000-8000-{0xABC000 + gpu:012x}"


def faulty(bundle: str) -> str:
    """The same node, after an upgrade of the driver without a reboot."""
    edits = [
        text("/proc/driver/nvidia/version", "535.261.03", "535.247.01"),
        stdout("nvidia-smi-xml", None, MISMATCH),
        Edit(("commands", "nvidia-smi-xml", "rc"), None, 18),
    ]
    return json.dumps(apply(json.loads(bundle), edits))


def verdict(bundle: str) -> Status:
    """What the node comes to, without the way over SSH."""
    return worst(finding.status for finding in findings(json.loads(bundle)))
