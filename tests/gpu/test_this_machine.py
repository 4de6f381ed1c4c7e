"""gpunode on the GPUs of this machine, as a user runs it there: what it reports is what nvidia-smi reports.

It ran on a simulated GPU of a lab node; on a real one it never ran."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import beside_python, run_program

DRIVER = Path("/proc/driver/nvidia/version")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not DRIVER.exists(), reason="no NVIDIA driver is loaded on this machine"),
]
QUERY = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """UUID, name, memory in MiB and driver of each GPU."""
    done = run_program(QUERY, limit_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split(", ") for line in done.stdout.splitlines()]


def answer(*words: str, ends: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The only node in a document that gpunode prints."""
    done = run_program([beside_python("gpunode"), *words, "--format", "json"], limit_s=240)
    assert done.returncode in ends, done.stderr
    (node,) = json.loads(done.stdout)["nodes"]
    assert isinstance(node, dict)
    return node


def test_validate_judges_each_gpu_with_its_driver(rows: list[list[str]]) -> None:
    node = answer("validate", "--level", "quick", ends=(0, 1, 3))
    assert [[gpu["uuid"], gpu["name"]] for gpu in node["gpus"]] == [row[:2] for row in rows]
    assert {node["stack"]["driver"]} == {row[3] for row in rows}
    of_gpus = [finding for finding in node["findings"] if finding["check"].startswith("gpu.")]
    assert [finding for finding in of_gpus if finding["status"] == "error"] == []
    assert {finding["status"] for finding in of_gpus if finding["check"] == "gpu.present"} == {"pass"}


def test_top_samples_each_gpu(rows: list[list[str]]) -> None:
    gpus = answer("top", "--once", "--window", "3")["gpus"]
    memory = [f"{gpu['memory_total_mib']:.0f}" if gpu["memory_total_mib"] else "[N/A]" for gpu in gpus]
    assert [[gpu["uuid"], gpu["name"], mib] for gpu, mib in zip(gpus, memory, strict=True)] == [row[:3] for row in rows]
    assert all(gpu["temperature_c"] > 0 and gpu["verdict"] for gpu in gpus)
