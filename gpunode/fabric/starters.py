"""How ranks start: over connections to nodes, by srun or mpirun, and by texts for torchrun, sbatch and Kubernetes.

Over connections each node is probed, takes its part in the run, and gets a report. Started by another program, each
rank is one process: the payload, which reads its rank from what its starter sets. Rank 0 prints the records.
"""

import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpunode.checks import Finding, Status, identify
from gpunode.errors import UndeterminedError, UsageError
from gpunode.fabric.preflight import PORT_BASES, finding
from gpunode.fabric.records import UNKNOWN, ExpectedOfNodes, records_of
from gpunode.fabric.run import END_S, STEP_S, FabricRequest, FabricRun
from gpunode.fabric.verdict import FabricVerdict, verdict_of
from gpunode.facts import NodeFacts
from gpunode.fleet import Collected, Node, Target, Then
from gpunode.fleet.process import Completed
from gpunode.fleet.process import run as run_program
from gpunode.isolation import Exceeded
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.report import NodeReport, judged, unreachable
from gpunode.probe import Answer
from gpunode.workload.payload import payload_script
from gpunode.workload.payload.external import FOLDERS
from gpunode.workload.payload.nccl import COLLECTIVES
from gpunode.workload.run import NodeTransport, Progress


@dataclass
class FabricWork:
    """Work of ``fleet.collect`` on each node after its probe: its part of the run."""

    run: FabricRun
    limit_s: float
    facts_of: Callable[[Answer], NodeFacts]
    facts: dict[str, NodeFacts]
    progress: Progress = field(default=lambda *_: None)

    def __call__(self, node: Node, answer: Answer, deadline: float) -> list[dict[str, Any]]:
        """Take part; the results are in the run."""
        name = node.target.name
        try:
            facts = self.facts[name] = self.facts_of(answer)
            transport = NodeTransport(node, deadline - END_S)
            self.run.member(name, transport, facts, lambda text: self.progress(name, text), deadline - END_S)
        except (UsageError, Exceeded) as err:
            self.run.add(name, finding("nodes.node", Status.ERROR, "node", str(err)))
        finally:
            self.run.leave(name)
        return []

    def failed(self, reason: str) -> list[dict[str, Any]]:
        """Return the reason as a record, for the node's report."""
        return [{"record": "fabric.failed", "error": reason}]


def over_ssh(
    targets: Sequence[Target],
    request: FabricRequest,
    expects: ExpectedOfNodes,
    *,
    timeout_s: float,
    collect: Callable[[Callable[[Progress], Then]], Iterable[Collected]],
) -> tuple[FabricVerdict, list[NodeReport]]:
    """Run the ranks over connections to nodes; return the verdict and the reports on the nodes.

    ``timeout_s`` is the limit of the connection and of the probe. ``collect`` collects from all targets at the same
    time, because they wait for each other, and does what it gets on each of them after its probe.
    """
    names = [target.name for target in targets]
    request = replace(request, racks={target.name: target.rack for target in targets if target.rack})
    began = time.monotonic()
    facts: dict[str, NodeFacts] = {}
    run = FabricRun(request, names, timeout_s)
    image_s = request.image_limit_s if request.in_container else 0.0
    limit_s = request.run_limit_s + image_s + timeout_s + 4 * STEP_S + END_S
    collected: dict[str, Collected] = {}
    with Evaluator() as evaluator:

        def then(progress: Progress) -> FabricWork:
            return FabricWork(run, limit_s, evaluator.facts, facts, progress)

        for answer in collect(then):
            collected[answer.host] = answer
            run.leave(answer.host)
    result = run.end()
    verdict = FabricVerdict()
    minutes = (time.monotonic() - began) / 60
    if result.nodes:
        verdict = verdict_of(
            result.records,
            nodes=result.nodes,
            engine="ssh",
            backend=result.backend,
            ranks=result.ranks,
            minutes=minutes,
            facts=facts,
            rank_names=result.rank_names,
            expects=expects.of(result.nodes),
        )
    for name, reason in result.failures.items():
        verdict.add([name], finding("nodes.ranks", Status.ERROR, "node", f"its ranks did not finish: {reason}"))
    reports = []
    for target in sorted(targets, key=lambda target: target.name):
        findings = [*result.findings.get(target.name, ()), *verdict.findings.get(target.name, ())]
        explained = any(each.status in (Status.FAIL, Status.ERROR) for each in findings)
        if target.name not in result.nodes and not explained:
            text = "not run: fewer than two nodes were left after the tests before the ranks"
            findings.append(finding("nodes.links", Status.ERROR, "node", text))
        reports.append(_node_report(target, collected.get(target.name), facts.get(target.name), findings))
    return verdict, reports


def _node_report(
    target: Target, collected: Collected | None, facts: NodeFacts | None, findings: list[Finding]
) -> NodeReport:
    if collected is None or collected.answer is None:
        return unreachable(target.name, (collected and collected.reason) or "no answer", None)
    lost = [str(record["error"]) for record in collected.answer.records if record.get("record") == "fabric.failed"]
    findings = findings + [finding("nodes.node", Status.ERROR, "node", reason) for reason in lost]
    if facts is None:
        return judged(target.name, UNKNOWN, findings, collected.seconds)
    return judged(target.name, identify(facts), findings, collected.seconds)


PROGRAMS = {"slurm": "srun", "mpi": "mpirun"}
MARK = "GPUNODE_PAYLOAD"
NAME = "gpunode-fabric"
KILL_S = 30
"""Seconds after the limit of the ranks until their starter ends what is left of them."""
NCCL_TESTS_S = 240
"""Limit of nccl-tests, which run after the ranks where they are installed."""
NCCL_TESTS = (
    f'PATH="$PATH:{":".join(FOLDERS)}"; program=$(command -v all_reduce_perf) || exit 0; '
    'exec "$program" -b 8 -e 1G -f 2 -g 1 -c 1'
)
"""One process for each GPU, as ranks are started: nccl-tests built with MPI find each other. Up to the largest message
of our own collectives: a larger one is compared with nothing, and on a slow network takes longer than the limit.
"""


@dataclass(frozen=True)
class StarterRequest:
    """What is started, on which nodes."""

    nodes: Sequence[str]
    """Names as the starter knows them; their number for Kubernetes."""
    ranks: int
    """Of each node."""
    backend: Literal["gloo", "nccl"]
    minutes: float
    python: str = "python3"
    image: str | None = None
    interface: str | None = None
    """Network interface of the ranks; None: as the libraries choose it."""
    host: str | None = None
    """Address of rank 0; None: as the starter names it."""
    tests: str = "fabric,nccl,ddp"
    rank_limit_s: float = 30.0
    racks: Mapping[str, str] = field(default_factory=dict)

    @property
    def limit_s(self) -> int:
        """Return the seconds after which the ranks end by themselves."""
        return int(self.minutes * 60)

    def settings(self, host: str | None) -> dict[str, Any]:
        """Return the payload's settings, the same for all ranks."""
        return {
            "starter": {
                "host": host,
                "port": PORT_BASES[1] + 100,
                "backend": self.backend,
                "limit_s": self.rank_limit_s,
                "nodes": len(self.nodes),
            },
            "user_site": True,
            "interface": self.interface,
            "collectives": [name for name in COLLECTIVES if name != "broadcast"],
            "fabric": {"racks": dict(self.racks), "limit_s": self.limit_s},
        }

    def words(self, host: str | None = None) -> list[str]:
        """Return the arguments of the payload."""
        settings = json.dumps(self.settings(host or self.host), sort_keys=True)
        return ["--tests", self.tests, "--settings", settings, "--limit", str(self.limit_s)]


def command(starter: Literal["slurm", "mpi"], request: StarterRequest) -> list[str]:
    """Return the command that starts the ranks from here; it reads the payload from stdin."""
    stdin = ["--input=all"] if starter == "slurm" else ["--stdin", "all"]
    return [*_started(starter, request, request.limit_s), *stdin, request.python, "-I", "-", *request.words()]


def nccl_tests_command(starter: Literal["slurm", "mpi"], request: StarterRequest) -> list[str]:
    """Return the command that runs nccl-tests' all-reduce on the same GPUs; without nccl-tests it prints nothing."""
    return [*_started(starter, request, NCCL_TESTS_S), "/bin/sh", "-c", NCCL_TESTS]


def _started(starter: Literal["slurm", "mpi"], request: StarterRequest, limit_s: int) -> list[str]:
    number = len(request.nodes)
    if starter == "slurm":
        return [
            "srun",
            f"--job-name={NAME}",
            f"--nodelist={','.join(request.nodes)}",
            f"--nodes={number}",
            f"--ntasks={number * request.ranks}",
            f"--ntasks-per-node={request.ranks}",
            f"--time={_minutes(limit_s)}",
            "--distribution=block",
            "--kill-on-bad-exit=1",
            f"--wait={KILL_S}",
            *(["--exclusive", f"--gpus-per-node={request.ranks}"] if request.backend == "nccl" else []),
        ]
    hosts = ",".join(f"{name}:{request.ranks}" for name in request.nodes)
    return [
        "mpirun",
        "--host",
        hosts,
        "-np",
        str(number * request.ranks),
        "--map-by",
        f"ppr:{request.ranks}:node",
        "--bind-to",
        "none",
        "--timeout",
        str(limit_s + KILL_S),
    ]


def _minutes(limit_s: int) -> int:
    return max(1, -(-(limit_s + KILL_S) // 60))


def text(starter: Literal["slurm", "torchrun", "kubernetes"], request: StarterRequest) -> str:
    """Return a text that starts the ranks elsewhere: a script for sbatch or of torchrun, or a manifest."""
    if starter == "kubernetes":
        return manifest(request)
    program = payload_script()
    if starter == "slurm":
        tested = request.backend == "nccl" and "nccl" in request.tests
        minutes = _minutes(request.limit_s) + (_minutes(NCCL_TESTS_S) if tested else 0)
        head = [
            "#!/bin/bash",
            f"#SBATCH --job-name={NAME}",
            f"#SBATCH --nodes={len(request.nodes)}",
            f"#SBATCH --nodelist={','.join(request.nodes)}",
            f"#SBATCH --ntasks-per-node={request.ranks}",
            f"#SBATCH --time={minutes}",
            *(["#SBATCH --exclusive", f"#SBATCH --gpus-per-node={request.ranks}"] if request.backend == "nccl" else []),
            "# sbatch this file; then: gpunode validate --fabric --engine slurm --records slurm-JOBID.out",
            'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        ]
        start = f"srun --kill-on-bad-exit=1 --wait={KILL_S} --input=all {_quoted(request.python, '-I', '-')}"
    else:
        head = [
            "#!/bin/bash",
            f"# Run this file on each of the {len(request.nodes)} nodes, with NODE_RANK=0, 1, ... and on all of them",
            "# MASTER_ADDR, the address of node 0. Then, with the output of node 0:",
            "# gpunode validate --fabric --engine torchrun --records OUTPUT",
            ': "${NODE_RANK:?set NODE_RANK}" "${MASTER_ADDR:?set MASTER_ADDR}"',
            "payload=$(mktemp) && trap 'rm -f \"$payload\"' EXIT",
            f"cat > \"$payload\" <<'{MARK}'\n{program.rstrip()}\n{MARK}",
        ]
        start = (
            f"timeout -k {KILL_S} {request.limit_s + KILL_S} torchrun --nnodes={len(request.nodes)} "
            f'--nproc-per-node={request.ranks} --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" "$payload"'
        )
        return "\n".join([*head, f"{start} {_quoted(*request.words())}", ""])
    rest = [f"srun --kill-on-bad-exit=1 --wait={KILL_S} {_quoted('/bin/sh', '-c', NCCL_TESTS)}"] if tested else []
    return "\n".join([*head, f"{start} {_quoted(*request.words())} <<'{MARK}'", program.rstrip(), MARK, *rest, ""])


def _quoted(*words: str) -> str:
    return shlex.join(words)


def manifest(request: StarterRequest) -> str:
    """Return a ConfigMap with the payload, a headless Service and an indexed Job, one pod for each node, as JSON.

    Fields: Kubernetes API reference v1.30, Job v1 batch, Service v1 core, ConfigMap v1 core.
    """
    labels = {"app.kubernetes.io/name": NAME}
    host = f"{NAME}-0.{NAME}"
    # One process for each rank of the pod; the first that fails ends the pod.
    start = (
        "for local in $(seq 0 $((RANKS - 1))); do "
        f"RANK=$((JOB_COMPLETION_INDEX * RANKS + local)) WORLD_SIZE={len(request.nodes) * request.ranks} "
        f'LOCAL_RANK=$local {request.python} -I /payload/payload.py "$@" & pids="$pids $!"; done; '
        "code=0; for pid in $pids; do wait $pid || code=$?; done; exit $code"
    )
    container: dict[str, Any] = {
        "name": "ranks",
        "image": request.image,
        "command": ["/bin/sh", "-c", start, NAME, *request.words(host)],
        "env": [{"name": "RANKS", "value": str(request.ranks)}],
        "volumeMounts": [
            {"name": "payload", "mountPath": "/payload", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if request.backend == "nccl":
        container["resources"] = {"limits": {"nvidia.com/gpu": str(request.ranks)}}
    pod = {
        "subdomain": NAME,
        "restartPolicy": "Never",
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
                ]
            }
        },
        "containers": [container],
        "volumes": [
            {"name": "payload", "configMap": {"name": NAME}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    items = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME, "labels": labels},
            "data": {"payload.py": payload_script()},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME, "labels": labels},
            "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": NAME, "labels": labels},
            "spec": {
                "completionMode": "Indexed",
                "completions": len(request.nodes),
                "parallelism": len(request.nodes),
                "backoffLimit": 0,
                "activeDeadlineSeconds": request.limit_s + KILL_S,
                "ttlSecondsAfterFinished": 3600,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1) + "\n"


def started_by(engine: Literal["slurm", "mpi"], request: StarterRequest) -> list[dict[str, Any]]:
    """Run the ranks by srun or mpirun; return their records. Nothing of it is left at the end, or on Ctrl-C."""
    done = _bound(command(engine, request), request.limit_s, payload_script())
    records = records_of(done.stdout)
    if not records:
        raise UndeterminedError(_failed(engine, done))
    return records


def nccl_tests_by(engine: Literal["slurm", "mpi"], request: StarterRequest) -> tuple[str, str | None]:
    """Run nccl-tests by srun or mpirun; return the output, and how the starter failed."""
    try:
        done = _bound(nccl_tests_command(engine, request), NCCL_TESTS_S, None)
    except UndeterminedError as err:
        # As where srun waits for the nodes: what the ranks measured is reported all the same.
        return "", str(err)
    return done.stdout, _failed(engine, done) if done.rc else None


def _bound(argv: list[str], limit_s: int, stdin: str | None) -> Completed:
    """Run srun or mpirun, which ends with this program, also if it is killed (setpriv of util-linux)."""
    if shutil.which(argv[0]) is not None and shutil.which("setpriv") is not None:
        argv = ["setpriv", "--pdeathsig", "TERM", *argv]
    return run_program(argv, timeout_s=limit_s + 2 * KILL_S, stdin=stdin, grace_s=KILL_S)


def _failed(engine: Literal["slurm", "mpi"], done: Completed) -> str:
    # mpirun frames its messages with lines of dashes.
    last = [line for line in done.stderr.splitlines() if re.search(r"\w", line)]
    return f"{PROGRAMS[engine]} ended with exit code {done.rc}{f': {last[-1]}' if last else ''}"
