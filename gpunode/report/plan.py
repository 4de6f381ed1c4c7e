"""A plan as text for people."""

import json
import os
import sys
from collections.abc import Iterator
from io import StringIO
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpunode.stack import Conflict, Plan, PlanGroup, Stack
from gpunode.stack.model import Library, Service
from gpunode.stack.resolve import Explanation
from gpunode.text import all_printable, counted, listed, printable_json

PIPE_WIDTH = 160
"""Columns if the output is not a terminal: lines stay complete for grep."""
NAMES = {
    "cuda_compat": "forward compatibility",
    "toolkit": "host toolkit",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "dcgm": "DCGM",
    "container_toolkit": "container toolkit",
    "fabric_manager": "fabric manager",
    "nscq": "NSCQ",
    "nvsdm": "NVSDM",
    "nvlsm": "NVLSM",
    "imex": "IMEX",
}
"""Components that a stack may lack."""
MOST_HOSTS = 12
MOST_DRIVERS = 6


def rendered(document: Plan, form: str, *, verbose: bool) -> str:
    """Return the plan as text of one format."""
    if form == "json":
        return printable_json(document.model_dump_json(by_alias=True, indent=1)) + "\n"
    if form == "yaml":
        return yaml.safe_dump(json.loads(document.model_dump_json(by_alias=True)), sort_keys=False, width=110)
    return as_text(document, verbose=verbose)


def dumped(document: Any, form: str) -> str:
    """Return a document as JSON or YAML."""
    if form == "json":
        return json.dumps(document, indent=1) + "\n"
    return yaml.safe_dump(document, sort_keys=False, width=110)


def as_text(document: Plan, *, verbose: bool) -> str:
    """Return the plan: one block for each group of nodes."""
    document = Plan.model_validate(all_printable(document.model_dump()))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    out = StringIO()
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(file=out, force_terminal=colour, no_color=not colour, width=width, highlight=False)
    for number, group in enumerate(document.groups):
        if number:
            console.print()
        for part in _group(group, verbose=verbose):
            console.print(part, soft_wrap=isinstance(part, Text))
    console.print()
    if any(group.stack is not None and group.hosts for group in document.groups):
        # The catalog has versions; only the node shows whether its sources have them and its holds allow them.
        hint = "apt and dnf were not queried: gpunode provision --check also reports what they refuse on a node"
        console.print(Text(f"note: {hint}", style="yellow"), soft_wrap=True)
    for note in document.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print(_last_line(document), soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _group(group: PlanGroup, *, verbose: bool) -> Iterator[RenderableType]:
    if group.hosts:
        yield Text(f"{counted(len(group.hosts), 'node')}: {listed(group.hosts, MOST_HOSTS)}", style="bold")
    if group.stack is not None:
        # Of a machine: its GPUs are not named. A warning reports whether there are none, or unknown ones.
        yield from _stack(group.stack, "no known NVIDIA GPU" if group.hosts else "no GPU named", verbose=verbose)
    if group.conflict is not None:
        yield from _conflict(group.conflict)
    if group.undetermined is not None:
        yield Text(f"could not be determined: {group.undetermined}", style="yellow")
    for drift in group.drift:
        style = "yellow" if drift.state != "in-step" or drift.past_eol else ""
        whose = "" if len(drift.hosts) == len(group.hosts) else f" ({', '.join(drift.hosts[:MOST_HOSTS])})"
        yield Text(f"drift: {drift.state}: {drift.text}{whose}", style=style)


def _stack(stack: Stack, without: str, *, verbose: bool) -> Iterator[RenderableType]:
    gpus = stack.platform or ", ".join(stack.gpus) or without
    yield Text(f"{gpus} on {stack.os}, {stack.arch}" + (f", kernel {stack.kernel}" if stack.kernel else ""))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim")
    for name, value, field in _lines(stack):
        reason = stack.reasons[field]
        table.add_row(name, value, f"{reason.rule}: {reason.text}")
    for field, name in NAMES.items():
        if getattr(stack, field) is None and verbose:
            table.add_row(name, "-", f"{stack.reasons[field].rule}: {stack.reasons[field].text}")
    yield Padding(table, (0, 0, 0, 2))
    yield Text("  packages")
    packages = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for package in stack.packages:
        tie = "same version as the driver" if package.with_driver else ""
        packages.add_row(package.name, package.version or "set by the repository", tie)
    yield Padding(packages, (0, 0, 0, 4))
    for warning in stack.warnings:
        yield Text(f"warning: {warning.text} [{warning.rule}]", style="yellow")


def _lines(stack: Stack) -> Iterator[tuple[str, str, str]]:
    driver, module, cuda = stack.driver, stack.module, stack.cuda
    yield "source", stack.source, "source"
    kind = f" ({driver.type})" if driver.type else ""
    yield "driver", f"{driver.version or driver.constraint}, branch {driver.branch}{kind}", "driver"
    kernel = f" for {module.kernel_flavour}: {', '.join(module.kernel_packages)}" if module.kernel_flavour else ""
    yield "kernel module", f"{module.flavour}, {module.build}{kernel}", "module"
    reach = f", up to {cuda.newest} by minor-version compatibility" if cuda.newest != cuda.native else ""
    requested = f"{cuda.wished} ({cuda.support}); " if cuda.wished else ""
    yield "CUDA in containers", f"{requested}{cuda.native or 'unknown'}{reach}", "cuda"
    for field, name in NAMES.items():
        part: Library | Service | None = getattr(stack, field)
        if part is not None:
            version = part.version or "set by the repository"
            yield name, f"{version} ({', '.join(part.packages)})", field
    if stack.frameworks is not None:
        made = [(stack.frameworks.pytorch, stack.frameworks.pytorch_cuda, "PyTorch")]
        made.append((stack.frameworks.tensorflow, stack.frameworks.tensorflow_cuda, "TensorFlow"))
        yield "frameworks", ", ".join(f"{n} {v} (CUDA {c})" for v, c, n in made if v), "frameworks"
    rdma = {True: "yes", False: "no", None: "depends on the kernel"}[stack.gpudirect_rdma]
    yield "GPUDirect RDMA", rdma, "gpudirect_rdma"
    if stack.pin is not None:
        held = stack.pin.pattern or ", ".join(preference.pin for preference in stack.pin.preferences)
        yield "held by", f"{stack.pin.mechanism}: {held}", "pin"
    if stack.remove:
        yield "to be removed", ", ".join(stack.remove), "remove"
    yield "restart", stack.restart.kind, "restart"
    yield "end of life", str(stack.eol or "unknown"), "eol"


def _conflict(conflict: Conflict) -> Iterator[RenderableType]:
    requirements = " + ".join(str(term) for term in conflict.terms)
    yield Text(f"no stack: conflict between {requirements}", style="bold red")
    for clash in conflict.clashes:
        yield Text(f"  {clash.text} [{clash.rule}]")
    if conflict.offers:
        yield Text("nearest valid stacks:")
    for offer in conflict.offers:
        yield Text(f"  {', '.join(offer.change)}: {offer.summary}")


def _last_line(document: Plan) -> Text:
    counts = {
        "with a stack": sum(max(1, len(group.hosts)) for group in document.groups if group.stack),
        "without a stack": sum(max(1, len(group.hosts)) for group in document.groups if group.conflict),
        "not determined": sum(len(group.hosts) for group in document.groups if group.undetermined),
    }
    summary = ", ".join(f"{counted(number, 'node')} {kind}" for kind, number in counts.items() if number)
    return Text(f"{summary}; support dates were evaluated for {document.today}")


def explanation_text(explanation: Explanation) -> str:
    """Return the rule, its statements on the question, and its decisions."""
    return "\n".join(_explanation_lines(explanation)) + "\n"


def _explanation_lines(explanation: Explanation) -> Iterator[str]:
    yield explanation.rule
    yield f"  means  {explanation.means}"
    yield f"  facts  {explanation.facts}"
    for saying in explanation.says:
        yield f"  {'refuses' if saying.refuses else 'warns'}: {saying.text}"
        if saying.drivers:
            yield f"    about {listed(saying.drivers, MOST_DRIVERS)}"
    for field, text in explanation.decided.items():
        yield f"  decides {field}: {text}"
    if not explanation.says and not explanation.decided:
        yield "  does not apply to this request"
    yield f"  chosen: {explanation.chosen}" if explanation.chosen else "  no stack matches"
