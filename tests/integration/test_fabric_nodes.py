"""``validate --fabric`` over four nodes in two racks on this machine, 16 ranks over Gloo, and by Slurm and Open MPI.

GPUNODE_TORCH_PYTHON names a Python with PyTorch, of the version of this machine's Python: test_payload_torch.py.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fabric_nodes import FAULTS, SSHD, FabricNodes, named
from fabric_starters import SLURM, mpi_environment, slurm

PYTHON = os.environ.get("GPUNODE_TORCH_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="GPUNODE_TORCH_PYTHON names no Python with PyTorch"),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd: apt-get install openssh-server"),
    pytest.mark.timeout(900),
    pytest.mark.alone,
]
LINKS = ("--ranks", "4", "--links-only", "--minutes", "6")
GONE_S = 60


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabricNodes]:
    with FabricNodes(tmp_path_factory.mktemp("fabric"), str(PYTHON)) as found:
        yield found


def suspects(report: dict[str, Any]) -> dict[str, set[str]]:
    """What is named on each node, without that other nodes have no verdict."""
    found = {node: checks - {"nodes.links"} for node, checks in named(report, "fail", "warn", "error").items()}
    return {node: checks for node, checks in found.items() if checks}


def none_left(nodes: FabricNodes, limit_s: float = GONE_S) -> None:
    """Wait until no process of a run is left on any node."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and nodes.left():
        time.sleep(0.5)
    assert nodes.left() == {}


def test_healthy_nodes_have_no_suspect(nodes: FabricNodes) -> None:
    nodes.shape()
    code, report = nodes.run(*LINKS)
    assert (code, named(report, "fail", "warn", "error")) == (0, {})
    assert {node["host"] for node in report["nodes"]} == set(nodes.names)
    assert report["fabric"]["ranks"] == 16
    none_left(nodes)


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_is_named_and_nothing_else(nodes: FabricNodes, name: str) -> None:
    make, expected, more = FAULTS[name]
    nodes.shape()
    with make(nodes):
        code, report = nodes.run(*LINKS, *more)
    assert suspects(report) == expected
    assert code == 1
    none_left(nodes)


# --- other starters


@pytest.mark.skipif(bool(SLURM), reason=f"no {', '.join(SLURM)}: apt-get install slurmd slurmctld munge")
def test_srun_starts_the_ranks(nodes: FabricNodes) -> None:
    nodes.shape()
    with slurm(nodes, ["node0", "node2"]) as environment:
        words = ("--engine", "slurm", "--backend", "gloo", "--ranks", "2", "--limit", "node0,node2")
        code, report = nodes.run(*words, *LINKS[2:], **environment)
        assert (code, named(report, "fail", "warn", "error")) == (0, {})
        assert {node["host"] for node in report["nodes"]} == {"node0", "node2"}
        assert (report["fabric"]["engine"], report["fabric"]["ranks"]) == ("slurm", 4)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
def test_mpirun_starts_the_ranks(nodes: FabricNodes) -> None:
    nodes.shape()
    words = ("--engine", "mpi", "--backend", "gloo", "--ranks", "2", "--rendezvous", nodes.address("node0"))
    code, report = nodes.run(*words, "--limit", "node0,node2", *LINKS[2:], **mpi_environment(nodes))
    assert (code, named(report, "fail", "warn", "error")) == (0, {})
    assert (report["fabric"]["engine"], report["fabric"]["ranks"]) == ("mpi", 4)
    none_left(nodes)
