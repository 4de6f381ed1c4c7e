"""The adapters of schedulers: none, Slurm, Kubernetes, and programs of the site."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from gpunode.change.scheduler import Availability, Run, Scheduler, SchedulerError, ServiceState, run_program
from gpunode.errors import UsageError
from gpunode.text import last_line, listed, one_line

_FLAGS = re.compile(r"[A-Z_]+")
_SLURM_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "DOWN", "FUTURE", "MAINT", "UNKNOWN"})
_SLURM_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING", "DRAINING", "FAILING", "ALLOC", "MIX", "COMP"})
_SLURM_REBOOTS = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})
_SLURM_NOTES = r"(?: : reboot (?:issued|complete|timed out))*"
"""What slurmctld adds to a reason."""
ANNOTATION = "gpunode.io/drained-by"
MIRROR = "kubernetes.io/config.mirror"
"""Annotation of a static pod's mirror, which the API cannot evict."""
DONE = ("Succeeded", "Failed")
Json = dict[str, Any]


class NoScheduler(Scheduler):
    """Nobody hands out work: whether a node is idle is seen on the node alone."""

    def state(self, node: str, token: str) -> ServiceState:
        """Return that the node is at the run's disposal."""
        return ServiceState(Availability.OURS if self._drained.get(node) == token else Availability.IN_SERVICE)

    def __init__(self) -> None:
        self._drained: dict[str, str] = {}

    def drain(self, node: str, token: str) -> None:
        """Record the drain."""
        self._drained[node] = token

    def busy(self, node: str, token: str) -> str:  # noqa: ARG002
        """Return that nothing is known to run."""
        return ""

    def resume(self, node: str, token: str) -> None:  # noqa: ARG002
        """Remove the record of the drain."""
        self._drained.pop(node, None)


class SlurmScheduler(Scheduler):
    """Slurm, by ``scontrol``: the token is the reason of the drain.

    Reasons are compared as a whole, but for the notes that slurmctld adds when it reboots a node: a reason that
    somebody wrote since is theirs. A node that rebooted while it was drained may be DOWN with the same reason;
    ``State=RESUME`` ends both.

    From the sources of 22.05 to 25.11 (tests/integration/test_slurm_reboot.py asks 22.05): with ``nextstate=DOWN`` the
    registration of slurmd after a boot removes DRAIN and leaves DOWN; with ReturnToService=2 its second registration
    ends DOWN too. Without ``nextstate``, ``scontrol cancel_reboot`` would end the drain. Without ``reason`` the reason
    stays, whoever wrote it.
    """

    def __init__(self, run: Run = run_program) -> None:
        self._run = run

    def _call(self, *argv: str) -> str:
        done = self._run(["scontrol", *argv], None)
        if done.rc != 0:
            raise SchedulerError(f"scontrol {' '.join(argv)}: {last_line(done.stderr or done.stdout) or done.rc}")
        return done.stdout

    def _node_state(self, node: str) -> tuple[frozenset[str], str]:
        """Return the parts of a node's state, and its reason."""
        output = self._call("show", "node", node)
        state = re.search(r"^ *State=(\S+)", output, re.MULTILINE)
        if state is None:
            raise SchedulerError(f"scontrol show node {node}: no State in its answer")
        reason = re.search(r"^ *Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?$", output, re.MULTILINE)
        return frozenset(_FLAGS.findall(state[1])), reason[1] if reason else ""

    def state(self, node: str, token: str) -> ServiceState:
        """Return whether the node gets work: drained, down or failing nodes do not."""
        return _slurm_state(*self._node_state(node), token)

    def drain(self, node: str, token: str) -> None:
        """Set the node to DRAIN with the token as reason; after a reboot, restore both."""
        flags, reason = self._node_state(node)
        now = _slurm_state(flags, reason, token)
        if now.service is Availability.FOREIGN:
            raise SchedulerError(now.text)
        if "DRAIN" not in flags or (reason != token and not flags & _SLURM_REBOOTS):
            self._call("update", f"NodeName={node}", "State=DRAIN", f"Reason={token}")

    def busy(self, node: str, token: str) -> str:  # noqa: ARG002
        """Return the state of a node that still runs jobs or ends them, or that Slurm is about to reboot."""
        flags, _ = self._node_state(node)
        if flags & (_SLURM_BUSY | _SLURM_REBOOTS):
            return f"Slurm: {'+'.join(sorted(flags))}"
        return "" if flags & {"IDLE", "DOWN", "DRAINED"} else f"Slurm: {'+'.join(sorted(flags))}"

    def resume(self, node: str, token: str) -> None:
        """End the drain."""
        if self.state(node, token).service is Availability.OURS:
            self._call("update", f"NodeName={node}", "State=RESUME")

    def reboot(self, node: str, token: str) -> str:
        """Request the reboot where slurmctld has a RebootProgram; a refused request is left to Ansible."""
        config = dict(re.findall(r"^(\w+) += (.*?) *$", self._call("show", "config"), re.MULTILINE))
        if not {"RebootProgram", "ReturnToService"} <= config.keys():
            raise SchedulerError("scontrol show config: no RebootProgram or ReturnToService in its answer")
        self.drain(node, token)
        if config["RebootProgram"] == "(null)":
            return "Slurm has no RebootProgram"
        if config["ReturnToService"] == "2":
            return "with ReturnToService=2 Slurm would end the drain"
        flags, _ = self._node_state(node)
        if "NOT_RESPONDING" in flags:
            return "slurmd does not respond"
        refused = "Slurm ignored the request"
        if not flags & _SLURM_REBOOTS:
            try:
                self._call("reboot", "ASAP", "nextstate=DOWN", node)
            except SchedulerError as err:
                refused = str(err)
        if self.rebooting(node, token):
            return ""
        if busy := self.busy(node, token):
            raise SchedulerError(busy)  # the drain had been ended meanwhile, and a job began
        return refused

    def rebooting(self, node: str, token: str) -> bool:
        """Return whether slurmctld has the request, or noted on the drain's reason that it passed it on."""
        flags, reason = self._node_state(node)
        noted = reason != token and _slurm_state(flags, reason, token).service is Availability.OURS
        return noted or bool(flags & _SLURM_REBOOTS)

    def cancel_reboot(self, node: str, token: str) -> str:
        """Remove the request; Slurm refuses that once it is issued. With ``nextstate`` the drain stays."""
        flags, reason = self._node_state(node)
        if "REBOOT_REQUESTED" in flags and _slurm_state(flags, reason, token).service is Availability.OURS:
            self._call("cancel_reboot", node)
            return ""
        return f"Slurm: {'+'.join(sorted(flags))}"


def _slurm_state(flags: frozenset[str], reason: str, token: str) -> ServiceState:
    if not flags & _SLURM_DRAINED:
        return ServiceState(Availability.IN_SERVICE)
    if re.fullmatch(re.escape(token) + _SLURM_NOTES, reason):
        return ServiceState(Availability.OURS)
    return ServiceState(Availability.FOREIGN, one_line(reason or "+".join(sorted(flags))))


class CommandScheduler(Scheduler):
    """Programs of the site: ``PROGRAM state|drain|busy|resume|reboot NODE TOKEN``.

    ``state`` prints ``in-service``, ``ours`` (the drain with the token) or ``foreign REASON``; ``busy`` prints what
    still runs. An exit code other than 0 is a failure, with its last line as the reason. ``reboot`` is optional: a
    program that requests the reboot prints ``requested``.
    """

    def __init__(self, program: str, run: Run = run_program) -> None:
        self._program, self._run = program, run

    def _call(self, word: str, node: str, token: str) -> str:
        answer, problem = self._ran(word, node, token)
        if problem:
            raise SchedulerError(problem)
        return answer

    def _ran(self, word: str, node: str, token: str) -> tuple[str, str]:
        """Return what the program prints, and why it failed."""
        done = self._run([self._program, word, node, token], None)
        failed = f"{self._program} {word} {node}: {last_line(done.stderr or done.stdout) or done.rc}"
        return one_line(done.stdout), failed if done.rc != 0 else ""

    def state(self, node: str, token: str) -> ServiceState:
        """Return what the program prints."""
        word, _, reason = self._call("state", node, token).partition(" ")
        known = {"in-service": Availability.IN_SERVICE, "ours": Availability.OURS, "foreign": Availability.FOREIGN}
        if word not in known:
            raise SchedulerError(f"{self._program} state {node}: expected in-service, ours or foreign, got {word!r}")
        return ServiceState(known[word], reason)

    def drain(self, node: str, token: str) -> None:
        """Call the program unless the node is drained."""
        now = self.state(node, token)
        if now.service is Availability.FOREIGN:
            raise SchedulerError(now.text)
        if now.service is not Availability.OURS:
            self._call("drain", node, token)

    def busy(self, node: str, token: str) -> str:
        """Return what the program prints."""
        return self._call("busy", node, token)

    def resume(self, node: str, token: str) -> None:
        """End the drain if it has the token."""
        if self.state(node, token).service is Availability.OURS:
            self._call("resume", node, token)

    def reboot(self, node: str, token: str) -> str:
        """Call the program; one without this word fails, or prints something else.

        Raises SchedulerError if it does not end in time: it may have requested the reboot.
        """
        answer, problem = self._ran("reboot", node, token)
        return problem or ("" if answer == "requested" else "the program reboots no nodes")


class KubernetesScheduler(Scheduler):
    """Kubernetes by ``kubectl``: cordon with the token as an annotation, eviction through the API.

    A node that is unschedulable without the token was cordoned by others.

    ``kubectl`` and not the Python client: it is where people administer a cluster, it has their credentials and
    plug-ins for them, and ``--raw`` calls the API without a discovery of it. A node is written as a whole with the
    resourceVersion that was read, so what others changed meanwhile is an error of the API and not lost. Shapes: Node,
    Pod and Eviction of https://kubernetes.io/docs/reference/kubernetes-api/ (core/v1, policy/v1), read on 2026-11-23.
    """

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
        document = self._raw("get", _node_path(node))
        if document.get("kind") != "Node" or not isinstance(document.get("metadata"), dict):
            raise SchedulerError(f"kubectl get {_node_path(node)}: the answer is not a Node")
        return document

    def state(self, node: str, token: str) -> ServiceState:
        """Return whether pods are scheduled to the node."""
        return _kubernetes_state(self._node(node), token)

    def drain(self, node: str, token: str) -> None:
        """Set the node unschedulable, and record the token in the same write."""
        document = self._node(node)
        now = _kubernetes_state(document, token)
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
        self._raw("replace", _node_path(node), body)

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
        if _kubernetes_state(document, token).service is not Availability.OURS:
            return
        metadata, spec = document["metadata"], document.get("spec") or {}
        annotations = {name: value for name, value in metadata["annotations"].items() if name != ANNOTATION}
        spec = {name: value for name, value in spec.items() if name != "unschedulable"}
        # The taint follows from unschedulable; the node controller removes it too, a moment later.
        taints = [taint for taint in spec.get("taints") or () if taint.get("key") != "node.kubernetes.io/unschedulable"]
        spec = {**spec, "taints": taints} if "taints" in spec else spec
        self._raw(
            "replace",
            _node_path(node),
            {**document, "metadata": {**metadata, "annotations": annotations}, "spec": spec},
        )


def _node_path(node: str) -> str:
    return f"/api/v1/nodes/{quote(node, safe='')}"


def _kubernetes_state(document: Json, token: str) -> ServiceState:
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


ADAPTERS: Mapping[str, Callable[[], Scheduler]] = {
    "none": NoScheduler,
    "slurm": SlurmScheduler,
    "kubernetes": KubernetesScheduler,
}
COMMAND = "command"


def scheduler_of(text: str) -> Scheduler:
    """Return the adapter that ``--scheduler`` names. Raises UsageError."""
    if text in ADAPTERS:
        return ADAPTERS[text]()
    kind, _, program = text.partition(":")
    if kind == COMMAND and program:
        return CommandScheduler(program)
    raise UsageError(f"--scheduler {text}: expected {', '.join(ADAPTERS)} or {COMMAND}:PROGRAM")
