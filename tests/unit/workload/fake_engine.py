"""An engine of the test's own: a real HTTP server with given answers. tests/lab asks a real one."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gpunode.workload.transport import LaunchFailure

Answer = tuple[int, Any]


@dataclass
class FakeEngine:
    """Answers by ``METHOD path`` without version and query; what is a list is streamed, one JSON object a line."""

    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    version: dict[str, Any] = field(default_factory=lambda: {"Version": "28.5.1", "ApiVersion": "1.51"})
    info: dict[str, Any] = field(default_factory=lambda: {"SystemTime": "2026-11-20T12:00:00.123456789Z"})

    def start(self) -> ThreadingHTTPServer:
        """Serve on a free port of the loopback."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def answer(self, method: str, path: str) -> Answer:
        """The answer to one request."""
        bare = re.sub(r"^/v1\.[0-9]+|\?.*", "", path)
        self.requests.append(f"{method} {bare}")
        known: dict[str, Answer] = {"GET /version": (200, self.version), "GET /info": (200, self.info)}
        return (known | self.answers).get(f"{method} {bare}", (404, {"message": f"no {bare}"}))


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            while self.headers.get("Transfer-Encoding") == "chunked" and self.rfile.readline() != b"0\r\n":
                pass
            status, body = engine.answer(self.command, self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if isinstance(body, list | Iterator) and self.command == "POST":
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for line in body:
                    data = json.dumps(line).encode() + b"\r\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
                return
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class Stream:
    """A connection to the fake, or one that breaks off with a complaint."""

    def __init__(self, port: int | None, message: str) -> None:
        self._answers = message
        if port is None:
            self.sock, remote_end = socket.socketpair()
            remote_end.close()
        else:
            self.sock = socket.create_connection(("127.0.0.1", port), 5)

    def complaint(self) -> str:
        return self._answers

    def close(self) -> None:
        # As the connection to a node's program ends: whoever reads from it gets the end of the file.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


@dataclass
class FakeWay:
    """The way to the fake; ``refuse`` may reject a request, by complaint or by a LaunchFailure."""

    server: ThreadingHTTPServer
    as_root: tuple[bool, ...] = (False,)
    user: str = "alice"
    refuse: Callable[[bool], str | LaunchFailure | None] = lambda root: None  # noqa: ARG005
    opened: list[bool] = field(default_factory=list)

    def engine(self, *, root: bool) -> Stream:
        self.opened.append(root)
        refusal = self.refuse(root)
        if isinstance(refusal, LaunchFailure):
            raise refusal
        return Stream(None if refusal else self.server.server_address[1], refusal or "")

    def python(self, program: str, arguments: tuple[str, ...]) -> Stream:  # noqa: ARG002
        raise AssertionError("no test here runs on the host")
