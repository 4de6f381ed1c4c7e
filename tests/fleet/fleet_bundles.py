"""Bundles of many nodes, no two alike: the healthy simulated machines of the checks' own tests, distinguished as real
nodes are."""

import json
import re
import sys
from pathlib import Path

from gpunode.checks import Status
from gpunode.judging.report import worst

# Benchmarks come here without pytest's own path.
sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("contract", "."))

from bundles import Edit, apply, findings, stdout, text
from machines import GRACE, GUEST, HGX, PCIE_2, PCIE_4, T4_1, bundle

MACHINES = (PCIE_2, HGX, PCIE_4, T4_1, GUEST, GRACE)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.261\n"
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def healthy(number: int, host: str) -> str:
    """The bundle of node ``number``: one of ``MACHINES``, with its own name, time, GPU identities and readings."""
    document = bundle(MACHINES[number % len(MACHINES)])
    document["host"] = host
    document["collected_at"] = f"2026-11-20T12:{number // 60 % 60:02d}:{number % 60:02d}Z"
    raw = json.dumps(document)
    gpus = {old: uuid(number, gpu) for gpu, old in enumerate(dict.fromkeys(_UUID.findall(raw)))}
    raw = _UUID.sub(lambda match: gpus[match[0]], raw)
    raw = re.sub(r"<serial>(\d{8})\d*<", lambda match: f"<serial>{match[1]}{number:05d}<", raw)
    raw = re.sub(r"<gpu_temp>\d+ C", f"<gpu_temp>{28 + number % 23} C", raw)
    return re.sub(r"<fan_speed>\d+ %", f"<fan_speed>{20 + number % 11} %", raw)


def gpus(number: int) -> list[str]:
    """The identities of node ``number``'s GPUs in their order."""
    return [uuid(number, gpu) for gpu in range(len(MACHINES[number % len(MACHINES)].gpus))]


def uuid(number: int, gpu: int) -> str:
    """Of one GPU of node ``number``."""
    return f"GPU-{number:08x}-0000-4000-8000-{0xABC000 + gpu:012x}"


def faulty(raw: str) -> str:
    """The same node, which must have driver 535.261.03, after an upgrade to it without a reboot."""
    edits = [
        text("/proc/driver/nvidia/version", "535.261.03", "535.247.01"),
        stdout("nvidia-smi-xml", None, MISMATCH),
        Edit(("commands", "nvidia-smi-xml", "rc"), None, 18),
    ]
    return json.dumps(apply(json.loads(raw), edits))


def verdict(raw: str) -> Status:
    """What the node comes to, without the way over SSH."""
    return worst(finding.status for finding in findings(json.loads(raw)))
