"""``gpunode explain``: what an error text means, and what a node has to do with it."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator

import click
from packaging.version import Version
from rich.text import Text

from gpunode.catalog import load
from gpunode.checks import Status, registry
from gpunode.checks.wheels import runs_on, wheel_architectures
from gpunode.cli import selection as selection_
from gpunode.cli.options import FORMAT, REPLAY, verbose_option
from gpunode.cli.selection import Selection, refuse_asking
from gpunode.errors import Exit, UsageError
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.report import NodeReport
from gpunode.judging.request import JudgingRequest
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.report.console import PlainConsole
from gpunode.report.outcomes import ExplainedNode, ExplainOutcome, MessageExplanation
from gpunode.report.summary import driver_of, gpus_of
from gpunode.text import listed, printable
from gpunode.workload.causes import CAUSES

MOST_SEARCHED = 16 * 1024
"""Characters of a text that are searched, at its end."""
MOST = 3
"""Explanations of one text."""
XID = re.compile(r"\bXid\s{0,3}(?:\(PCI:[0-9a-f:.]{1,20}\))?[:\s]{0,3}(\d{1,4})\b", re.IGNORECASE)
ALWAYS = ("node.reachable",)
"""Selected with the checks of an explanation: one without a check for this level is explained too."""


@click.command("explain")
@click.argument("message")
@selection_.options
@REPLAY
@verbose_option("Also show checks that passed on the nodes.")
@FORMAT
def explain_command(*, message: str, selection: Selection, replay: bool, verbose: bool, form: str) -> int:
    """Explain an error MESSAGE, and with HOSTs, -i or --replay what these nodes have to do with it.

    Exit codes: 0 explained, 2 wrong usage, 3 the text is unknown, or a node could not be reached.

    \b
    Examples:
      gpunode explain "CUDA error: no kernel image is available for execution on the device" --replay gpu-01.json
      gpunode explain "NVRM: Xid (PCI:0000:1a:00): 79, pid=1234"
      gpunode explain "Failed to initialize NVML: Unknown Error" -i inventory/hosts.yml
    """
    if not message.strip():
        raise UsageError("MESSAGE is empty: the error text, in quotes")
    if replay:
        refuse_asking("--replay contacts no node")
        if not selection.hosts:
            raise UsageError("--replay BUNDLE is missing: the saved bundles")
    known = explanations(message[-MOST_SEARCHED:])
    console = PlainConsole(sys.stdout)
    shown = form == "console"
    if not known:
        click.echo("gpunode: the text is unknown: gpunode catalog list messages shows those that are known", err=True)
    for explanation in known if shown else ():
        _show(explanation, console)
    nodes = []
    if known and (replay or selection.hosts or selection.inventories):
        for node in judged_nodes(selection, known, replay=replay):
            lines = tuple(map(printable, about(node, known, message, verbose=verbose)))
            nodes.append(ExplainedNode(host=printable(node.host), reached=node.hardware is not None, lines=lines))
            for line in lines if shown else ():
                console.show(Text(line))
    code = Exit.GOOD if known and all(node.reached for node in nodes) else Exit.UNDETERMINED
    if not shown:
        click.echo(ExplainOutcome(exit_code=int(code), explanations=tuple(known), nodes=tuple(nodes)).text())
    return code


def explanations(message: str) -> list[MessageExplanation]:
    """Return what the text means, at most MOST explanations."""
    known = list(_messages(message)) or list(_causes(message))
    return list(dict.fromkeys([*_xids(message), *known]))[:MOST]


def _xids(message: str) -> Iterator[MessageExplanation]:
    for number in dict.fromkeys(XID.findall(message)):
        row = load().xid(int(number))
        if row is not None:
            yield MessageExplanation(
                title=f"Xid {number} {row.name}, {row.severity}",
                means=row.meaning,
                remedy=row.action,
                checks=("gpu.xid", "gpu.xid-earlier"),
                sources=_urls(row.source),
            )


def _messages(message: str) -> Iterator[MessageExplanation]:
    for row in load().messages.values():
        if re.search(row.pattern, message, re.IGNORECASE):
            yield MessageExplanation(
                title=f"{row.program}: {row.id}",
                means=row.means,
                remedy=row.remedy,
                checks=row.checks,
                sources=_urls(row.source),
                fact=row.fact,
            )


def _causes(message: str) -> Iterator[MessageExplanation]:
    """Yield the first cause of a container engine's text, unless it is the last row, which only names the toolkit."""
    for cause in CAUSES[:-1]:
        match = re.search(cause.pattern, message, re.IGNORECASE)
        if match:
            means = cause.means.replace("image {image}", "the image").format(**match.groupdict())
            fact = "cuda" if "cuda" in match.groupdict() else None
            checks = ("container.runs", "container.gpus", "container.toolkit")
            yield MessageExplanation(
                title=f"container engine: {cause.kind}",
                means=means,
                remedy=cause.remedy,
                checks=checks,
                sources=(cause.source,),
                fact=fact,
            )
            return


def _urls(keys: Iterable[str]) -> tuple[str, ...]:
    sources = load().sources
    return tuple(sources[key].url or sources[key].title for key in keys if key in sources)


def _show(explanation: MessageExplanation, console: PlainConsole) -> None:
    console.show(Text(printable(explanation.title), "bold"))
    console.show(Text(printable(f"meaning: {explanation.means}")), 2)
    console.show(Text(printable(f"to do: {explanation.remedy}")), 2)
    console.show(Text(f"checks: {', '.join(explanation.checks)} (gpunode checks {explanation.checks[0]})"), 2)
    console.show(Text(printable(f"source: {listed(explanation.sources)}"), "dim"), 2)


def judged_nodes(selection: Selection, known: Iterable[MessageExplanation], *, replay: bool) -> Iterator[NodeReport]:
    """Yield the nodes, judged by the checks of the explanations that only read."""
    checks = {check for explanation in known for check in explanation.checks if registry[check].level == "quick"}
    files = bundle_files(selection.hosts) if replay else []
    targets = [] if replay else selection.targets()
    with Evaluator(JudgingRequest(level="quick", checks=frozenset({*ALWAYS, *checks}))) as evaluator:
        answers = saved_answers(files) if replay else selection.collect(targets=targets)
        for node in evaluator.judge_fleet(answers, strict=len(files) == 1):
            yield node.report


def about(node: NodeReport, known: Iterable[MessageExplanation], message: str, *, verbose: bool) -> Iterator[str]:
    """Yield lines on what a node has to do with the text."""
    simulated = ", SIMULATED" if node.simulated else ""
    yield f"{node.host}: {_identity(node)}{simulated}"
    for fact in dict.fromkeys(explanation.fact for explanation in known if explanation.fact):
        yield f"  {FACTS[fact](node, message)}"
    shown = [
        finding for finding in node.findings if verbose or finding.status in (Status.FAIL, Status.WARN, Status.ERROR)
    ]
    for finding in shown:
        component = "" if finding.component == "node" else f"{finding.component}: "
        yield f"  {finding.status.value}  {finding.check}  {component}{finding.message}"
    if not shown:
        yield "  no finding of the read-only checks (-v lists their results)"


def _identity(node: NodeReport) -> str:
    if node.hardware is None:
        return "not reached"
    driver = driver_of(node)
    of = "" if node.stack.driver is None and node.stack.driver_packages is None else "driver "
    return f"{gpus_of(node)}, {of}{driver}, CUDA {node.stack.cuda or 'unknown'}"


def capability_fact(node: NodeReport, message: str) -> str:
    """Return how the GPU's compute capability relates to those that the text lists."""
    row = load().gpus.get((node.hardware and node.hardware.gpu_model) or "")
    capability = None if row is None else row.compute_capability
    if capability is None:
        return "the compute capability of this GPU is unknown"
    _, _, listing = message.partition("supports CUDA capabilities")
    names = re.findall(r"\b(?:sm|compute)_\d{2,3}[af]?\b", listing)
    built = sorted(names, key=lambda name: (name.startswith("compute"), len(name), name))
    if built:
        ends = " to ".join(dict.fromkeys((built[0], built[-1])))
        code = "it has code for it" if runs_on(built, Version(capability)) else "no code for it"
        return f"the build has {ends}, this GPU is {capability}: {code}"
    wheels = [
        f"CUDA {listed(wheel.cuda)} (PyTorch {_range(wheel.since, wheel.until)})"
        for wheel in load().rows("wheels").values()
        if wheel.arch == (node.stack.architecture or "x86_64")
        and runs_on(wheel_architectures(wheel), Version(capability))
    ]
    return f"this GPU is {capability}; wheels of PyTorch with its code: {listed(wheels) or 'none in the catalog'}"


def _range(since: str, until: str | None) -> str:
    return since if since == until else f"{since} to {until or 'the newest'}"


def cuda_fact(node: NodeReport, message: str) -> str:
    """Return how the CUDA version of the driver relates to the one that the text requires."""
    supported = node.stack.cuda
    if supported is None:
        return "the CUDA version that the driver supports is unknown"
    required = re.search(r"cuda ?>= ?(\d{1,2}\.\d{1,2})", message, re.IGNORECASE)
    if required is None:
        return f"the driver supports CUDA {supported}"
    enough = Version(required[1]) <= Version(supported)
    return f"the driver supports CUDA {supported}, {required[1]} is required: {'enough' if enough else 'too old'}"


FACTS: dict[str, Callable[[NodeReport, str], str]] = {"capability": capability_fact, "cuda": cuda_fact}
