"""``gpunode plan``: matching versions for machines or for a hypothetical node."""

import shlex
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
import yaml

from gpunode.catalog import Catalog, load
from gpunode.cli.options import (
    ASK_BECOME_PASS,
    INVENTORY,
    LIMIT,
    OVERLAY,
    PARALLEL,
    QUIET,
    REPLAY,
    STRICT,
    TIMEOUT,
    format_option,
    verbose_option,
)
from gpunode.cli.selection import refuse_asking
from gpunode.errors import Exit, UsageError
from gpunode.report.plan import dumped, rendered
from gpunode.stack import GpuGroup, NodePicture, Plan, PlanHost, Request, plan
from gpunode.stack.kubernetes import OPERATOR, PLUGIN, operator_values, plugin_values
from gpunode.stack.option_values import cuda_request, driver_request, framework_request, kernel_release
from gpunode.text import printable


@dataclass(frozen=True)
class PlanOptions:
    """The command line."""

    bundles: tuple[str, ...]
    inventories: tuple[str, ...]
    limit: str | None
    replay: bool
    gpus: tuple[str, ...]
    count: int | None
    platform: str | None
    system: str | None
    arch: Any
    kernel: str | None
    source: Any
    driver: str | None
    cuda: str | None
    toolkit: str | None
    kernel_module: Any
    framework: str | None
    kernel_policy: Any
    secure_boot: bool | None
    past_eol: Any
    explain: str | None
    diff: tuple[str, str] | None
    overlays: tuple[str, ...]
    today: str | None
    form: str
    write: bool
    strict: bool
    parallel: int
    timeout_s: float
    ask_become_pass: bool
    verbose: bool

    @property
    def hypothetical(self) -> dict[str, object]:
        """Return the options that describe a hypothetical node, as far as they were given."""
        described = {
            "--gpu": self.gpus,
            "--count": self.count,
            "--platform": self.platform,
            "--os": self.system,
            "--arch": self.arch,
            "--kernel": self.kernel,
            "--secure-boot": self.secure_boot,
        }
        return {option: value for option, value in described.items() if value not in (None, ())}


@click.command("plan")
@click.argument("bundles", metavar="[BUNDLE]...", nargs=-1)
@INVENTORY
@LIMIT
@REPLAY
@click.option("--gpu", "gpus", multiple=True, metavar="NAME|PCI-ID", help="GPU of a hypothetical node.  [repeatable]")
@click.option("--count", type=click.IntRange(1, 64), metavar="N", help="Number of each --gpu.")
@click.option("--platform", metavar="NAME", help="Board, server or cloud shape: hgx-h100-8.")
@click.option("--os", "system", metavar="SYSTEM", help="Operating system: ubuntu-24.04.")
@click.option("--arch", type=click.Choice(["x86_64", "aarch64"]), help="CPU architecture.")
@click.option("--kernel", metavar="RELEASE", help="Kernel release, as uname -r prints it.")
@click.option("--source", type=click.Choice(["nvidia", "ubuntu", "debian"]), help="Source of the driver packages.")
@click.option(
    "--secure-boot/--no-secure-boot", default=None, help="Whether secure boot is enabled on the hypothetical node."
)
@click.option(
    "--driver",
    metavar="REQUEST",
    help="A branch, its newest (580-latest), a release, a range ('>=580,<595'), lts, production, newest or keep.",
)
@click.option("--cuda", metavar="X.Y", help="CUDA version that containers require.")
@click.option("--toolkit", metavar="X.Y|none", help="CUDA toolkit on the host.  [default: none]")
@click.option(
    "--kernel-module",
    type=click.Choice(["auto", "open", "proprietary"]),
    default="auto",
    show_default=True,
    help="Flavour of the kernel module.",
)
@click.option(
    "--framework",
    metavar="NAME==X.Y",
    help="Framework release with wheels that must run: torch==2.9, tensorflow==2.20.",
)
@click.option(
    "--kernel-policy",
    type=click.Choice(["hold", "follow"]),
    help="For modules signed by the distribution: hold kernel and driver, or upgrade both with the archive.",
)
@click.option(
    "--past-eol",
    type=click.Choice(["warn", "refuse"]),
    default="warn",
    show_default=True,
    help="Action for a branch past its published end of life; a computed end of life always warns.",
)
@click.option("--explain", metavar="RULE", help="Explain one rule and how it applies to this request: R10.")
@click.option("--diff", nargs=2, metavar="A B", help="Compare two saved plans (--format json or yaml, or a lock).")
@OVERLAY
@click.option("--today", metavar="DATE", help="Evaluate support dates for this day, YYYY-MM-DD.  [default: today]")
@format_option(
    *("table", "json", "yaml", OPERATOR, PLUGIN),
    text="gpu-operator, device-plugin: Helm values for Kubernetes nodes with this driver on the host.",
)
@STRICT
@click.option("--write", is_flag=True, help="Write the lock gpunode_stack.yml to host_vars or group_vars.")
@PARALLEL
@TIMEOUT
@QUIET
@ASK_BECOME_PASS
@verbose_option("Also show components that the stack omits, and why.")
def plan_command(**values: Any) -> int:
    """Resolve a matched stack: driver, CUDA, fabric, DCGM, containers and package names, each with the rule that
    decides it.

    Plans for the hosts of an inventory (-i), for saved bundles (--replay), or for a hypothetical node (--gpu or
    --platform, --os ...). Changes nothing on a node.

    Exit codes: 0 decided (--diff: no difference), 1 no stack matches (--diff: they differ), 2 wrong usage, 3 a node
    could not be probed.

    \b
    Examples:
      gpunode plan --platform hgx-h100-8 --os ubuntu-24.04 --driver lts --cuda 13.0
      gpunode plan --gpu V100 --os ubuntu-22.04 --cuda 13.0
      gpunode plan --gpu L40S --os ubuntu-24.04 --driver '>=580,<595' --framework torch==2.9
      gpunode plan --gpu V100 --os ubuntu-22.04 --cuda 13.0 --explain R04
      gpunode plan --platform hgx-h100-8 --os ubuntu-24.04 --driver 580 --format gpu-operator
      gpunode plan --diff before.json after.json
      gpunode plan -i inventory/hosts.yml --limit gpu --driver lts --write
    """
    options = PlanOptions(**values)
    if options.diff is not None:
        return _diff(options)
    _must_fit_together(options)
    if not options.inventories:
        refuse_asking("--replay contacts no node" if options.replay else "a hypothetical node cannot be reached")
    catalog = load(options.overlays)
    request = _request(options, catalog)
    today = _date(options.today)
    if options.explain is not None:
        return _explain(options, request, catalog, today)
    if options.inventories:
        document = _of_inventory(options, request, catalog, today)
    elif options.replay:
        document = _of_bundles(options.bundles, request, catalog, today)
    else:
        document = plan([PlanHost("", _picture(options, catalog))], request, catalog, today)
    if options.form in (OPERATOR, PLUGIN):
        return _helm_values(document, options, catalog)
    click.echo(rendered(document, options.form, verbose=options.verbose), nl=False)
    return exit_code(document, strict=options.strict)


def _helm_values(document: Plan, options: PlanOptions, catalog: Catalog) -> int:
    """Print a values file; nothing but the reasons on stderr if a node has no stack, or one that is not supported."""
    helm = (operator_values if options.form == OPERATOR else plugin_values)(document, catalog)
    problems = [*helm.problems]
    for group in document.groups:
        hosts = f"{', '.join(group.hosts)}: " if group.hosts else ""
        if group.conflict is not None:
            problems.append(f"{hosts}no stack matches: {'; '.join(clash.text for clash in group.conflict.clashes)}")
        elif group.undetermined is not None:
            problems.append(f"{hosts}undetermined: {group.undetermined}")
    for problem in problems:
        click.echo(f"gpunode: {printable(problem)}", err=True)
    if helm.problems:
        return Exit.FAILED
    if not problems:
        head = "".join(f"# {printable(line)}\n" for line in helm.comments)
        click.echo(head + yaml.safe_dump(helm.values, sort_keys=False), nl=False)
    return exit_code(document, strict=options.strict)


def _diff(options: PlanOptions) -> int:
    from gpunode.stack.plan import differences  # noqa: PLC0415 (only needed here)

    excluded = {
        "-i": options.inventories,
        "--replay": options.replay or options.bundles,
        "--explain": options.explain,
        "--write": options.write,
    }
    other = next((name for name, value in (options.hypothetical | excluded).items() if value), None)
    if other is not None:
        raise UsageError(f"--diff compares two files and cannot be combined with {other}")
    first, second = map(Path, options.diff or ())
    changes = differences(first, second, verbose=options.verbose)
    if options.form in (OPERATOR, PLUGIN):
        raise UsageError(f"--diff prints table, json or yaml, not {options.form}")
    if options.form == "table":
        click.echo("\n".join(map(str, changes)) if changes else "no difference")
    else:
        document = [change._asdict() for change in changes]
        click.echo(dumped(document, options.form), nl=False)
    return Exit.FAILED if changes else Exit.GOOD


def _explain(options: PlanOptions, request: Request, catalog: Catalog, today: date) -> int:
    from gpunode.report.plan import explanation_text as explained  # noqa: PLC0415 (only needed here)
    from gpunode.stack.resolve import explain_rule  # noqa: PLC0415 (the same)

    if options.inventories or options.replay:
        raise UsageError("--explain answers for a hypothetical node: describe it with --gpu or --platform and --os")
    explanation = explain_rule(options.explain or "", request, _picture(options, catalog), catalog, today)
    plain = explanation.model_dump(mode="json")
    click.echo(explained(explanation) if options.form == "table" else dumped(plain, options.form), nl=False)
    return Exit.GOOD


def exit_code(document: Plan, *, strict: bool = False) -> int:
    """Return 1 if no stack matches for a node (``strict``: or one has warnings), else 3 if one is unknown, else 0."""
    if any(group.conflict is not None for group in document.groups):
        return Exit.FAILED
    if strict and any(group.stack is not None and group.stack.warnings for group in document.groups):
        return Exit.FAILED
    if any(group.undetermined is not None for group in document.groups):
        return Exit.UNDETERMINED
    return Exit.GOOD


def _must_fit_together(options: PlanOptions) -> None:
    machines = [name for name, requested in (("-i", options.inventories), ("--replay", options.replay)) if requested]
    if options.bundles and not options.replay:
        raise UsageError(f"{options.bundles[0]}: put --replay before saved bundles")
    if len(machines) == 2:
        raise UsageError("-i and --replay cannot be combined: plan for an inventory or for saved bundles")
    hypothetical = options.hypothetical
    if machines and hypothetical:
        raise UsageError(
            f"{next(iter(hypothetical))} describes a hypothetical node and cannot be combined with {machines[0]}"
        )
    if not machines and not hypothetical:
        raise UsageError("nothing to plan for: use --platform or --gpu with --os, -i INVENTORY, or --replay BUNDLE")
    if options.gpus and options.platform:
        raise UsageError("--platform defines the GPUs: remove --gpu")
    if options.count and not options.gpus:
        raise UsageError("--count needs a --gpu")
    if options.limit is not None and not options.inventories:
        raise UsageError("--limit needs an inventory: -i INVENTORY")
    if options.diff is None and options.explain is not None and options.form in (OPERATOR, PLUGIN):
        raise UsageError(f"--explain prints table, json or yaml, not {options.form}")
    if options.write and not options.inventories:
        raise UsageError("--write needs an inventory: -i INVENTORY; a lock is written beside its variables")


def _date(text: str | None) -> date:
    if text is None:
        return date.today()
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--today {text}: expected a date (example: 2026-11-20)") from None


def _request(options: PlanOptions, catalog: Catalog) -> Request:
    toolkit = None if options.toolkit in (None, "none") else cuda_request("--toolkit", options.toolkit, catalog)
    return Request(
        source=options.source,
        driver=driver_request(options.driver, catalog),
        cuda=cuda_request("--cuda", options.cuda, catalog),
        toolkit=toolkit,
        kernel_module=None if options.kernel_module == "auto" else options.kernel_module,
        framework=framework_request(options.framework, catalog),
        kernel_policy=options.kernel_policy,
        past_eol=options.past_eol,
    )


def _picture(options: PlanOptions, catalog: Catalog) -> NodePicture:
    """Return the hypothetical node. A GPU that is named twice exists twice."""
    named = Counter(options.gpus)
    groups = []
    for label, times in named.items():
        match = catalog.find_gpu(label)
        count = options.count * times if options.count else times if times > 1 else None
        groups.append(GpuGroup(label=label, models=tuple(gpu.id for gpu in match.gpus), count=count))
    return NodePicture(
        os=None if options.system is None else catalog.os(options.system).id,
        arch=options.arch,
        kernel=kernel_release(options.kernel),
        gpus=tuple(groups),
        secure_boot=options.secure_boot,
        platform=None if options.platform is None else catalog.platform(options.platform).id,
    )


def _of_bundles(places: tuple[str, ...], request: Request, catalog: Catalog, today: date) -> Plan:
    from gpunode.judging.evaluator import Evaluator  # noqa: PLC0415 (a hypothetical node has no facts)
    from gpunode.judging.saved import bundle_files, saved_answers  # noqa: PLC0415 (the same)
    from gpunode.stack.picture import host_of  # noqa: PLC0415 (the same)

    files = bundle_files(places)
    with Evaluator() as evaluator:
        # One at a time: a thousand nodes would be too much for a controller's memory.
        answers = evaluator.facts_of_fleet(saved_answers(files), strict=len(files) == 1)
        hosts = (
            PlanHost(node.host, None, node.reason) if node.facts is None else host_of(node.host, node.facts, catalog)
            for node in answers
        )
        return plan(hosts, request, catalog, today)


def _only_in_this_plan(options: PlanOptions, request: Request) -> dict[str, str]:
    """Return the options that request something, which gpunode provision does not know."""
    requested = {
        "--source": request.source,
        "--driver": request.driver,
        "--kernel-module": request.kernel_module,
        "--cuda": request.cuda,
        "--toolkit": request.toolkit,
        "--framework": request.framework,
        "--kernel-policy": request.kernel_policy,
        "--past-eol": None if options.past_eol == "warn" else options.past_eol,
    }
    return {option: str(value) for option, value in requested.items() if value is not None}


def _of_inventory(options: PlanOptions, request: Request, catalog: Catalog, today: date) -> Plan:
    from gpunode.cli.provision import keep_unwritten, of_inventory  # noqa: PLC0415 (a hypothetical node needs no SSH)
    from gpunode.fleet import locks  # noqa: PLC0415
    from gpunode.judging.evaluator import Evaluator  # noqa: PLC0415
    from gpunode.provisioning.node_stack import VARIABLES  # noqa: PLC0415

    with Evaluator() as evaluator:
        answer = of_inventory(options, evaluator, catalog, request)
        document = plan(answer.hosts, request, catalog, today)
    only_here = {} if options.write else _only_in_this_plan(options, request)
    notes = []
    if only_here:
        variables = [VARIABLES[option].rstrip(":") for option in only_here if option in VARIABLES]
        text = f"{', '.join(only_here)}: in this plan only, gpunode provision reads the inventory; use --write"
        notes.append(f"{text}, or set {', '.join(variables)}" if variables else text)
    if not options.write:
        notes += locks.locks_to_write(document, answer.inventory, options.limit)
    document = document.model_copy(update={"notes": (*document.notes, *notes)})
    words = [word for option, value in only_here.items() for word in (option, shlex.quote(value))]
    limited = ["--limit", shlex.quote(options.limit)] if options.limit and words else []
    keep_unwritten(answer.inventory.sources, [*limited, *words], datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    if options.write:
        for path in locks.write_locks(document, answer.inventory, options.limit):
            click.echo(f"gpunode: locked in {path}", err=True)
    return document
