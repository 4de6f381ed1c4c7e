# ruff: noqa: PTH123
"""The node's part of ``gpunode validate --fabric`` before ranks start. Python 3.8, standard library.

It prints one line of JSON with the node's addresses and names, then answers requests on stdin, one line each:
``{"clock": 1}`` with its time, ``{"dial": [...]}`` with what it reached of other nodes by TCP and by UDP without
fragmentation; ``{"counters": 1}`` with the error counters of its RDMA ports, ``{"serve": [...]}`` and
``{"measure": {...}}`` with perftest between two nodes, which ``{"stop": 1}`` ends. Until stdin ends it answers the
others' connections and datagrams.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

SIOCGIFCONF, SIOCGIFNETMASK = 0x8912, 0x891B
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
LARGEST = 65535
"""Bytes of an IPv4 packet, also where an interface's MTU is larger."""
HEADERS = 28
"""Bytes of the headers of IPv4 and UDP."""
SIZES = (8972, 4064, 2020, 1472, 1372, 1252, 548)
"""Payloads of usual MTUs, tried where the node's own MTU does not pass."""
DIAL_S, DATAGRAM_S, TRIES = 3.0, 0.3, 3
AT_ONCE = 16
INFINIBAND = "/sys/class/infiniband"
PERFTEST = ("ib_write_bw", "ib_write_lat")
SIZED = {"ib_write_bw": ("-D", "2", "--report_gbits"), "ib_write_lat": ("-n", "1000")}
"""Arguments of both sides."""
COLUMN = {"ib_write_bw": 3, "ib_write_lat": 4}
"""Average rate, and typical time, in the row after the head."""
PERFTEST_S, SERVED_S = 15, 45
ERRORS = (
    "symbol_error",
    "link_downed",
    "link_error_recovery",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "packet_seq_err",
    "out_of_sequence",
    "local_ack_timeout_err",
    "rx_icrc_encapsulated",
)
"""Files of ``counters`` and ``hw_counters`` of a port that count errors."""


def addresses() -> list[dict[str, Any]]:
    """Return the IPv4 addresses of this node's interfaces, with prefix, MTU and speed."""
    rows = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        room = array.array("B", bytes(40 * 1024))
        start, _ = room.buffer_info()
        size, _ = struct.unpack("iL", fcntl.ioctl(sock.fileno(), SIOCGIFCONF, struct.pack("iL", len(room), start)))
        data = room.tobytes()[:size]
        for at in range(0, size, 40):
            label = data[at : at + 16].partition(b"\0")[0].decode(errors="replace")
            address = socket.inet_ntoa(data[at + 20 : at + 24])
            mask = fcntl.ioctl(sock.fileno(), SIOCGIFNETMASK, struct.pack("256s", label.encode()[:15]))[20:24]
            name = label.partition(":")[0]
            rows.append(
                {
                    "interface": name,
                    "address": address,
                    "prefix": bin(int.from_bytes(mask, "big")).count("1"),
                    "mtu": number(f"/sys/class/net/{name}/mtu"),
                    "speed_mbit_per_s": number(f"/sys/class/net/{name}/speed"),
                }
            )
    return rows


def number(path: str) -> int | None:
    """Return the number in a file; None if there is none."""
    try:
        with open(path, encoding="ascii") as stream:
            reading = int(stream.read(32))
    except (OSError, ValueError):
        return None
    return reading if reading > 0 else None


def resolved(name: str) -> list[str]:
    """Return the IPv4 addresses of a name, as programs resolve it here."""
    try:
        rows = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(row[4][0]) for row in rows})


def taken(ports: list[int]) -> list[int]:
    """Return the ports on which something listens."""
    occupied = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
                sock.listen(1)
            except OSError:
                occupied.append(port)
    return occupied


class Responder:
    """Answers to connections and datagrams of other nodes, at one port."""

    def __init__(self) -> None:
        self._tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._tcp.bind(("", 0))
        self._tcp.listen(64)
        self.port = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("", self.port))
        for work in (self._connections, self._datagrams):
            threading.Thread(target=work, daemon=True).start()

    def _connections(self) -> None:
        while True:
            connection, _ = self._tcp.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(DIAL_S)
                connection.sendall(connection.recv(64))

    def _datagrams(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                data, sender = self._udp.recvfrom(65536)
                self._udp.sendto(b"%d " % len(data) + data[:16], sender)


def reached(host: str, port: int, mtu: int | None) -> dict[str, Any]:
    """Return what this node reached of another: ``tcp`` (None: it answered), ``mtu`` of the path (None: unknown)."""
    nonce = os.urandom(8).hex().encode()
    try:
        with socket.create_connection((host, port), DIAL_S) as sock:
            sock.sendall(nonce)
            answer = sock.recv(64)
    except socket.timeout:
        return {"tcp": f"no answer within {DIAL_S:g} s", "mtu": None}
    except OSError as err:
        return {"tcp": err.strerror or str(err), "mtu": None}
    if answer != nonce:
        return {"tcp": "something else answered", "mtu": None}
    return {"tcp": None, "mtu": path_mtu(host, port, mtu)}


def path_mtu(host: str, port: int, mtu: int | None) -> int | None:
    """Return the largest packet that reached the other node whole; None if no datagram did."""
    own_size = min(mtu or 1500, LARGEST) - HEADERS
    for size in (own_size, *(size for size in SIZES if size < own_size)):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            sock.settimeout(DATAGRAM_S)
            mark = os.urandom(8).hex().encode()
            for _ in range(TRIES):
                try:
                    sock.sendto(mark + bytes(size - len(mark)), (host, port))
                    if sock.recv(64) == b"%d " % size + mark:
                        return size + HEADERS
                except OSError:
                    continue
    return None


def dialed(peers: list[list[Any]]) -> dict[str, Any]:
    """Return what this node reached, by the other's name; some of them at a time."""
    outcomes: dict[str, Any] = {}
    waiting = list(peers)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                name, host, port, mtu = waiting.pop()
            outcomes[name] = reached(str(host), int(port), mtu)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def error_counters(folder: str = INFINIBAND) -> dict[str, int]:
    """Return the counters of errors of all RDMA ports: ``{"mlx5_0/1 symbol_error": 0}``."""
    counters = {}
    for device in entries(folder):
        for port in entries(f"{folder}/{device}/ports"):
            for kind in ("counters", "hw_counters"):
                path = f"{folder}/{device}/ports/{port}/{kind}"
                for name in sorted(set(entries(path)) & set(ERRORS)):
                    counters[f"{device}/{port} {name}"] = number(f"{path}/{name}") or 0
    return counters


def entries(folder: str) -> list[str]:
    """Return the names in a folder; none if there is none."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 (Python 3.8)
    except OSError:
        return []


class Perftest:
    """Programs of perftest that run: servers, and clients of another node's."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def serve(self, devices: list[list[Any]]) -> dict[str, list[int]]:
        """Start a server of each program for each device; return their TCP ports by device."""
        ports_by_device = {}
        for device, gid in devices:
            ports = []
            for program in PERFTEST:
                with socket.socket() as sock:
                    sock.bind(("", 0))
                    port = sock.getsockname()[1]
                self._start(program, str(device), gid, port, None)
                ports.append(port)
            ports_by_device[str(device)] = ports
        time.sleep(1)
        return ports_by_device

    def _start(self, program: str, device: str, gid: int | None, port: int, host: str | None) -> Any:
        words = [program, "-d", device, "-F", "-p", str(port), *SIZED[program]]
        words += [] if gid is None else ["-x", str(int(gid))]
        words += [] if host is None else [host]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if host is not None else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if host is not None else subprocess.DEVNULL,
            start_new_session=True,
        )
        self._running.append(process)
        # A server without a client ends as well.
        timer = threading.Timer(SERVED_S if host is None else PERFTEST_S, end_group, (process,))
        timer.daemon = True
        timer.start()
        return process

    def measure(self, host: str, devices: list[list[Any]]) -> dict[str, dict[str, Any]]:
        """Return rate and latency of each device with the same one of a server, all devices at the same time."""
        outcomes: dict[str, dict[str, Any]] = {}

        def work(device: str, gid: int | None, ports: list[int]) -> None:
            outcome: dict[str, Any] = {}
            for program, port, key in zip(PERFTEST, ports, ("gbit_per_s", "latency_us")):
                try:
                    process = self._start(program, device, gid, int(port), host)
                    output = process.communicate(timeout=PERFTEST_S + 5)[0].decode(errors="replace")
                    outcome[key] = figure(output, program)
                    if outcome[key] is None:
                        last = [line for line in output.splitlines() if line.strip(" -")] or ["no output"]
                        outcome["error"] = f"{program}: {last[-1].strip()[:200]}"
                        break
                except (OSError, subprocess.SubprocessError) as err:
                    outcome["error"] = f"{program}: {str(err)[:200]}"
                    break
            outcomes[device] = outcome

        threads = [threading.Thread(target=work, args=(str(row[0]), row[1], row[2]), daemon=True) for row in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * (PERFTEST_S + 5))
        return dict(outcomes)

    def stop(self) -> None:
        """End all programs."""
        for process in self._running:
            end_group(process)
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        self._running = []


def end_group(process: Any) -> None:
    """Kill a program, and what it started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def figure(output: str, program: str) -> float | None:
    """Return the figure in the row after perftest's head; None if there is none."""
    rows = output.splitlines()
    for at, line in enumerate(rows):
        if line.lstrip().startswith("#bytes"):
            for row in rows[at + 1 :]:
                words = row.split()
                if len(words) > COLUMN[program] and words[0].isdigit():
                    with contextlib.suppress(ValueError):
                        return float(words[COLUMN[program]])
    return None


PROGRAMS = Perftest()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    if "clock" in request:
        return {"clock": time.time()}
    if "counters" in request:
        return {"counters": error_counters()}
    if "serve" in request:
        return {"serving": PROGRAMS.serve(request["serve"])}
    if "measure" in request:
        return {"measured": PROGRAMS.measure(str(request["measure"]["host"]), request["measure"]["devices"])}
    if "stop" in request:
        PROGRAMS.stop()
        return {"stopped": True}
    return {"dialed": dialed(request["dial"])}


def main(ports: list[int]) -> None:
    """Print what this node reports of itself, then answer until stdin ends."""
    responder, name = Responder(), socket.gethostname()
    hello = {"hostname": name, "resolved": resolved(name), "addresses": addresses(), "port": responder.port}
    installed = [program for program in PERFTEST if shutil.which(program) is not None]
    print_line({"hello": {**hello, "taken": taken(ports), "programs": installed}})
    try:
        for line in sys.stdin:
            print_line(answer(json.loads(line)))
    finally:
        PROGRAMS.stop()


def print_line(document: dict[str, Any]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
