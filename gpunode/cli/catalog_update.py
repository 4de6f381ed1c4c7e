"""``gpunode catalog update``: an overlay with entries that package indexes have and the catalog lacks."""

from datetime import date
from pathlib import Path

import click

from gpunode.catalog import Catalog
from gpunode.catalog.lint import lint
from gpunode.catalog.read import Document, merge, parse, read
from gpunode.cli.writing import write_whole
from gpunode.errors import Exit, UsageError


@click.command(
    "update", epilog="Example: gpunode catalog update --from /srv/mirror/ubuntu2404/x86_64 -o site-catalog.yml"
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    required=True,
    metavar="DIR|URL",
    help="Package repository, or a pci.ids file.  [repeatable]",
)
@click.option("-o", "--output", metavar="FILE", help="Write the overlay to this file.  [default: stdout]")
@click.option(
    "--overlay",
    "overlays",
    multiple=True,
    metavar="FILE",
    help="Site catalog file with entries that count as known.  [repeatable]",
)
@click.option("--today", metavar="DATE", help="Date of new rows, YYYY-MM-DD.  [default: today]")
@click.option("-v", "--verbose", is_flag=True, help="Print each new row on stderr.")
def update(
    *, sources: tuple[str, ...], output: str | None, overlays: tuple[str, ...], today: str | None, verbose: bool
) -> int:
    """Read package indexes and write an overlay with the branches, releases, toolkits and GPUs that are new.

    A source is a folder, a file or an https address of a repository: Packages (also gz, xz), repodata (also gz, xz), or
    a pci.ids. Each row has its source and the day; values that an index does not contain are marked as unsure. The
    overlay is linted with the catalog before it is written. No signature is checked: use trusted sources only.
    """
    from gpunode.catalog.indexes import read_source  # noqa: PLC0415 (loads urllib and ssl)
    from gpunode.catalog.update import HEADER, as_text  # noqa: PLC0415 (the same)
    from gpunode.catalog.update import overlay as found_in  # noqa: PLC0415 (the same)

    day = _day(today)
    target = Path(output) if output else None
    own = [read(Path(path)) for path in overlays]
    before = _written_before(target, HEADER)
    catalog = _sound([*own, *([before] if before else [])])
    found = found_in([index for source in sources for index in read_source(source)], catalog, day)
    summary = found.summary
    new = [f"{name}/{key}" for name, rows in found.sections.items() for key in rows if name != "sources"]
    if before is not None:
        found.sections = merge(before.sections, found.sections)
    text = as_text(found, day)
    _sound([*own, parse(text, output or "the new overlay")])
    if target is None:
        click.echo(text, nl=False)
    else:
        write_whole(target, text)
    for row in new if verbose else ():
        click.echo(f"gpunode: new: {row}", err=True)
    for left in found.left_out:
        click.echo(f"gpunode: skipped: {left}", err=True)
    click.echo(f"gpunode: {f'new: {summary}' if summary else 'nothing new'}", err=True)
    return Exit.GOOD


def _day(text: str | None) -> date:
    try:
        return date.fromisoformat(text) if text is not None else date.today()
    except ValueError:
        raise UsageError(f"--today {text}: expected a date (example: 2026-11-20)") from None


def _written_before(target: Path | None, header: str) -> Document | None:
    """Return the overlay that this command wrote earlier, so that its content is kept. Other files are not replaced."""
    if target is None or not target.exists():
        return None
    document = read(target)
    if not target.read_text(encoding="utf-8").startswith(header):
        raise UsageError(f"{target}: was not written by this command and is not replaced: choose another file")
    return document


def _sound(documents: list[Document]) -> Catalog:
    """Return the catalog with overlays; UsageError with the first fault if there is one."""
    catalog = Catalog(documents)
    problems = lint(catalog) if documents else []
    if problems:
        raise UsageError(
            f"nothing was written: {problems[0]}{f' (and {len(problems) - 1} more)' if problems[1:] else ''}"
        )
    return catalog
