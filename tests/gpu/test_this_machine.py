"""gpunode on the GPUs of this machine, as a user runs it there: what it reports is what nvidia-smi reports."""

import json
from typing import Any

import pytest
from programs import beside_python, run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
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
    statuses = {finding["check"]: finding["status"] for finding in node["findings"]}
    assert statuses["gpu.present"] == "pass"
    assert [name for name, status in statuses.items() if name.startswith("gpu.") and status == "error"] == []


def test_top_samples_each_gpu(rows: list[list[str]]) -> None:
    gpus = answer("top", "--once", "--window", "3")["gpus"]
    assert [[gpu["uuid"], gpu["name"], f"{gpu['memory_total_mib']:.0f}"] for gpu in gpus] == [row[:3] for row in rows]
    assert all(gpu["temperature_c"] > 0 and gpu["verdict"] for gpu in gpus)
