"""The one-file gpunode, copied to nodes that have Python and nothing else of it: Debian 12 and 13."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
CONCERNS = ("gpunode/cli/zipapp", "gpunode/zipapp_main", "gpunode/probe/", "gpunode/onnode/probe")

PYTHONS = {"debian-12": "3.11", "debian-13": "3.13"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for the Pythons of both systems."""
    out = tmp_path_factory.mktemp("zipapp") / "gpunode.pyz"
    words = [word for version in PYTHONS.values() for word in ("--python", version)]
    argv = [sys.executable, "-m", "gpunode", "zipapp", str(out), *words]
    done = run_program(argv, limit_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(params=PYTHONS)
def node(request: pytest.FixtureRequest, lab: Lab, archive: Path) -> LabNode:
    """A node with the archive in /tmp."""
    node = next(node for node in lab.up(1, request.param) if node.os == request.param)
    config = str(lab.inventory_path.parent / "ssh_config")
    copy = ["scp", "-q", "-F", config, str(archive), f"{node.name}:/tmp/gpunode.pyz"]
    subprocess.run(copy, check=True, timeout=120, stdin=subprocess.DEVNULL)
    return node


def verdicts(stdout: str) -> dict[str, str]:
    """Check to status of the only node in a report."""
    (judged,) = json.loads(stdout)["nodes"]
    assert judged["simulated"] is True
    return {finding["check"]: finding["status"] for finding in judged["findings"]}


def test_root_gets_the_verdict_that_ssh_gives(lab: Lab, node: LabNode) -> None:
    local = node.ssh(["sudo", "-n", "/tmp/gpunode.pyz", "validate", "--format", "json"], timeout_s=120)
    assert local.stderr == ""
    argv = [sys.executable, "-m", "gpunode", "validate", "-i", str(lab.inventory_path), "--limit", node.name]
    remote = run_program([*argv, "--format", "json"], limit_s=120)
    assert verdicts(local.stdout) == verdicts(remote.stdout)
    assert local.returncode == remote.returncode


def test_a_user_sees_less_and_the_report_states_it(node: LabNode) -> None:
    done = node.ssh(["/tmp/gpunode.pyz", "validate", "--format", "json"], timeout_s=120)
    status = verdicts(done.stdout)
    assert status["node.reachable"] == "pass"
    assert status["gpu.present"] == "error"
    assert done.returncode in (1, 3)
