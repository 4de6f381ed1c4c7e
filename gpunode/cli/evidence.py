"""``gpunode evidence``: saved bundles without what identifies the site, as one file to send."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gpunode import __version__
from gpunode.cli.options import QUIET, VERBOSE_ACCEPTED, output_option, quiet
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.request import JudgingRequest
from gpunode.judging.saved import bundle_files, read_file
from gpunode.judging.scrubbing import Scrubber
from gpunode.probe import Answer, Collected
from gpunode.probe.bundle import Bundle
from gpunode.text import counted, printable
from gpunode.whole import write_whole

FORMAT = "gpunode.evidence/1"
MOST_SHOWN = 40
Document = dict[str, Any]


@click.command("evidence")
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True)
@output_option("Write the archive: evidence.tar.gz.")
@click.option("--word", "words", multiple=True, metavar="TEXT", help="Also replace this word: a customer, a project.")
@QUIET
@VERBOSE_ACCEPTED
def command(*, bundles: tuple[str, ...], output: Path | None, words: tuple[str, ...]) -> int:
    """Make an archive of saved bundles that can be sent to others; without --output, show what it would contain.

    Names of hosts, users and sites, addresses, MAC addresses, serial numbers, UUIDs, GUIDs, keys and process names are
    replaced, the same by the same in all bundles. Each bundle is judged before and after: the verdicts must be the
    same. Exit codes: 0 good, 2 wrong usage, or something could not be replaced, 3 a verdict changed or is unknown.

    \b
    Examples:
      gpunode collect -i site/hosts.yml --save bundles/
      gpunode evidence bundles/
      gpunode evidence bundles/ --word acme --output evidence.tar.gz
    """
    files = bundle_files(bundles)
    originals = [_read(path) for path in files]
    scrubber = Scrubber([str(document["host"]) for document in originals], words)
    scrubbed = [scrubber.bundle(document) for document in originals]
    for number, document in enumerate(scrubbed, start=1):
        document["host"] = f"node-{number}"
    texts = [json.dumps(document, indent=1, sort_keys=True) + "\n" for document in scrubbed]
    for path, text in zip(files, texts, strict=True):
        leftover = next(scrubber.left(text), None)
        if leftover is not None:
            raise UsageError(f"{path}: nothing was written: {leftover} could not be replaced everywhere")
    changed = _changed_verdicts(originals, scrubbed)
    members = {f"bundles/node-{number}.json": text for number, text in enumerate(texts, start=1)}
    if not quiet():
        for line in _preview(scrubber, scrubbed, members):
            click.echo(printable(line), err=output is not None)
    for line in changed[:MOST_SHOWN]:
        click.echo(printable(f"verdict changed: {line}"), err=True)
    if changed:
        raise UndeterminedError(f"nothing was written: {counted(len(changed), 'verdict')} changed by the replacement")
    if output is not None:
        archive = packed(members, dict(scrubber.replaced))
        write_whole(output, archive, private=True)
        click.echo(f"{hashlib.sha256(archive).hexdigest()}  {output}")
    return Exit.GOOD


def _read(path: Path) -> Document:
    content = read_file(path)
    return json.loads(Bundle.from_json(content, str(path)).to_json())  # type: ignore[no-any-return]


def _preview(scrubber: Scrubber, documents: Sequence[Document], members: Mapping[str, str]) -> Iterator[str]:
    """Yield what leaves: files, what each has, what was replaced."""
    for name, text in members.items():
        yield f"{name}: {len(text) / 1000:.0f} kB"
    names = sorted({name for document in documents for key in ("commands", "files") for name in document.get(key, ())})
    yield f"with {counted(len(names), 'command and file', 'commands and files')}: {' '.join(names[:MOST_SHOWN])} …"
    rows = sorted(scrubber.replaced.items())
    yield "replaced: " + (", ".join(f"{kind} {number}" for kind, number in rows) or "nothing")
    yield "read the archive before you send it; --word TEXT replaces what else must not leave"


def _changed_verdicts(before: Sequence[Document], after: Sequence[Document]) -> list[str]:
    """Return the findings that a node has only before or only after, without components that were renamed."""
    lines = []
    for number, (original, scrubbed) in enumerate(zip(_verdicts(before), _verdicts(after), strict=True), start=1):
        for check, status in sorted(original ^ scrubbed):
            lines.append(f"node-{number}: {check} {status}")
    return lines


def _verdicts(documents: Sequence[Document]) -> list[set[tuple[str, str]]]:
    answers = [
        Collected(f"node-{number}", Answer(json.dumps(document).encode(), where=f"node-{number}"), None, None)
        for number, document in enumerate(documents, start=1)
    ]
    with Evaluator(JudgingRequest()) as evaluator:
        reports = [node.report for node in evaluator.judge_fleet(answers)]
    return [{(finding.check, str(finding.status)) for finding in report.findings} for report in reports]


def packed(members: Mapping[str, str], replaced: Mapping[str, int]) -> bytes:
    """Return the archive: the bundles, and MANIFEST.json with the hash of each."""
    manifest = {
        "schema": FORMAT,
        "gpunode_version": __version__,
        "replaced": dict(sorted(replaced.items())),
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in members.items()},
    }
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for name, text in {"MANIFEST.json": json.dumps(manifest, indent=1) + "\n", **members}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()
