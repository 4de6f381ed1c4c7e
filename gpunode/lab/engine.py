"""The Docker engine on this machine: reaching it, and what its host can give a node."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import requests
from docker.errors import DockerException

from gpunode.errors import UndeterminedError, UsageError

GIB = 2**30
API_TIMEOUT_S = 120
CGROUP = Path("/sys/fs/cgroup")
REAL_DRIVER = Path("/proc/driver/nvidia")

_INSTALL = "as root on Debian or Ubuntu: apt-get install docker.io mmdebstrap (in the checkout: scripts/docker-engine)"


def connect() -> docker.DockerClient:
    """A client of the local engine.

    Raises UndeterminedError with what to do where there is none, where this user may not use it, or where it runs
    without root; UsageError where ``DOCKER_HOST`` names another machine.
    """
    host = os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith("unix://"):
        raise UsageError(f"DOCKER_HOST={host}: lab nodes run on this machine: unset DOCKER_HOST")
    try:
        client = docker.from_env(timeout=API_TIMEOUT_S)
        options = client.info().get("SecurityOptions") or []
    except (DockerException, requests.RequestException) as err:
        raise UndeterminedError(_why(err)) from None
    if any("rootless" in option for option in options):
        raise UndeterminedError("the lab needs a Docker engine that runs as root; this one is rootless")
    return client


def refuse_real_driver(*, force: bool, proc: Path | None = None) -> None:
    """Raise UsageError where this machine has the NVIDIA driver, unless ``force``.

    Root in a lab node may make device files and use those of major 195: real GPUs would be within its reach.
    """
    proc = proc or REAL_DRIVER
    if proc.exists() and not force:
        raise UsageError(
            f"this machine has the NVIDIA driver loaded ({proc}), and root in a lab node could reach its GPUs: "
            "use a machine without GPUs, or gpunode lab up --force"
        )


def _why(err: Exception) -> str:
    socket = Path(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://"))
    if socket.exists() and not os.access(socket, os.W_OK):
        return (
            f"no permission on {socket}: run as root, or join the group docker (usermod -aG docker USER; log in again)"
        )
    if shutil.which("dockerd") is None and not socket.exists():
        return f"no Docker engine on this machine: {_INSTALL}"
    start = "systemctl start docker, or as root scripts/docker-engine"
    return f"the Docker engine does not answer on {socket} ({_one_line(err)}): start it ({start})"


@contextmanager
def docker_errors(doing: str) -> Iterator[None]:
    """Turn what the engine or the way to it raises into one line that says what was being done."""
    try:
        yield
    except (DockerException, requests.RequestException) as err:
        raise UndeterminedError(f"{doing}: {_one_line(err)}") from err


def _one_line(err: Exception) -> str:
    text = getattr(err, "explanation", None) or str(err)
    return " ".join(str(text).split())[:300]


def need_space(path: Path, gib: float) -> None:
    """Raise UndeterminedError where less than that much is free at ``path`` (or its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free / GIB
    if free < gib:
        raise UndeterminedError(f"{path}: {free:.1f} GiB free, the lab needs {gib:.1f} GiB: free disk space there")


def cgroup_mount(system: str, root: Path = CGROUP) -> dict[str, dict[str, str]]:
    """The bind mount that gives a node's systemd its cgroups.

    systemd up to 255 works on every layout. systemd 256 and later (Debian 13) takes cgroup v2 alone; on a hybrid host
    it gets the v2 tree that is mounted beside the v1 controllers. Raises UndeterminedError where there is none.
    """
    source = root
    if not (root / "cgroup.controllers").exists() and system == "debian-13":
        source = root / "unified"
        if not (source / "cgroup.controllers").exists():
            raise UndeterminedError(f"{system} needs cgroup v2, which this machine does not mount: use --os debian-12")
    return {str(source): {"bind": str(CGROUP), "mode": "rw"}}


def mtu() -> int | None:
    """The MTU of the way out, where it is below Ethernet's 1500 (VPNs, clouds); Docker would assume 1500."""
    for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]:
        interface, destination = line.split()[:2]
        if destination == "00000000":
            value = int(Path(f"/sys/class/net/{interface}/mtu").read_text(encoding="ascii"))
            return value if value < 1500 else None
    return None
