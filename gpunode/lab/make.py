"""Creation of one node: its container, its identity, its first start."""

import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import docker
from docker.models.containers import Container
from docker.types import Mount

from gpunode.errors import UndeterminedError
from gpunode.lab.archive import Entry, tar_of
from gpunode.lab.engine import cgroup_mount, docker_errors
from gpunode.lab.hardware import describe
from gpunode.lab.hardware.on_node import BOOT, DEVICE_RULES, entries
from gpunode.lab.node import (
    ADDRESS,
    HARDWARE_LABEL,
    HOST_KEY_LABEL,
    LAB_LABEL,
    NODE_LABEL,
    PORT_LABEL,
    SYSTEM_LABEL,
    LabNode,
)
from gpunode.lab.recipe import ADMIN, GID, OPERATOR, UIDS, LabSystem
from gpunode.lab.state import LabState, make_key

PORTS = range(22000, 23000)  # below Linux's outgoing range, so that a restarted node finds its port free
AUTOFS_RULE = "c 10:235 rwm"
"""A node may open /dev/autofs once somebody creates it there: what mounts at the first access can be tried."""
_ATTEMPTS = 8  # another lab that is made at the same time takes the same ports
_CAPABILITIES_WITHHELD = (
    "SYS_MODULE",  # a node must not load its modules into the host's kernel
    "SYS_RAWIO",  # nor write to the host's memory and disks
    "SYS_RESOURCE",  # hosts that are containers or small virtual machines cannot grant it
    "SYS_TIME",  # the clock is the host's
)
# The kernel's network settings belong to the node's own network namespace; a Docker engine in the node writes them.
_NETWORK_SETTINGS = "mount --bind /proc/sys/net /proc/sys/net && mount -o remount,bind,rw /proc/sys/net"


@dataclass(frozen=True)
class NewNode:
    """A node to be created."""

    name: str
    port: int
    hardware: str | None = None


class Ports:
    """Free ports of this machine's loopback, each returned once; safe to use from several threads."""

    def __init__(self, used: set[int]) -> None:
        self._left = iter(port for port in PORTS if port not in used)
        self._lock = threading.Lock()

    def take(self) -> int:
        """Return the next free port; UndeterminedError if there is none."""
        with self._lock:
            for port in self._left:
                with socket.socket() as probe:
                    try:
                        probe.bind((ADDRESS, port))
                    except OSError:
                        continue
                return port
        raise UndeterminedError(f"no free port from {PORTS.start} to {PORTS.stop - 1} on {ADDRESS}: gpunode lab down")


@dataclass(frozen=True)
class Maker:
    """Creator of the new nodes of one lab from one image."""

    client: docker.DockerClient
    lab: str
    network: str
    state: LabState
    system: LabSystem
    image: str
    init: str
    """Shell script that the container runs first and that then executes systemd."""
    ports: Ports
    extra: tuple[Entry, ...] = ()
    """Further files of every node, in place before its first boot."""
    stop: threading.Event = field(default_factory=threading.Event)

    def make(self, new: NewNode) -> LabNode:
        """Create and start a node; take another port if another process occupied this one first."""
        name, port = new.name, new.port
        with tempfile.TemporaryDirectory(prefix="gpunode-lab-") as folder:
            host_key = Path(folder, "key")
            public = make_key(host_key, name)
            identity = tar_of(self._identity(new, host_key.read_text(encoding="ascii"), public))
        for left in reversed(range(_ATTEMPTS)):
            if self.stop.is_set():
                raise UndeterminedError(f"{name}: not created: interrupted")
            container = self._create(new, port, public)
            try:
                with docker_errors(f"{name}: starting"):
                    container.put_archive("/", identity)
                    container.start()
                    container.reload()
            except UndeterminedError as err:
                if not left or "already" not in str(err):
                    raise
                container.remove(force=True)
                port = self.ports.take()
            else:
                break
        node = LabNode.of(container, self.state)
        self._set_password(node)
        return node

    def _create(self, new: NewNode, port: int, host_key: str) -> Container:
        labels = {
            LAB_LABEL: self.lab,
            NODE_LABEL: new.name,
            SYSTEM_LABEL: self.system.id,
            PORT_LABEL: str(port),
            HOST_KEY_LABEL: host_key,
        }
        boot = [_NETWORK_SETTINGS]
        if new.hardware:
            labels[HARDWARE_LABEL] = new.hardware
            boot.append(BOOT)
        with docker_errors(f"{new.name}: creating its container"):
            container: Container = self.client.containers.create(
                self.image,
                ["/bin/sh", "-c", "\n".join([*boot, self.init])],
                name=f"{self.network}-{new.name}",
                hostname=new.name,
                labels=labels,
                network=self.network,
                ports={"22/tcp": (ADDRESS, port)},
                cap_add=["ALL"],
                cap_drop=list(_CAPABILITIES_WITHHELD),
                security_opt=["seccomp=unconfined", "apparmor=unconfined", "label=disable"],
                cgroupns="host",
                userns_mode="host",
                device_cgroup_rules=[AUTOFS_RULE, *(DEVICE_RULES if new.hardware else ())],
                volumes=cgroup_mount(self.system.id),
                # An engine in the node cannot create its overlays on the node's own overlay.
                mounts=[Mount("/var/lib/docker", None, labels={LAB_LABEL: self.lab})],
                tmpfs={"/run": "mode=755,nosuid,nodev", "/tmp": "mode=1777,nosuid,nodev,exec"},  # noqa: S108
                # A node that reboots itself is restarted; one that was stopped, or that was running when its host
                # rebooted, is not.
                restart_policy={"Name": "on-failure"},
                stop_signal="SIGRTMIN+3",
            )
        return container

    def _identity(self, new: NewNode, private: str, public: str) -> Iterator[Entry]:
        """Yield the files that identify this node, in place before its first boot."""
        yield Entry("etc/machine-id", uuid.uuid4().hex + "\n", 0o444)
        yield Entry("etc/motd", greeting(self.lab, new, self.system), 0o644)
        yield Entry("etc/ssh/ssh_host_ed25519_key", private, 0o600)
        yield Entry("etc/ssh/ssh_host_ed25519_key.pub", f"{public} {new.name}\n", 0o644)
        key = self.state.key.with_suffix(".pub").read_text(encoding="ascii")
        for user in (ADMIN, OPERATOR):
            yield Entry(f"home/{user}/.ssh", None, 0o700, UIDS[user], GID)
            yield Entry(f"home/{user}/.ssh/authorized_keys", key, 0o600, UIDS[user], GID)
        yield from self.extra
        if new.hardware:
            yield from entries(describe(new.hardware, f"{self.lab}/{new.name}"))

    def _set_password(self, node: LabNode) -> None:
        password = self.state.password.read_text(encoding="ascii").strip()
        done = node.run(["sh", "-c", f'echo "{OPERATOR}:$PASSWORD" | chpasswd'], env={"PASSWORD": password})
        if done.returncode != 0:
            raise UndeterminedError(f"{node.name}: chpasswd: {done.stderr.strip()}")


def greeting(lab: str, new: NewNode, system: LabSystem) -> str:
    """Return the text shown after login to a node; the tools themselves answer as on a real server."""
    tree = "Debian's packages under the name of " if system.lookalike else ""
    lines = [f"{new.name}, a node of gpunode lab {lab}: a container with {tree}{system.id}."]
    if new.hardware:
        lines.append(
            f"Its hardware ({new.hardware}), NVIDIA's tools and packages are simulated: no GPU is behind them."
        )
    return "\n".join(["", *lines, ""]) + "\n"
