"""``gpunode top`` with the lab's nvidia-smi, over a real sshd and on this machine: what arrives, and what is left."""

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import forked
import pytest
from fleet_fixtures import start_sshd  # noqa: F401
from fleet_sshd import Server
from simulated import lay, node_at

import gpunode.lab
from gpunode.cli.root import answer
from gpunode.cli.streams import guard
from gpunode.fleet import Target, local_target
from gpunode.lab.hardware.describe import describe
from gpunode.lab.simulator import state
from gpunode.top import stream
from gpunode.top.model import TopDocument, TopNode
from gpunode.top.stream import FleetModel, Watch

Start = Callable[..., Server]
DRIVER = "580.95.05"
PROGRAM = stream.node_program
TOOL = """\
#!{python} -IS
import os, sys
os.environ["GPUNODE_LAB_ROOT"] = {root!r}
sys.dont_write_bytecode = True
sys.path.insert(0, {lab!r})
from simulator.smi import main
sys.exit(main(sys.argv[1:]))
"""


class Node:
    """A simulated node: its files, its tools in a folder, and the program that finds them there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        hardware = describe("l40s-4", root.name)
        modes: dict[str, dict[str, object]] = {str(gpu["index"]): {} for gpu in hardware["gpus"]}
        lay(root, hardware, DRIVER, modes)
        (root / "proc").symlink_to("/proc")
        self.tools = root / "tools"
        self.tools.mkdir()
        lab = str(Path(gpunode.lab.__file__).parent)
        self._tool("nvidia-smi", TOOL.format(python=sys.executable, root=str(root), lab=lab))
        self._tool("dmesg", f"#!/bin/sh\nexec tail -n +1 -F {root}/kmsg\n")
        self.xid(13, 0.0)

    def _tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def program(self) -> bytes:
        text = PROGRAM().decode()
        for name, value in (("DRIVER", f"{self.root}/etc/gpunode/lab-node"), ("PATH", f"{self.tools}:/usr/bin:/bin")):
            before = text
            text = "\n".join(
                f'{name} = "{value}"' if line.startswith(f"{name} = ") else line for line in text.split("\n")
            )
            assert text != before
        return text.encode()

    def load(self, *loads: Mapping[str, object]) -> None:
        """Set what the GPUs do."""
        with node_at(self.root, DRIVER), state.change_faults() as faults:
            faults[:] = [{"fault": "load", "component": f"gpu{gpu}", **load} for gpu, load in enumerate(loads)]

    def hang(self) -> None:
        with node_at(self.root, DRIVER), state.change_faults() as faults:
            faults.append({"fault": "smi-hangs", "component": None})

    def busy(self, *pids: int) -> None:
        entries = [{"gpu": gpu, "pid": pid, "name": "python3", "memory_mib": 4096} for gpu, pid in enumerate(pids)]
        with node_at(self.root, DRIVER), state.change() as (_, running):
            running["processes"] = entries

    def xid(self, number: int, at: float) -> None:
        with (self.root / "kmsg").open("a") as log:
            log.write(f"<3>[{at:12.6f}] NVRM: Xid (PCI:0000:38:00): {number}, pid=7, name=x, Ch 00000008\n")

    def processes(self) -> list[int]:
        """Processes that were started from its tools."""
        pids = []
        for pid in os.listdir("/proc"):  # noqa: PTH208
            try:
                words = Path("/proc", pid, "cmdline").read_bytes() if pid.isdigit() else b""
            except OSError:
                continue
            if str(self.root).encode() in words:
                pids.append(int(pid))
        return pids


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path / "node")
    monkeypatch.setattr(stream, "node_program", node.program)
    return node


class Looking:
    """A watch over targets, and what it saw."""

    def __init__(self, targets: list[Target], window_s: float = 3.0) -> None:
        self.model = FleetModel([target.name for target in targets], 1, window_s)
        self.watch = Watch(targets, self.model, parallel=8, timeout_s=30)

    def until(self, met: Callable[[TopDocument], bool], limit_s: float = 60) -> TopDocument:
        end = time.monotonic() + limit_s
        while not met(document := self.model.snapshot()):
            assert time.monotonic() < end, document.as_json()
            time.sleep(0.1)
        return document


def gone(node: Node, limit_s: float = 20) -> bool:
    end = time.monotonic() + limit_s
    while node.processes() and time.monotonic() < end:
        time.sleep(0.1)
    return not node.processes()


def settled(node: TopNode) -> bool:
    return bool(node.gpus) and all(gpu.verdict != "-" for gpu in node.gpus)


@pytest.fixture(params=["ssh", "local"])
def target(request: pytest.FixtureRequest, start_sshd: Start) -> Target:  # noqa: F811
    return start_sshd().target("gpu-01") if request.param == "ssh" else local_target()


LOADS = (
    {"utilization": 97, "memory": 40, "power": 85, "received": 0, "sent": 0},
    {"utilization": 40, "memory": 10, "power": 40, "received": 2100, "sent": 10},
    {"utilization": 100, "memory": 0, "power": 18, "received": 0, "sent": 0},
    {"utilization": 0, "memory": 0, "power": 10, "received": 0, "sent": 0},
)


def test_loads_have_their_verdicts_and_nothing_is_left(node: Node, target: Target) -> None:
    node.load(*LOADS)
    node.busy(*[os.getpid()] * 4)
    looking = Looking([target])
    with looking.watch:
        looking.until(lambda document: settled(document.nodes[0]))
        node.xid(79, time.clock_gettime(time.CLOCK_MONOTONIC))
        document = looking.until(
            lambda document: (
                bool(document.nodes[0].latency_ms)
                and bool(document.nodes[0].cost_percent)
                and all(gpu.processes and gpu.processes[0].name for gpu in document.nodes[0].gpus)
                and any(gpu.xids for gpu in document.nodes[0].gpus)
                and document.nodes[0].gpus[1].pcie_received_gb_per_s is not None
            )
        )
        assert len(node.processes()) >= 4
    (load,) = document.nodes
    assert [gpu.verdict for gpu in load.gpus] == ["ok", "starving", "stuck", "occupied-idle"]
    assert load.gpus[1].pcie_received_gb_per_s == 2.1
    (process,) = load.gpus[0].processes
    assert (process.pid, process.memory_mib) == (os.getpid(), 4096)
    assert process.user
    # Only what was logged after the start counts.
    assert [event.xid for gpu in load.gpus for event in gpu.xids] == [79]
    assert gone(node), node.processes()


def test_a_node_that_hangs_has_a_row_since_when_and_the_other_goes_on(
    tmp_path: Path,
    start_sshd: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad = Node(tmp_path / "good"), Node(tmp_path / "bad")
    programs = iter([good.program(), bad.program()])
    monkeypatch.setattr(stream, "node_program", lambda: next(programs))
    # Which of the two gets which program is open.
    looking = Looking([start_sshd().target("gpu-01"), start_sshd().target("gpu-02")])
    with looking.watch:
        document = looking.until(lambda document: all(map(settled, document.nodes)))
        assert [node.status for node in document.nodes] == ["live", "live"]
        bad.hang()
        document = looking.until(lambda document: {node.status for node in document.nodes} == {"live", "silent"})
        silent = next(node for node in document.nodes if node.status == "silent")
        assert silent.since < document.at
        assert "hangs" in str(silent.reason)
    assert gone(good)
    assert gone(bad)


def test_nothing_outlives_a_controller_that_is_killed(node: Node, start_sshd: Start) -> None:  # noqa: F811
    target = start_sshd().target("gpu-01")
    pid = os.fork()
    if pid == 0:
        try:
            looking = Looking([target])
            with looking.watch:
                time.sleep(60)
        finally:
            os._exit(0)
    end = time.monotonic() + 30
    while len(node.processes()) < 4 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(node.processes()) >= 4
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert gone(node), node.processes()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: sys.stdout.write('G ' + '1, ' * 900 + '\\n')", "sends too much"),
        ("sys.stdout.write('x' * 9000); sys.stdout.flush(); time.sleep(60)", "sends too much"),
        (
            "print('E G,secret-4711 \\x1b[2J', flush=True); time.sleep(1); sys.exit('secret-4711 is known')",
            "[password] is known",
        ),
        ("time.sleep(60)", "no answer for 2 s"),
    ],
    ids=["flood", "endless line", "password", "silence"],
)
def test_a_hostile_program_costs_only_its_node(program: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "node_program", f"import sys, time\n{program}\n".encode)
    monkeypatch.setattr(stream, "SILENCE_S", 2.0)
    target = Target("gpu-01", "local", password="secret-4711")  # noqa: S106 (of this test)
    looking = Looking([target, Target("gpu-02", "local")])
    with looking.watch:
        document = looking.until(lambda document: all(node.status == "failed" for node in document.nodes))
    assert reason in str(document.nodes[0].reason)
    text = document.nodes[0].model_dump_json()
    assert "secret-4711" not in text
    assert "\x1b" not in text


def top_on_a_terminal(kind: str, *options: str) -> tuple[int, int]:
    """Start the verb on a terminal of this kind; return its process and the other end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        with contextlib.suppress(BaseException):
            os.environ["TERM"] = kind
            sys.stdin = os.fdopen(0)
            guard()
            code = answer(["top", *options])
        os._exit(code)
    return pid, terminal


def rest_of(terminal: int) -> bytes:
    """Return what a terminal shows until its program has ended."""
    shown = b""
    with contextlib.suppress(OSError):
        while select.select([terminal], [], [], 30)[0] and (data := os.read(terminal, 65536)):
            shown += data
    return shown


def test_a_screen_ends_with_q_and_restores_the_terminal() -> None:
    pid, terminal = top_on_a_terminal("xterm")  # a dumb one has no screen
    shown = b""
    try:
        while b"VERDICT" not in shown:
            assert select.select([terminal], [], [], 30)[0]
            shown += os.read(terminal, 65536)
        os.write(terminal, b"spq")
        shown += rest_of(terminal)
        # 3 without a driver on this machine.
        assert forked.ended(pid) in (0, 3)
    finally:
        # The end of its terminal ends it.
        os.close(terminal)
    assert b"\x1b[?1049h" in shown
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"VERDICT")


def test_a_terminal_without_a_cursor_gets_a_table_for_each_interval() -> None:
    pid, terminal = top_on_a_terminal("dumb", "--duration", "3")
    try:
        shown = rest_of(terminal)
        assert forked.ended(pid) in (0, 3)
    finally:
        os.close(terminal)
    assert shown.count(b"VERDICT") >= 2
    assert b"\x1b" not in shown
