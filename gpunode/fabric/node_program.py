# ruff: noqa: PTH123
"""The node's part of ``gpunode validate --fabric`` before ranks start. Python 3.8, standard library.

It prints one line of JSON with the node's addresses and names, then answers requests on stdin, one line each:
``{"clock": 1}`` with its time, ``{"dial": [...]}`` with what it reached of other nodes by TCP and by UDP without
fragmentation. Until stdin ends it answers the others' connections and datagrams.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
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


def addresses() -> list[dict[str, Any]]:
    """Return the IPv4 addresses of this node's interfaces, with prefix, MTU and speed."""
    found = []
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
            found.append(
                {
                    "interface": name,
                    "address": address,
                    "prefix": bin(int.from_bytes(mask, "big")).count("1"),
                    "mtu": number(f"/sys/class/net/{name}/mtu"),
                    "speed_mbit_per_s": number(f"/sys/class/net/{name}/speed"),
                }
            )
    return found


def number(path: str) -> int | None:
    """Return the number in a file; None if there is none."""
    try:
        with open(path, encoding="ascii") as stream:
            found = int(stream.read(32))
    except (OSError, ValueError):
        return None
    return found if found > 0 else None


def resolved(name: str) -> list[str]:
    """Return the IPv4 addresses of a name, as programs resolve it here."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(one[4][0]) for one in found})


def taken(ports: list[int]) -> list[int]:
    """Return the ports on which something listens."""
    found = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", port))
                sock.listen(1)
            except OSError:
                found.append(port)
    return found


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
    except socket.timeout:  # noqa: UP041 (its name before Python 3.10)
        return {"tcp": f"no answer within {DIAL_S:g} s", "mtu": None}
    except OSError as err:
        return {"tcp": err.strerror or str(err), "mtu": None}
    if answer != nonce:
        return {"tcp": "something else answered", "mtu": None}
    return {"tcp": None, "mtu": path_mtu(host, port, mtu)}


def path_mtu(host: str, port: int, mtu: int | None) -> int | None:
    """Return the largest packet that reached the other node whole; None if no datagram did."""
    own = min(mtu or 1500, LARGEST) - HEADERS
    for size in (own, *(size for size in SIZES if size < own)):
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
    found: dict[str, Any] = {}
    waiting = list(peers)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                name, host, port, mtu = waiting.pop()
            found[name] = reached(str(host), int(port), mtu)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    if "clock" in request:
        return {"clock": time.time()}
    return {"dialed": dialed(request["dial"])}


def main(ports: list[int]) -> None:
    """Print what this node reports of itself, then answer until stdin ends."""
    responder, name = Responder(), socket.gethostname()
    hello = {"hostname": name, "resolved": resolved(name), "addresses": addresses(), "port": responder.port}
    print_line({"hello": {**hello, "taken": taken(ports)}})
    for line in sys.stdin:
        print_line(answer(json.loads(line)))


def print_line(document: dict[str, Any]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
