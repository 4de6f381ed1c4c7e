"""One lab node: a container with systemd as PID 1, reached over SSH as a server would be."""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from docker.models.containers import Container

from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.lab.engine import docker_errors, run_in
from gpunode.lab.state import LabState

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
