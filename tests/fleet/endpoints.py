"""Many SSH endpoints on this machine's loopback, each of which answers the probe with its own bundle, or wrongly.

One address of 127.0.0.0/8 each, one port for all. Real sshds listen there, and what they run in place of any command
plays the node: it prints what the fleet waits for, reads the probe to its end, and prints the bundle of its
address. How a node can be bad is in ``BAD``.
"""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
BAD = ("silent", "hangs", "half", "refused", "closes", "floods")
"""Accepts and never speaks; hangs before it answers; hangs after half of the bundle; nobody listens; closes at once;
sends without end."""

_NETWORK = "127.77.0"
_PER_SSHD = 16
"""Addresses that one sshd listens on at most (MAX_LISTEN_SOCKS in its source)."""
_HALF = 4000
_ANSWER = """\
set -- $SSH_CONNECTION
node={folder}/$3
stay() {{ echo $$ >>{folder}/staying; exec sleep 600; }}
[ -e "$node.hangs" ] && stay
token=${{SSH_ORIGINAL_COMMAND#*gpunode-}}
[ "$token" = "$SSH_ORIGINAL_COMMAND" ] || {{ echo "gpunode-${{token%% *}} ready"; cat >/dev/null; }}
[ -e "$node.floods" ] && exec yes "$token"
[ -e "$node.half" ] && {{ head -c {half} "$node.json"; stay; }}
exec cat "$node.json"
"""


@dataclass(frozen=True)
class Endpoints:
    """Endpoints that stand. ``addresses`` by node name; ``bad`` maps a name to its kind."""

    folder: Path
    port: int
    addresses: Mapping[str, str]
    bad: Mapping[str, str]

    @property
    def inventory(self) -> Path:
        """For Ansible and gpunode; the bad ones are in the group ``bad``."""
        return self.folder / "hosts.json"

    @property
    def ssh_config(self) -> Path:
        """For ssh and what calls it, by node name."""
        return self.folder / "ssh_config"

    def bundle(self, name: str) -> Path:
        """The file that a node answers with."""
        return self.folder / f"{self.addresses[name]}.json"


@contextmanager
def endpoints(folder: Path, bundles: Mapping[str, str], bad: Mapping[str, str]) -> Iterator[Endpoints]:
    """Endpoints for the nodes in ``bundles``; those in ``bad`` (name to kind) are bad ones.

    The kinds half and floods need a bundle too. Callers other than gpunode get the bundle without being read from.
    """
    folder.chmod(0o755)
    names = sorted({*bundles, *bad})
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    standing = Endpoints(folder, _free_port(), addresses, dict(bad))
    for name, text in bundles.items():
        standing.bundle(name).write_text(text, encoding="utf-8")
    for name, kind in bad.items():
        (folder / f"{addresses[name]}.{kind}").touch()
    answer = folder / "answer"
    answer.write_text(_ANSWER.format(folder=folder, half=_HALF))
    _write_client_files(standing)
    listening = [address for name, address in addresses.items() if bad.get(name) not in ("silent", "refused", "closes")]
    with ExitStack() as stack:
        stack.callback(_end_staying, folder / "staying")
        for first in range(0, len(listening), _PER_SSHD):
            stack.enter_context(_sshd(standing, listening[first : first + _PER_SSHD], first))
        for name, kind in bad.items():
            if kind in ("silent", "closes"):
                stack.enter_context(_listener(addresses[name], standing.port, closes=kind == "closes"))
        yield standing


def _write_client_files(standing: Endpoints) -> None:
    folder, port = standing.folder, standing.port
    for name in ("host_key", "identity"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(argv, check=True, timeout=30)
    shutil.copy(folder / "identity.pub", folder / "authorized_keys")
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = folder / "known_hosts"
    known.write_text("".join(f"[{address}]:{port} {key}\n" for address in standing.addresses.values()))
    options = {
        "User": getpass.getuser(),
        "Port": str(port),
        "IdentityFile": str(folder / "identity"),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": str(known),
        "GlobalKnownHostsFile": "none",
        "BatchMode": "yes",
        "ConnectTimeout": "20",
    }
    lines = [f"Host {name}\n  HostName {address}\n" for name, address in standing.addresses.items()]
    lines += ["Host *\n", *(f"  {key} {value}\n" for key, value in options.items())]
    standing.ssh_config.write_text("".join(lines))
    hosts = {name: {"ansible_host": name} for name in standing.addresses}
    groups: dict[str, object] = {"bad": {"hosts": {name: {} for name in standing.bad}}} if standing.bad else {}
    variables = {"ansible_ssh_args": f"-F {standing.ssh_config}", "ansible_become": False}
    document = {"all": {"vars": variables, "hosts": hosts, "children": groups}}
    standing.inventory.write_text(json.dumps(document, indent=1))


@contextmanager
def _sshd(standing: Endpoints, addresses: Sequence[str], number: int) -> Iterator[None]:
    folder = standing.folder
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / f"sshd_config-{number}"
    lines = [
        *(f"ListenAddress {address}:{standing.port}" for address in addresses),
        f"HostKey {folder}/host_key",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        f"PidFile {folder}/sshd-{number}.pid",
        *("UsePAM no", "StrictModes no", "MaxStartups 500", "PasswordAuthentication no", "PermitRootLogin yes"),
        *("PrintMotd no", "PrintLastLog no", "PermitUserRC no", f"ForceCommand /bin/sh {folder}/answer"),
    ]
    config.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(
        [str(SSHD), "-D", "-f", str(config), "-E", str(folder / f"sshd-{number}.log")],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for address in addresses:
            _wait_until_open(address, standing.port, process)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def _wait_until_open(address: str, port: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        assert process.poll() is None, "sshd ended at once"
        with socket.socket() as sock:
            sock.settimeout(1)
            if sock.connect_ex((address, port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"sshd does not listen on {address}:{port}")


@contextmanager
def _listener(address: str, port: int, *, closes: bool) -> Iterator[None]:
    """An endpoint that accepts and sends nothing, or that closes at once."""

    def serve() -> None:
        held = []
        with suppress(OSError):
            while True:
                sock, _ = listening.accept()
                held.append(sock)
                if closes:
                    held.pop().close()

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def _end_staying(pids: Path) -> None:
    """End the sleeping nodes, which outlive a caller that hangs up."""
    for pid in pids.read_text().split() if pids.exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
