"""Nodes of a fabric on this machine: namespaces with an sshd each, in two racks of bridges, with tc on their links.

A node has a network, a host name, mounts and processes of its own, so that its process list is its own, and the end of
its first process is the end of the node. Root, iproute2 and sshd are needed; nothing outside the namespaces changes.

    GPUNODE_TORCH_PYTHON=... python tests/integration/fabric_nodes.py [--healthy 20] [FAULT ...]

runs ``gpunode validate --fabric`` over 4 nodes with 4 ranks each, and prints a table row for each fault.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_sshd import make_key

SSHD = "/usr/sbin/sshd"
NETWORK, CONTROLLER = "10.77.0", "10.77.0.250"
FAST, SLOW = "400mbit", "25mbit"
CGROUPS = next(path for path in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")) if path.exists())
QUOTA = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "2000", "cpu.max": "2000 100000"}
"""Of both versions of cgroups: a fiftieth of a processor. A product of matrices needs 14 ms or more of it, hence many
periods: it takes longer than beside the 15 other ranks and other work on two processors. With a hundredth, what comes
before the products took a rank longer than its limit where a product needs 27 ms.
"""
EXCHANGED, LOOK_S = 500_000, 0.2
"""Bytes that a node sends in these seconds once its ranks exchange messages: while they meet it sends less."""
INIT = """\
import os, subprocess, sys, time
name, config, log, hosts, home, cgroups, packages, site = sys.argv[1:]
for words in (
    ["mount", "--rbind", "/sys/fs/cgroup", cgroups],
    ["mount", "-t", "sysfs", "sysfs", "/sys"],
    ["mount", "--rbind", cgroups, "/sys/fs/cgroup"],
    ["mount", "--bind", hosts, "/etc/hosts"],
    ["mount", "--bind", packages, site],
    ["mount", "--rbind", home, "/root"],
    ["hostname", name],
    ["ip", "link", "set", "lo", "up"],
):
    subprocess.run(words, check=True)
subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", config, "-E", log])
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.2)
"""


def call(*words: str, check: bool = True) -> str:
    """The output of a program of this machine."""
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or not check, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Namespace:
    """A process that holds namespaces."""

    holder: subprocess.Popen[bytes]
    pid: int

    def call(self, *words: str, check: bool = True) -> str:
        """The output of a program in its network."""
        return call("nsenter", "-t", str(self.pid), "-n", *words, check=check)

    def processes(self) -> list[str]:
        """The command lines of all processes in its PID namespace, without its first process and sshd's own."""
        output = call("nsenter", "-t", str(self.pid), "-p", "-m", "ps", "-e", "-ww", "-o", "pid=,args=", check=False)
        rows = [line.split(None, 1) for line in output.splitlines()]
        prefixes = ("sshd", "/usr/sbin/sshd", "ps -e", "[")
        return [row[1] for row in rows if len(row) == 2 and row[0] != "1" and not row[1].startswith(prefixes)]

    def end(self) -> None:
        """End its first process, and with it all others."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.holder.pid, signal.SIGKILL)
        self.holder.wait(10)


def held(*words: str, program: Sequence[str]) -> Namespace:
    """New namespaces, as ``unshare`` names them, with a first process."""
    holder = subprocess.Popen(
        ["unshare", *words, "--fork", "--kill-child=KILL", *program], stdin=subprocess.DEVNULL, start_new_session=True
    )
    end = time.monotonic() + 10
    while time.monotonic() < end:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text(encoding="ascii").split()
        if children and Path(f"/proc/{children[0]}/comm").read_text(encoding="ascii").strip() != "unshare":
            return Namespace(holder, int(children[0]))
        time.sleep(0.02)
    raise AssertionError("unshare started nothing")


class FabricNodes:
    """Racks of nodes; ``python`` has the PyTorch that the nodes use, for their Python's version."""

    def __init__(self, folder: Path, python: str, racks: int = 2, size: int = 2) -> None:
        self.folder, self._python = folder, python
        self.names = [f"node{number}" for number in range(racks * size)]
        self.racks = {name: f"rack{number // size}" for number, name in enumerate(self.names)}
        self.nodes: dict[str, Namespace] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "FabricNodes":
        try:
            self._up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _up(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        hosts = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}", encoding="ascii")
        names = f"mount --bind {self.folder}/hosts /etc/hosts && exec sleep infinity"
        self.switch = held("--net", "--mount", program=["sh", "-c", names])
        self._stack.callback(self.switch.end)
        racks = sorted(set(self.racks.values()))
        for rack in racks:
            self.switch.call("ip", "link", "add", "name", rack, "mtu", "9000", "type", "bridge")
            self.switch.call("ip", "link", "set", rack, "up")
        self.switch.call("ip", "link", "set", "lo", "up")
        for rack in racks[1:]:
            ends = (f"up-{racks[0]}", f"up-{rack}")
            self.switch.call(
                "ip", "link", "add", "name", ends[0], "mtu", "9000", "type", "veth", "peer", "name", ends[1]
            )
            for end, of in zip(ends, (racks[0], rack), strict=True):
                self.switch.call("ip", "link", "set", end, "mtu", "9000", "master", of, "up")
        self.switch.call("ip", "address", "add", f"{CONTROLLER}/24", "dev", racks[0])
        # Jumbo frames only between nodes: a wrong MTU does not cut them off from the controller.
        route = f"{NETWORK}.0/24 dev {racks[0]} src {CONTROLLER} mtu lock 1500 advmss 1460"
        self.switch.call("ip", "route", "replace", *route.split())
        make_key(self.folder / "identity")
        # The nodes' own Python finds PyTorch among root's packages. A link would lead to nothing where PyTorch is in
        # the folder /root of this machine: that of a node is another one.
        self._packages = call(self._python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        self._site = self.folder / "home" / ".local" / "lib" / Path(self._packages).parent.name / "site-packages"
        self._site.mkdir(parents=True)
        for name in self.names:
            self.start(name)
        self._inventory()
        self.shape()

    def address(self, name: str) -> str:
        """The address of a node."""
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def start(self, name: str) -> None:
        """Start a node, also again."""
        folder = self.folder / name
        (folder / "cgroups").mkdir(parents=True, exist_ok=True)
        if not (folder / "host_key").exists():
            make_key(folder / "host_key")
        shutil.copy(self.folder / "identity.pub", folder / "authorized_keys")
        lines = (
            "Port 22",
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            f"PidFile {folder}/pid",
            *("UsePAM no", "StrictModes no", "MaxStartups 200", "PasswordAuthentication no", "PermitRootLogin yes"),
        )
        (folder / "sshd_config").write_text("\n".join(lines) + "\n", encoding="ascii")
        program = [sys.executable, "-c", INIT, name, str(folder / "sshd_config"), str(folder / "log")]
        packages = [self._packages, str(self._site)]
        node = held(
            "--net",
            "--uts",
            "--pid",
            "--mount",
            "--mount-proc",
            program=[*program, *(str(self.folder / path) for path in ("hosts", "home", f"{name}/cgroups")), *packages],
        )
        self.nodes[name] = node
        self._stack.callback(node.end)
        port = f"v-{name}"
        self.switch.call("ip", "link", "del", port, check=False)
        self.switch.call(
            "ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid)
        )
        self.switch.call("ip", "link", "set", port, "mtu", "9000", "master", self.racks[name], "up")
        node.call("ip", "link", "set", "eth0", "mtu", "9000", "up")
        node.call("ip", "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        end = time.monotonic() + 20
        while time.monotonic() < end and ":22" not in node.call("ss", "-Hltn"):
            time.sleep(0.1)

    def _inventory(self) -> None:
        keys = []
        for name in self.names:
            key = " ".join((self.folder / name / "host_key.pub").read_text(encoding="ascii").split()[:2])
            keys.append(f"{name},{self.address(name)} {key}\n")
        (self.folder / "known_hosts").write_text("".join(keys), encoding="ascii")
        common = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.folder / "identity"),
            "ansible_ssh_common_args": f"-F none -o UserKnownHostsFile={self.folder}/known_hosts -o IdentitiesOnly=yes",
        }
        hosts = {name: {"ansible_host": self.address(name), "gpunode_rack": self.racks[name]} for name in self.names}
        (self.folder / "inventory.json").write_text(json.dumps({"all": {"hosts": hosts, "vars": common}}), "utf-8")

    # --- links

    def shape(self, **rates: str) -> None:
        """Give all links their rate, those of named nodes another one, ``uplink`` that of the racks' switches."""
        for name in self.names:
            rate = rates.get(name, FAST)
            self.limit(self.switch, f"v-{name}", rate)
            self.limit(self.nodes[name], "eth0", rate)
        for rack in sorted(set(self.racks.values()))[1:]:
            for end in ("up-rack0", f"up-{rack}"):
                self.limit(self.switch, end, rates.get("uplink", "1000mbit"))

    def limit(self, where: Namespace, device: str, rate: str) -> None:
        """Give a device a rate."""
        where.call(
            "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb", "limit", "1mb"
        )

    def slow_pair(self, first: str, other: str) -> None:
        """Slow down what two nodes send to each other."""
        for name, to in ((first, other), (other, first)):
            tc = [
                ("tc", *words.split()) for words in PAIR.format(fast=FAST, slow=SLOW, to=self.address(to)).splitlines()
            ]
            self.nodes[name].call("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
            for words in tc:
                self.nodes[name].call(*words)

    def path_mtu(self, name: str, mtu: int) -> None:
        """Give the switch's port of a node an MTU: larger frames are lost without a message."""
        self.switch.call("ip", "link", "set", f"v-{name}", "mtu", str(mtu))

    def ranks(self, name: str, number: int = 4) -> list[int]:
        """The processes of a node's ranks, in their order, here; empty before all of them run."""
        root = self.nodes[name].pid
        pids = _below(root)
        for pid in pids:
            children = sorted(child for child in pids if _parent(child) == pid)
            if len(children) == number and all("payload.pyz" in _args(process) for process in (pid, *children)):
                return children
        return []

    # --- runs

    def command(self, *words: str) -> list[str]:
        """The command line of ``validate --fabric``, in the switch's network."""
        gpunode = [sys.executable, "-m", "gpunode", "validate", "--fabric", "-i", str(self.folder / "inventory.json")]
        defaults = [] if "--engine" in words else ["--no-container"]
        return ["nsenter", "-t", str(self.switch.pid), "-n", "-m", *gpunode, *defaults, *words]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the controller."""
        return {**os.environ, "GPUNODE_HISTORY": "off", "HOME": str(self.folder), "NO_COLOR": "1"}

    def run(
        self, *words: str, limit_s: float = 900, more: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Exit code and report of a run; ``more`` is added to its environment."""
        argv, environment = self.command("--format", "json", *words), {**self.environment, **(more or {})}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False, env=environment)
        assert done.stdout.startswith("{"), done.stderr[-2000:]
        report = json.loads(done.stdout)
        assert "nodes" in report, f"{report} {done.stderr[-2000:]}"
        return done.returncode, report

    def left(self) -> dict[str, list[str]]:
        """The processes of each node that are left of a run."""
        return {name: rest for name, node in self.nodes.items() if (rest := node.processes())}


PAIR = """\
qdisc add dev eth0 root handle 1: htb default 10
class add dev eth0 parent 1: classid 1:10 htb rate {fast}
class add dev eth0 parent 1: classid 1:20 htb rate {slow}
filter add dev eth0 protocol ip parent 1: prio 1 u32 match ip dst {to}/32 flowid 1:20"""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0


def _args(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    return ""


def _met(nodes: FabricNodes, name: str, local: int, number: int = 4) -> list[int]:
    """The process of a rank, as soon as it connected to the others; it imported PyTorch by then."""
    return [pid for pid in nodes.ranks(name, number)[local : local + 1] if _connected(pid)]


def _connected(pid: int) -> bool:
    """Whether a process has a TCP connection."""
    inodes = set()
    with contextlib.suppress(OSError):
        for family in ("tcp", "tcp6"):
            rows = Path(f"/proc/{pid}/net/{family}").read_text(encoding="ascii").splitlines()[1:]
            inodes |= {f"socket:[{row.split()[9]}]" for row in rows}
        return any(str(link.readlink()) in inodes for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _below(pid: int) -> list[int]:
    pids, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{current}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
        pids.append(current)
    return pids


def named(report: dict[str, Any], *statuses: str) -> dict[str, set[str]]:
    """Checks with these statuses, by node."""
    return {
        node["host"]: {finding["check"] for finding in node["findings"] if finding["status"] in statuses}
        for node in report["nodes"]
        if any(finding["status"] in statuses for finding in node["findings"])
    }


# --- faults


@contextlib.contextmanager
def while_running(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run something beside a run, until it ends."""
    over = threading.Event()
    thread = threading.Thread(target=act, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)


def wait_for(over: threading.Event, look: Callable[[], list[int]]) -> list[int]:
    """The processes as soon as there are some."""
    while not over.wait(0.1):
        if pids := look():
            return pids
    return []


def slow_rank(nodes: FabricNodes, name: str, local: int) -> contextlib.AbstractContextManager[None]:
    """Let a rank have a fiftieth of a processor from its rendezvous until its node's exchanges begin: it stands for a
    slow GPU.
    """
    group = CGROUPS / f"gpunode-fabric-{os.getpid()}"

    def sent() -> int:
        row = next(
            line
            for line in Path(f"/proc/{nodes.nodes[name].pid}/net/dev").read_text(encoding="ascii").splitlines()
            if "eth0:" in line
        )
        return int(row.split(":")[1].split()[8])

    def act(over: threading.Event) -> None:
        pids = wait_for(over, lambda: _met(nodes, name, local))
        if not pids:
            return
        group.mkdir()
        try:
            for file, text in QUOTA.items():
                if (group / file).exists():
                    (group / file).write_text(text, encoding="ascii")
            (group / "cgroup.procs").write_text(str(pids[0]), encoding="ascii")
            before = sent()
            while not over.wait(LOOK_S) and sent() < before + EXCHANGED:
                before = sent()
        finally:
            for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
                (CGROUPS / "cgroup.procs").write_text(pid, encoding="ascii")
            group.rmdir()

    return while_running(act)


def hanging_rank(
    nodes: FabricNodes, name: str, local: int, after_s: float | None, number: int = 4
) -> contextlib.AbstractContextManager[None]:
    """Stop a rank of several of a node for good, seconds after its rendezvous, or before it."""

    def look() -> list[int]:
        pids = nodes.ranks(name, number)[local : local + 1]
        return _met(nodes, name, local, number) if after_s is not None else pids

    def act(over: threading.Event) -> None:
        pids = wait_for(over, look)
        if pids and not over.wait(after_s or 0.0):
            os.kill(pids[0], signal.SIGSTOP)

    return while_running(act)


def bad_cable(nodes: FabricNodes, name: str) -> contextlib.AbstractContextManager[None]:
    """Let a node's link be slow most of the time."""

    def act(over: threading.Event) -> None:
        while not over.is_set():
            for rate, seconds in ((SLOW, 4.0), (FAST, 0.5)):
                nodes.limit(nodes.switch, f"v-{name}", rate)
                nodes.limit(nodes.nodes[name], "eth0", rate)
                over.wait(seconds)

    return while_running(act)


@contextlib.contextmanager
def shaped(nodes: FabricNodes, **rates: str) -> Iterator[None]:
    """Other rates for the time of a run."""
    nodes.shape(**rates)
    yield


@contextlib.contextmanager
def pair(nodes: FabricNodes, first: str, other: str) -> Iterator[None]:
    """One slow pair for the time of a run."""
    nodes.slow_pair(first, other)
    yield


@contextlib.contextmanager
def mtu(nodes: FabricNodes, name: str) -> Iterator[None]:
    """A switch port with a small MTU for the time of a run."""
    nodes.path_mtu(name, 1500)
    try:
        yield
    finally:
        nodes.path_mtu(name, 9000)


@contextlib.contextmanager
def _both(*made: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for fault in made:
            stack.enter_context(fault)
        yield


Make = Callable[[FabricNodes], contextlib.AbstractContextManager[None]]
FAULTS: dict[str, tuple[Make, dict[str, set[str]], tuple[str, ...]]] = {
    "slow GPU (node2, rank 1)": (lambda n: slow_rank(n, "node2", 1), {"node2": {"nodes.gpu"}}, ()),
    "slow NIC (node1)": (lambda n: shaped(n, node1=SLOW), {"node1": {"nodes.node"}}, ()),
    "bad cable, slow at times (node3)": (lambda n: bad_cable(n, "node3"), {"node3": {"nodes.node"}}, ()),
    "wrong MTU (node2), before the ranks": (lambda n: mtu(n, "node2"), {"node2": {"nodes.mtu"}}, ()),
    "wrong MTU (node2), by the ranks": (
        lambda n: mtu(n, "node2"),
        {"node2": {"nodes.mtu", "nodes.node"}},
        ("--force",),
    ),
    "hanging rank (node1, rank 2)": (
        lambda n: hanging_rank(n, "node1", 2, 1.0),
        {"node1": {"nodes.stopped"}},
        (),
    ),
    "hanging rank, the only one of its node (node2)": (
        lambda n: hanging_rank(n, "node2", 0, 0.0, 1),
        {"node2": {"nodes.stopped", "nodes.ranks"}},
        ("--ranks", "1"),
    ),
    "slow uplink of a rack": (
        lambda n: shaped(n, uplink=SLOW),
        {name: {"nodes.racks"} for name in ("node0", "node1", "node2", "node3")},
        (),
    ),
    "slow pair (node0, node3)": (
        lambda n: pair(n, "node0", "node3"),
        {"node0": {"nodes.link"}, "node3": {"nodes.link"}},
        (),
    ),
    "two: slow NIC (node0), slow GPU (node3, rank 2)": (
        lambda n: _both(shaped(n, node0=SLOW), slow_rank(n, "node3", 2)),
        {"node0": {"nodes.node"}, "node3": {"nodes.gpu"}},
        (),
    ),
}
"""By name: how it is made, which checks fail or warn on which nodes, and further words of the command line."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("faults", nargs="*", help="words that their names contain")
    options = parser.parse_args()
    python = os.environ["GPUNODE_TORCH_PYTHON"]
    words = ("--ranks", "4", "--links-only", "--minutes", "6")
    with tempfile.TemporaryDirectory() as folder, FabricNodes(Path(folder), python) as nodes:
        for name, (make, expected, more) in FAULTS.items():
            if not any(word in name for word in options.faults):
                continue
            nodes.shape()
            began = time.monotonic()
            with make(nodes):
                code, report = nodes.run(*words, *more)
            took = time.monotonic() - began
            by_node = named(report, "fail", "warn", "error")
            bad = {node: checks - {"nodes.links"} for node, checks in by_node.items()}
            bad = {node: checks for node, checks in bad.items() if checks}
            verdict = "as expected" if bad == expected else f"expected {expected}"
            fabric = report["fabric"] or {}
            print(f"| {name} | {bad} | {fabric.get('rounds')} | {took:.0f} s | {code} | {verdict} |", flush=True)
            print("   ", nodes.left(), flush=True)
        nodes.shape()
        seconds, rounds, suspects = [], [], 0
        for _ in range(options.healthy):
            began = time.monotonic()
            code, report = nodes.run(*words)
            seconds.append(time.monotonic() - began)
            rounds.append(report["fabric"]["rounds"])
            suspects += code != 0
            print(
                f"healthy: {code} {rounds[-1]} rounds {seconds[-1]:.0f} s {named(report, 'fail', 'warn', 'error')}",
                flush=True,
            )
        if seconds:
            row = (options.healthy, suspects, statistics.median(rounds), max(rounds), statistics.median(seconds))
            print("| none, {} runs | {} suspects | {} ({}) | {:.0f} s |".format(*row))


if __name__ == "__main__":
    main()
