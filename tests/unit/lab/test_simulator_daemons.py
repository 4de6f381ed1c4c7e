"""Simulated daemons: what they need, what they set, how they end; run as processes of their own."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import forked
import pytest
from programs import runs
from simulated import write
from simulated_node import DRIVER, SimulatedNode, node  # noqa: F401

from gpunode.facts.parsers.kinds import parsed
from gpunode.lab.simulator import daemons, state
from gpunode.lab.simulator.entry_points import TOOLS
from gpunode.lab.simulator.node import NodeSnapshot

LIMIT_S = 30
CONFIG = "DAEMONIZE=1\nLOG_FILE_NAME=/var/log/fabricmanager.log\n# a remark\nFABRIC_MODE=0\n"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(name="run")
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a tool of the simulator on the node below the folder; daemons that it leaves are ended."""
    monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", DRIVER)
    monkeypatch.setenv("GPUNODE_LAB_ROOT", str(tmp_path))

    def run(tool: str, *words: str, version: str = DRIVER) -> "subprocess.CompletedProcess[str]":
        monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", version)
        module, _, function = TOOLS[tool].partition(":")
        program = getattr(import_module(f"gpunode.lab.simulator.{module}"), function or "main")
        out, err = tmp_path / "out", tmp_path / "err"
        for stream in (out, err):
            stream.write_text("", encoding="utf-8")
        code = forked.run(list(words), stdout=out, stderr=err, limit_s=LIMIT_S, program=program)
        return subprocess.CompletedProcess(words, code, *(stream.read_text(encoding="utf-8") for stream in (out, err)))

    yield run
    running: dict[str, Any] = json.loads((tmp_path / "run/gpunode-lab/state.json").read_text(encoding="utf-8"))
    for name in ("persistenced", "fabric_manager", "nvlsm", "host_engine"):
        if running.get(name):
            os.kill(running[name], signal.SIGKILL)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    limit = time.monotonic() + LIMIT_S
    while runs(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not runs(pid)


def test_persistenced_keeps_persistence_mode_while_it_runs(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("l40s-4")
    assert run("nvidia-persistenced", "--user", "root", "--verbose").returncode == 0
    pid = int((node.root / "var/run/nvidia-persistenced/nvidia-persistenced.pid").read_text(encoding="ascii"))
    assert state.running()["persistenced"] == pid
    assert node.cells("persistence_mode", 3) == ["Enabled"]
    assert run("nvidia-persistenced", "--user", "root").returncode == 1
    end(pid)
    assert node.cells("persistence_mode", 3) == ["Disabled"]
    assert not (node.root / "var/run/nvidia-persistenced/nvidia-persistenced.pid").exists()


def test_persistenced_without_a_module_or_its_user(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("l40s-4")
    assert "Failed to find user ID" in run("nvidia-persistenced", "--user", "nobody-of-that-name").stderr
    node.running(module=None)
    answer = run("nvidia-persistenced", "--user", "root")
    assert answer.returncode == 1
    assert "Failed to query NVIDIA devices" in answer.stderr


def test_fabric_manager_completes_the_fabric(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("hgx-h100-8", fabric=False)
    write(node.root, "x", 0)
    config = node.root / "usr/share/nvidia/nvswitch/fabricmanager.cfg"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG, encoding="utf-8")
    assert node.cells("fabric.state") == ["In Progress"]
    assert "NS" in node.ask("topo", "-p2p", "r").splitlines()[1]
    answer = run("nv-fabricmanager", "-c", "/usr/share/nvidia/nvswitch/fabricmanager.cfg", "-p", "/run/fm.pid")
    assert answer.returncode == 0, answer.stderr
    assert node.cells("fabric.state,fabric.status") == ["Completed", "Success"]
    assert "NS" not in node.ask("topo", "-p2p", "r").splitlines()[1]
    assert "Successfully configured" in (node.root / "var/log/fabricmanager.log").read_text(encoding="utf-8")
    end(int((node.root / "run/fm.pid").read_text(encoding="ascii")))
    assert state.running()["fabric_manager"] is None


@pytest.mark.parametrize(
    ("hardware", "release", "running", "words"),
    [
        (
            "hgx-h100-8",
            "580.178.04",
            {},
            f"interface version 580.178.04 don't match with driver version {DRIVER}. Please update",
        ),
        ("hgx-h100-8", DRIVER, {"module": None}, "NVIDIA kernel module is not loaded"),
        ("l40s-4", DRIVER, {}, "NV_WARN_NOTHING_TO_DO"),
        ("hgx-b200-8", DRIVER, {}, "NV_WARN_NOTHING_TO_DO"),
        ("hgx-b200-8", DRIVER, {"nvlsm": os.getpid()}, None),
        ("hgx-h100-8", DRIVER, {}, None),
        ("dgx-a100-8", DRIVER, {}, None),
    ],
)
def test_fabric_manager_refuses(
    node: SimulatedNode,  # noqa: F811
    hardware: str,
    release: str,
    running: dict[str, Any],
    words: str | None,
) -> None:
    node.lay(hardware)
    node.running(**running)
    refusal = daemons.refusal(NodeSnapshot(), release)
    assert refusal is None if words is None else words in (refusal or "")


def test_a_refusal_is_exit_code_1_and_in_the_log(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("hgx-h100-8", fabric=False)
    config = node.root / "fm.cfg"
    config.write_text(CONFIG, encoding="utf-8")
    answer = run("nv-fabricmanager", "-c", "/fm.cfg", version="580.178.04")
    assert answer.returncode == 1
    assert "don't match with driver version" in answer.stderr
    assert "don't match" in (node.root / "var/log/fabricmanager.log").read_text(encoding="utf-8")
    assert node.cells("fabric.state") == ["In Progress"]
    assert run("nv-fabricmanager", "-c", "/nowhere.cfg").returncode == 1
    assert run("nv-fabricmanager", "--version").stdout == f"Fabric Manager version is : {DRIVER}\n"


def test_the_subnet_manager_needs_its_modules(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("hgx-b200-8")
    answer = run("nvlsm", "--guid", "0x0", "--pid_file", "/run/nvlsm.pid", "-B")
    assert answer.returncode == 1
    assert "ib_umad" in answer.stderr
    node.running(modules=["ib_umad", "mlx5_core", "nvidia"])
    assert run("nvlsm", "--guid", "0x0", "--pid_file", "/run/nvlsm.pid", "-B").returncode == 0
    assert daemons.refusal(NodeSnapshot(), DRIVER) is None
    end(state.running()["nvlsm"])


def test_dcgmi_asks_the_host_engine(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    assert run("dcgmi", "discovery", "-l").returncode == 1
    assert run("nv-hostengine", version="4.4.1").returncode == 0
    assert "8 GPUs found." in run("dcgmi", "discovery", "-l").stdout
    node.ask("-pm", "1")
    answer = run("dcgmi", "diag", "-r", "1", "-j", version="4.4.1")
    diagnosis = parsed("dcgm-diag", answer.stdout)
    assert (answer.returncode, diagnosis["overall"], diagnosis["dcgm_version"]) == (0, "pass", "4.4.1")
    assert diagnosis["driver_version"] == DRIVER
    node.fault("remap-pending", "gpu3")
    answer = run("dcgmi", "diag", "-r", "1", "-j", version="4.4.1")
    diagnosis = parsed("dcgm-diag", answer.stdout)
    assert answer.returncode != 0
    assert [gpu["gpu"] for gpu in diagnosis["tests"][0]["gpus"] if gpu["status"] == "fail"] == [3]
    assert run("dcgmi", "diag", "-r", "3", "-j").returncode == 1
    assert run("dcgmi", "diag", "-r", "1").returncode == 1
    assert run("nv-hostengine", "-t").returncode == 0


def test_imex_needs_the_drivers_version(node: SimulatedNode, run: Run) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    write(node.root, "etc/nvidia-imex/config.cfg", "")
    answer = run("nvidia-imex", "-c", "/etc/nvidia-imex/config.cfg", version="570.211.01")
    assert answer.returncode == 1
    assert "570.211.01" in answer.stderr
