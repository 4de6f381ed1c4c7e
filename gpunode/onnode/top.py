# ruff: noqa: PTH110, PTH116, PTH123, S606
"""The node's part of ``gpunode top``: one stream of samples of its GPUs. Python 3.8, standard library.

Sent over stdin, which stays open: it ends with the connection, with its process group, or after ``BEAT_LIMIT_S``
without a line from the other side. It starts nvidia-smi and dmesg once each, in a loop of their own, on a terminal:
the terminal's end ends them, and makes them write each line at once. It starts no tool of NVIDIA while the driver is
not loaded, because nvidia-smi as root would load it. Each line on stdout begins with its kind:

======= ===================================================================================================
``N``   a JSON document: whether the node is simulated
``G``   a GPU: values of nvidia-smi's fields, as CSV
``A``   a process on a GPU: UUID, process id, memory in MiB
``T``   PCIe rates of a GPU: index, received and sent in MB/s
``K``   a line of the kernel's log that names an Xid
``P``   a process: JSON with ``pid``, ``uid``, ``user``, ``name``, ``cgroup``
``C``   seconds: processor time of this program, of the programs that it started, and since its start
``E``   a program that ended: its kind, and its last line
``B``   the number that the other side sent
======= ===================================================================================================
"""

from __future__ import annotations

import json
import os
import pty
import pwd
import queue
import select
import signal
import sys
import threading
import time
from typing import Any

BEAT_LIMIT_S = 30.0
SEND_LIMIT_S = 30.0
COST_EVERY_S = 5.0
LINE_BYTES = 2000
NAMES_MOST = 512
PCIE_LEAST_S, PCIE_MOST_S = 5, 10
"""The driver counts bytes for 20 ms per direction and GPU, so it is not asked at each interval; dmon's limit is 10."""
RETRY_S, RETRY_MOST_S = 10.0, 300.0
DRIVER = "/proc/driver/nvidia/version"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Follower:
    """A program that writes lines until it is ended, on a terminal of its own."""

    def __init__(self, kind: str, variants: list[list[str]]) -> None:
        self.kind = kind
        self.variants = variants
        self.variant = 0
        self.pid = 0
        self.terminal = -1
        self.rest = b""
        self.last = b""
        self.wait_s = RETRY_S
        self.due = 0.0
        self.spent_s = 0.0
        self.killed: list[int] = []
        """Processes without a known end: a program that hangs in the driver does not end, and is not waited for."""

    def start(self) -> None:
        self.killed = [pid for pid in self.killed if not has_ended(pid)]
        argv = self.variants[self.variant]
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            try:
                os.execvpe(argv[0], argv, {"PATH": PATH, "LC_ALL": "C", "TERM": "dumb"})
            except OSError as err:
                os.write(1, f"{argv[0]}: {err.strerror}\n".encode())
            finally:
                os._exit(127)

    def lines(self) -> list[bytes] | None:
        """Return the lines that it wrote; None after its end."""
        try:
            data = os.read(self.terminal, 65536)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, rest = (self.rest + data).split(b"\n")
        self.rest = rest[:LINE_BYTES]
        lines = [line.strip(b"\r \t")[:LINE_BYTES] for line in lines]
        lines = [line for line in lines if line]
        if lines:
            self.last = lines[-1]
        return lines

    def end(self) -> None:
        if self.pid:
            self.spent_s += processor_s(self.pid)
            os.close(self.terminal)
            os.kill(self.pid, signal.SIGKILL)
            if not has_ended(self.pid):
                self.killed.append(self.pid)
            self.pid, self.terminal, self.rest = 0, -1, b""

    def ended(self, now: float) -> bytes:
        """Return the last line after an end, and set the time of the next start."""
        last = self.last or self.rest
        self.end()
        if b"not a valid field" in last and self.variant + 1 < len(self.variants):
            self.variant += 1
            self.due = now
        else:
            self.due = now + self.wait_s
            self.wait_s = min(2 * self.wait_s, RETRY_MOST_S)
        self.last = b""
        return last


def has_ended(pid: int) -> bool:
    """Collect the status of a child if it has ended: until then its number belongs to no other process."""
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that a process took so far."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Processes:
    """Who the processes on GPUs are. Users are looked up in a thread: a directory service may hang."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self.unnamed: queue.Queue[dict[str, Any]] = queue.Queue()
        self.named: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self.look_up, daemon=True).start()

    def look_up(self) -> None:
        names: dict[int, str] = {}
        while True:
            process = self.unnamed.get()
            uid = process["uid"]
            if uid not in names:
                try:
                    names[uid] = pwd.getpwuid(uid).pw_name
                except (KeyError, OSError):
                    names[uid] = str(uid)
            self.named.put(dict(process, user=names[uid]))

    def seen(self, line: bytes, now: float, keep_s: float) -> None:
        try:
            pid = int(line.split(b",")[1])
        except (ValueError, IndexError):
            return
        if now - self.known.get(pid, -keep_s) >= keep_s and len(self.known) < NAMES_MOST:
            process = about(pid)
            if process is not None:
                # Once without the user's name, which may take long.
                self.named.put(process)
                self.unnamed.put(process)
        self.known[pid] = now
        for old in [number for number, at in self.known.items() if now - at > keep_s]:
            del self.known[old]

    def ready(self) -> list[dict[str, Any]]:
        processes = []
        while not self.named.empty():
            processes.append(self.named.get())
        return processes


def about(pid: int) -> dict[str, Any] | None:
    """Return what /proc has about a process; None if it has ended."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/comm", "rb") as stream:
            name = stream.read(64).decode(errors="replace").strip()
        with open(f"/proc/{pid}/cgroup", "rb") as stream:
            lines = stream.read(16384).decode(errors="replace").splitlines()
    except OSError:
        return None
    paths = [line.split(":", 2)[-1] for line in lines]
    return {"pid": pid, "uid": uid, "user": str(uid), "name": name, "cgroup": max(paths, key=len, default="")[:1000]}


class NodeSampler:
    """The loop: reads the programs, answers beats, and ends when nobody listens."""

    def __init__(self, gpu_fields: list[str], interval: int) -> None:
        self.interval = interval
        every = ["-l", str(interval)]
        csv = ["--format=csv,noheader,nounits"]
        pcie = str(min(max(interval, PCIE_LEAST_S), PCIE_MOST_S))
        queries = [["nvidia-smi", "--query-gpu=" + fields, *csv, *every] for fields in gpu_fields]
        apps = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", *csv, *every]
        self.followers = [
            Follower("G", queries),
            Follower("A", [apps]),
            Follower("T", [["nvidia-smi", "dmon", "-s", "t", "-d", pcie]]),
            Follower("K", [["dmesg", "-r", "-w"]]),
        ]
        self.processes = Processes()
        self.started = self.beaten = time.monotonic()
        self.cost_due = self.started + COST_EVERY_S
        self.driver_missing = False

    def run(self) -> None:
        os.set_blocking(1, False)
        self.send("N", json.dumps({"simulated": os.path.exists("/etc/gpunode/lab-node")}))
        try:
            while self.step():
                pass
        finally:
            for follower in self.followers:
                follower.end()

    def step(self) -> bool:
        """Do what is due; return False when the other side is gone."""
        now = time.monotonic()
        self.start_followers(now)
        running = {follower.terminal: follower for follower in self.followers if follower.pid}
        ready, _, _ = select.select([0, *running], [], [], 1.0)
        now = time.monotonic()
        for number in ready:
            if number in running:
                self.forward(running[number], now)
        for process in self.processes.ready():
            self.send("P", json.dumps(process))
        if now >= self.cost_due:
            self.cost_due = now + COST_EVERY_S
            spent = sum(
                follower.spent_s + (processor_s(follower.pid) if follower.pid else 0.0) for follower in self.followers
            )
            self.send("C", f"{time.process_time():.2f},{spent:.2f},{now - self.started:.2f}")
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return False
            self.beaten = now
            self.send("B", data.split()[-1].decode(errors="replace")[:40] if data.split() else "")
        return now - self.beaten < BEAT_LIMIT_S

    def start_followers(self, now: float) -> None:
        loaded = os.path.exists(DRIVER)
        if not loaded and not self.driver_missing:
            self.send("E", "G,the NVIDIA driver is not loaded")
        self.driver_missing = not loaded
        for follower in self.followers:
            if not follower.pid and now >= follower.due and (loaded or follower.kind == "K"):
                follower.start()

    def forward(self, follower: Follower, now: float) -> None:
        lines = follower.lines()
        if lines is None:
            self.send("E", follower.kind + "," + follower.ended(now).decode(errors="replace"))
            return
        for line in lines:
            if follower.kind == "A":
                self.processes.seen(line, now, max(10.0, 3.0 * self.interval))
            if follower.kind == "K" and not self.is_new_xid(line):
                continue
            self.send(follower.kind, line.decode(errors="replace"))
            if follower.kind in "GA":
                follower.wait_s = RETRY_S

    def is_new_xid(self, line: bytes) -> bool:
        """Return whether the kernel itself logged an Xid after the start: dmesg repeats the whole log first."""
        head, bracket, rest = line.partition(b"] NVRM: Xid (")
        level, _, stamp = head.partition(b">[")
        try:
            return bool(bracket and rest) and int(level[1:]) < 8 and float(stamp) >= self.started - 1
        except ValueError:
            return False

    def send(self, kind: str, text: str) -> None:
        """Write a line; end the program if nobody reads it in time."""
        line = (kind + " " + " ".join(text.split("\n")))[:LINE_BYTES]
        data = (line + "\n").encode(errors="replace")
        deadline = time.monotonic() + SEND_LIMIT_S
        while data:
            if not select.select([], [1], [], max(0.0, deadline - time.monotonic()))[1]:
                raise SystemExit(0)
            try:
                data = data[os.write(1, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise SystemExit(0) from None


if __name__ == "__main__":
    NodeSampler(sys.argv[3:], int(sys.argv[2])).run()
