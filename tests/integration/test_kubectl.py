"""The real ``kubectl`` between the adapter and a server that answers as the API does (``kube_api``)."""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kube_api import Api, node, pod

from gpunode.change.adapters import KubernetesScheduler
from gpunode.change.scheduler import Availability, SchedulerError
from gpunode.fleet.process import Completed, run

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl: apt-get install kubernetes-client")
DRAIN_ID = "gpunode-upgrade-0123456789ab"


@contextmanager
def served(api: Api) -> Iterator[KubernetesScheduler]:
    """The adapter, with kubectl that asks this server."""

    class Handler(BaseHTTPRequestHandler):
        def sent(self) -> bytes:
            """The body, whole or in the chunks in which kubectl sends a file."""
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(parts)

        def do_GET(self) -> None:
            text = self.sent()
            code, document = api.answer(self.command, self.path, json.loads(text) if text else None)
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_PUT = do_POST = do_GET  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "KUBECONFIG": "/dev/null"}

    def kubectl(argv: Sequence[str], stdin: str | None) -> Completed:
        command = [argv[0], f"--server=http://127.0.0.1:{server.server_port}", *argv[1:]]
        return run(command, timeout_s=60, env=environment, stdin=stdin)

    try:
        yield KubernetesScheduler(kubectl)
    finally:
        server.shutdown()


def test_a_node_through_a_drain() -> None:
    before = node("gpu-1")
    api = Api(before, [pod("exporter", "DaemonSet"), pod("train"), pod("infer"), pod("notebook", None)])
    with served(api) as scheduler:
        scheduler.drain("gpu-1", DRAIN_ID)
        assert scheduler.state("gpu-1", DRAIN_ID).service is Availability.OURS
        assert scheduler.state("gpu-1", "another").service is Availability.FOREIGN
        api.budget = True
        assert "disruption budget" in scheduler.busy("gpu-1", DRAIN_ID)
        api.budget = False
        scheduler.busy("gpu-1", DRAIN_ID)
        assert scheduler.busy("gpu-1", DRAIN_ID) == "pods: ml/notebook"
        assert [manifest["metadata"]["name"] for manifest in api.pods] == ["exporter", "notebook"]
        api.pods.pop()
        assert scheduler.busy("gpu-1", DRAIN_ID) == ""
        scheduler.resume("gpu-1", DRAIN_ID)
        assert scheduler.state("gpu-1", DRAIN_ID).service is Availability.IN_SERVICE
        assert api.node["spec"] == before["spec"]
        with pytest.raises(SchedulerError, match="could not find"):
            scheduler.state("gpu-9", DRAIN_ID)
