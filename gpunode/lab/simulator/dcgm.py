"""DCGM 4: ``dcgmi`` with its discovery and the JSON of the level 1 diagnosis, and its daemon ``nv-hostengine``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from . import daemons, state
from .node import NodeSnapshot, SimulatedGpu, package_release
from .readings import ecc_counts, remapped

NO_ENGINE = (
    "Error: unable to establish a connection to the specified host: localhost\n"
    "Error: Unable to connect to host engine. Host engine connection invalid/disconnected.\n"
)
FAILED, FAILED_DIAGNOSIS = 1, 226


def dcgmi(argv: list[str]) -> int:
    """Run dcgmi with these arguments; return its exit code."""
    if argv[:1] in (["-v"], ["--version"]):
        return _print(f"Version : {package_release() or 'unknown'}\nBuild Type : Release\n")
    node = NodeSnapshot()
    if not daemons.is_running(node.running.get("host_engine")):
        sys.stdout.write(NO_ENGINE)
        return FAILED
    if argv[:2] in (["discovery", "-l"], ["discovery", "--list"]):
        return _print(discovery(node))
    if argv[:1] == ["diag"]:
        return _diagnosis(node, argv[1:])
    sys.stderr.write(f"PARSE ERROR: Argument: {' '.join(argv)}\n             Couldn't find match for argument\n")
    return FAILED


def _print(text: str) -> int:
    sys.stdout.write(text)
    return 0


def discovery(node: NodeSnapshot) -> str:
    """Return the output of ``dcgmi discovery -l``: GPUs, and the NVSwitches on the PCI bus."""
    rule = "+--------+----------------------------------------------------------------------+"
    lines = [f"{len(node.gpus)} GPU{'s' if len(node.gpus) != 1 else ''} found.", rule]
    lines += ["| GPU ID | Device Information                                                   |", rule]
    for gpu in node.gpus:
        about = (f"Name: {gpu.name}", f"PCI Bus ID: {gpu.bus_id}", f"Device UUID: {gpu.uuid}")
        for number, text in enumerate(about):
            lines.append(f"| {str(gpu.index).ljust(6) if number == 0 else ' ' * 6} | {text.ljust(68)} |")
        lines.append(rule)
    switches = node.hardware.get("nvswitches") or []
    lines += [f"{len(switches)} NvSwitches found.", "+-----------+", "| Switch ID |", "+-----------+"]
    lines += [f"| {str(number).ljust(9)} |" for number in range(len(switches))]
    return "\n".join([*lines, "+-----------+"]) + "\n"


def _diagnosis(node: NodeSnapshot, argv: list[str]) -> int:
    level = argv[argv.index("-r") + 1] if "-r" in argv[:-1] else None
    if level not in ("1", "short", "software") or not {"-j", "--json"}.intersection(argv):
        sys.stderr.write("dcgmi: a simulated GPU node supports only diag -r 1 -j: no GPU to load (gpunode lab)\n")
        return FAILED
    tests = software(node)
    failed = any(result["status"] == "Fail" for test in tests for result in test["results"])
    document = {
        "DCGM Diagnostic": {
            "test_categories": [{"category": "Deployment", "tests": tests}],
        },
        "entity_groups": [{"entity_group": "GPU", "entity_group_id": 1, "entities": [
            {"entity_id": gpu.index, "device_id": str(gpu.entry["pci_device_id"]).partition(":")[2]}
            for gpu in node.gpus
        ]}],
        "metadata": {"DCGM Version": package_release() or "", "Driver Version Detected": node.driver},
    }  # fmt: skip
    sys.stdout.write(json.dumps(document, indent=4) + "\n")
    return FAILED_DIAGNOSIS if failed else 0


def software(node: NodeSnapshot) -> list[dict[str, Any]]:
    """Return the software test of level 1 in DCGM 4's format: one test, a result for each GPU."""
    results = []
    for gpu in node.gpus:
        problems = [problem for problem in _problems(gpu) if problem]
        result: dict[str, Any] = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu.index}
        result["status"] = "Fail" if problems else "Pass"
        if problems:
            result["warnings"] = [{"warning": text, "error_id": 0} for text in problems]
        results.append(result)
    worst = "Fail" if any(result["status"] == "Fail" for result in results) else "Pass"
    return [{"name": "software", "results": results, "test_summary": {"status": worst}}]


def _problems(gpu: SimulatedGpu) -> list[str]:
    problems = []
    if gpu.lost:
        problems.append(f"GPU {gpu.index} was lost. Reboot the system to recover this GPU.")
    if not gpu.persistence:
        problems.append(
            f"Persistence mode for GPU {gpu.index} is disabled. Enable persistence mode by running nvidia-smi -pm 1."
        )
    if ecc_counts(gpu)["volatile/dram_uncorrectable"]:
        problems.append(
            f"GPU {gpu.index} had uncorrectable memory errors. Drain the GPU and reset it or reboot the node."
        )
    if remapped(gpu)["pending"]:
        problems.append(f"GPU {gpu.index} has a pending row remap. Drain the GPU and reset it or reboot the node.")
    if remapped(gpu)["failure"]:
        problems.append(f"GPU {gpu.index} had uncorrectable row remapping failures. Run a field diagnostic on the GPU.")
    return problems


PID_FILE = "/var/run/nvhostengine.pid"


def host_engine(argv: list[str]) -> int:
    """Start, stop or print the version of the host engine; return its exit code."""
    if "--version" in argv or "-v" in argv:
        sys.stdout.write(f"Version : {package_release() or 'unknown'}\nBuild Type : Release\n")
        return 0
    if "-t" in argv or "--term" in argv:
        return _terminate()
    background = not {"-n", "--no-daemon"}.intersection(argv)
    if daemons.is_running(NodeSnapshot().running.get("host_engine")):
        sys.stderr.write("Host engine already running.\n")
        return 1
    file = argv[argv.index("--pid") + 1] if "--pid" in argv[:-1] else PID_FILE

    def start() -> None:
        _set(os.getpid())

    def stop() -> None:
        _set(None)

    sys.stdout.write("Started host engine version " + (package_release() or "unknown") + " using port number: 5555 \n")
    return (daemons.fork if background else daemons.foreground)(state.path(file), start, stop)


def _terminate() -> int:
    pid = NodeSnapshot().running.get("host_engine")
    if not isinstance(pid, int) or not daemons.is_running(pid):
        sys.stderr.write("Unable to terminate host engine, it may not be running.\n")
        return 1
    os.kill(pid, 15)
    sys.stdout.write("Host engine successfully terminated.\n")
    return 0


def _set(pid: int | None) -> None:
    with state.change() as (_, running):
        running["host_engine"] = pid
