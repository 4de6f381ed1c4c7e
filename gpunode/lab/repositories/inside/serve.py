"""PID 1 of the vendor's container: publishes at the first start, then serves, with the active faults.

The rpm packages are signed one by one, which takes a while: the first request for them triggers it and waits, and
builds them first where the image was made for systems with apt. A fault
is active while there is a file of its name in ``ON``; its content is the fault's argument.
"""

import fnmatch
import http.server
import io
import re
import socket
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import build  # type: ignore[import-not-found]
import publish  # type: ignore[import-not-found]

ON = Path("/srv/on")
READY = Path("/srv/ready")
PLAN = "/srv/gpunode/plan.json"
_POLL_S = 0.2
_APT = {"flat", "suites"}
_RPM = {"rpm"}
_LOGIN = b"<!DOCTYPE html><html><head><title>Login</title></head><body>Log in to use this network.</body></html>\n"
_publishing = threading.Lock()


def is_on(fault: str) -> bool:
    """Return whether that fault is active now."""
    return (ON / fault).exists()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Handler of requests: files below the root, overridden by the faults' files."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def translate_path(self, path: str) -> str:
        """Return the file to send: the first active fault's that exists, else the real one."""
        real = Path(super().translate_path(path))
        relative = real.relative_to(publish.ROOT)
        for fault in sorted(publish.FAULTS.iterdir()):
            if is_on(fault.name) and (fault / relative).is_file():
                return str(fault / relative)
        return str(real) + ("/" if path.endswith("/") else "")

    def send_head(self):  # type: ignore[no-untyped-def]
        """Refuse files that a fault removes."""
        name = self.path.rpartition("/")[2]
        # A fault's file is not newer than the file that it replaces, and the other way round.
        del self.headers["If-Modified-Since"]
        if re.search("/(rhel[0-9]+|rpm|rocky|epel|centos)/", self.path):
            publish_once(_RPM)
        if is_on("unreachable"):
            self.close_connection = True
            return None
        if is_on("html"):
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(_LOGIN)))
            self.end_headers()
            return io.BytesIO(_LOGIN)
        hidden = ["InRelease", "Release.gpg", "repomd.xml.asc"] if is_on("unsigned") else []
        if is_on("package-gone"):
            hidden += (ON / "package-gone").read_text(encoding="utf-8").split()
        if any(fnmatch.fnmatch(name, pattern) for pattern in hidden):
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        return super().send_head()


class Server(http.server.ThreadingHTTPServer):
    """HTTP server that listens only while the repository is reachable."""

    daemon_threads = True
    request_queue_size = 64


def serve() -> None:
    """Serve for ever, without a listener while the fault ``unreachable`` is active."""
    while True:
        if is_on("unreachable"):
            time.sleep(_POLL_S)
            continue
        with Server(("", 80), lambda *args: Handler(*args, directory=str(publish.ROOT))) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _POLL_S})
            thread.start()
            READY.write_text(socket.gethostname())
            while not is_on("unreachable"):
                time.sleep(_POLL_S)
            server.shutdown()
            thread.join()


def publish_once(kinds: set[str]) -> None:
    """Publish the repositories of these kinds, unless that was done before."""
    done = Path("/srv/published") / min(kinds)
    with _publishing:
        if not done.exists():
            if missing := {kind for kind in kinds if not (build.BUILT / kind).exists()}:
                build.main(PLAN, missing)
            publish.main(PLAN, kinds)
            done.parent.mkdir(exist_ok=True)
            done.touch()


if __name__ == "__main__":
    READY.unlink(missing_ok=True)
    ON.mkdir(exist_ok=True)
    publish_once(_APT)
    serve()
