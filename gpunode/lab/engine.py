"""The Docker engine on this machine: the connection to it, what its host provides for nodes, a lock around its use."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import docker
import requests
from docker.errors import DockerException
from docker.models.containers import Container
from docker.utils.socket import consume_socket_output, demux_adaptor, frames_iter

from gpunode.errors import UndeterminedError, UsageError
from gpunode.text import one_line

GIB = 2**30
API_TIMEOUT_S = 120
CGROUP = Path("/sys/fs/cgroup")
REAL_DRIVER = Path("/proc/driver/nvidia")
WATCHERS = Path("/proc/sys/fs/inotify/max_user_instances")
WATCHERS_OF_NODE = 10
"""Counted in a node with the driver and Docker; a bare one has 7, of systemd and udev."""

_INSTALL = "as root on Debian or Ubuntu: apt-get install docker.io mmdebstrap (in the checkout: scripts/docker-engine)"


def connect() -> docker.DockerClient:
    """Return a client of the local engine.

    Raises UndeterminedError with what to do if no engine runs, if this user may not use it, or if it runs
    without root; UsageError if ``DOCKER_HOST`` names another machine.
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
    """Raise UsageError if this machine has the NVIDIA driver, unless ``force``.

    Root in a lab node may create device files and use those of major 195, so it could access real GPUs.
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
    """Convert errors of the engine and of its connection to one line that names the operation."""
    try:
        yield
    except (DockerException, requests.RequestException) as err:
        raise UndeterminedError(f"{doing}: {_one_line(err)}") from err


def run_in(container: Container, argv: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, bytes, bytes]:
    """Run a program as root in a container; return its exit code, its output and its errors.

    ``exec_run`` reads past the buffer in which the header of the response came, so that output which comes with it is
    lost (https://github.com/docker/docker-py/issues/2042). Here the program begins once the header was read.
    """
    api = cast(docker.DockerClient, container.client).api
    waiting = ["sh", "-c", 'read -r _; exec "$@" </dev/null', "sh", *argv]
    run = api.exec_create(container.id, waiting, stdin=True, environment=dict(env or {}))["Id"]
    stream: Any = api.exec_start(run, socket=True)
    try:
        stream._sock.sendall(b"\n")  # the reader that docker-py returns cannot write
        # docker-py's stubs do not have this function.
        frames = (demux_adaptor(*frame) for frame in frames_iter(stream, tty=False))  # type: ignore[no-untyped-call]
        out, err = consume_socket_output(frames, demux=True)
    finally:
        stream.close()
    return int(api.exec_inspect(run)["ExitCode"] or 0), out or b"", err or b""


def _one_line(err: Exception) -> str:
    text = getattr(err, "explanation", None) or str(err)
    return one_line(str(text), 300)


def need_space(path: Path, gib: float) -> None:
    """Raise UndeterminedError if less than ``gib`` GiB is free at ``path`` (or its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free / GIB
    if free < gib:
        raise UndeterminedError(f"{path}: {free:.1f} GiB free, the lab needs {gib:.1f} GiB: free disk space there")


def cgroup_mount(system: str, root: Path = CGROUP) -> dict[str, dict[str, str]]:
    """Return the bind mount through which a node's systemd gets its cgroups.

    systemd up to 255 works on every layout. systemd 256 and later (Debian 13) supports only cgroup v2; on a hybrid
    host it gets the v2 tree that is mounted beside the v1 controllers. Raises UndeterminedError if there is none.
    """
    source = root
    if not (root / "cgroup.controllers").exists() and system == "debian-13":
        source = root / "unified"
        if not (source / "cgroup.controllers").exists():
            raise UndeterminedError(f"{system} needs cgroup v2, which this machine does not mount: use --os debian-12")
    return {str(source): {"bind": str(CGROUP), "mode": "rw"}}


def few_watchers(nodes: int) -> str | None:
    """Return a line if so many nodes may use up the kernel's inotify instances: units with a path then fail to start,
    with "Too many open files".
    """
    try:
        allowed = int(WATCHERS.read_text(encoding="ascii"))
    except OSError:
        return None
    if nodes * WATCHERS_OF_NODE <= allowed:
        return None
    needed = f"{nodes} nodes use up to {nodes * WATCHERS_OF_NODE} inotify instances, this kernel allows {allowed}"
    return f"{needed}: sysctl -w fs.inotify.max_user_instances=1024"


def mtu() -> int | None:
    """Return the MTU of the default route if it is below Ethernet's 1500 (VPNs, clouds); Docker would assume 1500."""
    for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]:
        interface, destination = line.split()[:2]
        if destination == "00000000":
            value = int(Path(f"/sys/class/net/{interface}/mtu").read_text(encoding="ascii"))
            return value if value < 1500 else None
    return None


@contextmanager
def locked(
    name: str, limit_s: float, progress: Callable[[str], None], stop: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold the machine-wide lock of that name; UndeterminedError if another process holds it longer than ``limit_s``,
    or when ``stop`` returns true.

    It is an abstract Unix socket, which the kernel frees when the process ends, also when it is killed.
    """
    deadline = time.monotonic() + limit_s
    reported = False
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0gpunode-lab/{name}")
                break
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    raise
                if not reported:
                    progress(f"{name}: waiting for another gpunode lab command")
                    reported = True
                if stop():
                    raise UndeterminedError(f"{name}: interrupted") from err
                if time.monotonic() > deadline:
                    text = f"another gpunode lab command works on {name} for more than {limit_s:g} s: wait for it"
                    raise UndeterminedError(text) from err
            time.sleep(0.2)
        yield
