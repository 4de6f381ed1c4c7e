"""Kubernetes by ``kubectl``: cordon with the token as an annotation, eviction through the API.

``kubectl`` and not the Python client: it is where people administer a cluster, it has their credentials and plug-ins
for them, and ``--raw`` calls the API without a discovery of it. A node is written as a whole with the resourceVersion
that was read, so what others changed meanwhile is an error of the API and not lost. Shapes: Node, Pod and Eviction of
https://kubernetes.io/docs/reference/kubernetes-api/ (core/v1, policy/v1), read on 2026-11-23.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from gpunode.change.scheduler import Availability, Run, Scheduler, SchedulerError, ServiceState, run_program
from gpunode.text import last_line, listed

ANNOTATION = "gpunode.io/drained-by"
MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a static pod's mirror, which the API cannot evict."""
DONE = ("Succeeded", "Failed")
Json = dict[str, Any]


class KubernetesScheduler(Scheduler):
    """Kubernetes. A node that is unschedulable without the token was cordoned by others."""

    def __init__(self, run: Run = run_program) -> None:
        self._run = run

    def _raw(self, verb: str, path: str, body: Json | None = None) -> Json:
        """Return the answer of the API. Raises SchedulerError."""
        argv = ["kubectl", verb, "--raw", path, *(("-f", "-") if body is not None else ())]
        done = self._run(argv, None if body is None else json.dumps(body))
        if done.rc != 0:
            raise SchedulerError(f"kubectl {verb} {path}: {last_line(done.stderr or done.stdout) or done.rc}")
        try:
            document = json.loads(done.stdout)
        except (ValueError, RecursionError):
            raise SchedulerError(f"kubectl {verb} {path}: the answer is not JSON") from None
        if not isinstance(document, dict):
            raise SchedulerError(f"kubectl {verb} {path}: the answer is not an object")
        return document

    def _node(self, node: str) -> Json:
        document = self._raw("get", _path(node))
        if document.get("kind") != "Node" or not isinstance(document.get("metadata"), dict):
            raise SchedulerError(f"kubectl get {_path(node)}: the answer is not a Node")
        return document

    def state(self, node: str, token: str) -> ServiceState:
        """Return whether pods are scheduled to the node."""
        return _state(self._node(node), token)

    def drain(self, node: str, token: str) -> None:
        """Set the node unschedulable, and record the token in the same write."""
        document = self._node(node)
        now = _state(document, token)
        if now.service is Availability.FOREIGN:
            raise SchedulerError(now.text)
        if now.service is Availability.OURS:
            return
        metadata, spec = document["metadata"], document.get("spec") or {}
        annotations = {**(metadata.get("annotations") or {}), ANNOTATION: token}
        body = {
            **document,
            "metadata": {**metadata, "annotations": annotations},
            "spec": {**spec, "unschedulable": True},
        }
        self._raw("replace", _path(node), body)

    def busy(self, node: str, token: str) -> str:  # noqa: ARG002
        """Ask for the eviction of what may be evicted, and return what still runs.

        Pods of DaemonSets and static pods stay. A pod without a controller would not come back, and one with an
        emptyDir on a disk would lose it: they are waited for. A PodDisruptionBudget makes the API refuse an eviction,
        which is asked for again the next time.
        """
        left: list[str] = []
        for pod in list(self._pods(node)):
            metadata = pod["metadata"]
            name = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
            left.append(name)
            if metadata.get("deletionTimestamp") or not _evictable(pod):
                continue
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": metadata["name"], "namespace": metadata.get("namespace", "default")},
            }
            try:
                self._raw("create", f"/api/v1/namespaces/{quote(name.replace('/', '/pods/'))}/eviction", body)
            except SchedulerError as err:
                left[-1] = f"{name} ({err})"
        return f"pods: {listed(left, 4)}" if left else ""

    def _pods(self, node: str) -> Iterator[Json]:
        """Yield the pods that are work: neither of a DaemonSet, nor static, nor ended."""
        more = ""
        while True:
            path = f"/api/v1/pods?fieldSelector={quote(f'spec.nodeName={node}')}&limit=500{more}"
            document = self._raw("get", path)
            items = document.get("items")
            if not isinstance(items, list):
                raise SchedulerError(f"kubectl get {path}: the answer is not a list of pods")
            for pod in items:
                metadata = pod.get("metadata") or {}
                owners = metadata.get("ownerReferences") or ()
                of_daemon_set = any(owner.get("kind") == "DaemonSet" and owner.get("controller") for owner in owners)
                ended = (pod.get("status") or {}).get("phase") in DONE
                if not (of_daemon_set or ended or MIRROR in (metadata.get("annotations") or {})):
                    yield pod
            following = (document.get("metadata") or {}).get("continue")
            if not following:
                return
            more = f"&continue={quote(following)}"

    def resume(self, node: str, token: str) -> None:
        """Remove the token, and what makes the node unschedulable, in the same write."""
        document = self._node(node)
        if _state(document, token).service is not Availability.OURS:
            return
        metadata, spec = document["metadata"], document.get("spec") or {}
        annotations = {name: value for name, value in metadata["annotations"].items() if name != ANNOTATION}
        spec = {name: value for name, value in spec.items() if name != "unschedulable"}
        # The taint follows from unschedulable; the node controller removes it too, a moment later.
        taints = [taint for taint in spec.get("taints") or () if taint.get("key") != "node.kubernetes.io/unschedulable"]
        spec = {**spec, "taints": taints} if "taints" in spec else spec
        self._raw(
            "replace", _path(node), {**document, "metadata": {**metadata, "annotations": annotations}, "spec": spec}
        )


def _path(node: str) -> str:
    return f"/api/v1/nodes/{quote(node, safe='')}"


def _state(document: Json, token: str) -> ServiceState:
    unschedulable = (document.get("spec") or {}).get("unschedulable") is True
    mark = (document["metadata"].get("annotations") or {}).get(ANNOTATION)
    if not unschedulable:
        return ServiceState(Availability.IN_SERVICE)
    if mark == token:
        return ServiceState(Availability.OURS)
    return ServiceState(Availability.FOREIGN, f"cordoned by {mark}" if mark else "cordoned")


def _evictable(pod: Json) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    on_disk = any("emptyDir" in volume and (volume["emptyDir"] or {}).get("medium") != "Memory" for volume in volumes)
    return any(owner.get("controller") for owner in owners) and not on_disk
