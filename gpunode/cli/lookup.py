"""``gpunode catalog``: catalog data with their sources; ``gpunode parse``: the raw output of one tool as JSON."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from gpunode.catalog import Catalog, GpuMatch, load
from gpunode.catalog.catalog import FILES, MODELS
from gpunode.catalog.gpus import normal, similar
from gpunode.catalog.lint import lint
from gpunode.catalog.read import read
from gpunode.cli.options import OVERLAY, format_option, verbose_option
from gpunode.cli.streams import table_lines
from gpunode.errors import Exit, UsageError
from gpunode.text import nearest, unknown

COLUMNS: Mapping[str, Sequence[str]] = {
    "gpus": ("name", "pci", "architecture", "compute_capability", "memory_gb", "form", "modules", "last_branch"),
    "architectures": ("name", "compute_capabilities", "modules", "last_cuda", "last_branch"),
    "chips": ("architecture", "compute_capability"),
    "pci_parts": ("name", "role"),
    "branches": ("type", "released", "eol", "latest", "native_cuda", "modules"),
    "cuda_majors": ("floor", "branch", "min_compute_capability"),
    "toolkits": ("label", "branch", "driver", "runfile_driver"),
    "forward_compat": ("package", "works_on"),
    "cudnn": ("since", "latest", "min_compute_capability"),
    "nccl": ("cuda_majors", "builds"),
    "dcgm": ("latest", "min_branch"),
    "container_toolkit": ("released", "repository"),
    "container_engines": ("cdi", "cdi_default", "additional_gids"),
    "frameworks": ("released", "builds"),
    "wheels": ("cuda", "arch", "compute_capabilities"),
    "workload_images": ("framework", "image", "cuda", "min_compute_capability", "arch"),
    "kubernetes": ("version",),
    "systems": ("name", "manager", "supported", "origins"),
    "packages": ("component", "origin", "first_branch", "last_branch", "flavour", "variant", "names"),
    "pinning": ("origin", "kind", "first_branch", "last_branch", "pattern"),
    "kernel_flavours": ("image", "headers"),
    "platforms": ("name", "kind", "gpus", "nvswitches", "services"),
    "xids": ("severity", "kind", "meaning"),
    "messages": ("program", "means"),
    "expectations": ("metric", "value", "unit", "kind", "gpu", "count", "nodes"),
    "bands": ("metric", "path", "share", "message_bytes"),
    "sources": ("title", "date"),
}
SHORT = {"gpu": "gpus", "drivers": "branches", "driver": "branches", "cuda": "toolkits", "os": "systems"}
"""Other names of a kind."""

EMPTY: tuple[Any, ...] = (None, [], {})


@click.group("catalog", epilog='Example: gpunode catalog show "H100 SXM"')
@verbose_option("As with list, show or lint.")
@click.pass_context
def catalog_command(ctx: click.Context, /, *, verbose: bool) -> None:
    """Show catalog data with its sources: GPUs, drivers, CUDA, packages, platforms, Xids, expected figures."""
    if verbose:
        ctx.default_map = {verb: {"verbose": True} for verb in ("list", "show", "lint")}


@catalog_command.command("list", epilog="Example: gpunode catalog list gpus")
@click.argument("kind", required=False)
@OVERLAY
@format_option("table", "json", "yaml")
@verbose_option("Also show source, date and confidence of each row.")
def list_rows(*, kind: str | None, overlays: tuple[str, ...], form: str, verbose: bool) -> int:
    """List the rows of one KIND, or all kinds."""
    catalog = load(overlays)
    if kind is None:
        rows = [{"kind": name, "rows": len(catalog.rows(name)), "file": file} for file, name in _kinds()]
        _print_document(
            rows, form, lambda: table_lines(["kind", "rows", "file"], [list(map(str, row.values())) for row in rows])
        )
        return Exit.GOOD
    name = _kind(kind)
    entries = list(catalog.rows(name).values())
    extra = ("source", "date", "confidence") if verbose and name != "sources" else ()
    columns = ["id", *COLUMNS[name], *extra]
    cells = [[_short(getattr(row, column)) for column in columns] for row in entries]
    _print_document([row.model_dump(mode="json") for row in entries], form, lambda: table_lines(columns, cells))
    return Exit.GOOD


@catalog_command.command(
    "show", epilog='Examples: gpunode catalog show "H100 SXM"; show 580; show xid/79; show ubuntu-24.04'
)
@click.argument("name")
@OVERLAY
@format_option("table", "json", "yaml")
@verbose_option("Also show unknown fields.")
def show(*, name: str, overlays: tuple[str, ...], form: str, verbose: bool) -> int:
    """Show one entry with its sources: by id, name, alias, PCI id or KIND/ID.

    The name of a GPU family shows the common and the differing properties of its models.
    """
    catalog = load(overlays)
    kind, thing, others = _find(catalog, name)
    if isinstance(thing, GpuMatch):
        named = sorted({source for gpu in thing.gpus for source in gpu.source})
        body = {
            "models": {gpu.id: gpu.name for gpu in thing.gpus},
            "common": _plain(thing.common),
            "differs": _plain(thing.differs),
        }
        document = {"section": "gpus", "family": name, **body, "sources": _sources(catalog, named)}
        heading = f"{name}: {len(thing.gpus)} models"
    else:
        dump = thing.model_dump(mode="json")
        body = dump if verbose or form != "table" else {key: value for key, value in dump.items() if value not in EMPTY}
        body = {**body, **{key: str(getattr(thing, key)) for key in ("eol", "latest") if getattr(thing, key, None)}}
        document = {"section": kind, **body, "sources": _sources(catalog, getattr(thing, "source", ()))}
        heading = f"{getattr(thing, 'name', None) or getattr(thing, 'title', None) or thing.id} ({kind}/{thing.id})"
    _print_document(document, form, lambda: _page(heading, body, document["sources"]))
    if others:
        click.echo(f"other entries with this name: {', '.join(others)}", err=True)
    return Exit.GOOD


@catalog_command.command("lint", epilog="Example: gpunode catalog lint site-catalog.yml")
@click.argument("files", nargs=-1)
@OVERLAY
@verbose_option("Print the rule of each problem.")
def lint_files(*, files: tuple[str, ...], overlays: tuple[str, ...], verbose: bool) -> int:
    """Verify the catalog with FILES overlaid; print one line per problem and exit 2 if there are any."""
    catalog = Catalog([read(Path(path)) for path in (*overlays, *files)])
    problems = lint(catalog)
    for problem in problems:
        click.echo(f"{problem} [{problem.rule}]" if verbose else str(problem))
    if problems:
        return Exit.USAGE
    rows = sum(len(catalog.rows(name)) for name in MODELS)
    click.echo(f"valid: {rows} rows in {len(MODELS)} kinds")
    return Exit.GOOD


def _kinds() -> Iterator[tuple[str, str]]:
    return ((file, name) for file, kinds in FILES.items() for name in kinds)


def _kind(text: str) -> str:
    name = SHORT.get(text.lower(), text.lower().replace("-", "_"))
    for known in (name, f"{name}s", f"{name}es"):
        if known in MODELS:
            return known
    hint = _near(name, {key: key for key in MODELS}, "see gpunode catalog list")
    raise UsageError(f"unknown kind {text!r}; {hint}")


def _near(text: str, shown: Mapping[str, str], listed: str) -> str:
    """Return the names similar to an unknown one; if none is similar, how to list them."""
    first = text.split(" ", maxsplit=1)[0]
    near = nearest(text, shown, likeness=0.7) or [key for key in shown if key.split(" ")[0] == first]
    return similar(text, shown) if near else listed


def _find(catalog: Catalog, text: str) -> tuple[str, Any, list[str]]:
    """Return kind, row (or a GpuMatch of several) and other entries of that name; UsageError with the most similar
    names.
    """
    kind, slash, key = text.partition("/")
    if slash:
        name = _kind(kind)
        rows = catalog.rows(name)
        if key not in rows:
            hint = _near(key, {row: row for row in rows}, f"see gpunode catalog list {name}")
            raise UsageError(f"{name} has no {key!r}; {hint}")
        return name, rows[key], []
    entries: list[tuple[str, Any]] = []
    lookups: tuple[tuple[str, Callable[[str], Any]], ...] = (
        ("gpus", catalog.find_gpu),
        ("platforms", catalog.platform),
        ("systems", catalog.os),
        ("branches", catalog.branch),
        ("toolkits", catalog.toolkit),
    )
    for name, look in lookups:
        try:
            thing = look(text)
        except UsageError:
            continue  # not of this kind; perhaps of the next
        entries.append((name, (thing.gpu or thing) if isinstance(thing, GpuMatch) else thing))
    entries += [(name, catalog.rows(name)[text]) for name in MODELS if text in catalog.rows(name)]
    if not entries:
        listed = "see gpunode catalog list and gpunode catalog list KIND"
        raise UsageError(f"the catalog has no entry {text!r}; {_near(normal(text), _names(catalog), listed)}")
    name, thing = entries[0]
    others = {f"{other}/{row.id}" for other, row in entries[1:] if row is not thing and not isinstance(row, GpuMatch)}
    return name, thing, sorted(others)


def _names(catalog: Catalog) -> dict[str, str]:
    """Return all names that ``show`` accepts, compared form → displayed form, except numbers alone."""
    texts = [text for gpu in catalog.gpus.values() for text in (gpu.name, *gpu.aliases, *gpu.families)]
    texts += [key for _, name in _kinds() for key in catalog.rows(name) if not key.isdecimal()]
    return {normal(text): text for text in texts}


def _sources(catalog: Catalog, names: Sequence[str]) -> dict[str, Any]:
    return {name: catalog.sources[name].model_dump(exclude={"id"}, exclude_none=True) for name in names}


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item not in (None, (), {})}
    return list(value) if isinstance(value, tuple) else value


def _print_document(document: Any, form: str, table: Callable[[], Iterator[str]]) -> None:
    if form == "json":
        click.echo(json.dumps(document, indent=1, ensure_ascii=False))
    elif form == "yaml":
        click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120), nl=False)
    else:
        for line in table():
            click.echo(line)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return " ".join(f"{item}x{key}" if isinstance(item, int) else str(key) for key, item in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return str(value)


def _page(heading: str, body: Mapping[str, Any], sources: Mapping[str, Any]) -> Iterator[str]:
    yield heading
    unsure = body.get("unsure", {})
    shown = {key: value for key, value in body.items() if key not in ("id", "name", "source", "unsure")}
    if "points" in shown:
        shown["points"] = {version: when or "(no date)" for version, when in shown["points"].items()}
    width = max(map(len, shown))
    for key, value in shown.items():
        doubt = f"  (unsure: {unsure[key]})" if key in unsure else ""
        if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
            yield f"  {key}{doubt}"
            yield from (f"    {name}: {_inline(item)}" for name, item in value.items())
        else:
            yield f"  {key.ljust(width)}  {_inline(value)}{doubt}"
    yield "sources"
    for name, source in sources.items():
        tail = ", ".join(source[part] for part in ("url", "date") if part in source)
        yield f"  {name}: {source['title']}{f' ({tail})' if tail else ''}"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items() if item not in (None, [], {}))
    if isinstance(value, list):
        return ", ".join(map(_inline, value))
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


@click.command("parse")
@click.argument("kind", metavar="KIND")
@click.argument("file", metavar="FILE|-")
@verbose_option("Print the size and kind of the input on stderr.")
def parse_command(*, kind: str, file: str, verbose: bool) -> int:
    """Parse the raw output of one tool (FILE, or - for stdin) and print it as one JSON document.

    Unknown values are null, keys contain the units. A failure reported by the tool is a result ({"error": ...}, exit
    0); truncated text or text of another kind is rejected (exit 2).

    \b
    Kinds:
      nvidia-smi-xml     nvidia-smi -q -x, drivers from 375 on
      nvidia-smi-q       nvidia-smi -q, also with -d, drivers 270 to 620
      nvidia-smi-table   nvidia-smi
      nvidia-smi-query   nvidia-smi --query-gpu=… --format=csv and the other queries
      nvidia-smi-topo    nvidia-smi topo -m
      nvidia-smi-nvlink  nvidia-smi nvlink --status, -e
      nvidia-smi-list    nvidia-smi -L
      nccl-tests         any *_perf of nccl-tests
      nvbandwidth        nvbandwidth, text or JSON
      bandwidth-test     CUDA sample bandwidthTest
      p2p-bandwidth      CUDA sample p2pBandwidthLatencyTest
      dcgm-diag          dcgmi diag, JSON of DCGM 2 to 4 or the table
      dmesg              dmesg, /dev/kmsg, syslog, journalctl
      lspci              lspci, with -nn and -vv
      ibstat             ibstat, ibstatus
      numactl            numactl --hardware
      lscpu              LC_ALL=C lscpu, lscpu -J
      driver-version     /proc/driver/nvidia/version

    \b
    Examples:
      nvidia-smi -q -x | gpunode parse nvidia-smi-xml - | jq '.gpus[].temperature_c'
      gpunode parse nccl-tests all_reduce.log
    """
    from gpunode.facts.errors import ParseError  # noqa: PLC0415 (parsers of many tools)
    from gpunode.facts.parsers.kinds import KINDS, decoded, parsed  # noqa: PLC0415 (the same)

    if kind not in KINDS:
        raise UsageError(unknown("kind", kind, KINDS))
    name = "standard input" if file == "-" else file
    data = _raw(file)
    if verbose:
        click.echo(f"gpunode: {name}: {len(data)} bytes read as {kind}", err=True)
    try:
        # An Xid has the catalog's meaning.
        xids = (
            {xid.number: xid for xid in load().xids.values() if xid.severity != "unused"} if kind == "dmesg" else None
        )
        answer = parsed(kind, decoded(data), xids)
    except ParseError as err:
        raise UsageError(f"{name}: not valid as {kind}: {err}") from None
    click.echo(json.dumps(answer, indent=1, allow_nan=False))
    return 0


def _raw(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as err:
        raise UsageError(f"{file}: cannot be read: {err.strerror}") from None
