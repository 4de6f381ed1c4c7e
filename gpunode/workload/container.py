"""One container for one run: what it may and may not do, its output, and its end whatever happens.

Nothing of the node but the directory of --storage is mounted into it, and no file of it stays on the node: the payload
comes over its stdin. Stdin closes with the connection, at whose end the watchdog inside ends the container; so it does
at its time limit, should nobody notice that the connection is gone. The engine then removes it by itself.
"""

import contextlib
import posixpath
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
from gpunode.workload.way import LaunchFailure

KIND = "nvidia.com/gpu"
LABEL = "gpunode.validate"
LIMIT_LABEL = "gpunode.validate.limit-s"
SHM_BYTES = 8 * 2**30
"""A ceiling, not a reservation. NCCL and DataLoader workers need far more than Docker's 64 MiB."""
STACK_BYTES = 64 * 2**20
SCRATCH_BYTES = 4 * 2**30
PIDS = 32768
NOBODY = "65534:65534"
"""Who runs the payload where the image has root for it: it writes into /tmp alone."""
MEMORY_SHARE = 0.75
"""Of the node's: what else runs there stays alive should the payload grow without end."""
_STALE_AFTER_S = 60
_HEADER = struct.Struct(">BxxxL")
_STDERR = 2


@dataclass(frozen=True)
class Devices:
    """GPUs as the container gets them."""

    how: str
    """``cdi``; ``runtime``: by the engine's device request, which NVIDIA's hook answers; ``nvidia``: by the runtime of
    that name and its variable; ``none``."""
    names: tuple[str, ...] | None = None
    """As ``how`` has them: names of a CDI specification, or ``INDEX`` and ``INDEX:MIG``. None: all."""

    @property
    def requests(self) -> list[DeviceRequest]:
        """As the engine's API takes it."""
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
        """As a record has it."""
        match self.how:
            case "cdi" | "none" as how:
                return how
        return "runtime"

    @property
    def variables(self) -> dict[str, str]:
        """For the container: what the NVIDIA runtime reads. Only a device request brings its own."""
        if self.how == "runtime":
            return {}
        if self.how == "nvidia":
            visible = "all" if self.names is None else ",".join(self.names)
            return {"NVIDIA_VISIBLE_DEVICES": visible, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        # An image's own value would bring all GPUs in where nvidia is the default runtime.
        return {"NVIDIA_VISIBLE_DEVICES": "void"}

    @property
    def means(self) -> str:
        """For a sentence."""
        return {"cdi": "by CDI", "runtime": "by --gpus", "nvidia": "by its runtime nvidia"}.get(self.how, "for none")


@dataclass(frozen=True)
class PythonProgram:
    """What Python is given: its ``-c``, arguments, and what it reads first from stdin."""

    code: str
    arguments: tuple[str, ...]
    stdin: bytes


@dataclass(frozen=True)
class Network:
    """An engine's network that joins the containers of a group."""

    name: str
    alias: str
    """By which the others find this container there."""


SYSTEM_FOLDERS = tuple(
    f"/{name}"
    for name in ("bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr", "var/run")
)
"""What lies in them is the image's or the engine's: a directory of the node in its place would hide it."""
IMAGE_FOLDERS = ("/", "/opt", "/tmp", "/var")  # noqa: S108
"""What lies below them may be the node's."""


def hides_image(directory: str) -> bool:
    """Return whether a directory of the node, at its own path in a container, would hide what a container needs."""
    path = posixpath.normpath(directory).replace("//", "/")
    return path in IMAGE_FOLDERS or any(path == one or path.startswith(f"{one}/") for one in SYSTEM_FOLDERS)


@dataclass(frozen=True)
class ContainerJob:
    """What one container is made for."""

    image: Image
    devices: Devices
    program: PythonProgram
    limit_s: float
    """As the watchdog inside has it."""
    as_nobody: bool = True
    """Not as root: the GPUs' device files are open to everybody."""
    network: Network | None = None
    """None: nothing but its own loopback."""
    storage: str | None = None
    """A directory of the node that the container gets at the same path, to measure its storage."""
    plain: bool = False
    """With the engine's own shared memory and limits, as docker run gives them to whoever names none."""


@dataclass(frozen=True)
class Confinement:
    """What an engine, or an image, may not be able to do; each is given up only where the start says so."""

    limits: bool = True
    """Raised limits of the process."""
    user: str | None = None
    """In place of the image's own."""
    read_only: bool = True
    memory: bool = True
    """A limit, where the engine says that it has one."""
    pids: bool = True
    """A limit of processes."""
    storage: bool = True
    """The directory to measure: where there is none on the node, the payload names it, and the rest is measured."""

    def without(self, complaint: str) -> "Confinement | None":
        """The next one to try after a start that failed; None where the failure has another reason."""
        text = complaint.lower()
        # An engine that has no right to raise limits itself (in a container, rootless) runs it with its own.
        if self.limits and "rlimit" in text:
            return replace(self, limits=False)
        # Hooks of older toolkits write into the image's files.
        if self.read_only and "read-only file system" in text:
            return replace(self, read_only=False)
        # An engine in a container may lack the part of cgroups that it says it has.
        if self.memory and "cgroup" in text and "memory" in text:
            return replace(self, memory=False)
        if self.pids and "cgroup" in text and "pids" in text:
            return replace(self, pids=False)
        if self.storage and "bind source path does not exist" in text:
            return replace(self, storage=False)
        # Its Python lies where only root may look.
        if self.user is not None and "permission denied" in text:
            return replace(self, user=None)
        return None


def run(engine: Engine, job: ContainerJob, output: BoundedOutput, known: Confinement | None = None) -> Confinement:
    """Run the program in a container of its own; what it says goes into ``output``, and no container is left.

    Returns what could be withheld from it; ``known`` is what a run before this one found out.
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
            less = trying.without(err.said) if err.kind == "start" else None
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
        # A frame is passed on as it comes: the engine says how long it is, and may say four gigabytes.
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
        # An engine whose reader has stopped reading would wait for it when the container is to go.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def converse(sock: socket.socket, stdin: bytes, take: Callable[[bytes], None], deadline: float) -> None:
    """Send what the program reads first, then take what it says until its end; OSError at the deadline."""
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended before it read: it will have said why
        sock.sendall(stdin)
    while True:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        data = sock.recv(65536)
        if not data:
            return
        take(data)


def _user(engine: Engine, job: ContainerJob) -> str | None:
    """Who runs the payload in place of the image's user; None where that is not root, or has to be."""
    with engine.doing("image", f"looking at image {job.image.name}"):
        config = engine.api.inspect_image(job.image.id).get("Config") or {}
    own = str(config.get("User") or "root").partition(":")[0]
    return NOBODY if job.as_nobody and own in ("root", "0") else None


def _memory(engine: Engine) -> int | None:
    """Bytes that the payload may have; None where the engine cannot limit them, or does not say what there is."""
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
        runtime="nvidia" if job.devices.how == "nvidia" else None,
        mounts=[Mount(job.storage, job.storage, type="bind")] if job.storage and confinement.storage else None,
    )
    if not confinement.pids:
        host["PidsLimit"] = 0  # sent all the same: Podman has a limit of its own where none is named
    # A user without an entry in the image's /etc/passwd has neither name nor home.
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
            stdin_open=True,  # for one client alone: it closes when that goes
            tty=False,
            host_config=host,
            **joining,
        )
    return str(created["Id"])


def _plain(err: LaunchFailure, engine: Engine, job: ContainerJob) -> LaunchFailure:
    """Return what the engine said of a start that failed, in words of what is wrong."""
    known = explained(err.said, job.image.name) if err.kind == "start" else None
    if known is None:
        return err
    kind, line = known
    if kind == "no-gpu-support":
        line = f"{engine.name} does not pass GPUs to containers, requested {job.devices.means}: {line}"
    return LaunchFailure(kind, line, err.said)


def remove(engine: Engine, container: str) -> None:
    """Remove it, running or not; the engine may be quicker, and a broken way is no reason to raise again."""
    with (
        contextlib.suppress(LaunchFailure),
        engine.doing("start", "removing the container"),
        contextlib.suppress(APIError),
    ):
        engine.api.remove_container(container, v=True, force=True)


def sweep(engine: Engine) -> Sequence[str]:
    """Remove what an earlier run has left: containers of ours past their own limit, or that never started."""
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
    """The engine's own clock, which also dates its containers; this machine's where it says none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return time.time()
