"""The workload on a node with a simulated GPU, its driver, Docker and the container toolkit: who gets which GPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from gpunode.lab import Lab, LabNode
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import write_workload_image

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
CONCERNS = ("gpunode/workload/", "gpunode/onnode/watchdog", "gpunode/fleet/")

HOOK = "/usr/bin/nvidia-container-runtime-hook"
TOOLKIT = """\
set -e
if command -v nvidia-ctk; then exit 0; fi
apt-get install -qy --no-install-recommends docker.io
echo 'deb [trusted=yes] http://vendor/libnvidia-container/stable/deb/amd64 /' > /etc/apt/sources.list.d/toolkit.list
apt-get update -q
apt-get install -qy nvidia-container-toolkit
nvidia-ctk runtime configure --runtime=docker
systemctl restart docker
"""


@dataclass
class Place:
    """The node, and how it is asked."""

    lab: Lab
    node: LabNode
    folder: Path

    def root(self, script: str, limit_s: float = 120) -> str:
        done = self.node.run(["sh", "-c", script], timeout_s=limit_s, env={"DEBIAN_FRONTEND": "noninteractive"})
        assert done.returncode == 0, f"{script}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def gpunode(self, *argv: str, limit_s: float = 300) -> "subprocess.CompletedProcess[str]":
        return run_program([sys.executable, "-m", "gpunode", *argv], limit_s=limit_s)

    def validate(self, *options: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The finding of ``container.runs``, and the records by name."""
        image = ("--image-file", str(self.folder / "python.tar"))
        where = ("-i", str(self.lab.inventory_path), "--select", "container.runs", "--save", str(self.folder))
        done = self.gpunode("validate", *where, *image, "--format", "json", *options)
        (finding,) = json.loads(done.stdout)["nodes"][0]["findings"]
        bundle = json.loads((self.folder / f"{self.node.name}.json").read_text())
        return finding, {record["record"]: record for record in bundle["results"]}

    @contextmanager
    def fault(self, *words: str) -> Iterator[None]:
        done = self.gpunode("lab", "fault", "--name", self.lab.name, self.node.name, *words)
        assert done.returncode == 0, done.stderr
        try:
            yield
        finally:
            self.gpunode("lab", "fault", "--name", self.lab.name, self.node.name, "--heal")


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    (node,) = lab.up(1, "debian-12", ["t4-1"])
    machine = Place(lab, node, tmp_path_factory.mktemp("workload"))
    write_workload_image(connect(), "python", machine.folder / "python.tar", print)
    done = machine.gpunode("provision", "-i", str(lab.inventory_path), limit_s=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    machine.root(TOOLKIT, limit_s=400)
    yield machine
    assert machine.root("docker ps -aq") == ""


def test_the_container_gets_the_idle_gpu(host: Place) -> None:
    finding, records = host.validate()
    assert finding["status"] == "pass", finding
    record = records["container"]
    assert (record["device"], record["container"]["gpus"], record["values"]["gpus"]) == ("cuda", "runtime", 1)
    assert "/dev/nvidia0" in records["versions.system"]["values"]["devices"]
    assert all(record["simulated"] for record in records.values())


def test_a_busy_gpu_is_skipped_with_process_and_user(host: Place) -> None:
    with host.fault("gpu0", "gpu-busy"):
        finding, records = host.validate()
        assert finding["status"] == "skip", finding
        assert "gpu0: " in finding["message"]
        assert "admin)" in finding["message"]
        assert set(records) == {"container"}
        forced, records = host.validate("--force")
        assert forced["status"] == "pass", forced
        assert records["container"]["values"]["gpus"] == 1


def test_an_engine_that_gives_no_gpus_is_named(host: Place) -> None:
    host.root(f"mv {HOOK} /root/hook && systemctl restart docker")
    try:
        finding, records = host.validate()
    finally:
        host.root(f"mv /root/hook {HOOK} && systemctl restart docker")
    assert finding["status"] == "error"
    assert "does not pass GPUs to containers" in finding["message"]
    assert "role nvidia_container_toolkit" in finding["message"]
    assert records["container"]["values"]["kind"] == "no-gpu-support"


def test_a_driver_that_does_not_answer_starts_nothing(host: Place) -> None:
    with host.fault("library-mismatch"):
        finding, records = host.validate()
        assert finding["status"] == "error"
        assert "nothing was started" in finding["message"]
        assert records["container"]["values"]["kind"] == "unknown"
