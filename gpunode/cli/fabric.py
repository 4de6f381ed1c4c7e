"""``gpunode validate --fabric``: ranks on many nodes together, and what is slow or broken between them."""

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import click
from click.core import ParameterSource

from gpunode import __version__
from gpunode.checks import Expectation
from gpunode.cli import selection as selection_
from gpunode.cli.options import (
    BASELINE,
    EXPECT,
    IMAGE_FILE,
    NO_CONTAINER,
    STRICT,
    CommandWithOutputs,
    history_option,
    image_option,
    output_options,
    outputs,
    verbose_option,
)
from gpunode.cli.selection import Selection
from gpunode.cli.validate import write
from gpunode.errors import UsageError
from gpunode.fabric import starters
from gpunode.fabric.records import ExpectedOfNodes, has_nccl_tests, of_dumps, of_records, read_file, records_of
from gpunode.fabric.run import LEAST_NODES, FabricRequest
from gpunode.fabric.starters import StarterRequest, over_ssh
from gpunode.fabric.verdict import FabricVerdict
from gpunode.fleet import Target
from gpunode.history.runs import record_fabric
from gpunode.judging.expectation import read_baselines, read_expectation
from gpunode.judging.report import exit_code, report
from gpunode.text import now
from gpunode.workload.distributed import missing_ranks
from gpunode.workload.image import read_image_file
from gpunode.workload.run import PYTORCH, image_of

ENGINES = ("ssh", "slurm", "mpi", "torchrun", "kubernetes")
PRINTED = ("torchrun", "kubernetes")
"""Engines of which gpunode prints the script or the manifest, and starts nothing."""
DEFAULT_RANKS = {"nccl": 8, "gloo": 1}
OF_RANKS = (
    *("hosts", "printed", "minutes", "ranks", "backend", "interface", "links_only", "image", "image_file"),
    *("no_container", "python", "rendezvous", "force"),
)
"""Options of ranks that are to start."""


@click.command("validate", cls=CommandWithOutputs)
@click.option("--fabric", is_flag=True, expose_value=False, help="Validate the nodes together.")
@selection_.options
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="ssh",
    show_default=True,
    help="What starts the ranks. ssh: gpunode, over the inventory's connections; slurm, mpi: srun and mpirun of this "
    "machine; torchrun, kubernetes: a script, or a manifest, is printed. With --records: what started them.",
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
@image_option()
@IMAGE_FILE
@NO_CONTAINER
@click.option("--python", "python", default="python3", show_default=True, help="Python of slurm, mpi and kubernetes.")
@click.option("--rendezvous", metavar="HOST", help="Address of rank 0.  [default: found by facts, or by the engine]")
@click.option(
    "--force", is_flag=True, help="Go on with busy GPUs, and with nodes that failed before the ranks started."
)
@EXPECT
@BASELINE
@history_option("yes, with --records and --dumps no")
@output_options
@STRICT
@verbose_option("Also show notes and passed checks.")
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
      gpunode validate --fabric --engine slurm --records slurm-4711.out
      gpunode validate --fabric --dumps /tmp/nccl_traces
    """
    places = outputs(ctx)
    if records is not None and dumps is not None:
        raise UsageError("--records cannot be combined with --dumps")
    if printed and engine != "slurm":
        raise UsageError(
            "--print: only --engine slurm starts ranks that it can also print; torchrun, kubernetes: always"
        )
    started, began = now(), time.monotonic()
    tests = "fabric" if links_only else "fabric,nccl,ddp"
    expects = ExpectedOfNodes(
        read_expectation(expect) if expect else Expectation(), read_baselines(baseline) if baseline else {}
    )
    wanted = history if history is not None else records is None and dumps is None
    if dumps is not None:
        selection_.refuse_asking("--dumps contacts no node")
        _refuse(ctx, "--dumps starts no ranks", (*OF_RANKS, "engine", "expect", "baseline"))
        verdict, nodes = FabricVerdict(), of_dumps(dumps)
    elif records is not None:
        selection_.refuse_asking("--records contacts no node")
        _refuse(ctx, "--records starts no ranks", OF_RANKS)
        text = read_file(records)
        if not (rank_records := records_of(text)):
            reason = "no record of a rank: name the output of a script that --fabric printed"
            raise UsageError(f"--records {records}: {reason}")
        of_engine = "unknown" if ctx.get_parameter_source("engine") is ParameterSource.DEFAULT else engine
        tested_log = (text, None) if has_nccl_tests(text) else None
        verdict, nodes = of_records(rank_records, of_engine, (time.monotonic() - began) / 60, expects, tested_log)
    elif engine == "ssh":
        _refuse(ctx, "--engine ssh", ("backend", "python", "rendezvous"))
        file = read_image_file(image_file) if image_file else None
        request = FabricRequest(
            image=functools.partial(image_of, image, file, PYTORCH),
            in_container=not no_container,
            run_limit_s=minutes * 60,
            ranks=ranks or 1,
            force=force,
            interface=interface,
            file=file,
            tests=tests,
        )
        targets = _targets(selection)
        # All nodes at the same time: they wait for each other.
        together = replace(selection, parallel=len(targets))
        collect = functools.partial(together.collect, targets=targets)
        verdict, nodes = over_ssh(targets, request, expects, timeout_s=selection.timeout_s, collect=collect)
    else:
        _refuse(ctx, f"--engine {engine}", ("no_container", "force", "image_file"))
        if image is not None and engine != "kubernetes":
            raise UsageError(f"--engine {engine} uses no image: --image cannot be combined with it")
        if engine == "kubernetes" and image is None:
            raise UsageError("--engine kubernetes: name the image of the pods with --image")
        chosen = backend or "nccl"
        targets = _targets(selection)
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
        output = starters.started_by(cast("Any", engine), starter)
        tested = chosen == "nccl" and not links_only and not any(map(missing_ranks, output))
        log = starters.nccl_tests_by(cast("Any", engine), starter) if tested else None
        verdict, nodes = of_records(output, engine, (time.monotonic() - began) / 60, expects, log)
    fleet = record_fabric(nodes, started, now(), wanted=wanted)
    document = report(
        nodes,
        level="standard",
        version=__version__,
        started_at=started,
        finished_at=now(),
        fleet=fleet,
        fabric=verdict.report,
    )
    for rendering in places:
        write(document, rendering, verbose=verbose)
    return exit_code(document, strict=strict)


def _targets(selection: Selection) -> list[Target]:
    """Return the nodes. Raises UsageError if there are fewer than two."""
    targets = selection.targets()
    if len(targets) < LEAST_NODES:
        raise UsageError("--fabric needs at least two nodes: -i INVENTORY, or hosts")
    return targets


def _refuse(ctx: click.Context, why: str, names: Sequence[str]) -> None:
    """Raise UsageError for options without an effect."""
    options = [
        param.opts[0] if isinstance(param, click.Option) else "HOST"
        for param in ctx.command.params
        # Click counts hosts as given where there are none.
        if param.name in names and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if ctx.params[param.name] != ()
    ]
    if options:
        raise UsageError(f"{why}: {', '.join(options)} has no effect there")
