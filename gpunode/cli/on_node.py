"""``gpunode validate --on-node``: judge this machine within a budget, for a scheduler's prolog.

The probe starts before anything else is loaded; while it runs, the checks are loaded.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from gpunode import __version__
from gpunode.catalog import load, origins
from gpunode.checks import Finding, State, Status, identify, registry
from gpunode.checks.own import load_packages
from gpunode.checks.registry import NOT_RUN, not_run
from gpunode.cli.options import EXPECT, SELECT, SKIP, STRICT, Duration, policy_option
from gpunode.cli.writing import write_whole
from gpunode.errors import UsageError
from gpunode.facts import facts_from_bundle
from gpunode.judging.report import (
    AFFECTED,
    WORST_FIRST,
    NodeReport,
    Report,
    counting,
    exit_code,
    judged,
    report,
    unreachable,
)
from gpunode.judging.request import JudgingRequest, findings_of, selected_checks
from gpunode.probe import Answer
from gpunode.report import formats
from gpunode.report.folding import cause_rank
from gpunode.text import printable

SCRIPT = Path(__file__).parents[1] / "probe" / "script.py"
FORMATS = ("console", "json", "prometheus", "slurm")
OF_PROBE, OF_WAITING = 0.65, 0.9
"""Shares of the budget: for the probe to query sources, and for its answer to arrive; the rest is for judging."""
MOST_BYTES = 64 << 20
__all__ = ["LocalJudging", "exit_code", "slurm_line", "within_budget", "write_whole", "written"]
REASON_MOST = 200
"""Characters of a reason: sinfo shows it in one line."""
CUT = ("left of the time for the whole probe", "the time for the whole probe is used up", "not finished within")
"""In the reason for data that the budget cut off."""


@click.command("validate", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--on-node", is_flag=True, help="Validate this machine, without Ansible and SSH.")
@click.option(
    "--budget",
    type=Duration(1),
    default="5s",
    show_default=True,
    metavar="DURATION",
    help="What does not fit is reported as not run.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="console",
    show_default=True,
    help="slurm: one line, STATE: REASON.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for the report, replaced as a whole when the verdict is complete.",
)
@EXPECT
@policy_option()
@SELECT
@SKIP
@STRICT
@click.option("-v", "--verbose", is_flag=True, help="Also show notes, passed and skipped checks, and the duration.")
def validate_on_node(  # noqa: PLR0913
    *,
    on_node: bool,  # noqa: ARG001
    budget: float,
    form: str,
    output: Path | None,
    expect: Path | None,
    policy_file: Path | None,
    selected: tuple[str, ...],
    skipped: tuple[str, ...],
    strict: bool,
    verbose: bool,
) -> int:
    """Judge this machine by its passive checks within a budget: what a scheduler's prolog or a timer calls.

    Nothing runs on a GPU. Exit codes as everywhere: 0 good, 1 a check failed, 3 could not be determined.

    \b
    Example:
      gpunode validate --on-node --budget 5s --format slurm
      gpunode validate --on-node --budget 30s --format prometheus --output /var/lib/node_exporter/gpunode.prom
    """
    startup = since_start()
    begun = time.monotonic() - startup
    look = ProbeRun(begun + OF_PROBE * budget, begun + OF_WAITING * budget)
    try:
        # Most of the time until a verdict goes into this, while the probe runs.

        judging = LocalJudging(expect, policy_file, selected, skipped)
        loaded = time.monotonic()
        answer = look.answer()
    finally:
        look.end()
    looked = time.monotonic()
    document = judging.report(answer, until=begun + budget, seconds=looked - begun)
    text = written(document, form, verbose=verbose)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_whole(output, text)
    if verbose:
        parts = {"probe started": begun + startup, "checks loaded": loaded, "probe ended": looked}
        times = [f"{name} {at - begun:.2f} s" for name, at in {**parts, "verdict": time.monotonic()}.items()]
        click.echo(f"gpunode: {', '.join(times)} after the start", err=True)
    return exit_code(document, strict=strict)


def since_start() -> float:
    """Return the age of this process in seconds: the budget includes Python's own start."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    ticks = int(fields[19])  # the 22nd of proc_pid_stat(5), counted after the name
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def interpreter() -> str:
    """Return the path of this Python, which does not know its own if it was started without PATH, as in prologs."""
    return sys.executable or str(Path("/proc/self/exe").readlink())


class ProbeRun:
    """The probe in a process group of its own: it should end by ``own``, and is killed at ``deadline``."""

    def __init__(self, own: float, deadline: float) -> None:
        self._deadline = deadline
        seconds = f"{max(0.1, own - time.monotonic()):.3f}"
        with SCRIPT.open("rb") as script:
            self._process = subprocess.Popen(
                [interpreter(), "-I", "-", seconds],
                stdin=script,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )

    def answer(self) -> bytes:
        """Return what it printed by the deadline; empty if it did not finish."""
        stream = self._process.stdout
        if stream is None:
            return b""
        parts: list[bytes] = []
        size = 0
        with selectors.DefaultSelector() as selector:
            selector.register(stream.fileno(), selectors.EVENT_READ)
            while size <= MOST_BYTES and selector.select(max(0.0, self._deadline - time.monotonic())):
                part = os.read(stream.fileno(), 1 << 20)
                if not part:
                    return b"".join(parts)
                parts.append(part)
                size += len(part)
        return b""

    def end(self) -> None:
        """End it, with the commands that it started: on a signal it ends them."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        if self._process.stdout is not None:
            self._process.stdout.close()


class LocalJudging:
    """The criteria for this machine. Raises UsageError for invalid files and names."""

    def __init__(
        self, expect: Path | None, policy: Path | None, selected: tuple[str, ...], skipped: tuple[str, ...]
    ) -> None:
        self._started = datetime.now(UTC)
        load()
        origins.table()
        load_packages(registry)
        request = JudgingRequest()
        if expect is not None:
            from gpunode.judging.expectation import read_expectation  # noqa: PLC0415 (a prolog mostly has none)

            request = replace(request, expectation=read_expectation(expect))
        if policy is not None:
            from gpunode.judging.policy import read_policy, today  # noqa: PLC0415

            request = replace(request, policy=read_policy(policy, today()))
        self.request = replace(request, checks=selected_checks(selected, skipped))

    def report(self, answer: bytes, *, until: float, seconds: float) -> Report:
        """Return the report on the probe's answer; checks that have not begun by ``until`` are not run."""
        form = "%Y-%m-%dT%H:%M:%SZ"
        node = self._node(answer, until, seconds)
        started, finished = self._started.strftime(form), datetime.now(UTC).strftime(form)
        return report([node], level="quick", version=__version__, started_at=started, finished_at=finished)

    def _node(self, answer: bytes, until: float, seconds: float) -> NodeReport:
        name = os.uname().nodename
        if not answer:
            # It has limits of its own: either the machine is overloaded, or something hangs in the kernel.
            return unreachable(name, f"the probe did not end within the budget ({seconds:.1f} s)", seconds)
        try:
            bundle = Answer(answer, where="the probe's answer").bundle()
        except UsageError as err:
            return unreachable(name, str(err), seconds)
        facts = facts_from_bundle(bundle)
        found = findings_of(bundle, facts, self.request, level="quick", policy=self.request.policy, until=until)
        smi_cut = any(run.answers == "smi" and run.ended in ("slow", "not-run") for run in facts.tool_runs or ())
        findings = [within_budget(finding, smi_cut=smi_cut) for finding in found]
        return judged(bundle.host, identify(facts), findings, seconds, self.request.policy)


def within_budget(finding: Finding, *, smi_cut: bool) -> Finding:
    """Return the finding unchanged, or as not run if its data are missing only because of the budget.

    ``smi_cut``: nvidia-smi itself did not answer in time. Whether it hangs or is slow is unknown: the finding on it
    stays undetermined, so that the node does not count as healthy.
    """
    if finding.status is not Status.ERROR or not any(text in finding.message for text in CUT):
        return finding
    if smi_cut and finding.check == "driver.tools-answer":
        return finding
    return not_run(finding.check, finding.message)


def written(document: Report, form: str, *, verbose: bool) -> str:
    """Return the report in the format of ``--format``."""
    if form == "slurm":
        return slurm_line(document.nodes[0]) + "\n"
    return "".join(formats.parts(form, document, verbose=verbose))


def slurm_line(node: NodeReport) -> str:
    """Return ``STATE: REASON``: drain, observe or none according to the findings, or unknown.

    One line without quotes, so that a script can pass it to scontrol unchanged.
    """
    statuses = [finding.status for finding in counting(node.findings)]
    left = sum(finding.message.startswith(NOT_RUN) for finding in node.findings)
    if node.status in (Status.PASS, Status.SKIP):
        counts = f"{statuses.count(Status.PASS)} passed, {statuses.count(Status.SKIP)} skipped"
        state = "none" if node.status is Status.PASS else "unknown"
        return f"{state}: {counts}{f', {left} not run' if left else ''}"
    known = node.status is not Status.ERROR or node.recommended_state is State.DRAIN
    state = node.recommended_state.value if known else "unknown"
    bad = [
        finding
        for finding in counting(node.findings)
        if finding.status in AFFECTED and (known or finding.status is Status.ERROR)
    ]
    bad.sort(
        key=lambda finding: (
            finding.recommended_state is not node.recommended_state,
            WORST_FIRST.index(finding.status),
            cause_rank((finding.check,)),
        )
    )
    first, more = bad[0], len(bad) - 1
    where = "" if first.component == "node" else f" {first.component}"
    rest = f" (and {more} more)" if more else ""
    text = printable(f"{first.check}{where}: {first.message}").replace('"', "'").replace("\\", "/")
    return f"{state}: {text[: REASON_MOST - len(rest)]}{rest}"
