"""``gpunode validate --fabric``: ranks on many nodes together, and what is slow or broken between them."""

import functools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import click
from click.core import ParameterSource

from gpunode import __version__
from gpunode.checks import Baseline, Expectation, Finding, Identity, RunningStack, Status, identify
from gpunode.cli import outputs as outputs_
from gpunode.cli import selection as selection_
from gpunode.cli.options import EXPECT, STRICT
from gpunode.cli.outputs import CommandWithOutputs
from gpunode.cli.selection import NodeProgress, Selection
from gpunode.cli.validate import now, write
from gpunode.errors import UndeterminedError, UsageError
from gpunode.fabric import starters
from gpunode.fabric.flight_recorder import findings_of, read_dumps
from gpunode.fabric.preflight import finding
from gpunode.fabric.run import END_S, LEAST_NODES, STEP_S, FabricRequest, FabricRun
from gpunode.fabric.second_opinion import has_nccl_tests, opinion_of
from gpunode.fabric.starters import KILL_S, NCCL_TESTS_S, StarterRequest
from gpunode.fabric.verdict import FabricVerdict, verdict_of
from gpunode.facts import NodeFacts
from gpunode.fleet import Collected, Node, Target
from gpunode.fleet.process import Completed
from gpunode.fleet.process import run as run_program
from gpunode.history.outliers import FleetProfile
from gpunode.history.recording import Recorder
from gpunode.history.snapshot import GpuRecord, Snapshot, figures_of, verdicts_of
from gpunode.history.store import FABRIC
from gpunode.isolation import Exceeded
from gpunode.judging.baseline import read_baselines
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.expectation import read_expectation
from gpunode.judging.report import Fleet, NodeReport, exit_code, judged, report, unreachable, worst
from gpunode.probe import Answer
from gpunode.text import one_line
from gpunode.workload.distributed import missing_ranks
from gpunode.workload.image import read_image_file
from gpunode.workload.output import BoundedOutput
from gpunode.workload.payload.pack import payload_script
from gpunode.workload.run import NodeTransport, catalog_image
from gpunode.workload.transport import LaunchFailure

ENGINES = ("ssh", "slurm", "mpi", "torchrun", "kubernetes")
PRINTED = ("torchrun", "kubernetes")
"""Engines of which gpunode prints the script or the manifest, and starts nothing."""
PROGRAMS = {"slurm": "srun", "mpi": "mpirun"}
MOST_RECORDS = 64 * 2**20
DEFAULT_RANKS = {"nccl": 8, "gloo": 1}


@click.command("validate", cls=CommandWithOutputs)
@click.option("--fabric", is_flag=True, expose_value=False, help="Validate the nodes together.")
@selection_.options
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="ssh",
    show_default=True,
    help="What starts the ranks. ssh: gpunode, over the inventory's connections; slurm, mpi: srun and mpirun of this "
    "machine; torchrun, kubernetes: a script, or a manifest, is printed.",
)
@click.option("--print", "printed", is_flag=True, help="With --engine slurm: print a script for sbatch.")
@click.option(
    "--records",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Judge the output of ranks that a printed script started; no node is contacted.",
)
@click.option(
    "--dumps",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Name the rank of a job that stopped first, by the dumps of PyTorch's flight recorder; no node is contacted.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.5, max=600),
    default=5.0,
    show_default=True,
    help="Time limit of the ranks.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    help="Ranks of each node.  [default: one for each GPU, with --engine ssh; else 8, or 1 with --backend gloo]",
)
@click.option(
    "--backend",
    type=click.Choice(("nccl", "gloo")),
    help="gloo: without GPUs.  [default: nccl; with --engine ssh by the nodes' GPUs]",
)
@click.option(
    "--interface",
    metavar="NAME",
    help="Network interface of the ranks.  [default: with --engine ssh the fastest, else as NCCL and Gloo choose it]",
)
@click.option("--links-only", is_flag=True, help="Only the exchanges between nodes: no collectives, no training.")
@click.option("--image", metavar="IMAGE", help="Container image of the ranks.  [default: from the catalog]")
@click.option(
    "--image-file", type=click.Path(path_type=Path), metavar="FILE", help="Archive of the image (docker save)."
)
@click.option("--no-container", is_flag=True, help="Run the ranks with the node's own Python.")
@click.option("--python", "python", default="python3", show_default=True, help="Python of slurm, mpi and kubernetes.")
@click.option("--rendezvous", metavar="HOST", help="Address of rank 0.  [default: found by facts, or by the engine]")
@click.option(
    "--force", is_flag=True, help="Go on with busy GPUs, and with nodes that failed before the ranks started."
)
@EXPECT
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Report of --format json of an earlier run with --fabric; figures are compared with those of the same node.",
)
@click.option(
    "--history/--no-history",
    default=None,
    help="Save this run: gpunode history --help.  [default: yes, with --records and --dumps no]",
)
@outputs_.options
@STRICT
@click.option("-v", "--verbose", is_flag=True, help="Also show notes and passed checks.")
@click.pass_context
def validate_fabric(  # noqa: PLR0913
    ctx: click.Context,
    /,
    *,
    selection: Selection,
    engine: Literal["ssh", "slurm", "mpi", "torchrun", "kubernetes"],
    printed: bool,
    records: Path | None,
    dumps: Path | None,
    minutes: float,
    ranks: int | None,
    backend: Literal["nccl", "gloo"] | None,
    interface: str | None,
    links_only: bool,
    image: str | None,
    image_file: Path | None,
    no_container: bool,
    python: str,
    rendezvous: str | None,
    force: bool,
    expect: Path | None,
    baseline: Path | None,
    history: bool | None,
    strict: bool,
    verbose: bool,
    **_: object,
) -> int:
    """Run ranks of PyTorch on HOSTs, or on the hosts of an inventory (-i), together: docs/fabric.md.

    Pairs of nodes exchange messages in rounds; a slow GPU, NIC, node, rail, rack or pair is named. Then collectives,
    and training steps with gradients compared. No setting of a node is changed. Exit codes: 0 nothing failed, 1
    something failed, 2 wrong usage, 3 could not be determined.

    \b
    Examples:
      gpunode validate --fabric -i inventory/hosts.yml
      gpunode validate --fabric -i inventory/hosts.yml --limit rack7 --format html --output fabric.html
      gpunode validate --fabric --engine slurm gpu-[01-16] --ranks 8
      gpunode validate --fabric --engine slurm --print gpu-[01-16] > fabric.sbatch
      gpunode validate --fabric --records slurm-4711.out
      gpunode validate --fabric --dumps /tmp/nccl_traces
    """
    places = outputs_.outputs(ctx)
    if printed and engine != "slurm":
        raise UsageError(
            "--print: only --engine slurm starts ranks that it can also print; torchrun, kubernetes: always"
        )
    started, began = now(), time.monotonic()
    tests = "fabric" if links_only else "fabric,nccl,ddp"
    if records is not None and dumps is not None:
        raise UsageError("--records cannot be combined with --dumps")
    expects = ExpectedOfNodes(
        read_expectation(expect) if expect else Expectation(), read_baselines(baseline) if baseline else {}
    )
    wanted = history if history is not None else records is None and dumps is None
    if dumps is not None:
        selection_.refuse_asking("--dumps contacts no node")
        verdict, nodes = FabricVerdict(), of_dumps(dumps)
    elif records is not None:
        selection_.refuse_asking("--records contacts no node")
        text = read_file(records)
        found = records_of(text)
        if not found:
            reason = "no record of a rank: name the output of a script that --fabric printed"
            raise UsageError(f"--records {records}: {reason}")
        printed_log = (text, None) if has_nccl_tests(text) else None
        verdict, nodes = of_records(found, engine, (time.monotonic() - began) / 60, expects, printed_log)
    elif engine == "ssh":
        _refuse(ctx, "--engine ssh", ("backend", "python", "rendezvous"))
        request = FabricRequest(
            image=functools.partial(_image, image, image_file),
            in_container=not no_container,
            run_limit_s=minutes * 60,
            ranks=ranks or 1,
            force=force,
            interface=interface,
            file=read_image_file(image_file) if image_file else None,
            tests=tests,
        )
        verdict, nodes = over_ssh(selection, request, expects)
    else:
        _refuse(ctx, f"--engine {engine}", ("no_container", "force", "image_file"))
        if image is not None and engine != "kubernetes":
            raise UsageError(f"--engine {engine} uses no image: --image cannot be combined with it")
        if engine == "kubernetes" and image is None:
            raise UsageError("--engine kubernetes: name the image of the pods with --image")
        chosen = backend or "nccl"
        targets = selection.targets()
        if len(targets) < LEAST_NODES:
            raise UsageError("--fabric needs at least two nodes: -i INVENTORY, or hosts")
        starter = StarterRequest(
            nodes=[target.name for target in targets],
            ranks=ranks or DEFAULT_RANKS[chosen],
            backend=chosen,
            minutes=minutes,
            python=python,
            image=image,
            interface=interface,
            host=rendezvous,
            tests=tests,
            racks={target.name: target.rack for target in targets if target.rack},
        )
        if printed or engine in PRINTED:
            click.echo(starters.text(cast("Any", engine), starter), nl=False)
            return 0
        output = started_by(cast("Any", engine), starter)
        tested = chosen == "nccl" and not links_only and not any(map(missing_ranks, output))
        log = nccl_tests_by(cast("Any", engine), starter) if tested else None
        verdict, nodes = of_records(output, engine, (time.monotonic() - began) / 60, expects, log)
    fleet = kept(nodes, started, wanted=wanted)
    document = report(
        nodes,
        level="standard",
        version=__version__,
        started_at=started,
        finished_at=now(),
        fleet=fleet,
        fabric=verdict.report,
    )
    for place in places:
        write(document, place, verbose=verbose)
    return exit_code(document, strict=strict)


@dataclass(frozen=True)
class ExpectedOfNodes:
    """What the site expects, and the earlier figures of each node."""

    site: Expectation
    baselines: Mapping[str, Baseline]

    def of(self, names: Iterable[str]) -> dict[str, Expectation]:
        """Return the expectation of each node."""
        return {
            name: self.site.with_baseline(self.baselines[name]) if name in self.baselines else self.site
            for name in names
        }


def kept(nodes: Sequence[NodeReport], started: str, *, wanted: bool) -> Fleet:
    """Save the run in the history, and return the nodes with figures that differ from most others'."""
    recorder = Recorder(FABRIC, "standard", started, wanted=wanted)
    fleet = FleetProfile()
    with recorder:
        for node in nodes:
            snapshot = Snapshot(
                host=node.host,
                level="standard",
                simulated=node.simulated,
                stack=node.stack,
                gpus=tuple(GpuRecord(index=gpu.index, name=gpu.name, uuid=gpu.uuid) for gpu in node.gpus),
                verdicts=verdicts_of(node.findings),
                figures=figures_of(node.findings),
            )
            fleet.add(snapshot)
            recorder.node(snapshot, node.status.value, node.findings)
        recorder.finish(worst(node.status for node in nodes), now())
    figures = [one for one in fleet.outliers() if one.kind == "figure"]
    return Fleet(outliers=tuple(one.model_dump(mode="json") for one in figures) if figures else None)


def of_dumps(folder: Path) -> list[NodeReport]:
    """Return the verdict on the dumps of one job, as the report on a node of its name. Raises UsageError."""
    findings = [one for _, one in findings_of(read_dumps(folder))]
    return [judged("job", _unknown(), findings, None)]


def _refuse(ctx: click.Context, why: str, names: Sequence[str]) -> None:
    """Raise UsageError for options without an effect."""
    source = ctx.get_parameter_source
    given = [f"--{name.replace('_', '-')}" for name in names if source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise UsageError(f"{why}: {', '.join(given)} has no effect there")


def _image(named: str | None, file: Path | None, node: NodeFacts) -> str:
    if named is not None:
        return named
    if file is not None:
        archive = read_image_file(file)
        return archive.name or archive.id
    return catalog_image(node)


# --- ssh


@dataclass
class FabricWork:
    """Work of ``fleet.collect`` on each node after its probe: its part of the run."""

    run: FabricRun
    limit_s: float
    facts_of: Callable[[Answer], NodeFacts]
    facts: dict[str, NodeFacts]
    progress: NodeProgress = field(default=lambda *_: None)

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
    selection: Selection, request: FabricRequest, expects: ExpectedOfNodes
) -> tuple[FabricVerdict, list[NodeReport]]:
    """Run the ranks over the inventory's connections; return the verdict and the reports on the nodes."""
    targets = selection.targets()
    names = [target.name for target in targets]
    if len(targets) < LEAST_NODES:
        raise UsageError("--fabric needs at least two nodes: -i INVENTORY, or hosts")
    request = replace(request, racks={target.name: target.rack for target in targets if target.rack})
    began = time.monotonic()
    # All nodes at the same time: they wait for each other.
    selection = replace(selection, parallel=len(targets))
    facts: dict[str, NodeFacts] = {}
    run = FabricRun(request, names, selection.timeout_s)
    image_s = request.image_limit_s if request.in_container else 0.0
    limit_s = request.run_limit_s + image_s + selection.timeout_s + 4 * STEP_S + END_S
    collected: dict[str, Collected] = {}
    with Evaluator() as evaluator:

        def then(progress: NodeProgress) -> FabricWork:
            return FabricWork(run, limit_s, evaluator.facts, facts, progress)

        for one in selection.collect(then=then, targets=targets):
            collected[one.host] = one
            run.leave(one.host)
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
    for target in sorted(targets, key=lambda one: one.name):
        own = [*result.findings.get(target.name, ()), *verdict.findings.get(target.name, ())]
        if target.name not in result.nodes and not any(one.status in (Status.FAIL, Status.ERROR) for one in own):
            text = "not run: fewer than two nodes were left after the tests before the ranks"
            own.append(finding("nodes.links", Status.ERROR, "node", text))
        reports.append(_node_report(target, collected.get(target.name), facts.get(target.name), own))
    return verdict, reports


def _node_report(
    target: Target, collected: Collected | None, facts: NodeFacts | None, findings: list[Finding]
) -> NodeReport:
    if collected is None or collected.answer is None:
        return unreachable(target.name, (collected and collected.reason) or "no answer", None)
    lost = [str(record["error"]) for record in collected.answer.records if record.get("record") == "fabric.failed"]
    findings = findings + [finding("nodes.node", Status.ERROR, "node", reason) for reason in lost]
    if facts is None:
        return judged(target.name, _unknown(), findings, collected.seconds)
    return judged(target.name, identify(facts), findings, collected.seconds)


def _unknown() -> Identity:
    return Identity(simulated=False, stack=RunningStack(), gpus=())


# --- other engines


def started_by(engine: Literal["slurm", "mpi"], request: StarterRequest) -> list[dict[str, Any]]:
    """Run the ranks by srun or mpirun; return their records. Nothing of it is left at the end, or on Ctrl-C."""
    done = _bound(starters.command(engine, request), request.limit_s, payload_script())
    found = records_of(done.stdout)
    if not found:
        raise UndeterminedError(_failed(engine, done))
    return found


def nccl_tests_by(engine: Literal["slurm", "mpi"], request: StarterRequest) -> tuple[str, str | None]:
    """Run nccl-tests by srun or mpirun; return the output, and how the starter failed."""
    try:
        done = _bound(starters.nccl_tests_command(engine, request), NCCL_TESTS_S, None)
    except UndeterminedError:
        # As where srun waits for the nodes: what the ranks measured is reported all the same.
        return "", f"{PROGRAMS[engine]} did not end within {NCCL_TESTS_S + 2 * KILL_S} s"
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


def of_records(
    records: list[dict[str, Any]],
    engine: str,
    minutes: float,
    expects: ExpectedOfNodes,
    nccl_tests_log: tuple[str, str | None] | None = None,
) -> tuple[FabricVerdict, list[NodeReport]]:
    """Return the verdict on records, and on nccl-tests' output, and the reports on the nodes that the records name."""
    links = next((one for one in records if one.get("record") == "fabric.links"), {})
    given = links.get("values")
    values: dict[str, Any] = given if isinstance(given, dict) else {}
    names = [one_line(str(name), 100) for name in (values.get("names") or ["rank 0"])]
    verdict = verdict_of(
        records,
        nodes=names,
        engine=engine,
        backend=str(values.get("backend") or "unknown"),
        ranks=len(values.get("rank_nodes") or names),
        minutes=minutes,
        expects=expects.of(names),
    )
    if nccl_tests_log is not None:
        output, failure = nccl_tests_log
        verdict.add(names, opinion_of(output, verdict.report, failure))
    return verdict, [judged(name, _unknown(), verdict.findings[name], None) for name in sorted(verdict.findings)]


def read_file(path: Path) -> str:
    """Return the text of a file. Raises UsageError."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_RECORDS + 1)
    except OSError as err:
        raise UsageError(f"--records {path}: {err.strerror}") from None
    if len(data) > MOST_RECORDS:
        raise UsageError(f"--records {path}: more than {MOST_RECORDS >> 20} MiB")
    return data.decode(errors="replace")


def records_of(text: str) -> list[dict[str, Any]]:
    """Return the records in the output of ranks."""
    output = BoundedOutput()
    try:
        output.stdout(text.encode() + b"\n")
    except LaunchFailure as err:
        raise UndeterminedError(str(err)) from None
    return output.records
