"""One lab node: a container with systemd as PID 1, reached over SSH as a server would be; and its creation."""

import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import docker
from docker.models.containers import Container
from docker.types import Mount

from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.lab.engine import cgroup_mount, docker_errors, run_in
from gpunode.lab.hardware import describe
from gpunode.lab.hardware.describe import BOOT, DEVICE_RULES, entries
from gpunode.lab.recipe import ADMIN, GID, OPERATOR, UIDS, Entry, LabSystem, tar_of
from gpunode.lab.state import LabState, make_key

ADDRESS = "127.0.0.1"
LAB_LABEL = "gpunode.lab"
NODE_LABEL = "gpunode.lab.node"
SYSTEM_LABEL = "gpunode.lab.os"
PORT_LABEL = "gpunode.lab.port"
HOST_KEY_LABEL = "gpunode.lab.host-key"
HARDWARE_LABEL = "gpunode.lab.hardware"
BOOT_LIMIT_S = 300
FAULT_LIMIT_S = 60
FAULT_TOOL = "/usr/lib/gpunode-lab/bin/fault"
STOP_LIMIT_S = 30


@dataclass(frozen=True)
class LabNode:
    """A node as described by its Docker labels. ``address`` and ``port`` stay the same over restarts."""

    name: str
    os: str
    port: int
    host_key: str
    state: LabState
    container: Container = field(repr=False, compare=False)
    address: str = ADDRESS
    hardware: str | None = None
    """The name of its simulated hardware."""

    @classmethod
    def of(cls, container: Container, state: LabState) -> "LabNode":
        """Return the node of this container."""
        labels = container.labels
        return cls(
            name=labels[NODE_LABEL],
            os=labels[SYSTEM_LABEL],
            port=int(labels[PORT_LABEL]),
            host_key=labels[HOST_KEY_LABEL],
            state=state,
            container=container,
            hardware=labels.get(HARDWARE_LABEL),
        )

    @property
    def running(self) -> bool:
        """Return whether its container ran at the last look."""
        return bool(self.container.status == "running")

    def ssh(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60,
        input: str | None = None,  # noqa: A002
    ) -> subprocess.CompletedProcess[str]:
        """Run a command over SSH as ``admin``; the shell of the node joins ``argv`` with blanks, as ssh does.

        Raises UndeterminedError when it takes longer than ``timeout_s``; rc 255 is ssh's own failure.
        """
        command = ["ssh", "-F", str(self.state.ssh_config), self.name, "--", *argv]
        stdin = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                start_new_session=True,
                **stdin,
            )
        except FileNotFoundError:
            raise UndeterminedError("ssh is missing: apt-get install openssh-client") from None
        except subprocess.TimeoutExpired:
            raise UndeterminedError(
                f"{self.name}: no answer over SSH within {timeout_s:g} s: {' '.join(argv)}"
            ) from None

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 60, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root through Docker, independent of SSH; rc 124 or 137 if it exceeds ``timeout_s``."""
        limited = ["timeout", "-k", "5", f"{timeout_s:g}", *argv]
        with docker_errors(f"{self.name}: running {argv[0]}"):
            code, out, err = run_in(self.container, limited, env)
        return subprocess.CompletedProcess(list(argv), code, _text(out), _text(err))

    def fault(self, name: str, component: str | None = None, **details: str | int) -> str:
        """Set a fault of the simulated hardware; return one line about it. UsageError lists the known faults."""
        words = [*([component] if component else []), name, *(f"{key}={value}" for key, value in details.items())]
        return self.fault_words(words)

    def fault_words(self, words: Sequence[str]) -> str:
        """Set a fault given as arguments of ``gpunode lab fault``: component, fault, ``key=value``."""
        return self._fault(*words)

    def heal_words(self, words: Sequence[str]) -> list[str]:
        """Heal faults given as arguments of ``gpunode lab fault``: component, fault; either may be omitted."""
        return self._fault(*words, "--heal").splitlines()

    def heal(self, name: str | None = None, component: str | None = None) -> list[str]:
        """Heal the faults that match, all without a name; return one line for each that was set."""
        return self.heal_words([word for word in (component, name) if word])

    def faults(self) -> list[str]:
        """Return the active faults, a line each: component, fault, details."""
        rows = (line.split("\t") for line in self._fault("--list").splitlines())
        return [row[1] for row in rows if row[0] == "set"]

    def fault_kinds(self) -> list[tuple[str, str, str, str]]:
        """Return the known faults: component type (node, gpu, link), name, description, details."""
        rows = (line.split("\t") for line in self._fault("--list").splitlines())
        return [(row[1], row[2], row[3], row[4]) for row in rows if row[0] == "can"]

    def _fault(self, *words: str) -> str:
        if self.hardware is None:
            raise UsageError(f"{self.name} has no simulated hardware: gpunode lab up --hardware NAME")
        if not self.running:
            raise UndeterminedError(f"{self.name} does not run: gpunode lab up starts it")
        done = self.run([FAULT_TOOL, *words], timeout_s=FAULT_LIMIT_S)
        if done.returncode == Exit.USAGE:
            raise UsageError(done.stderr.strip())
        if done.returncode != 0:
            error = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            raise UndeterminedError(f"{self.name}: the fault could not be set or healed: {error}")
        return done.stdout.strip()

    def restart(self) -> None:
        """Reboot the node: systemd stops everything and boots again; return when the node answers."""
        with docker_errors(f"{self.name}: restarting"):
            self.container.restart(timeout=STOP_LIMIT_S)
            self.container.reload()
        self.wait()

    def wait(self, limit_s: float = BOOT_LIMIT_S, stop: Callable[[], bool] = lambda: False) -> str:
        """Wait until SSH answers with the known host key and systemd has booted.

        Returns ``running``, or ``degraded: UNIT …`` with the units that failed. Raises UndeterminedError at the
        limit, when ``stop`` returns true, and at once for an unexpected host key.
        """
        deadline = time.monotonic() + limit_s
        last = "nothing yet"
        while time.monotonic() < deadline and not stop():
            left = deadline - time.monotonic()
            try:
                done = self.ssh(["systemctl", "is-system-running", "--wait"], timeout_s=max(1.0, min(left, 5)))
            except UndeterminedError as err:
                last = str(err)
                continue
            state = done.stdout.strip()
            if state == "running":
                return state
            if state == "degraded":
                failed = self.ssh(["systemctl", "list-units", "--failed", "--plain", "--no-legend"]).stdout
                return "degraded: " + " ".join(line.split()[0] for line in failed.splitlines() if line.strip())
            if "Host key verification failed" in done.stderr:
                raise UndeterminedError(
                    f"{self.name}: its host key differs from the generated one: gpunode lab down, then up"
                )
            last = state or (done.stderr.strip().splitlines() or [last])[-1]
            time.sleep(0.3)
        raise UndeterminedError(
            f"{self.name}: not up within {limit_s:g} s (last: {last}): docker exec {self.container.name} journalctl -b"
        )


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


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
