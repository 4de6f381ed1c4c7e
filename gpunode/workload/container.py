"""One container for one run: its rights, its output, and its removal in every case.

Nothing of the node except the directory of --storage is mounted into it, and it leaves no file on the node: the payload
is sent over its stdin. Stdin closes with the connection, and then the watchdog inside ends the container; it also ends
it at its time limit, in case nobody notices that the connection is gone. The engine then removes the container.
"""

import contextlib
import posixpath
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from docker.errors import APIError
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from gpunode.workload.causes import explained
from gpunode.workload.engine import Engine, raw_socket
from gpunode.workload.image import Image
from gpunode.workload.output import BoundedOutput
from gpunode.workload.transport import LaunchFailure

KIND = "nvidia.com/gpu"
LABEL = "gpunode.validate"
LIMIT_LABEL = "gpunode.validate.limit-s"
SHM_BYTES = 8 * 2**30
"""A ceiling, not a reservation. NCCL and DataLoader workers need far more than Docker's 64 MiB."""
STACK_BYTES = 64 * 2**20
SCRATCH_BYTES = 4 * 2**30
PIDS = 32768
NOBODY = "65534:65534"
"""The user that runs the payload if the image's user is root: it can write only to /tmp."""
MEMORY_SHARE = 0.75
"""Share of the node's memory: other programs there keep running if the payload grows without limit."""
_STALE_AFTER_S = 60
_HEADER = struct.Struct(">BxxxL")
_STDERR = 2


@dataclass(frozen=True)
class Devices:
    """GPUs as the container gets them."""

    how: str
    """``cdi``; ``runtime``: by the engine's device request, which NVIDIA's hook answers; ``nvidia``: by the runtime of
    that name and its variable; ``none``.
    """
    names: tuple[str, ...] | None = None
    """Names in the form that ``how`` needs: of a CDI specification, or ``INDEX`` and ``INDEX:MIG``. None: all."""

    @property
    def requests(self) -> list[DeviceRequest]:
        """Return the device requests of the engine's API."""
        if self.how in ("none", "nvidia"):
            return []
        if self.how == "cdi":
            names = ("all",) if self.names is None else self.names
            return [DeviceRequest(driver="cdi", device_ids=[f"{KIND}={name}" for name in names])]
        capabilities = [["gpu", "compute", "utility"]]
        if self.names is None:
            return [DeviceRequest(count=-1, capabilities=capabilities)]
        return [DeviceRequest(device_ids=list(self.names), capabilities=capabilities)]

    @property
    def recorded(self) -> Literal["cdi", "runtime", "none"]:
        """Return the value for a record."""
        match self.how:
            case "cdi" | "none" as how:
                return how
        return "runtime"

    @property
    def variables(self) -> dict[str, str]:
        """Return the container's variables that the NVIDIA runtime reads. Only a device request sets its own."""
        if self.how == "runtime":
            return {}
        if self.how == "nvidia":
            visible = "all" if self.names is None else ",".join(self.names)
            return {"NVIDIA_VISIBLE_DEVICES": visible, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        # If nvidia is the default runtime, an image's own value would add all GPUs.
        return {"NVIDIA_VISIBLE_DEVICES": "void"}

    @property
    def means(self) -> str:
        """Return a description for use in a sentence."""
        return {"cdi": "by CDI", "runtime": "by --gpus", "nvidia": "by its runtime nvidia"}.get(self.how, "for none")


@dataclass(frozen=True)
class PythonProgram:
    """Input of Python: its ``-c``, arguments, and what it reads first from stdin."""

    code: str
    arguments: tuple[str, ...]
    stdin: bytes


@dataclass(frozen=True)
class Network:
    """An engine's network that joins the containers of a group."""

    name: str
    alias: str
    """The name by which the others reach this container there."""


RDMA_DEVICES = "/dev/infiniband:/dev/infiniband:rw"
SYSTEM_FOLDERS = tuple(
    f"/{name}"
    for name in ("bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr", "var/run")
)
"""These folders belong to the image or the engine: a node's directory mounted over them would hide their content."""
ABSENT = re.compile(r"bind source path does not exist: *(/[^\n\"']*)", re.IGNORECASE)
"""In what engines print for a directory that is not on the node."""
IMAGE_FOLDERS = ("/", "/opt", "/tmp", "/var")  # noqa: S108
"""Folders below these may be the node's."""


def hides_image(directory: str) -> bool:
    """Return whether a directory of the node, at its own path in a container, would hide what a container needs."""
    path = posixpath.normpath(directory).replace("//", "/")
    return path in IMAGE_FOLDERS or any(path == folder or path.startswith(f"{folder}/") for folder in SYSTEM_FOLDERS)


@dataclass(frozen=True)
class ContainerJob:
    """The purpose and the settings of one container."""

    image: Image
    devices: Devices
    program: PythonProgram
    limit_s: float
    """Time limit of the watchdog inside."""
    as_nobody: bool = True
    """Not as root: the GPUs' device files are open to all users."""
    network: Network | None = None
    """None: only its own loopback."""
    storage: str | None = None
    """A directory of the node, mounted at the same path, for measuring its storage."""
    data: str | None = None
    """A directory of the node, mounted read-only at the same path."""
    rdma: bool = False
    """With the node's RDMA devices, for ranks over several nodes."""
    plain: bool = False
    """With the engine's default shared memory and limits, as with a plain docker run."""


@dataclass(frozen=True)
class Confinement:
    """Restrictions that an engine, or an image, may not support; each is dropped if the start fails because of it."""

    limits: bool = True
    """Raised limits of the process."""
    user: str | None = None
    """Used in place of the image's user."""
    read_only: bool = True
    memory: bool = True
    """A memory limit, if the engine reports support for it."""
    pids: bool = True
    """A limit on processes."""
    absent: tuple[str, ...] = ()
    """Directories to measure that do not exist on the node: the payload reports them, and the rest is measured."""

    def without(self, complaint: str) -> "Confinement | None":
        """Return the restrictions to try after a start that failed; None if the failure has another reason."""
        text = complaint.lower()
        # An engine without the right to raise limits (in a container, rootless) runs it with its own.
        if self.limits and "rlimit" in text:
            return replace(self, limits=False)
        # Hooks of older toolkits write into the image's files.
        if self.read_only and "read-only file system" in text:
            return replace(self, read_only=False)
        # An engine in a container may lack the part of cgroups that it reports.
        if self.memory and "cgroup" in text and "memory" in text:
            return replace(self, memory=False)
        if self.pids and "cgroup" in text and "pids" in text:
            return replace(self, pids=False)
        lacks = ABSENT.search(complaint)
        if lacks is not None and lacks[1] not in self.absent:
            return replace(self, absent=(*self.absent, lacks[1]))
        # Its Python is in a folder that only root may read.
        if self.user is not None and "permission denied" in text:
            return replace(self, user=None)
        return None


def run(engine: Engine, job: ContainerJob, output: BoundedOutput, known: Confinement | None = None) -> Confinement:
    """Run the program in a container of its own; its output goes into ``output``, and the container is removed.

    Returns the restrictions that were possible; ``known`` are those that a previous run found.
    Raises LaunchFailure: ``no-python``, ``no-gpu-support``, ``start``, ``time-limit``, ``flood``, ``broke-off`` …
    """
    trying = known or Confinement(user=_user(engine, job))
    while True:
        container: str | None = None
        try:
            container = _create(engine, job, trying)
            with engine.doing("start", f"starting a container of {job.image.name}"):
                parameters = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
                attached = engine.api.attach_socket(container, parameters)
                engine.api.start(container)
            _listen(raw_socket(attached), job, engine.deadline, output)
        except LaunchFailure as err:
            less = trying.without(err.engine_message) if err.kind == "start" else None
            if less is None:
                raise _plain(err, engine, job) from None
            trying = less
        else:
            return trying
        finally:
            if container is not None:
                remove(engine, container)


def _listen(sock: socket.socket, job: ContainerJob, deadline: float, output: BoundedOutput) -> None:
    head = b""
    kind, left = 0, 0

    def frames(data: bytes) -> None:
        # A frame is passed on as it arrives: the engine sends its length, which may be four gigabytes.
        nonlocal head, kind, left
        while data:
            if left:
                part, data = data[:left], data[left:]
                left -= len(part)
                (output.stderr if kind == _STDERR else output.stdout)(part)
                continue
            missing = _HEADER.size - len(head)
            head, data = head + data[:missing], data[missing:]
            if len(head) == _HEADER.size:
                kind, left = _HEADER.unpack(head)
                head = b""

    output.program = sock
    try:
        converse(sock, job.program.stdin, frames, deadline)
    except OSError as err:
        if time.monotonic() >= deadline:
            raise LaunchFailure(
                "time-limit",
                f"the payload did not end within {job.limit_s:.0f} s, nor by its watchdog (--workload-timeout S)",
            ) from None
        raise LaunchFailure("broke-off", f"the payload's output ended early: {err}") from None
    finally:
        # An engine with a client that stopped reading would wait for it when the container is removed.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def converse(sock: socket.socket, stdin: bytes, take: Callable[[bytes], None], deadline: float) -> None:
    """Send what the program reads first, then read its output until it ends; OSError at the deadline."""
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended early; its output has the reason
        sock.sendall(stdin)
    while True:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        data = sock.recv(65536)
        if not data:
            return
        take(data)


def _user(engine: Engine, job: ContainerJob) -> str | None:
    """Return the user that runs the payload in place of the image's; None if that is not root, or has to be root."""
    with engine.doing("image", f"looking at image {job.image.name}"):
        config = engine.api.inspect_image(job.image.id).get("Config") or {}
    user = str(config.get("User") or "root").partition(":")[0]
    return NOBODY if job.as_nobody and user in ("root", "0") else None


def _memory(engine: Engine) -> int | None:
    """Return the payload's memory limit in bytes; None if the engine cannot limit it, or does not report the total."""
    total = engine.info.get("MemTotal")
    if not engine.info.get("MemoryLimit") or not isinstance(total, int) or not 0 < total < 2**60:
        return None
    return int(total * MEMORY_SHARE)


def _create(engine: Engine, job: ContainerJob, confinement: Confinement) -> str:
    api, memory = engine.api, _memory(engine) if confinement.memory else None
    ulimits = [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=STACK_BYTES, hard=STACK_BYTES)]
    host = api.create_host_config(
        auto_remove=True,
        network_mode=job.network.name if job.network else "none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        log_config=LogConfig(type="none"),
        shm_size=None if job.plain else SHM_BYTES,
        tmpfs={"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={SCRATCH_BYTES}"},  # noqa: S108
        ulimits=ulimits if confinement.limits and not job.plain else [],
        pids_limit=PIDS,
        read_only=confinement.read_only,
        mem_limit=memory,
        # Equal to it: no swap beyond.
        memswap_limit=memory if memory and engine.info.get("SwapLimit") else None,
        device_requests=job.devices.requests,
        devices=[RDMA_DEVICES] if job.rdma else None,
        runtime="nvidia" if job.devices.how == "nvidia" else None,
        mounts=_mounts(job, confinement.absent),
    )
    if not confinement.pids:
        host["PidsLimit"] = 0  # sent explicitly: Podman has a default limit
    # A user without an entry in the image's /etc/passwd has no name and no home.
    environment = {"HOME": "/tmp", "USER": "gpunode", "LOGNAME": "gpunode"} if confinement.user else {}  # noqa: S108
    environment |= job.devices.variables
    joining = {}
    if job.network and job.network.name != "host":
        endpoint = api.create_endpoint_config(aliases=[job.network.alias])
        joining["networking_config"] = api.create_networking_config({job.network.name: endpoint})
    with engine.doing("start", f"creating a container of {job.image.name}"):
        created = api.create_container(
            job.image.id,
            name=f"gpunode-validate-{secrets.token_hex(6)}",
            entrypoint=["python3", "-I", "-B", "-c", job.program.code, *job.program.arguments],
            command=[],
            environment=environment,
            user=confinement.user,
            labels={LABEL: job.network.alias if job.network else "payload", LIMIT_LABEL: str(int(job.limit_s))},
            working_dir="/",
            stdin_open=True,  # for one client only: closed when it disconnects
            tty=False,
            host_config=host,
            **joining,
        )
    return str(created["Id"])


def _mounts(job: ContainerJob, absent: Sequence[str]) -> list[Mount] | None:
    """Return the directories of the node that the container gets."""
    # Two mounts at one path are refused: what is written to and read is one that can be written to.
    directories = {**({job.data: True} if job.data else {}), **({job.storage: False} if job.storage else {})}
    gone = {posixpath.normpath(path.strip()) for path in absent}
    if gone - {posixpath.normpath(path) for path in directories}:
        return None  # the engine names another path: without all of them it starts
    left = {path: read_only for path, read_only in directories.items() if posixpath.normpath(path) not in gone}
    return [Mount(path, path, type="bind", read_only=read_only) for path, read_only in left.items()] or None


def _plain(err: LaunchFailure, engine: Engine, job: ContainerJob) -> LaunchFailure:
    """Return the failure of a start with the engine's message explained."""
    known = explained(err.engine_message, job.image.name) if err.kind == "start" else None
    if known is None:
        return err
    kind, line = known
    if kind == "no-gpu-support":
        line = f"{engine.name} does not pass GPUs to containers, requested {job.devices.means}: {line}"
    return LaunchFailure(kind, line, err.engine_message)


def remove(engine: Engine, container: str) -> None:
    """Remove it, running or not; the engine may have removed it already. A broken connection is not raised again."""
    with (
        contextlib.suppress(LaunchFailure),
        engine.doing("start", "removing the container"),
        contextlib.suppress(APIError),
    ):
        engine.api.remove_container(container, v=True, force=True)


def sweep(engine: Engine) -> Sequence[str]:
    """Remove what an earlier run left: our containers past their own limit, or never started."""
    now = _epoch(str(engine.info.get("SystemTime", "")))
    removed: list[str] = []
    with engine.doing("start", "looking for containers of earlier runs"):
        for container in engine.api.containers(all=True, filters={"label": LABEL}):
            limit_s = int((container.get("Labels") or {}).get(LIMIT_LABEL, "0"))
            age_s = now - int(container["Created"])
            past = limit_s if container.get("State") == "running" else 0
            if age_s > past + _STALE_AFTER_S:
                remove(engine, container["Id"])
                removed.append(str(container["Id"]))
    return removed


def _epoch(text: str) -> float:
    """Return the engine's clock, which also dates its containers; this machine's if it reports none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return time.time()
