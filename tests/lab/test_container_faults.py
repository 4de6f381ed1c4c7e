"""Faults inside a container, on a node with a simulated GPU: each is found by its own name and nothing else.

Engine, containers, shared memory and the payload are real; GPU, driver and toolkit are the lab's simulations, and the
PyTorch of one image is a stand-in with the version of its build only. What is wrong with CDI and the toolkit's
packages is in test_container_toolkit.py.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from vendor_node import Shell

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import REPOSITORY, write_workload_image

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3000)]
CONCERNS = ("gpunode/checks/", "gpunode/workload/", "gpunode/tuning/")

TOOLKIT = "deb [signed-by=/etc/apt/keyrings/toolkit.asc] http://vendor/libnvidia-container/stable/deb/amd64 /"
PIN = "nvidia-driver-pinning-580"
PACKAGES = ("linux-headers-cloud-amd64", "nvidia-open", "docker.io", "nvidia-container-toolkit")
Verdicts = Mapping[str, str]
BAD = ("warn", "fail", "error")

# A build for CUDA that has no code for Turing: only its metadata exist.
TORCH = """
class _Nothing:
    def __getattr__(self, name):
        return lambda *arguments: None
class _C:
    @staticmethod
    def _cuda_getArchFlags():
        return "sm_80 sm_90"
class cuda:
    @staticmethod
    def is_available():
        return False
    @staticmethod
    def device_count():
        return 0
class backends:
    class cudnn:
        @staticmethod
        def is_available():
            return False
class version:
    cuda = "12.6"
__version__ = "2.14.1+stand.in"
"""
MADE = {
    "newer-cuda": "ENV CUDA_VERSION=14.0.0",
    "own-library": "COPY libcuda.so.550.54.15 /opt/old/\nRUN ldconfig -n /opt/old\nENV LD_LIBRARY_PATH=/opt/old",
    "old-wheel": "COPY torch.py /usr/lib/python3/dist-packages/torch.py",
}
"""Images on top of the lab's own, and what is wrong with each."""
RESTART = "systemctl reset-failed docker && systemctl restart docker"
"""systemd refuses a fourth start within a minute."""


class Place:
    """A node with a GPU, an engine, and images."""

    def __init__(self, lab: Lab, shell: Shell, folder: Path) -> None:
        self.inventory = str(lab.inventory_path)
        self.shell = shell
        self.folder = folder

    def validate(self, capfd: pytest.CaptureFixture[str], *arguments: str) -> Verdicts:
        """Status of each check on what is inside a container; of several findings the worst."""
        capfd.readouterr()
        run_gpunode(["validate", *arguments, "--level", "standard", "--format", "json"])
        statuses: dict[str, str] = {}
        for finding in json.loads(capfd.readouterr().out)["nodes"][0]["findings"]:
            check, status = finding["check"], finding["status"]
            if check.startswith(("container.", "framework.")) and statuses.get(check) not in BAD:
                statuses[check] = status
        return statuses

    def with_image(self, capfd: pytest.CaptureFixture[str], image: str) -> Verdicts:
        """Validate over SSH with an image that is on the node."""
        return self.validate(capfd, "-i", self.inventory, "--image", image, "--save", str(self.folder))

    @property
    def bundle(self) -> Path:
        """What was saved last."""
        return self.folder / f"{self.shell.node.name}.json"


def turned_bad(before: Verdicts, after: Verdicts) -> set[str]:
    """Checks that found nothing wrong and now do, or find it worse."""
    return {check for check, status in after.items() if status in BAD and status != before[check]}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    lab = Lab(f"inside-{os.getpid()}")
    try:
        (node,) = lab.up(1, "debian-12", ["t4-1"])
        shell = Shell(node)
        shell.trust("debian12")
        shell.fetch("http://vendor/libnvidia-container/gpgkey", "/etc/apt/keyrings/toolkit.asc")
        shell.do(f"echo '{TOOLKIT}' > /etc/apt/sources.list.d/toolkit.list && apt-get --quiet update", 900)
        shell.do(f"apt-get --yes install {PIN}")
        shell.do(f"apt-get --yes --no-install-recommends install {' '.join(PACKAGES)}", 1500)
        shell.do("modprobe nvidia && modprobe nvidia-uvm")
        shell.do("nvidia-ctk runtime configure --runtime=docker && systemctl restart docker")
        yield Place(lab, shell, tmp_path_factory.mktemp("inside"))
    finally:
        lab.down()


@pytest.fixture(scope="module")
def base(host: Place) -> str:
    """The lab's image with Python on the node, and those made of it."""
    archive = host.folder / "python.tar"
    write_workload_image(connect(), "python", archive, print)
    run_gpunode(["validate", "-i", host.inventory, "--select", "container.runs", "--image-file", str(archive)])
    name = host.shell.do(f"docker images --format '{{{{.Repository}}}}:{{{{.Tag}}}}' {REPOSITORY}").strip()
    for image, lines in MADE.items():
        host.shell.do(
            f"mkdir -p /root/{image}; cd /root/{image}\n"
            "cp $(realpath /usr/lib/x86_64-linux-gnu/libcuda.so.1) libcuda.so.550.54.15\n"
            f"cat > torch.py <<'END'\n{TORCH}\nEND\n"
            f"cat > Dockerfile <<'END'\nFROM {name}\n{lines}\nEND\n"
            f"docker build -q -t {image} ."
        )
    return name


@pytest.fixture(scope="module")
def healthy() -> dict[str, str]:
    """Filled by the first test: the others compare with it."""
    return {}


def test_a_container_without_a_fault(
    host: Place, base: str, healthy: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    healthy.update(host.with_image(capfd, base))
    assert healthy["container.runs"] == "pass"
    assert healthy["container.library"] == "pass"
    assert healthy["container.shm"] == "warn"  # Docker's own 64 MiB, which a plain docker run gets
    # The image has no framework, and nothing in it can compute on a simulated GPU.
    assert healthy["framework.wheel"] == "warn"
    assert healthy["container.gpus"] == "skip"
    assert {check for check, status in healthy.items() if status in ("fail", "error")} == set()


@pytest.mark.parametrize(
    ("image", "check"),
    [("newer-cuda", "container.cuda"), ("own-library", "container.library"), ("old-wheel", "framework.wheel")],
)
def test_a_fault_of_an_image_is_found_by_its_own_name(
    host: Place, healthy: Verdicts, capfd: pytest.CaptureFixture[str], image: str, check: str
) -> None:
    after = host.with_image(capfd, image)
    assert turned_bad(healthy, after) == {check}
    assert after[check] == "fail"


def test_shared_memory_that_the_engine_is_set_to_give_is_enough(
    host: Place, base: str, healthy: Verdicts, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a plain docker run gets is judged; the payload's own container asks for more. The role docker sets 1g."""
    setting = "import json, sys; settings = json.load(open(sys.argv[1])); settings['default-shm-size'] = '1g'; "
    setting += "json.dump(settings, open(sys.argv[1], 'w'))"
    host.shell.do("cp /etc/docker/daemon.json /root/daemon.json")
    host.shell.do(f'python3 -I -c "{setting}" /etc/docker/daemon.json && {RESTART}')
    try:
        after = host.with_image(capfd, base)
    finally:
        host.shell.do(f"mv /root/daemon.json /etc/docker/daemon.json && {RESTART}")
    assert after["container.shm"] == "pass"
    assert turned_bad(healthy, after) == set()
