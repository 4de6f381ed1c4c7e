"""Measurements with a real PyTorch on the processor: each gives a record of its shape, and leaves nothing.

GPUNODE_TORCH_PYTHON names a Python with PyTorch, see test_payload_torch.py. Nothing here is a figure of a GPU.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

from payload_programs import NEEDS_TORCH, PYTHON

from gpunode.facts.models.measured import MEASURED, VALUES
from gpunode.facts.models.workload import Record, values_of

pytestmark = NEEDS_TORCH
PARTS = "copy,gemm,nccl,memory,steps,ddp,storage,input,tools,burn"


def test_every_measurement_gives_a_record_of_its_shape(archive: Path, tmp_path: Path) -> None:
    data = archive.parent / "data"
    data.mkdir()
    for number in range(8):
        (data / f"{number}.bin").write_bytes(os.urandom(1 << 16))
    settings = json.dumps({"level": "deep", "storage": str(tmp_path), "data": str(data), "burn_s": 1.0})
    answer = subprocess.run(
        [str(PYTHON), str(archive), "--tests", PARTS, "--settings", settings],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
        env={**os.environ, "TMPDIR": str(archive.parent)},
    )
    *lines, end = [json.loads(line) for line in answer.stdout.splitlines()]
    reported = [line for line in lines if line["record"] == "progress"]
    records = [Record.model_validate(line) for line in lines if line["record"] != "progress"]
    assert end == {"record": "end", "records": len(records)}
    assert len(reported) == 10
    assert {record.record for record in records} == MEASURED
    for record in records:
        assert (record.error, record.undetermined) == (None, None), record
        if record.skipped is None:
            values = values_of(record, VALUES[record.record])
            assert not isinstance(values, str), values
            assert record.device == "cpu"
            assert set(record.values) <= set(type(values).model_fields), record.record
    (read,) = [record for record in records if record.record == "input.pipeline"]
    assert {row["state"] for row in read.values["loaders"]} >= {"hot"}
    assert read.values["advised_workers"] is not None
    assert len(list(data.iterdir())) == 8
    shutil.rmtree(data)
    # Nothing of it stays, neither in the scratch folder nor in the directory that was measured.
    assert list(tmp_path.iterdir()) == []
    assert [path.name for path in archive.parent.iterdir() if path.name != "payload.pyz"] == []
