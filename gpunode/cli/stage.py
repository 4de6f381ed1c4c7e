"""``gpunode stage``: copy a data set to a local disk, verified, within a limit of space."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import click

from gpunode.cli.options import QUIET, Duration, format_option, quiet, verbose_option
from gpunode.cli.streams import table_lines
from gpunode.errors import Exit, UsageError
from gpunode.staging.copying import CopyRun, FileListing, PieceJournal, described, listing
from gpunode.staging.shelf import StagedCopy, StagingFolder, amount, name_of
from gpunode.text import listed, printable

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
def command(  # noqa: PLR0913
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
        return _list(shelf, form)
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
        shelf.write(_record(name, source, contents, complete=False))
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
    shelf.write(_record(name, source, contents, complete=complete))
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


def _record(name: str, source: Path, contents: FileListing, *, complete: bool) -> StagedCopy:
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


def _list(shelf: StagingFolder, form: str) -> int:
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
