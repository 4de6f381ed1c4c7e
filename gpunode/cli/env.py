"""``gpunode env``: the tuned environment and the arguments of ``docker run`` for a node. ``gpunode advise``: what pays
on a node for training, with the node's own numbers.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import click
from rich.text import Text

from gpunode.cli import selection as selection_
from gpunode.cli.options import REPLAY, format_option, verbose_option
from gpunode.cli.selection import Selection, refuse_asking
from gpunode.cli.streams import table_lines
from gpunode.errors import Exit, GpunodeError, UsageError
from gpunode.facts import NodeFacts
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.node_figures import NodeFigure, as_json
from gpunode.judging.node_figures import figures as node_figures
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.report.console import PlainConsole
from gpunode.text import printable, printable_json
from gpunode.tuning import (
    GPU_ARGUMENTS,
    PROFILES,
    WORKLOADS,
    GpuRequest,
    Profile,
    Tuning,
    Tunings,
    Workload,
    docker_args,
    env_file,
    nccl_conf,
    shell,
    slice_of,
    systemd,
    tune,
)
from gpunode.tuning.advice import STEPS, AdviceDocument, NodeAdvice, advise
from gpunode.tuning.slices import MOST_GPUS

OF_ONE_NODE: Mapping[str, Callable[[Tuning], str]] = {
    "docker-args": lambda tuning: " ".join(docker_args(tuning)) + "\n",
    "env-file": env_file,
    "shell": shell,
    "systemd": systemd,
    "nccl-conf": lambda tuning: nccl_conf(tuning.node.nccl, f"gpunode env: {printable(tuning.host)}"),
}
"""Formats that a program reads directly: settings of two nodes would be mixed in them."""


@click.command("env")
@selection_.options
@REPLAY
@click.option(
    "--workload", type=click.Choice(WORKLOADS), default="pytorch", show_default=True, help="Workload to tune for."
)
@click.option(
    "--profile", type=click.Choice(PROFILES), default="training", show_default=True, help="Usage profile of the node."
)
@click.option("--multi-node", is_flag=True, help="The workload runs over several nodes.")
@click.option(
    "--gpus", "gpu_list", metavar="LIST", help="Only these GPUs with their share of the node: 0,1 or 0-3 or UUIDs."
)
@click.option(
    "--idle", type=click.IntRange(1, MOST_GPUS), metavar="NUMBER", help="As --gpus: so many idle GPUs near each other."
)
@click.option("--expandable-segments", is_flag=True, help="Enable PyTorch's expandable segments (disables CUDA IPC).")
@format_option("text", *OF_ONE_NODE, "json", text="Output format; text and json support several nodes.")
@verbose_option("Also show sources, and settings that are not changed and why.")
def env_command(  # noqa: PLR0913
    *,
    selection: Selection,
    replay: bool,
    workload: Workload,
    profile: Profile,
    multi_node: bool,
    gpu_list: str | None,
    idle: int | None,
    expandable_segments: bool,
    form: str,
    verbose: bool,
) -> int:
    """Print the settings for a workload on a node: HOST, hosts of an inventory (-i), a bundle (--replay), or this
    machine.

    Each value is derived from the node's facts and printed with its reason. Changes nothing on the node.
    Exit codes: 0 printed, 1 the requested GPUs are in use, 2 wrong usage, 3 a node could not be reached.

    \b
    Examples:
      gpunode env root@gpu-01 --workload pytorch --profile inference
      docker run $(gpunode env --format docker-args) IMAGE python3 train.py
      docker run $(gpunode env --idle 2 --format docker-args) IMAGE torchrun --nproc-per-node 2 train.py
    """
    if expandable_segments and workload != "pytorch":
        raise UsageError(f"--expandable-segments is a setting of PyTorch: --workload {workload} does not use it")
    if replay:
        refuse_asking("--replay contacts no node")
    request = _request(gpu_list, idle, form)
    missed, refused, tunings = list[str](), list[GpunodeError](), list[Tuning]()
    with Evaluator() as evaluator:
        for node in facts_of(selection, evaluator, missed, replay=replay):
            try:
                part = slice_of(node, request) if request else None
            except GpunodeError as err:
                refused.append(err)
                continue
            tunings.append(
                tune(node, workload, profile=profile, multi_node=multi_node, expandable=expandable_segments, part=part)
            )
    for line in (*missed, *map(str, refused)):
        click.echo(printable(line), err=True)
    number = len(tunings) + len(missed) + len(refused)
    if form in OF_ONE_NODE and number > 1:
        raise UsageError(f"--format {form} supports one node, got {number}")
    _print(tunings, form, verbose=verbose)
    if missed or number == 0:
        return Exit.UNDETERMINED
    # Of several nodes the one that needs an answer first.
    order = (Exit.USAGE, Exit.UNDETERMINED, Exit.FAILED)
    return min((err.exit_code for err in refused), key=order.index, default=Exit.GOOD)


def _print(tunings: Sequence[Tuning], form: str, *, verbose: bool) -> None:
    if form == "json":
        click.echo(printable_json(Tunings(nodes=tuple(tunings)).model_dump_json(by_alias=True, indent=1)))
    for tuning in tunings:
        if form in OF_ONE_NODE:
            click.echo(OF_ONE_NODE[form](tuning), nl=False)
            if form == "docker-args":
                # In a command line nothing else of the output is visible.
                for skipped in tuning.left_alone:
                    if skipped.name in GPU_ARGUMENTS:
                        click.echo(printable(f"{tuning.host}: no GPUs among the arguments: {skipped.reason}"), err=True)
        elif form == "text":
            _show(tuning, verbose=verbose)


def _request(gpus: str | None, idle: int | None, form: str) -> GpuRequest | None:
    """Return the requested slice; raise UsageError for one that cannot be meant."""
    if gpus is not None and idle is not None:
        raise UsageError("--gpus and --idle cannot be combined: name GPUs, or their number")
    if gpus is None and idle is None:
        return None
    if form == "nccl-conf":
        raise UsageError("--format nccl-conf is for the whole node: --gpus and --idle cannot be combined with it")
    return GpuRequest(idle=idle) if idle is not None else GpuRequest.parse(gpus or "")


def _show(tuning: Tuning, *, verbose: bool) -> None:
    console = PlainConsole(sys.stdout)
    over = " over several nodes" if tuning.multi_node else ""
    console.show(
        Text(
            f"{printable(tuning.host)}: {tuning.workload}, {tuning.profile}{over}"
            f"{f', {tuning.part.title}' if tuning.part else ''}"
            f"{' (simulated)' if tuning.simulated else ''}",
            "bold",
        )
    )
    parts = (
        ("job: environment", tuning.environment, "="),
        ("job: docker run", tuning.docker, " "),
        ("job: in the program", tuning.program, "="),
        ("node: environment (role ml_environment)", tuning.node.environment, "="),
        ("node: /etc/nccl.conf (role ml_environment)", tuning.node.nccl, "="),
        ("node: kernel (role kernel_tuning)", tuning.node.kernel, "="),
    )
    for title, settings, sign in parts:
        if not settings and title == "job: in the program":
            continue
        console.show(Text(title, "bold"), 2)
        for setting in settings:
            console.show(Text(printable(f"{setting.name}{sign if setting.value else ''}{setting.value}")), 4)
            source = f" [{setting.source}]" if verbose else ""
            console.show(Text(printable(f"{setting.reason}{source}"), "dim"), 8)
    if verbose:
        console.show(Text("left alone", "bold"), 2)
        for skipped in dict.fromkeys((*tuning.left_alone, *tuning.node.left_alone)):
            console.show(Text(printable(f"{skipped.name}: {skipped.reason}"), "dim"), 4)


def facts_of(selection: Selection, evaluator: Evaluator, missed: list[str], *, replay: bool) -> Iterator[NodeFacts]:
    """Yield the facts of each node; add a line to ``missed`` for one without facts."""
    files = bundle_files(selection.hosts) if replay else []
    answers = saved_answers(files) if replay else selection.collect()
    for node in evaluator.facts_of_fleet(answers, strict=len(files) == 1):
        if node.facts is None:
            missed.append(f"{node.host}: {node.reason}")
        else:
            yield node.facts


@click.command("advise")
@selection_.options
@REPLAY
@format_option("text", "json")
@click.option("--figures", is_flag=True, help="Print only the table: this node, the guides' figure, the limit.")
@verbose_option("Also show the source of each advice.")
def advise_command(*, selection: Selection, replay: bool, form: str, figures: bool, verbose: bool) -> int:
    """Print what pays for training on a node: HOST, hosts of an inventory (-i), a bundle (--replay), or this machine.

    In the order of docs/training-guide.md, each advice with a number of this node or its source. Figures are those in
    the bundle of a validate; a figure that is missing is printed with the command that measures it. Changes nothing.
    Exit codes: 0 printed, 2 wrong usage, 3 a node could not be reached or has no GPU.

    \b
    Examples:
      gpunode advise root@gpu-01
      gpunode validate -i inventory/hosts.yml --level deep --save runs/today
      gpunode advise --replay runs/today
      gpunode advise --replay runs/today --figures
    """
    if replay:
        refuse_asking("--replay contacts no node")
    missed = list[str]()
    tables = dict[str, list[NodeFigure]]()
    with Evaluator() as evaluator:
        advised = list[NodeAdvice]()
        for node in facts_of(selection, evaluator, missed, replay=replay):
            if node.gpus_on_bus:
                advised.append(advise(node))
                tables[node.host] = node_figures(node) if figures else []
            else:
                missed.append(f"{node.host}: {node.gap('pci') or 'no NVIDIA GPU on the PCI bus'}: no advice for it")
    for line in missed:
        click.echo(printable(line), err=True)
    if figures:
        _show_figures(tables, form)
    elif form == "json":
        click.echo(printable_json(AdviceDocument(nodes=tuple(advised)).model_dump_json(by_alias=True, indent=1)))
    else:
        for advice in advised:
            _show_advice(advice, verbose=verbose)
    return Exit.UNDETERMINED if missed or not advised else Exit.GOOD


def _show_figures(tables: dict[str, list[NodeFigure]], form: str) -> None:
    if form == "json":
        click.echo(printable_json(json.dumps({host: as_json(rows) for host, rows in tables.items()}, indent=1)))
        return
    for host, rows in tables.items():
        click.echo(printable(host))
        cells = [(row.figure, row.node or f"not measured: {row.missing}", row.guide, row.limit) for row in rows]
        for line in table_lines(("figure", "this node", "guide", "limit"), cells):
            click.echo(printable(line))


def _show_advice(node: NodeAdvice, *, verbose: bool) -> None:
    console = PlainConsole(sys.stdout)
    simulated = " (simulated)" if node.simulated else ""
    console.show(Text(printable(f"{node.host}: {node.gpus}{simulated}"), "bold"))
    for number, (step, title) in enumerate(STEPS.items(), start=1):
        advice = [tip for tip in node.advice if tip.step == step]
        if advice:
            console.show(Text(f"{number}. {title}", "bold"), 2)
        for tip in advice:
            console.show(Text(printable(f"{tip.title}: {tip.advice}")), 4)
            for figure in tip.numbers:
                console.show(Text(printable(figure)), 8)
            if tip.missing:
                console.show(Text(printable(f"not measured here: {tip.missing}")), 8)
            if tip.source and (verbose or not tip.numbers):
                console.show(Text(printable(f"source: {tip.source}"), "dim"), 8)
