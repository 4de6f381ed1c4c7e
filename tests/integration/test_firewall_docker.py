"""Ports that a real Docker engine publishes, and what its containers open, under the rules of the role firewall.

The engine runs in the network namespace of the node, so that neither it nor the rules touch this machine's network.
"""

import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from firewall_world import ADMIN, CLUSTER, FOREIGN, MONITOR, World

from gpunode.provisioning.firewall_policy import TABLE

PYTHON = Path("/usr/bin/python3")
NEEDED = ("nft", "ip", "nsenter", "dockerd", "docker", "containerd", "iptables-save")
pytest_plugins = ("firewall_fixtures",)
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif(not (PYTHON.exists() and Path("/lib").is_symlink()), reason="needs Python in a merged /usr"),
    pytest.mark.timeout(240),
]
BRIDGE = "172.31.7.1"
FETCH = "import urllib.request as u; print(u.urlopen('http://{}/', timeout=5).status)"
RULES = "iptables-save -t {} | grep -v '^#' | sed 's/\\[[0-9:]*\\]//'"
READY_S = 60


class Engine:
    """A Docker engine of its own in the node's namespace."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.socket = world, f"unix://{folder}/docker.sock"
        data = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        argv = ["dockerd", "-H", self.socket, *data, "--storage-driver", "vfs", "--bip", f"{BRIDGE}/24"]
        inside = ["nsenter", f"--net=/run/netns/{world.node}", *argv]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(inside, stdout=self.log, stderr=self.log, start_new_session=True)

    def docker(self, *words: str) -> str:
        argv = ["docker", "-H", self.socket, *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *words: str) -> str:
        """Run a container from an image that has nothing but links into this machine's /usr."""
        return self.docker("run", "-v", "/usr:/usr:ro", *words)

    def rules(self) -> str:
        return "".join(self.world.sh(self.world.node, RULES.format(table)) for table in ("nat", "filter"))

    def wait(self) -> None:
        end = time.monotonic() + READY_S
        while True:
            try:
                self.docker("version")
            except AssertionError:
                assert time.monotonic() < end
                assert self.process.poll() is None
                time.sleep(0.5)
            else:
                return


@pytest.fixture(scope="module")
def engine(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    world.sh(world.node, "nft delete table inet engine")
    engine = Engine(world, folder)
    try:
        engine.wait()
        with tarfile.open(folder / "image.tar", "w") as image:
            for name in ("lib", "lib64", "bin"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
                image.addfile(entry)
        engine.docker("import", str(folder / "image.tar"), "host")
        serve = [str(PYTHON), "-I", "-m", "http.server", "80"]
        for name, port in (("named", 8080), ("unnamed", 8081)):
            engine.run("--detach", "--name", name, "--publish", f"{port}:80", "--workdir", "/usr/share", "host", *serve)
        yield engine
        engine.docker("rm", "--force", "named", "unnamed")
    finally:
        os.killpg(engine.process.pid, signal.SIGTERM)
        engine.process.wait(30)
        engine.log.close()


def answers(world: World, expected: dict[int, str], host: int = FOREIGN) -> bool:
    """Return whether a scan comes to this while the servers start."""
    end = time.monotonic() + READY_S
    while world.scan(host, [*expected]) != expected:
        if time.monotonic() > end:
            return False
    return True


def test_published_ports_follow_the_policy_and_containers_go_on(world: World, engine: Engine) -> None:
    both = {8080: "open", 8081: "open"}
    assert answers(world, both)
    before = engine.rules()
    world.load(container_interfaces=["docker0", "br-*"])
    for version in (4, 6):  # over IPv6 it is docker-proxy that listens
        assert world.scan(MONITOR, [*both], version=version) == {8080: "open"}
        assert world.scan(CLUSTER, [*both], version=version) == both
        assert world.scan(FOREIGN, [*both], version=version) == {}
        assert world.scan(ADMIN, [*both], version=version) == {}
    for address in (f"{BRIDGE}:8081", "10.99.3.1:8080"):
        assert engine.run("--rm", "host", str(PYTHON), "-I", "-c", FETCH.format(address)) == "200\n"
    closed = "import socket; print(socket.socket().connect_ex(('10.99.3.2', 4444)))"
    assert engine.run("--rm", "host", str(PYTHON), "-I", "-c", closed) == "111\n"
    assert engine.rules() == before
    engine.docker("restart", "--time", "1", "named", "unnamed")
    assert answers(world, both, CLUSTER)
    assert world.scan(FOREIGN, [*both]) == {}
    world.sh(world.node, f"nft delete table inet {TABLE}")
    assert world.scan(FOREIGN, [*both]) == both
