# ruff: noqa: T201 (its output is what it is for)
"""Ask nodes for their bundles over one SSH transport: ``transports.py TRANSPORT CONFIG [OPTION]... -- HOST...``.

``fabric`` connects as gpunode does, ``ssh -G`` for each node included. ``openssh`` starts one ssh for each command; a
master connection serves a node that receives several commands, and the jump host of many nodes. ``openssh-curve25519``
is the same with the key exchange that Paramiko uses with OpenSSH before 9.9, in place of ssh's first choice, which
resists quantum computers and costs far more. All send gpunode's probe by gpunode's own conversation to 32 nodes at a
time, and print how many nodes answered with a bundle.

``ssh_transport.py`` measures them.
"""

import argparse
import faulthandler
import shlex
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRANSPORTS = ("fabric", "openssh", "openssh-curve25519")
PARALLEL = 32
NODE_LIMIT_S = 240.0
"""Long: what is compared is processor time, and other work on the machine must not end the comparison."""
MASTER_LIMIT_S = 20.0


@dataclass(frozen=True)
class Request:
    """Which nodes are asked, and how."""

    config: str
    """The ssh_config by which ``hosts`` and ``jump`` are names."""
    hosts: Sequence[str]
    jump: str | None
    password: str | None
    commands: int
    """How many times each node is asked over one login."""
    curve25519: bool
    """ssh offers only this key exchange."""


def by_fabric(request: Request) -> int:
    """Return how many nodes answered, as gpunode asks them."""
    from gpunode.fleet.connection import Abort, Gateways, connect, start  # noqa: PLC0415
    from gpunode.fleet.session import converse, program  # noqa: PLC0415
    from gpunode.fleet.ssh_config import resolve  # noqa: PLC0415

    script = probe()
    gateways = Gateways()
    options = ["-F", request.config, *(["-J", request.jump] if request.jump else [])]

    def ask(host: str) -> bytes:
        settings = resolve(host, [("the benchmark", options)])
        deadline, abort, output = time.monotonic() + NODE_LIMIT_S, Abort(), b""
        try:
            connection, _ = connect(
                settings, gateways=gateways, deadline=deadline, abort=abort, password=request.password
            )
            abort.add(connection.close)
            for _ in range(request.commands):
                what = program(None, sudo=False, ask=False, limit_s=NODE_LIMIT_S)
                session = start(connection, what.command, deadline)
                abort.add(session.close)
                output = converse(session, what, script, None, deadline)
                session.close()
        finally:
            abort()
        return output

    try:
        return answered(ask, request.hosts)
    finally:
        gateways.close()


def by_openssh(request: Request) -> int:
    """Return how many nodes answered, asked by OpenSSH's own program."""
    ssh = ["ssh", "-F", request.config, "-T", *(["-o", "BatchMode=no"] if request.password else [])]
    if request.curve25519:
        ssh += ["-o", "KexAlgorithms=curve25519-sha256,curve25519-sha256@libssh.org"]
    # Without the modules that the package imports: they would load Fabric and Paramiko.
    package = types.ModuleType("gpunode.fleet")
    package.__path__ = [str(ROOT / "gpunode" / "fleet")]
    sys.modules["gpunode.fleet"] = package
    from gpunode.fleet.session import LocalSession, converse, program  # noqa: PLC0415

    script = probe()

    def ask(host: str) -> bytes:
        deadline, output = time.monotonic() + NODE_LIMIT_S, b""
        with master([*ssh, *through], host, folder) if request.commands > 1 else no_master() as shared:
            for _ in range(request.commands):
                what = program(None, sudo=False, ask=False, limit_s=NODE_LIMIT_S)
                session = LocalSession([*ssh, *through, *shared, host, what.command])
                try:
                    output = converse(session, what, script, None, deadline)
                finally:
                    session.close()
        return output

    jump = request.jump
    with tempfile.TemporaryDirectory() as folder, master(ssh, jump, folder) if jump else no_master() as shared_jump:
        through = ["-o", f"ProxyCommand={shlex.join([*ssh, *shared_jump, '-W', '%h:%p', jump])}"] if jump else []
        return answered(ask, request.hosts)


@contextmanager
def no_master() -> Iterator[list[str]]:
    """Return no arguments: each ssh logs in by itself."""
    yield []


@contextmanager
def master(ssh: Sequence[str], host: str, folder: str) -> Iterator[list[str]]:
    """Hold a connection to ``host`` open; return the arguments by which another ssh uses it."""
    path = Path(folder, f"{host}.sock")
    process = subprocess.Popen([*ssh, "-M", "-N", "-S", str(path), host], stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + MASTER_LIMIT_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"no master connection to {host} within {MASTER_LIMIT_S:g} s")
            time.sleep(0.01)
        yield ["-S", str(path)]
    finally:
        process.terminate()
        try:
            process.wait(MASTER_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answered(ask: Callable[[str], bytes], hosts: Sequence[str]) -> int:
    """Return the number of hosts with a bundle; print why one failed."""
    from gpunode.fleet.session import NodeFailure  # noqa: PLC0415

    def asked(host: str) -> bool:
        try:
            return b"gpunode.bundle/1" in ask(host)
        except NodeFailure as err:
            print(f"{host}: {err}", file=sys.stderr)
            return False

    with ThreadPoolExecutor(max_workers=PARALLEL) as pool:
        return sum(pool.map(asked, hosts))


def probe() -> bytes:
    """Return the program that gpunode sends."""
    from gpunode.probe import script_text  # noqa: PLC0415

    return script_text().encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("transport", choices=TRANSPORTS)
    parser.add_argument("config")
    parser.add_argument("--jump", metavar="HOST")
    parser.add_argument("--password")
    parser.add_argument("--commands", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds; past it all threads' stacks are printed")
    parser.add_argument("hosts", nargs="+")
    chosen = parser.parse_args()
    faulthandler.dump_traceback_later(chosen.limit, exit=True)
    ask = by_fabric if chosen.transport == "fabric" else by_openssh
    curve25519 = chosen.transport == "openssh-curve25519"
    print(ask(Request(chosen.config, chosen.hosts, chosen.jump, chosen.password, chosen.commands, curve25519)))


if __name__ == "__main__":
    main()
