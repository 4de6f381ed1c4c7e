# ruff: noqa: T201 (its output is what it is for)
"""Measure the controller's cost of SSH: Fabric, as gpunode uses it, and OpenSSH's own program, in one run.

They ask the same real sshds on this machine's loopback (tests/fleet/endpoints.py) for the same bundles;
``transports.py`` describes how. None reads an inventory or judges. Every child is waited for, so that its processor
time counts. The node that requires a password is a server of Paramiko's in this process; its processor time does not.

    python benchmarks/ssh_transport.py [--nodes 40] [--rounds 5]
"""

import argparse
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, OPEN_SUCCEEDED

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "fleet"))

from endpoints import SSHD, endpoints  # noqa: E402
from fleet_bundles import healthy  # noqa: E402
from measure import Cost, machine, measured, with_bytecode  # noqa: E402

LIMIT_S = 300
"""For one run of one transport; it prints its stacks then and ends."""
PASSWORD = "correct-horse"  # noqa: S105 (of the server in this file)
COMMANDS = 11
TITLES = {"fabric": "Fabric", "openssh": "OpenSSH", "openssh-curve25519": "OpenSSH, curve25519"}
"""By the names of ``transports.py``."""
ASKPASS = '#!/bin/sh\ncat "$GPUNODE_BENCHMARK_PASSWORD"\n'


class PasswordServer(paramiko.ServerInterface):
    """A node that accepts only a password and answers any command with one bundle."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def check_auth_password(self, username: str, password: str) -> int:  # noqa: ARG002
        return int(AUTH_SUCCESSFUL if password == PASSWORD else AUTH_FAILED)

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002
        return "password"

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002
        return int(OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=self._reply, args=(channel, command), daemon=True).start()
        return True

    def _reply(self, channel: paramiko.Channel, command: bytes) -> None:
        token = command.partition(b"gpunode-")[2].partition(b" ")[0]
        channel.sendall(b"gpunode-" + token + b" ready\n")
        while channel.recv(1 << 16):
            pass
        channel.sendall(self._answer)
        channel.send_exit_status(0)
        channel.close()


@contextmanager
def password_node(folder: Path, answer: bytes) -> Iterator[str]:
    """Serve one node that requires a password; return the ssh_config by which it is ``gpu-pw``."""
    key = paramiko.Ed25519Key.from_private_key_file(str(folder / "host_key"))
    held: list[paramiko.Transport] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            transport = paramiko.Transport(sock)
            transport.add_server_key(key)
            transport.start_server(event=threading.Event(), server=PasswordServer(answer))
            held.append(transport)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        known = folder / "known_hosts_pw"
        known.write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
        config = folder / "ssh_config_pw"
        config.write_text(
            f"Host gpu-pw\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  UserKnownHostsFile {known}\n"
            "  GlobalKnownHostsFile none\n  IdentityFile none\n  IdentityAgent none\n  PubkeyAuthentication no\n"
        )
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield str(config)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for transport in held:
                transport.close()


def run(transport: str, words: Sequence[str], nodes: int, env: dict[str, str]) -> Cost:
    """Run once; raise SystemExit with the output if not every node answered."""
    argv = [sys.executable, "-I", "-X", f"pycache_prefix={env['PYTHONPYCACHEPREFIX']}"]
    argv += [str(ROOT / "benchmarks" / "transports.py"), transport, "--limit", str(LIMIT_S), *words]
    cost = measured(argv, timeout_s=LIMIT_S + 30, env=env)
    if cost.stdout.strip() != str(nodes):
        raise SystemExit(
            f"{transport} {' '.join(words)}: {cost.stdout.strip() or 'none'} of {nodes}\n{cost.stderr[-6000:]}"
        )
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=40, help="two or more")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if SSHD is None:
        raise SystemExit("no sshd on this machine: apt-get install openssh-server")
    jump, *nodes = names = [f"gpu-{number:03d}" for number in range(1, chosen.nodes + 2)]
    bundles = {name: healthy(number, name) for number, name in enumerate(names, start=1)}
    costs: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="gpunode-benchmark-") as place:
        folder = Path(place)
        askpass, secret = folder / "askpass", folder / "secret"
        askpass.write_text(ASKPASS)
        askpass.chmod(0o700)
        secret.write_text(PASSWORD + "\n")
        env = with_bytecode(folder / "bytecode") | {
            "SSH_ASKPASS": str(askpass),
            "SSH_ASKPASS_REQUIRE": "force",
            "GPUNODE_BENCHMARK_PASSWORD": str(secret),
        }
        with endpoints(folder, bundles, {}) as standing, password_node(folder, bundles[jump].encode()) as by_password:
            config = str(standing.ssh_config)
            many = f"{len(nodes)} nodes"
            shapes: dict[str, tuple[list[str], int]] = {
                "one node": ([config, "--", *nodes[:1]], 1),
                many: ([config, "--", *nodes], len(nodes)),
                "one node behind a jump host": ([config, "--jump", jump, "--", *nodes[:1]], 1),
                f"{many} behind a jump host": ([config, "--jump", jump, "--", *nodes], len(nodes)),
                f"one node, {COMMANDS} commands": ([config, "--commands", str(COMMANDS), "--", *nodes[:1]], 1),
                "one node, by password": ([by_password, "--password", PASSWORD, "--", "gpu-pw"], 1),
            }
            for transport in TITLES:  # so that all bytecode is there
                run(transport, *shapes["one node"], env)
            for number in range(chosen.rounds):
                for shape, (words, count) in shapes.items():
                    for transport in TITLES:
                        print(f"round {number + 1} of {chosen.rounds}: {shape}, {transport}", file=sys.stderr)
                        costs.setdefault((shape, transport), []).append(run(transport, words, count, env))
    print(f"median (best) of {chosen.rounds} rounds, bytecode compiled before;", end=" ")
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine()}\n")
    print(f"| processor time, elapsed time | {' | '.join(TITLES.values())} |")
    print("|---|" + "---|" * len(TITLES))
    for shape in shapes:
        print(f"| {shape} | {' | '.join(shown(costs[shape, transport]) for transport in TITLES)} |")
    print(f"\n| each further node, processor time | {' | '.join(TITLES.values())} |")
    print("|---|" + "---|" * len(TITLES))
    for few, all_of in (("one node", many), ("one node behind a jump host", f"{many} behind a jump host")):
        further = [
            1000 * (cpu(costs[all_of, transport]) - cpu(costs[few, transport])) / (len(nodes) - 1)
            for transport in TITLES
        ]
        print(f"| {all_of} | {' | '.join(f'{one:.1f} ms' for one in further)} |")


def cpu(costs: Sequence[Cost]) -> float:
    """Return the median of the processor time in seconds."""
    return statistics.median(cost.cpu_s for cost in costs)


def shown(costs: Sequence[Cost]) -> str:
    """Return median and best of the processor time, and the median of the elapsed time."""
    wall = statistics.median(cost.wall_s for cost in costs)
    return f"{1000 * cpu(costs):.0f} ms ({1000 * min(cost.cpu_s for cost in costs):.0f}), {wall:.1f} s"


if __name__ == "__main__":
    main()
