"""``gpunode profile`` with a real PyTorch on the processor: the planted cause is the one that is printed.

GPUNODE_TORCH_PYTHON names a Python with PyTorch, see test_payload_torch.py.
"""

import json
import os
from pathlib import Path

import pytest

from gpunode.cli import run

PYTHON = os.environ.get("GPUNODE_TORCH_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="GPUNODE_TORCH_PYTHON names no Python with PyTorch")
TRAINING = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
class Samples(Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, number):
        time.sleep(float(sys.argv[1]))
        return torch.ones(8), number % 4
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for samples, labels in DataLoader(Samples(), 8, num_workers=int(sys.argv[2])):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(samples), labels).backward()
    optimizer.step()
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(("workers", "cause"), [(0, "the main process waits for samples"), (1, "1 worker wait")])
def test_a_sleep_in_each_sample_is_named(
    workers: int, cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = [str(PYTHON), str(tmp_path / "train.py"), "0.02", str(workers), "3"]
    options = ["--tool", "torch", "--warmup", "3", "--steps", "6", "--output", str(tmp_path / "profile")]
    assert run(["profile", *options, "--format", "json", "--", *words]) == 1
    report = json.loads(capfd.readouterr().out)
    (row,) = [row for row in report["patterns"] if row["pattern"] == "data loading"]
    assert (report["exit_code"], report["steps"], row["status"]) == (3, 6, "look")
    assert row["cause"].startswith(cause)
    assert Path(report["trace"]).is_file()
    assert not (tmp_path / "profile" / "sitecustomize.py").exists()
