"""The payload with a real PyTorch: on the processor where there is no GPU. GPUNODE_TORCH_PYTHON names its Python.

python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch
GPUNODE_TORCH_PYTHON=/tmp/torch/bin/python pytest tests/integration/test_payload_torch.py
"""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from payload_programs import NEEDS_TORCH, PYTHON

from gpunode.facts.models.workload import (
    CollectiveValues,
    CompileValues,
    ConvolutionValues,
    DataloaderValues,
    MatmulValues,
    Record,
    StepValues,
    TensorValues,
    TorchValues,
    values_of,
)
from gpunode.tuning import payload_settings
from gpunode.workload.payload import payload_zip

# PyTorch takes every processor, and torch.compile has 420 s, which were not enough beside a lab and Molecule.
pytestmark = [NEEDS_TORCH, pytest.mark.alone]


def run(
    archive: Path, tests: str = "versions,gpus,frameworks", shm: str | None = None, python: str | None = PYTHON
) -> dict[str, Record]:
    """All records by name; with ``shm`` under a /dev/shm of that size."""
    command = [str(python), str(archive), "--tests", tests, "--settings", json.dumps(payload_settings())]
    if shm is not None:
        small = f"mount -t tmpfs -o size={shm} tmpfs /dev/shm && exec {shlex.join(command)}"
        command = ["unshare", "--mount", "sh", "-c", small]
    environment = {**os.environ, "TMPDIR": str(archive.parent)}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True, env=environment)
    *lines, end = [json.loads(line) for line in answer.stdout.splitlines()]
    assert end == {"record": "end", "records": len(lines)}
    return {record.record: record for record in map(Record.model_validate, lines)}


@pytest.fixture(scope="module")
def records(archive: Path) -> dict[str, Record]:
    return run(archive)


def read(records: dict[str, Record], name: str, kind: type[Any]) -> Any:
    assert records[name].error is None, records[name].error
    assert records[name].skipped is None, records[name].skipped
    values = values_of(records[name], kind)
    assert isinstance(values, kind), values
    return values


def test_what_runs_is_reported(records: dict[str, Record]) -> None:
    torch: TorchValues = read(records, "versions.torch", TorchValues)
    assert torch.version[0].isdigit()
    assert (torch.cuda is None) == (torch.architectures == ())
    device = "cuda" if torch.available and torch.count else "cpu"
    for part in ("tensor", "amp", "matmul", "cudnn", "dataloader"):
        assert records[f"frameworks.{part}"].device == device


def test_everything_computes_right(records: dict[str, Record]) -> None:
    assert read(records, "frameworks.tensor", TensorValues).max_error == 0
    steps: StepValues = read(records, "frameworks.amp", StepValues)
    losses = [loss for loss in steps.losses if loss is not None]
    assert len(losses) == len(steps.losses)
    assert losses[-1] < losses[0]
    convolution: ConvolutionValues = read(records, "frameworks.cudnn", ConvolutionValues)
    assert math.isfinite(convolution.max_error)
    assert convolution.max_error < 1e-3
    loader: DataloaderValues = read(records, "frameworks.dataloader", DataloaderValues)
    assert loader.batches == 16
    product: MatmulValues = read(records, "frameworks.matmul", MatmulValues)
    assert (product.wrong, product.dtype) == (0, "bfloat16")


def test_processes_reduce_together(records: dict[str, Record]) -> None:
    if records["frameworks.collective"].skipped:
        pytest.skip(str(records["frameworks.collective"].skipped))
    values: CollectiveValues = read(records, "frameworks.collective", CollectiveValues)
    assert (values.ranks >= 2, values.wrong) == (True, 0)
    assert values.backend == ("nccl" if records["frameworks.collective"].device == "cuda" else "gloo")


def test_a_pytorch_that_cannot_be_imported_fails_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True, timeout=60)
    (site,) = tmp_path.glob("v/lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise OSError('libcublas.so.12: cannot open shared object file')")
    archive = tmp_path / "payload.pyz"
    archive.write_bytes(payload_zip())
    records = run(archive, python=str(tmp_path / "v" / "bin" / "python"))
    assert records["versions.torch"].undetermined == (
        "PyTorch cannot be imported: OSError: libcublas.so.12: cannot open shared object file"
    )
    assert {record.error for record in records.values()} == {None}
    assert "versions.torch" in str(records["frameworks.tensor"].skipped)


def test_a_function_is_compiled_where_it_can_be(records: dict[str, Record]) -> None:
    if records["frameworks.compile"].skipped:
        pytest.skip(str(records["frameworks.compile"].skipped))
    values: CompileValues = read(records, "frameworks.compile", CompileValues)
    assert values.max_error < 1e-3
    assert values.cached_seconds is not None
    assert 0 < values.cached_seconds < values.compile_seconds


def test_compilers_leave_nothing_behind(records: dict[str, Record], archive: Path) -> None:
    assert records
    assert [path.name for path in archive.parent.iterdir() if path.name.startswith("gpunode-")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm of its own: needs root")
def test_too_little_shared_memory_is_one_record(archive: Path) -> None:
    records = run(archive, shm="1m")
    assert records["versions.limits"].values["shm_bytes"] == 2**20
    error = records["frameworks.dataloader"].error
    assert error is not None
    assert "No space left on device" in error or "Bus error" in error
    assert {name for name, record in records.items() if record.error is not None} == {"frameworks.dataloader"}
