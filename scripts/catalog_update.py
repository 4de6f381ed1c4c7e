"""Write an overlay with entries that package indexes have and the catalog lacks: branches, releases, toolkits, GPUs.

    python scripts/catalog_update.py --from DIR|URL [-o FILE]

``overlay`` compares and writes rows as text; they are linted with the catalog before anything is written. A package
index contains only versions: other fields of a row are copied from its neighbour and listed in ``unsure``, or left
out, so that no refusal depends on them.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import click
import yaml
from catalog_lint import problems
from package_indexes import Index, read_source
from packaging.version import Version as Number

from gpunode.catalog import Catalog, pci_ids
from gpunode.catalog.read import Document, merge, parse, read
from gpunode.catalog.software import Branch, Toolkit
from gpunode.errors import Exit, GpunodeError, UsageError
from gpunode.text import printable
from gpunode.whole import write_whole

HEADER = "# Written by scripts/catalog_update.py"
WRITTEN = re.compile(r"# Written by (scripts/catalog_update\.py|gpunode\scatalog\supdate) ")
"""The first line of an overlay that this program may extend; until 2026-11-23 it was a verb."""
MOST_NEW = 200
"""Rows or releases of one kind; a larger number indicates another catalog, not an update."""
_DRIVER = re.compile(
    r"(cuda-drivers|nvidia-open|nvidia-driver|nvidia-driver-cuda|nvidia-kernel-open-dkms|nvidia-kernel-dkms"
    r"|kmod-nvidia-(open|latest)-dkms|nvidia-dkms|nvidia-dkms-open|nvidia-fabric-?manager|libnvidia-compute)"
    r"(-\d{3}(-open)?)?"
)
"""Packages that have the driver's version, in every repository of NVIDIA's (packages.yml, components of the
closure)."""
_RELEASE = re.compile(r"([1-9]\d{2})\.\d{1,3}(\.\d{1,2})?")
_TOOLKIT = re.compile(r"cuda-toolkit-(\d{2})-(\d{1,2})")
_COMPAT = re.compile(r"cuda-compat-(\d{2})-(\d{1,2})")
_THREE = re.compile(r"\d{2}\.\d{1,2}\.\d{1,3}")
_OPEN = re.compile(r"nvidia-open.*|.*-open(-dkms)?|kmod-nvidia-open.*")
_PROPRIETARY = re.compile(r"cuda-drivers.*|nvidia-dkms(-\d+)?|nvidia-kernel-dkms|kmod-nvidia-latest-dkms")


@dataclass
class Found:
    """New sections of an overlay, and items that could not become a row."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, section: str, key: str, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self.sections.setdefault(section, {})[key] = dict(row)

    @property
    def summary(self) -> str:
        """Return ``1 branch, 3 releases``; empty if nothing is new."""
        branches = self.sections.get("branches", {})
        new = [row for row in branches.values() if "oldest_architecture" in row]
        counts = {
            "branches": len(new),
            "releases": sum(len(row["points"]) for row in branches.values()),
            "toolkits": len(self.sections.get("toolkits", {})),
            "container toolkits": len(self.sections.get("container_toolkit", {})),
            "GPUs": len(self.sections.get("gpus", {})),
        }
        return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)


def overlay(indexes: Iterable[Index], catalog: Catalog, today: date) -> Found:
    """Return rows for content of the indexes that the catalog does not have, each with its source and the day."""
    additions = Found()
    for index in indexes:
        source = _source_key(index, additions, catalog)
        title = f"{'pci.ids' if index.pci is not None else 'package index'}, SHA-256 {index.digest[:16]}"
        additions.add("sources", source, {"title": title, "url": index.where, "date": today.isoformat()})
        if index.pci is not None:
            _gpus(additions, index.pci, catalog, source, today)
            continue
        versions = _by_name(index)
        _branches(additions, versions, catalog, source, today)
        _toolkits(additions, versions, catalog, source, today)
        _container_toolkits(additions, versions, catalog, source, today)
    for name, rows in additions.sections.items():
        if len(rows) > MOST_NEW:
            additions.left_out.append(f"{name}: {len(rows) - MOST_NEW} of {len(rows)} rows, the most is {MOST_NEW}")
            additions.sections[name] = dict(list(rows.items())[:MOST_NEW])
    return additions


def as_text(additions: Found, today: date) -> str:
    """Return the overlay as YAML."""
    dumped = yaml.safe_dump(additions.sections, sort_keys=False, width=110, allow_unicode=False)
    return f"{HEADER} on {today}: entries of indexes that are not in the catalog.\n{dumped}"


def _source_key(index: Index, additions: Found, catalog: Catalog) -> str:
    """Return ``index-ubuntu2404-x86-64`` from the last parts of the address, with a number if the name is already in
    use."""
    parts = [part for part in index.where.split("/") if part and part not in ("repodata",)]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(parts[-3:-1]).lower()).strip("-") or "site"
    stem = f"{'pci-ids' if index.pci is not None else 'index'}-{name[:60]}"
    taken = {key for key, row in catalog.sources.items() if row.url != index.where} | set(
        additions.sections.get("sources", {})
    )
    others = (f"{stem}-{number}" for number in range(2, len(taken) + 3))
    return next(key for key in (stem, *others) if key not in taken)


def _by_name(index: Index) -> dict[str, set[str]]:
    versions: dict[str, set[str]] = {}
    for package in index.packages:
        versions.setdefault(package.name, set()).add(package.version)
    return versions


def _branches(additions: Found, versions: Mapping[str, set[str]], catalog: Catalog, source: str, today: date) -> None:
    """Add new releases of known branches, and new branches."""
    carried: dict[str, set[str]] = {}
    for name, known in versions.items():
        if _DRIVER.fullmatch(name):
            for version in known:
                if (match := _RELEASE.fullmatch(version)) is not None:
                    carried.setdefault(match[1], set()).add(version)
    for number, releases in sorted(carried.items()):
        branch = catalog.branches.get(number)
        new = sorted(releases - set(branch.points if branch else ()), key=Number)[:MOST_NEW]
        if not new:
            continue
        earlier = additions.sections.get("branches", {}).get(number)
        points = dict.fromkeys(new)
        if earlier is not None:
            earlier["points"] = dict.fromkeys(sorted({**earlier["points"], **points}, key=Number))
            earlier["source"] = list(dict.fromkeys([*earlier["source"], source]))
        elif branch is not None:
            additions.add("branches", number, {"points": points, "source": [*branch.source, source]})
        else:
            row = _new_branch(number, versions, catalog, source, today)
            additions.add("branches", number, {**row, "points": points})


def _new_branch(
    number: str, versions: Mapping[str, set[str]], catalog: Catalog, source: str, today: date
) -> dict[str, Any]:
    """Return a branch that the catalog does not have: fields are copied from its neighbour and listed as unsure."""
    neighbour = _neighbour(int(number), catalog)
    flavours = [
        flavour
        for flavour, names in (("open", _OPEN), ("proprietary", _PROPRIETARY))
        if any(names.fullmatch(name) and _carries(known, number) for name, known in versions.items())
    ]
    unsure = {
        "oldest_architecture": f"taken from {neighbour.id}",
        "modules": "from the names in one index" if flavours else f"taken from {neighbour.id}",
        "type": "not in an index",
        "released": "not in an index",
        "eol_vendor": "not in an index: see NVIDIA's table of branches",
        "eol_computed": "not in an index: release plus one year, LTSB three",
    }
    cuda = _native_cuda(number, versions)
    unsure["native_cuda"] = "from cuda-compat in one index" if cuda else f"taken from {neighbour.id}"
    return {
        "type": None,
        "released": None,
        "eol_vendor": None,
        "eol_computed": None,
        "native_cuda": cuda or neighbour.native_cuda,
        "oldest_architecture": neighbour.oldest_architecture,
        "modules": flavours or list(neighbour.modules),
        "unsure": unsure,
        "confidence": "derived",
        "source": [source],
        "date": today.isoformat(),
    }


def _neighbour(number: int, catalog: Catalog) -> Branch:
    """Return the nearest older branch; for a branch older than all, the oldest."""
    older = [row for row in catalog.branches.values() if row.number < number]
    return max(older, key=lambda row: row.number) if older else min(catalog.branches.values(), key=lambda r: r.number)


def _carries(known: Iterable[str], branch: str) -> bool:
    return any(version.startswith(f"{branch}.") for version in known)


def _native_cuda(number: str, versions: Mapping[str, set[str]]) -> str | None:
    """Return the newest CUDA with a cuda-compat package of this branch: the package has the version of its own
    driver."""
    series = [
        f"{match[1]}.{match[2]}"
        for name, known in versions.items()
        if (match := _COMPAT.fullmatch(name)) is not None and _carries(known, number)
    ]
    return max(series, key=Number, default=None)


def _toolkits(additions: Found, versions: Mapping[str, set[str]], catalog: Catalog, source: str, today: date) -> None:
    """Add toolkits that the catalog does not have, with the branch of their series."""
    for series, version in _new_toolkits(versions, catalog):
        if version in additions.sections.get("toolkits", {}):
            continue
        major = version.split(".", maxsplit=1)[0]
        if major not in catalog.cuda_majors:
            additions.left_out.append(f"CUDA toolkit {version}: the catalog has no driver floor for CUDA {major}")
            continue
        branch, why = _toolkit_branch(series, versions, catalog)
        if branch is None:
            additions.left_out.append(f"CUDA toolkit {version}: no known driver branch for CUDA {series}")
            continue
        if branch not in catalog.branches and branch not in additions.sections.get("branches", {}):
            additions.left_out.append(f"CUDA toolkit {version}: its branch {branch} is neither in the catalog nor new")
            continue
        row = {"label": version, "branch": int(branch), "unsure": {"branch": why}, "confidence": "derived"}
        additions.add("toolkits", version, {**row, "source": [source], "date": today.isoformat()})


def _new_toolkits(versions: Mapping[str, set[str]], catalog: Catalog) -> Iterator[tuple[str, str]]:
    for name, known in sorted(versions.items()):
        match = _TOOLKIT.fullmatch(name)
        series = f"{match[1]}.{match[2]}" if match else ""
        for version in sorted(known):
            if (
                match
                and _THREE.fullmatch(version)
                and version.startswith(f"{series}.")
                and version not in catalog.toolkits
            ):
                yield series, version


def _toolkit_branch(series: str, versions: Mapping[str, set[str]], catalog: Catalog) -> tuple[str | None, str]:
    same: Toolkit | None = next((row for row in catalog.toolkits.values() if row.series == series), None)
    if same is not None:
        return str(same.branch), f"that of {same.id}"
    compat = versions.get(f"cuda-compat-{series.replace('.', '-')}", set())
    branches = {version.split(".", maxsplit=1)[0] for version in compat if _RELEASE.fullmatch(version)}
    return (max(branches), "from cuda-compat in one index") if branches else (None, "")


def _container_toolkits(
    additions: Found, versions: Mapping[str, set[str]], catalog: Catalog, source: str, today: date
) -> None:
    """Add releases of the container toolkit that are newer than the newest known one."""
    newest = next(iter(catalog.container_toolkit.values()))
    for version in sorted(versions.get("nvidia-container-toolkit", ()), key=_number):
        if re.fullmatch(r"\d+\.\d+\.\d+", version) and Number(version) > Number(newest.id):
            row = {"replaces": list(newest.replaces), "repository": newest.repository, "key": newest.key}
            unsure = dict.fromkeys(row, f"taken from {newest.id}")
            additions.add(
                "container_toolkit",
                version,
                {**row, "unsure": unsure, "source": [source], "date": today.isoformat()},
            )


def _number(version: str) -> Number:
    return Number(version) if re.fullmatch(r"[\d.]+", version) else Number("0")


def _gpus(additions: Found, text: str, catalog: Catalog, source: str, today: date) -> None:
    """Add GPUs with a PCI id that the catalog does not have."""
    listed = list(pci_ids.parse(text.splitlines()))
    known = {pci for gpu in catalog.gpus.values() for pci in gpu.pci}
    new = [gpu for gpu in listed if gpu.pci not in known]
    chips = catalog.raw("chips")
    strange = sorted({gpu.chip for gpu in new if gpu.chip not in chips})
    if strange:
        additions.left_out.append(
            f"GPUs of unknown chips: {', '.join(strange[:12])}; add them to the section chips first"
        )
    rows = pci_ids.rows(new, chips, catalog.raw("gpus"), today.isoformat())
    for key, row in rows.items():
        additions.add("gpus", key, {**row, "source": [source, "chips"]})


@click.command(
    epilog="Example: python scripts/catalog_update.py --from /srv/mirror/ubuntu2404/x86_64 -o site-catalog.yml"
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
    day = _day(today)
    target = Path(output) if output else None
    others = [read(Path(path)) for path in overlays]
    before = _written_before(target)
    catalog = _sound([*others, *([before] if before else [])])
    additions = overlay([index for source in sources for index in read_source(source)], catalog, day)
    summary = additions.summary
    new = [f"{name}/{key}" for name, rows in additions.sections.items() for key in rows if name != "sources"]
    if before is not None:
        additions.sections = merge(before.sections, additions.sections)
    text = as_text(additions, day)
    _sound([*others, parse(text, output or "the new overlay")])
    if target is None:
        click.echo(text, nl=False)
    else:
        write_whole(target, text)
    for row in new if verbose else ():
        click.echo(f"new: {row}", err=True)
    for left in additions.left_out:
        click.echo(f"skipped: {left}", err=True)
    click.echo(f"new: {summary}" if summary else "nothing new", err=True)
    return Exit.GOOD


def _day(text: str | None) -> date:
    try:
        return date.fromisoformat(text) if text is not None else date.today()
    except ValueError:
        raise UsageError(f"--today {text}: expected a date (example: 2026-11-20)") from None


def _written_before(target: Path | None) -> Document | None:
    """Return the overlay that this command wrote earlier, so that its content is kept. Other files are not replaced."""
    if target is None or not target.exists():
        return None
    document = read(target)
    if not WRITTEN.match(target.read_text(encoding="utf-8")):
        raise UsageError(f"{target}: was not written by this program and is not replaced: choose another file")
    return document


def _sound(documents: list[Document]) -> Catalog:
    """Return the catalog with overlays; UsageError with the first fault if there is one."""
    catalog = Catalog(documents)
    faults = problems(catalog) if documents else []
    if faults:
        raise UsageError(f"nothing was written: {faults[0]}{f' (and {len(faults) - 1} more)' if faults[1:] else ''}")
    return catalog


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0 good, 2 wrong usage, 3 could not be determined."""
    try:
        return int(update.main(argv, prog_name="catalog_update.py", standalone_mode=False) or 0)
    except GpunodeError as err:
        click.echo(printable(f"catalog_update.py: {err}"), err=True)
        return err.exit_code
    except click.ClickException as err:
        click.echo(f"catalog_update.py: {' '.join(err.format_message().split())}", err=True)
        return Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
