"""``gpunode profile``: run a command under a profiler and print where its time goes."""

import os
from pathlib import Path

import click

from gpunode.cli.options import FORMAT, Duration, output_option, verbose_option
from gpunode.cli.streams import table_lines
from gpunode.errors import Exit, UsageError
from gpunode.profiling.patterns import ProfileDocument
from gpunode.profiling.run import TOOLS, ProfileRequest, ProfileResult, profile
from gpunode.text import counted, printable, printable_json

LOW = 70.0
"""Percent of utilization below which a GPU is called starving."""


class GpuList(click.ParamType[tuple[int, ...]]):
    """Indices of GPUs with commas: ``0,1``."""

    name = "gpus"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the indices."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.isdecimal() and len(part) < 4 for part in parts) or len(set(parts)) < len(parts):
            self.fail(f'"{value}" is not a list of GPUs (example: 0,1)', param, ctx)
        return tuple(int(part) for part in parts)


@click.command("profile")
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option("--container", metavar="ID", help="Run the command in this running container (docker exec).")
@click.option("--gpus", type=GpuList(), metavar="0,1", help="GPUs that the command may use.  [default: all]")
@click.option("--tool", type=click.Choice(TOOLS), help="Profiler.  [default: the first of these that can be used]")
@output_option("Folder for the trace, new or empty.  [default: gpunode-profile-PID]", metavar="DIR")
@click.option("--limit", type=Duration(1), default="10m", show_default=True, help="Time limit of the command.")
@click.option("--warmup", type=click.IntRange(0, 100_000), default=5, show_default=True, help="Skipped steps.")
@click.option("--steps", type=click.IntRange(1, 1000), default=20, show_default=True, help="Recorded steps.")
@FORMAT
@verbose_option("Also show what was checked before the run.")
def command(  # noqa: PLR0913
    *,
    words: tuple[str, ...],
    container: str | None,
    gpus: tuple[int, ...] | None,
    tool: str | None,
    output: Path | None,
    limit: float,
    warmup: int,
    steps: int,
    form: str,
    verbose: bool,
) -> int:
    """Run COMMAND under a profiler and print where its time goes: each pattern with its share, cause and remedy.

    The command is not changed; its output goes to stderr. nsys records the whole run, PyTorch's profiler some steps,
    py-spy stacks. Exit codes: 0 profiled, 1 profiled and the command failed, 2 wrong usage, 3 no profile.

    \b
    Examples:
      gpunode profile -- python3 train.py --epochs 1
      gpunode profile --gpus 0,1 --limit 5m -- torchrun --nproc-per-node 2 train.py
      gpunode profile --container 3f2a --tool py-spy -- python3 train.py
    """
    folder = made(output or Path(f"gpunode-profile-{os.getpid()}"))
    chosen = next((known for known in TOOLS if known == tool), None)
    request = ProfileRequest(words, container, gpus or (), chosen, folder, limit, warmup, steps)
    try:
        result = profile(request)
    finally:
        (folder / "sitecustomize.py").unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
    if form == "json":
        click.echo(printable_json(document(result).model_dump_json(by_alias=True, indent=1)))
    else:
        for line in lines(result, verbose=verbose):
            click.echo(printable(line))
    return Exit.GOOD if result.exit_code in (0, None) and result.signal is None else Exit.FAILED


def made(folder: Path) -> Path:
    """Return the folder, which exists and is empty. Raises UsageError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--output {folder}: the folder is not empty: name a new one")
    except OSError as err:
        raise UsageError(f"--output {folder}: {err.strerror or err}") from None
    return folder.resolve()


def ending(result: ProfileResult) -> str:
    """Return how the command ended."""
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    return "interrupted at the limit" if result.exit_code is None else f"ended with status {result.exit_code}"


def lines(result: ProfileResult, *, verbose: bool) -> list[str]:
    """Return the report for a terminal."""
    steps = f", {counted(result.notes.steps, 'step')} recorded" if result.notes.steps else ""
    report = [f"profiled with {result.tool} for {result.seconds:.1f} s{steps}; the command {ending(result)}"]
    report += [f"checked: {line}" for line in result.checked if verbose]
    report += [f"note: {remark}" for remark in result.remarks]
    order = {"look": 0, "ok": 1, "unknown": 2}
    rows = sorted(result.rows, key=lambda row: (order[row.status], -(row.value or 0.0)))
    report += table_lines(
        ("pattern", "", "measured", "cause", "change"),
        [(row.pattern, row.status, row.measured, row.cause, row.change) for row in rows],
    )
    if result.utilization:
        mean = sum(result.utilization) / len(result.utilization)
        verdict = ": starving" if mean < LOW else ""
        report.append(f"nvidia-smi: mean utilization {mean:.0f} % in {len(result.utilization)} samples{verdict}")
    else:
        report.append("nvidia-smi: no samples of a GPU")
    viewer = {"nsys": "Nsight Systems", "torch": "https://ui.perfetto.dev", "py-spy": "a viewer of folded stacks"}
    if result.trace is not None:
        report.append(f"trace: {result.trace} ({viewer[result.tool]})")
    return report


def document(result: ProfileResult) -> ProfileDocument:
    """Return the report as a document."""
    return ProfileDocument(
        tool=result.tool,
        seconds=round(result.seconds, 3),
        exit_code=result.exit_code,
        signal=result.signal,
        steps=result.notes.steps,
        torch=result.notes.torch,
        patterns=tuple(result.rows),
        utilization_percent=tuple(result.utilization),
        trace=str(result.trace) if result.trace else None,
        checked=tuple(result.checked),
        remarks=tuple(result.remarks),
    )
