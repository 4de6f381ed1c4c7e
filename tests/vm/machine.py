"""A virtual machine with a kernel of its own: starts from the shared image, answers SSH, reboots, keeps its disk."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from image import USER, Image
from programs import run_program

UP_LIMIT_S = 600
"""A boot takes about 20 s on an idle machine; the processor is emulated, and others may use this one."""
DOWN_LIMIT_S = 180
MAC = "52:54:00:12:34:"


@dataclass(frozen=True)
class Hardware:
    """What a machine is made of, as QEMU's options name it."""

    board: str = "pc"
    cpus: int = 2
    disk: str = "if=virtio"
    nic: str = "virtio-net-pci"
    devices: tuple[str, ...] = ()


@dataclass
class Machine:
    """One virtual machine; ``disks`` are sizes in bytes of empty virtio disks (/dev/disk/by-id/virtio-disk0, …)."""

    image: Image
    folder: Path
    disks: tuple[int, ...] = ()
    memory_mib: int = 2048
    options: tuple[str, ...] = ()
    """Further options of QEMU."""
    hardware: Hardware = field(default_factory=Hardware)
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> None:
        """Start the machine, with the disks as they were left, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        root = self.folder / "root.qcow2"
        if not root.exists():
            _qemu_img("create", "-f", "qcow2", "-F", "raw", "-b", self.image.disk, root)
            for number, size in enumerate(self.disks):
                _qemu_img("create", "-f", "raw", self.folder / f"disk{number}.raw", size)
        self.port = _free_port()
        self._write_inventory()
        with self.serial.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(root),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # The kernel shares processors out by session before it does by nice values.
        with suppress(OSError):
            Path(f"/proc/{self.process.pid}/autogroup").write_text("-10", encoding="ascii")
        self._await_boot("")

    def _command(self, root: Path) -> list[str]:
        drives = [
            f"file={self.image.boot},format=raw,if=virtio,snapshot=on",
            f"file={root},format=qcow2,cache=unsafe,{self.hardware.disk}",
            *(
                f"file={self.folder / f'disk{number}.raw'},format=raw,if=none,id=disk{number},cache=unsafe"
                for number in range(len(self.disks))
            ),
        ]
        # Behind the machine's own disks on the bus, so that it boots from those.
        devices = [
            f"virtio-blk-pci,drive=disk{number},serial=disk{number},addr={16 + number:#x}"
            for number in range(len(self.disks))
        ]
        return [
            # A starved guest misses the limits of what it is asked; without root nice warns and goes on.
            *("nice", "-n", "-10", "setpriv", "--pdeathsig", "KILL"),
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", self.hardware.board),
            *("-cpu", "max", "-smp", str(self.hardware.cpus)),
            *("-m", str(self.memory_mib), "-nodefaults", "-no-user-config", "-display", "none"),
            *("-serial", f"file:{self.serial}", "-device", "virtio-rng-pci"),
            *(word for drive in drives for word in ("-drive", drive)),
            *(word for device in devices for word in ("-device", device)),
            *("-netdev", f"user,id=net0,hostfwd=tcp:127.0.0.1:{self.port}-:22"),
            *("-device", f"{self.hardware.nic},netdev=net0,mac={MAC}56,romfile="),
            *self.hardware.devices,
            *self.options,
        ]

    def run(self, argv: Sequence[str], timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
        """Run a command as root in the machine."""
        words = " ".join("'" + word.replace("'", "'\\''") + "'" for word in argv)
        return run_program([*self.ssh, f"sudo -n {words}"], limit_s=timeout_s)

    def sh(self, script: str, timeout_s: float = 300) -> str:
        """Return what a shell script prints that root runs in the machine; it must succeed."""
        done = self.run(["bash", "-euo", "pipefail", "-c", script], timeout_s)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def reboot(self) -> None:
        """Reboot in an orderly way, and wait for the new boot."""
        before = self.boot_id()
        self.run(["systemctl", "reboot"], 60)
        self._await_boot(before)

    def boot_id(self) -> str:
        """Return the kernel's id of this boot; empty where the machine does not answer."""
        try:
            done = self.run(["cat", "/proc/sys/kernel/random/boot_id"], 30)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def power_off(self) -> None:
        """Shut down in an orderly way; ``start`` boots the same disks again."""
        self.run(["systemctl", "poweroff"], 60)
        if self.process is not None:
            self.process.wait(timeout=DOWN_LIMIT_S)
            self.process = None

    def kill(self) -> None:
        """End the machine as a loss of power does."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            self.process = None

    def nodes(self) -> "list[Machine]":
        """Return the machine itself: with ``inventory_path`` and ``run`` it stands where a lab can."""
        return [self]

    @property
    def inventory_path(self) -> Path:
        """An inventory with the machine in the group gpu_nodes."""
        return self.folder / "inventory.ini"

    @property
    def serial(self) -> Path:
        """What the machine printed to its serial console, and QEMU's messages."""
        return self.folder / "serial.log"

    @property
    def ssh(self) -> list[str]:
        """The words of ssh in front of a command."""
        return ["ssh", *self._options(), "-p", str(self.port), "-l", USER, "127.0.0.1"]

    def _options(self) -> list[str]:
        settings = {
            "UserKnownHostsFile": self.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            # A sealed image has no host key: each machine makes its own.
            "StrictHostKeyChecking": "yes" if self.image.host_key else "accept-new",
            "IdentitiesOnly": "yes",
            "IdentityFile": self.image.key,
            "BatchMode": "yes",
            "ConnectTimeout": 30,
        }
        return ["-F", "/dev/null", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]

    def _write_inventory(self) -> None:
        known = f"[127.0.0.1]:{self.port} {self.image.host_key}\n" if self.image.host_key else ""
        (self.folder / "known_hosts").write_text(known, encoding="ascii")
        common = " ".join(self._options())
        self.inventory_path.write_text(
            "[gpu_nodes]\n"
            f"vm ansible_host=127.0.0.1 ansible_port={self.port} ansible_user={USER} "
            f'ansible_ssh_common_args="{common}"\n',
            encoding="utf-8",
        )

    def _await_boot(self, before: str) -> None:
        """Wait until the machine answers with another boot than ``before``."""
        deadline = time.monotonic() + UP_LIMIT_S
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise AssertionError(f"QEMU ended: {self._last()}")
            if self.boot_id() not in ("", before):
                return
            time.sleep(1)
        raise AssertionError(f"the machine did not answer within {UP_LIMIT_S} s: {self._last()}")

    def _last(self) -> str:
        return self.serial.read_text(encoding="utf-8", errors="replace")[-2000:]


class StartVm(Protocol):
    """Start a machine with these fields of ``Machine``."""

    def __call__(
        self,
        *,
        image: Image = ...,
        disks: tuple[int, ...] = (),
        options: tuple[str, ...] = (),
        hardware: Hardware = ...,
    ) -> Machine: ...


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _qemu_img(*argv: object) -> None:
    subprocess.run(["qemu-img", *map(str, argv[:1]), "-q", *map(str, argv[1:])], check=True, timeout=60)
