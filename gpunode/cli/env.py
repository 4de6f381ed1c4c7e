"""``gpunode env``: the tuned environment and the arguments of ``docker run`` for a node."""

import sys
from collections.abc import Callable, Iterator, Mapping

import click
from rich.text import Text

from gpunode.cli import selection as selection_
from gpunode.cli.options import REPLAY
from gpunode.cli.selection import Selection, refuse_asking
from gpunode.errors import Exit, UsageError
from gpunode.facts import NodeFacts
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.report.console import PlainConsole
from gpunode.text import printable, printable_json
from gpunode.tuning import (
    GPU_ARGUMENTS,
    PROFILES,
    WORKLOADS,
    Profile,
    Tuning,
    Tunings,
    Workload,
    docker_args,
    env_file,
    nccl_conf,
    shell,
    systemd,
    tune,
)

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
@click.option("--expandable-segments", is_flag=True, help="Enable PyTorch's expandable segments (disables CUDA IPC).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", *OF_ONE_NODE, "json"]),
    default="text",
    show_default=True,
    help="Output format; text and json support several nodes.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also show sources, and settings that are not changed and why.")
def command(  # noqa: PLR0913
    *,
    selection: Selection,
    replay: bool,
    workload: Workload,
    profile: Profile,
    multi_node: bool,
    expandable_segments: bool,
    form: str,
    verbose: bool,
) -> int:
    """Print the settings for a workload on a node: HOST, hosts of an inventory (-i), a bundle (--replay), or this
    machine.

    Each value is derived from the node's facts and printed with its reason. Changes nothing on the node.
    Exit codes: 0 printed, 2 wrong usage, 3 a node could not be reached.

    \b
    Examples:
      gpunode env root@gpu-01 --workload pytorch --profile inference
      docker run $(gpunode env --format docker-args) IMAGE python3 train.py
    """
    if expandable_segments and workload != "pytorch":
        raise UsageError(f"--expandable-segments is a setting of PyTorch: --workload {workload} does not use it")
    if replay:
        refuse_asking("--replay contacts no node")
    missed = list[str]()
    with Evaluator() as evaluator:
        found = [
            tune(node, workload, profile=profile, multi_node=multi_node, expandable=expandable_segments)
            for node in _facts(selection, evaluator, missed, replay=replay)
        ]
    for line in missed:
        click.echo(printable(line), err=True)
    if form in OF_ONE_NODE and len(found) + len(missed) > 1:
        raise UsageError(f"--format {form} supports one node, got {len(found) + len(missed)}")
    if form == "json":
        click.echo(printable_json(Tunings(nodes=tuple(found)).model_dump_json(by_alias=True, indent=1)))
    for tuning in found:
        if form in OF_ONE_NODE:
            click.echo(OF_ONE_NODE[form](tuning), nl=False)
            if form == "docker-args":
                # In a command line nothing else of the output is visible.
                for one in tuning.left_alone:
                    if one.name in GPU_ARGUMENTS:
                        click.echo(printable(f"{tuning.host}: no GPUs among the arguments: {one.reason}"), err=True)
        elif form == "text":
            _show(tuning, verbose=verbose)
    return Exit.UNDETERMINED if missed or not found else Exit.GOOD


def _facts(selection: Selection, evaluator: Evaluator, missed: list[str], *, replay: bool) -> Iterator[NodeFacts]:
    """Yield the facts of each node; add a line for one without facts."""
    files = bundle_files(selection.hosts) if replay else []
    answers = saved_answers(files) if replay else selection.collect()
    for node in evaluator.facts_of_fleet(answers, strict=len(files) == 1):
        if node.facts is None:
            missed.append(f"{node.host}: {node.reason}")
        else:
            yield node.facts


def _show(tuning: Tuning, *, verbose: bool) -> None:
    console = PlainConsole(sys.stdout)
    over = " over several nodes" if tuning.multi_node else ""
    console.show(
        Text(
            f"{printable(tuning.host)}: {tuning.workload}, {tuning.profile}{over}"
            f"{' (simulated)' if tuning.simulated else ''}",
            "bold",
        )
    )
    parts = (
        ("job: environment", tuning.environment, "="),
        ("job: docker run", tuning.docker, " "),
        ("node: environment (role ml_environment)", tuning.node.environment, "="),
        ("node: /etc/nccl.conf (role ml_environment)", tuning.node.nccl, "="),
        ("node: kernel (role kernel_tuning)", tuning.node.kernel, "="),
    )
    for title, settings, sign in parts:
        console.show(Text(title, "bold"), 2)
        for setting in settings:
            console.show(Text(printable(f"{setting.name}{sign if setting.value else ''}{setting.value}")), 4)
            source = f" [{setting.source}]" if verbose else ""
            console.show(Text(printable(f"{setting.reason}{source}"), "dim"), 8)
    if verbose:
        console.show(Text("left alone", "bold"), 2)
        for one in dict.fromkeys((*tuning.left_alone, *tuning.node.left_alone)):
            console.show(Text(printable(f"{one.name}: {one.reason}"), "dim"), 4)
