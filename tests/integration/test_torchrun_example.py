"""The example that the role ml_environment deploys: DDP over two nodes under torchrun, each rank through gpunode-run.

Both nodes are this machine; the backend is Gloo. GPUNODE_TORCH_PYTHON names a Python with PyTorch.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpunode.fleet.process import kill_tree
from gpunode.onnode import program_text
from gpunode.provisioning.ml_environment import LAUNCHER
from gpunode.provisioning.templates import rendered

PYTHON = os.environ.get("GPUNODE_TORCH_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="GPUNODE_TORCH_PYTHON names no Python with PyTorch"),
    pytest.mark.timeout(400),
]
NODES, RANKS = 2, 2
TRAINING = """\
import json, os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Linear(64, 8)
inputs, labels = torch.randn(size * 16, 64), torch.randint(0, 8, (size * 16,))
loss = torch.nn.functional.cross_entropy(model(inputs), labels)
expected = torch.autograd.grad(loss, list(model.parameters()))
network = torch.nn.parallel.DistributedDataParallel(model)
own = slice(rank * 16, rank * 16 + 16)
torch.nn.functional.cross_entropy(network(inputs[own]), labels[own]).backward()
error = max(float((p.grad - e).abs().max()) for p, e in zip(network.parameters(), expected))
found = {"rank": rank, "size": size, "local": int(os.environ["LOCAL_RANK"]), "error": error,
    "threads": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0)), "omp": os.environ["OMP_NUM_THREADS"]}
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


def test_ddp_runs_over_two_nodes_under_torchrun(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    launcher, example, training = tmp_path / "gpunode-run", tmp_path / "torchrun.sh", tmp_path / "train.py"
    launcher.write_text(f"#!{sys.executable} -I\n{program_text('launcher')}")
    text = rendered("ml_environment", "torchrun.sh.j2", launcher=LAUNCHER)
    example.write_text(text.replace(LAUNCHER, str(launcher)).replace(":29500", f":{port}"))
    training.write_text(TRAINING)
    for path in (launcher, example):
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{Path(str(PYTHON)).parent}:{os.environ['PATH']}",
        "GPUS": str(RANKS),
        "NNODES": str(NODES),
        "HEAD": "127.0.0.1",
    }
    argv = [str(example), str(PYTHON), str(training), str(tmp_path)]
    nodes = [
        subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for _ in range(NODES)
    ]
    try:
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                kill_tree(node)
    assert [node.returncode for node in nodes] == [0] * NODES, outputs
    rows = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NODES * RANKS)]
    assert [(row["rank"], row["size"]) for row in rows] == [(rank, NODES * RANKS) for rank in range(NODES * RANKS)]
    assert sorted(row["local"] for row in rows) == [0, 0, 1, 1]
    assert max(row["error"] for row in rows) < 1e-6
    # gpunode-run gave each rank its share of the cores, and one thread for each.
    cores = len(os.sched_getaffinity(0))
    assert {row["cores"] for row in rows} == {max(1, cores // RANKS)}
    assert all(row["threads"] == int(row["omp"]) <= row["cores"] for row in rows)
