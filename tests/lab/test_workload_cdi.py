"""CDI with a real engine that has it (Debian 13, Docker 26): a container gets what it is given, and no more."""

import io
import json
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpunode.fleet import Answer, Node, collect, targets_from_inventory
from gpunode.lab import Lab, LabNode
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import write_workload_image
from gpunode.onnode import program_text
from gpunode.workload.container import ContainerJob, Devices, PythonProgram, run
from gpunode.workload.engine import connected
from gpunode.workload.image import provide, read_image_file
from gpunode.workload.launch import START
from gpunode.workload.output import BoundedOutput
from gpunode.workload.run import NodeTransport
from gpunode.workload.transport import LaunchFailure

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]
CONCERNS = ("gpunode/workload/", "gpunode/onnode/watchdog", "gpunode/fleet/")

# Two devices that the test can distinguish without a GPU: each brings a variable and a file of the host.
SPEC = {
    "cdiVersion": "0.6.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {"name": "0", "containerEdits": {"env": ["GOT_0=yes"], "deviceNodes": [{"path": "/dev/full"}]}},
        {"name": "1", "containerEdits": {"env": ["GOT_1=yes"]}},
        {"name": "all", "containerEdits": {"env": ["GOT_0=yes", "GOT_1=yes"]}},
    ],
}
INSTALL = "apt-get update -q && apt-get install -qy --no-install-recommends docker.io docker-cli"
PAYLOAD = """\
import json, os
status = {line.split(":")[0]: line.split()[1] for line in open("/proc/self/status") if ":" in line and line.split()[1:]}
print(json.dumps({"record": "seen", "got": sorted(name for name in os.environ if name.startswith("GOT_")),
  "visible": os.environ.get("NVIDIA_VISIBLE_DEVICES"), "capabilities": status["CapEff"], "new": status["NoNewPrivs"],
  "socket": os.path.exists("/var/run/docker.sock"), "network": sorted(os.listdir("/sys/class/net")),
  "parent": os.getppid(), "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize}))
print(json.dumps({"record": "end"}))
"""


@dataclass
class Place:
    """The node, its image, and a run on it."""

    lab: Lab
    node: LabNode
    folder: Path

    def root(self, script: str, limit_s: float = 120) -> str:
        done = self.node.run(["sh", "-c", script], timeout_s=limit_s, env={"DEBIAN_FRONTEND": "noninteractive"})
        assert done.returncode == 0, f"{script}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def run(self, devices: Devices) -> dict[str, object]:
        """What the payload saw in a container that was given these devices."""
        trying = Trying(devices, self.folder / "python.tar")
        (collected,) = collect(targets_from_inventory([str(self.lab.inventory_path)]), timeout_s=120, then=trying)
        assert collected.reason is None
        if trying.failure is not None:
            raise trying.failure
        assert collected.answer is not None
        return collected.answer.bundle().results[0]


class Trying:
    """Runs the test's own payload after the probe."""

    limit_s = 200.0

    def __init__(self, devices: Devices, image: Path) -> None:
        self.devices = devices
        self.image = image
        self.failure: LaunchFailure | None = None

    def __call__(self, node: Node, answer: Answer, deadline: float) -> list[dict[str, Any]]:  # noqa: ARG002
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("__main__.py", PAYLOAD)
        watchdog = program_text("watchdog").encode()
        lengths = (str(len(watchdog)), str(len(packed.getvalue())))
        program = PythonProgram(START, (*lengths, "60"), watchdog + packed.getvalue())
        output = BoundedOutput()
        try:
            with connected(NodeTransport(node, deadline), deadline) as engine:
                assert engine.knows_cdi
                image = provide(engine, "python", read_image_file(self.image), lambda _: None)
                run(engine, ContainerJob(image, self.devices, program, 60), output)
                output.judge(60)
        except LaunchFailure as err:
            self.failure = err
        return output.records

    def failed(self, reason: str) -> list[dict[str, Any]]:
        raise AssertionError(reason)


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    (node,) = lab.up(1, "debian-13")
    machine = Place(lab, node, tmp_path_factory.mktemp("workload"))
    write_workload_image(connect(), "python", machine.folder / "python.tar", print)
    machine.root(INSTALL, limit_s=400)
    spec = json.dumps(SPEC).replace("'", "")
    machine.root(f"mkdir -p /etc/cdi && echo '{spec}' > /etc/cdi/nvidia.json")
    machine.root('echo \'{"features": {"cdi": true}}\' > /etc/docker/daemon.json && systemctl restart docker')
    yield machine
    # Over SSH: with containers of its own, a node's cgroup may take no process from the engine (cgroup v2).
    left = node.ssh(["sudo", "docker", "ps", "-aq"])
    assert (left.returncode, left.stdout.strip()) == (0, ""), left.stderr


def test_devices_come_as_the_specification_has_them(host: Place) -> None:
    assert host.run(Devices("cdi"))["got"] == ["GOT_0", "GOT_1"]
    assert host.run(Devices("cdi", ("1",)))["got"] == ["GOT_1"]
    assert host.run(Devices("none"))["got"] == []


def test_the_container_may_nothing_that_it_does_not_need(host: Place) -> None:
    seen = host.run(Devices("cdi", ("1",)))
    assert (seen["capabilities"], seen["new"], seen["socket"]) == ("0000000000000000", "1", False)
    assert seen["network"] == ["lo"]
    assert (seen["visible"], seen["parent"], seen["shm"]) == ("void", 1, 8 * 2**30)


def test_a_device_that_no_specification_has_is_named(host: Place) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchFailure, match="does not pass GPUs to containers") as caught:
        host.run(Devices("cdi", ("7",)))
    assert caught.value.kind == "no-gpu-support"
    assert "nvidia.com/gpu=7" in str(caught.value)
    assert time.monotonic() - began < 100
