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
from pathlib import Path

import click

from gpunode.cli.options import (
    EXPECT,
    SELECT,
    SKIP,
    STRICT,
    Duration,
    format_option,
    output_option,
    policy_option,
    verbose_option,
)

SCRIPT = Path(__file__).parents[1] / "onnode" / "probe.py"
OF_PROBE, OF_WAITING = 0.65, 0.9
"""Shares of the budget: for the probe to query sources, and for its answer to arrive; the rest is for judging."""
MOST_BYTES = 64 << 20


@click.command("validate", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--on-node", is_flag=True, expose_value=False, help="Validate this machine, without Ansible and SSH.")
@click.option(
    "--budget",
    type=Duration(1),
    default="5s",
    show_default=True,
    metavar="DURATION",
    help="What does not fit is reported as not run.",
)
@format_option("console", "json", "prometheus", "slurm", text="slurm: one line, STATE: REASON.")
@output_option("File for the report, replaced as a whole when the verdict is complete.")
@EXPECT
@policy_option()
@SELECT
@SKIP
@STRICT
@verbose_option("Also show notes, passed and skipped checks, and the duration.")
def validate_on_node(  # noqa: PLR0913
    *,
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
        from gpunode.judging.local import LocalJudging  # noqa: PLC0415
        from gpunode.judging.report import exit_code  # noqa: PLC0415
        from gpunode.report.formats import written  # noqa: PLC0415
        from gpunode.whole import write_whole  # noqa: PLC0415

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
    """The probe in a process group of its own: it should end by ``soft_deadline``, and is killed at ``deadline``."""

    def __init__(self, soft_deadline: float, deadline: float) -> None:
        self._deadline = deadline
        seconds = f"{max(0.1, soft_deadline - time.monotonic()):.3f}"
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
