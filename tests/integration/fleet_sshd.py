"""What a test knows of a real sshd on the loopback; the fixtures that start one are in fleet_fixtures.py."""

import getpass
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from gpunode.fleet.ssh_config import SshSettings
from gpunode.fleet.targets import Target


@dataclass(frozen=True)
class Server:
    """One running sshd and what a client needs for it."""

    port: int
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def host_key(self) -> str:
        """Type and key, as known_hosts has them."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def settings(self) -> SshSettings:
        """What ssh would make of it with its known_hosts and identity."""
        return SshSettings(
            alias="127.0.0.1",
            hostname="127.0.0.1",
            port=self.port,
            user=getpass.getuser(),
            identity_files=(str(self.folder / "identity"),),
            identities_only=True,
            identity_agent="none",
            known_hosts_files=(str(self.folder / "known_hosts"),),
        )

    def target(self, name: str = "node", **changes: object) -> Target:
        """A target for this server; ``changes`` are to its settings."""
        return Target(name, "ssh", ssh=replace(self.settings, **changes), become=False)  # type: ignore[arg-type]


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def make_key(path: Path) -> None:
    """An ed25519 key pair without passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=30)
