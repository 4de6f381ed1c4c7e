"""What the Kubernetes API does with a node, its pods and evictions, as its published reference describes it.

Node, Pod, Eviction and Status: https://kubernetes.io/docs/reference/kubernetes-api/; conflicts by resourceVersion:
https://kubernetes.io/docs/reference/using-api/api-concepts/; 429 of a PodDisruptionBudget:
https://kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/. All read on 2026-11-23; no server of Kubernetes
is in Debian, PyPI or npm.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gpunode.fleet.process import Completed

Json = dict[str, Any]
VERBS = {"get": "GET", "replace": "PUT", "create": "POST"}


def node(name: str, **spec: object) -> Json:
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": name, "resourceVersion": "100", "annotations": {"node.alpha.kubernetes.io/ttl": "0"}},
        "spec": {"podCIDR": "10.244.1.0/24", **spec},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def pod(name: str, owner: str | None = "ReplicaSet", phase: str = "Running", **more: Any) -> Json:
    owners = [{"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "u", "controller": True}] if owner else []
    metadata = {"name": name, "namespace": "ml", "annotations": more.get("annotations", {}), "ownerReferences": owners}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "gpu-1", "volumes": more.get("volumes", [])},
        "status": {"phase": phase},
    }


@dataclass
class Api:
    """One node and its pods."""

    node: Json
    pods: list[Json] = field(default_factory=list)
    budget: bool = False
    """A PodDisruptionBudget allows no eviction."""
    version: int = 100

    def answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """Status and document of one request."""
        url = urlsplit(path)
        if url.path == "/api/v1/nodes/gpu-1" and method == "GET":
            return 200, self.node
        if url.path == "/api/v1/nodes/gpu-1" and method == "PUT" and body is not None:
            if body["metadata"]["resourceVersion"] != self.node["metadata"]["resourceVersion"]:
                return 409, status(
                    409, "Conflict", 'Operation cannot be fulfilled on nodes "gpu-1": the object has been modified'
                )
            self.version += 1
            self.node = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
            return 200, self.node
        if url.path == "/api/v1/pods" and parse_qs(url.query).get("fieldSelector") == ["spec.nodeName=gpu-1"]:
            return 200, self._page(parse_qs(url.query))
        evicted = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/eviction", url.path)
        if evicted and method == "POST" and body is not None:
            assert body["metadata"] == {"namespace": evicted[1], "name": evicted[2]}
            if self.budget:
                return 429, status(
                    429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget."
                )
            self.pods = [manifest for manifest in self.pods if manifest["metadata"]["name"] != evicted[2]]
            return 201, status(201, "", "")
        return 404, status(404, "NotFound", "the server could not find the requested resource")

    def _page(self, query: dict[str, list[str]]) -> Json:
        """Two pods a page: lists of a large cluster come in parts."""
        begin = int(query.get("continue", ["0"])[0])
        more = {"continue": str(begin + 2)} if begin + 2 < len(self.pods) else {}
        return {"kind": "PodList", "apiVersion": "v1", "metadata": more, "items": self.pods[begin : begin + 2]}

    def kubectl(self, argv: Sequence[str], stdin: str | None) -> Completed:
        """The program: exit code 1 and the message on stderr for an error of the API."""
        assert argv[0] == "kubectl"
        assert argv[2] == "--raw"
        code, document = self.answer(VERBS[argv[1]], argv[3], json.loads(stdin) if stdin else None)
        if code >= 400:
            return Completed(1, "", f"Error from server ({document['reason']}): {document['message']}\n")
        return Completed(0, json.dumps(document), "")


def status(code: int, reason: str, message: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure" if code >= 400 else "Success",
        "message": message,
        "reason": reason,
        "code": code,
    }
