"""``gpunode profile``: run a command under a profiler; ``gpunode stage``: copy a data set to a local disk."""

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import click

from gpunode.cli.options import FORMAT, QUIET, Duration, format_option, output_option, quiet, verbose_option
from gpunode.cli.streams import table_lines
from gpunode.errors import Exit, UsageError
from gpunode.profiling.patterns import ProfileDocument
from gpunode.profiling.run import TOOLS, ProfileRequest, ProfileResult, profile
from gpunode.staging.copying import CopyRun, FileListing, PieceJournal, described, listing
from gpunode.staging.shelf import StagedCopy, StagingFolder, amount, name_of
from gpunode.text import counted, listed, printable, printable_json

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
def profile_command(  # noqa: PLR0913
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
    folder = empty_folder(output or Path(f"gpunode-profile-{os.getpid()}"))
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
        for line in profile_lines(result, verbose=verbose):
            click.echo(printable(line))
    return Exit.GOOD if result.exit_code in (0, None) and result.signal is None else Exit.FAILED


def empty_folder(folder: Path) -> Path:
    """Return the folder, which exists and is empty. Raises UsageError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--output {folder}: the folder is not empty: name a new one")
    except OSError as err:
        raise UsageError(f"--output {folder}: {err.strerror or err}") from None
    return folder.resolve()


def _ending(result: ProfileResult) -> str:
    """Return how the command ended."""
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    return "interrupted at the limit" if result.exit_code is None else f"ended with status {result.exit_code}"


def profile_lines(result: ProfileResult, *, verbose: bool) -> list[str]:
    """Return the report for a terminal."""
    steps = f", {counted(result.notes.steps, 'step')} recorded" if result.notes.steps else ""
    report = [f"profiled with {result.tool} for {result.seconds:.1f} s{steps}; the command {_ending(result)}"]
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


UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
PROGRESS_S = 30.0


class ByteSize(click.ParamType[int]):
    """A number of bytes with a unit: ``500GB``, ``1.5T``, ``800GiB``."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([KMGT]i?)?B?", str(value), re.ASCII | re.IGNORECASE)
        if match is None or not float(match[1]):
            self.fail(f'"{value}" is not a size (examples: 500GB, 1.5TB, 800GiB).', param, ctx)
        return int(float(match[1]) * UNITS[(match[2] or "").upper()])


@click.command("stage")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="SRC DST")
@click.option("--name", metavar="NAME", help="Name of the copy in DST.  [default: that of SRC]")
@click.option(
    "--limit", type=ByteSize(), metavar="SIZE", help="Space of all copies in DST.  [default: that of the disk]"
)
@click.option(
    "--spare", type=Duration(0), default="60m", show_default=True, help="Copies used since then are not evicted."
)
@click.option("--jobs", type=click.IntRange(1, 64), default=8, show_default=True, help="Files to copy at once.")
@click.option("--verify", is_flag=True, help="Read everything in the copy, and copy again what differs.")
@click.option(
    "--stall", type=Duration(1), default="2m", show_default=True, help="Give up after this time without a byte."
)
@click.option(
    "--wait", type=Duration(0), default="60m", show_default=True, help="Time to wait for another run on this copy."
)
@click.option("--list", "only_list", is_flag=True, help="List the copies in DST.")
@format_option("text", "json", text="Format of --list.")
@QUIET
@verbose_option("Print progress every 2 s.")
def stage_command(  # noqa: PLR0913
    *,
    folders: tuple[Path, ...],
    name: str | None,
    limit: int | None,
    spare: float,
    jobs: int,
    verify: bool,
    stall: float,
    wait: float,
    only_list: bool,
    form: str,
    verbose: bool,
) -> int:
    """Copy the data set SRC to DST/NAME on a local disk, and print that path.

    Each piece is read back from the disk and compared. A run that was ended continues; a complete copy is compared
    with SRC by size and time, so that a job can begin with this command. Without room, the copies that were not used
    for the longest time are removed; none that a process uses. Exit codes: 0 complete, 1 some files could not be
    copied, 2 wrong usage or no room, 3 the source or the disk does not answer.

    \b
    Examples:
      DATA=$(gpunode stage /mnt/nfs/imagenet /scratch/data --limit 2TB) && python3 train.py --data "$DATA"
      gpunode stage --verify /mnt/nfs/imagenet /scratch/data
      gpunode stage --list /scratch/data
    """
    if len(folders) != (1 if only_list else 2):
        raise UsageError("expected SRC and DST, or --list DST (example: gpunode stage /mnt/nfs/imagenet /scratch/data)")
    shelf = StagingFolder(folders[-1].absolute())
    if only_list:
        return _list_copies(shelf, form)
    source = folders[0].absolute()
    called = name_of(source, name)
    if (shelf.path / called).is_relative_to(source) or source.is_relative_to(shelf.path):
        raise UsageError(f"{source} and {shelf.path / called}: one lies in the other: name another DST")
    shelf.open()
    with shelf.lock(called, wait, say):
        complete = stage(
            shelf, source, called, StageRequest(limit, spare, jobs, stall, verify, 2.0 if verbose else PROGRESS_S)
        )
    click.echo(printable(str(shelf.path / called)))
    return Exit.GOOD if complete else Exit.FAILED


@dataclass(frozen=True)
class StageRequest:
    """How a data set is copied."""

    limit: int | None
    spare_s: float
    jobs: int
    stall_s: float
    verify: bool
    progress_s: float


def stage(shelf: StagingFolder, source: Path, name: str, request: StageRequest) -> bool:
    """Return whether the copy is complete. Raises UsageError, UndeterminedError."""
    before = shelf.record(name)
    if before is None and (shelf.path / name).exists():
        raise UsageError(f"{shelf.path / name} exists, and gpunode stage did not create it: choose another --name")
    if before is not None and before.source != str(source):
        raise UsageError(f"{shelf.path / name} is a copy of {before.source}: choose another --name")
    try:
        contents = listing(source)
    except UsageError as err:
        if before is None or not before.complete:
            raise
        say(f"{err}; the copy of {_day(before.used_at)} is complete and used")
        shelf.write(before.model_copy(update={"used_at": time.time()}))
        return True
    say(f"{source}: {described(contents)}")
    copying = CopyRun(source, shelf.path / name, contents, PieceJournal(shelf.journal(name)))
    with shelf.lock("", 60.0, say):
        evicted = shelf.make_room(name, contents.bytes, copying.missing_bytes(), request.limit, request.spare_s)
        (shelf.path / name).mkdir(mode=0o755, exist_ok=True)
        shelf.write(_copy_record(name, source, contents, complete=False))
    pieces = copying.prepare(verify=request.verify)
    missing = sum(piece.size for piece in pieces)
    if evicted:
        say(f"evicted: {listed(f'{copy.name} ({amount(copy.bytes)}, used {_day(copy.used_at)})' for copy in evicted)}")
    began = time.monotonic()
    outcome = (
        copying.run(pieces, request.jobs, request.stall_s, _Progress(missing, request.progress_s))
        if pieces
        else copying.outcome
    )
    took = time.monotonic() - began
    complete = not outcome.failed
    shelf.write(_copy_record(name, source, contents, complete=complete))
    if pieces:
        rate = outcome.copied_bytes / max(took, 1e-9)
        say(f"copied {amount(outcome.copied_bytes)} in {took:.1f} s, verified ({amount(rate)}/s)")
    else:
        say("the copy is complete: nothing to copy")
    for line in outcome.failures:
        say(f"not copied: {line}")
    if outcome.failed > len(outcome.failures):
        say(f"not copied: {outcome.failed - len(outcome.failures)} more")
    return complete


def _copy_record(name: str, source: Path, contents: FileListing, *, complete: bool) -> StagedCopy:
    return StagedCopy(
        name=name,
        source=str(source),
        files=len(contents.files),
        bytes=contents.bytes,
        complete=complete,
        used_at=time.time(),
    )


class _Progress:
    def __init__(self, total: int, every_s: float) -> None:
        self._total, self._every_s = total, every_s
        self._began = time.monotonic()
        self._next = self._began + every_s

    def __call__(self, copied: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every_s
        rate = copied / (now - self._began)
        left = f", about {(self._total - copied) / rate / 60:.0f} min left" if rate else ""
        say(f"{amount(copied)} of {amount(self._total)}, {amount(rate)}/s{left}")


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    if not quiet():
        click.echo(printable(text), err=True)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _list_copies(shelf: StagingFolder, form: str) -> int:
    if not shelf.folder.is_dir():
        raise UsageError(f"{shelf.path}: gpunode stage has no copies there")
    copies = shelf.copies()
    if form == "json":
        click.echo(json.dumps([copy.model_dump(by_alias=True) for copy in copies], indent=1))
        return Exit.GOOD
    rows = [
        (
            copy.name,
            amount(copy.bytes),
            str(copy.files),
            "complete" if copy.complete else "incomplete",
            _day(copy.used_at),
            copy.source,
        )
        for copy in copies
    ]
    for line in table_lines(("name", "size", "files", "", "last used", "source"), rows):
        click.echo(printable(line))
    return Exit.GOOD
