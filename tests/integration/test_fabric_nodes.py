"""``validate --fabric`` over four nodes in two racks on this machine, 16 ranks over Gloo: faults, ends, other starters.

Each run takes a minute on two processors: with GPUNODE_TEST_ALL=1 all faults and ends, else those of ``CORE``.
GPUNODE_TORCH_PYTHON names a Python with PyTorch, of the version of this machine's Python: test_payload_torch.py.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import EVERYTHING
from fabric_nodes import FAULTS, SSHD, FabricNodes, hanging_rank, named
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
CORE_ENDS = ("SIGKILL of the controller",)
CORE = ("two: slow NIC (node0), slow GPU (node3, rank 2)",)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabricNodes]:
    words = ("unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "true")
    if subprocess.run(words, capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no mount namespace here")
    with FabricNodes(tmp_path_factory.mktemp("fabric"), str(PYTHON)) as started:
        yield started


def suspects(report: dict[str, Any]) -> dict[str, set[str]]:
    """What is named on each node, without that other nodes have no verdict."""
    by_node = {node: checks - {"nodes.links"} for node, checks in named(report, "fail", "warn", "error").items()}
    return {node: checks for node, checks in by_node.items() if checks}


def none_left(nodes: FabricNodes, limit_s: float = GONE_S) -> bool:
    """Whether no process of a run is left on any node within the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and nodes.left():
        time.sleep(0.5)
    assert nodes.left() == {}
    return True


def test_healthy_nodes_pass_everything(nodes: FabricNodes) -> None:
    nodes.shape()
    code, report = nodes.run("--ranks", "2", "--minutes", "10")
    assert (code, named(report, "fail", "warn", "error")) == (0, {})
    assert {node["host"] for node in report["nodes"]} == set(nodes.names)
    assert {row["name"] for row in report["fabric"]["collectives"]} >= {"all-reduce", "all-to-all", "send-recv"}
    assert report["fabric"]["ranks"] == 8
    assert none_left(nodes)


def test_a_rank_that_hangs_is_named_long_before_the_limit(nodes: FabricNodes) -> None:
    nodes.shape()
    began = time.monotonic()
    with hanging_rank(nodes, "node1", 2, 1.0):
        code, report = nodes.run(*LINKS)
    # Of the six minutes: its rendezvous, the limit of a rank, the end of its node, and a busy machine.
    assert time.monotonic() - began < 200
    assert (code, suspects(report)) == (1, {"node1": {"nodes.stopped"}})
    assert none_left(nodes)


@pytest.mark.parametrize("name", list(FAULTS) if EVERYTHING else CORE)
def test_each_fault_is_named_and_nothing_else(nodes: FabricNodes, name: str) -> None:
    make, expected, more = FAULTS[name]
    nodes.shape()
    with make(nodes):
        code, report = nodes.run(*LINKS, *more)
    assert suspects(report) == expected
    assert code == 1
    assert none_left(nodes)


# --- ends


def started(nodes: FabricNodes) -> "subprocess.Popen[str]":
    """A run with all its ranks."""
    nodes.shape()
    run = subprocess.Popen(
        nodes.command("--format", "json", *LINKS),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=nodes.environment,
        start_new_session=True,
    )
    end = time.monotonic() + 200
    while time.monotonic() < end and not all(nodes.ranks(name) for name in nodes.names):
        assert run.poll() is None
        time.sleep(0.2)
    assert all(nodes.ranks(name) for name in nodes.names)
    return run


def controller_ends(nodes: FabricNodes, number: signal.Signals) -> None:
    run = started(nodes)
    try:
        os.killpg(run.pid, number)
        run.wait(60)
    finally:
        run.kill()


def rank_is_killed(nodes: FabricNodes) -> None:
    run = started(nodes)
    os.kill(nodes.ranks("node2")[1], signal.SIGKILL)
    out, _ = run.communicate(timeout=400)
    assert suspects(json.loads(out)).get("node2") is not None
    assert "rank 9" in out


def node_is_lost(nodes: FabricNodes) -> None:
    run = started(nodes)
    nodes.nodes["node3"].end()
    try:
        out, _ = run.communicate(timeout=600)
    finally:
        nodes.start("node3")
    assert "node3" in suspects(json.loads(out))
    assert run.returncode in (1, 3)


def time_is_over(nodes: FabricNodes, minutes: float, hanging: contextlib.AbstractContextManager[None]) -> None:
    with hanging:
        code, report = nodes.run("--ranks", "4", "--minutes", f"{minutes:g}")
    assert code in (1, 3)
    assert named(report, "fail", "error")


def time_is_over_in_exchanges(nodes: FabricNodes) -> None:
    nodes.shape(**dict.fromkeys(nodes.names, "5mbit"))
    try:
        time_is_over(nodes, 0.5, contextlib.nullcontext())
    finally:
        nodes.shape()


ENDS: dict[str, Callable[[FabricNodes], None]] = {
    "SIGKILL of the controller": lambda nodes: controller_ends(nodes, signal.SIGKILL),
    "SIGINT of the controller": lambda nodes: controller_ends(nodes, signal.SIGINT),
    "SIGTERM of the controller": lambda nodes: controller_ends(nodes, signal.SIGTERM),
    "SIGHUP of the controller": lambda nodes: controller_ends(nodes, signal.SIGHUP),
    "SIGKILL of a rank": rank_is_killed,
    "loss of a node": node_is_lost,
    "time limit before the ranks meet": lambda nodes: time_is_over(nodes, 0.5, hanging_rank(nodes, "node0", 0, None)),
    "time limit while a rank hangs": lambda nodes: time_is_over(nodes, 0.5, hanging_rank(nodes, "node0", 0, 0.0)),
    "time limit in the exchanges": time_is_over_in_exchanges,
    "time limit in the collectives": lambda nodes: time_is_over(nodes, 0.8, contextlib.nullcontext()),
}


@pytest.mark.parametrize("name", list(ENDS) if EVERYTHING else CORE_ENDS)
def test_nothing_is_left_after_an_end(nodes: FabricNodes, name: str) -> None:
    ENDS[name](nodes)
    assert none_left(nodes)


# --- other starters


@pytest.mark.skipif(bool(SLURM), reason=f"no {', '.join(SLURM)}: apt-get install slurmd slurmctld munge")
def test_srun_starts_the_ranks(nodes: FabricNodes) -> None:
    nodes.shape()
    with slurm(nodes, ["node0", "node2"]) as environment:
        words = ("--engine", "slurm", "--backend", "gloo", "--ranks", "2", "--limit", "node0,node2")
        code, report = nodes.run(*words, *LINKS[2:], more=environment)
        assert (code, named(report, "fail", "warn", "error")) == (0, {})
        assert {node["host"] for node in report["nodes"]} == {"node0", "node2"}
        assert (report["fabric"]["engine"], report["fabric"]["ranks"]) == ("slurm", 4)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
def test_mpirun_starts_the_ranks(nodes: FabricNodes) -> None:
    nodes.shape()
    words = ("--engine", "mpi", "--backend", "gloo", "--ranks", "2", "--rendezvous", nodes.address("node0"))
    code, report = nodes.run(*words, "--limit", "node0,node2", *LINKS[2:], more=mpi_environment(nodes))
    assert (code, named(report, "fail", "warn", "error")) == (0, {})
    assert (report["fabric"]["engine"], report["fabric"]["ranks"]) == ("mpi", 4)
    assert none_left(nodes)
