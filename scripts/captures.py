"""Download the recorded outputs that tests/captures/manifest.tsv names, or take them from a folder.

    make captures                             from the public repositories that the manifest names
    make captures GPUNODE_CAPTURES=DIR        from a folder that has them

They are other people's, and therefore no part of the project. Each is kept in .cache/captures only if its SHA-256 is
that of the manifest; what is there already is not downloaded again. Exit 0: all are there; 1: some are not; 2: usage;
130: interrupted.
"""

import argparse
import csv
import hashlib
import http.client
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "tests" / "captures" / "manifest.tsv"
KEPT = ROOT / ".cache" / "captures"
SERVER = "https://raw.githubusercontent.com"
LARGEST = 64 * 2**20
"""Bytes of the largest file that is downloaded."""
ANSWER_S, FILE_S, WHOLE_S = 30.0, 120.0, 1800.0
"""Limits of one read, of one file and of everything."""
ATTEMPTS = 3
_NAME = re.compile(r"[\w-][\w.+-]*/[\w-][\w.+-]*")
_SPAN = re.compile(r"(\d+)(?::(\d+))?-(\d+)(?::(\d+))?")


class CaptureError(Exception):
    """One capture cannot be had; the message gives the reason."""


class ServerError(Exception):
    """The server cannot be reached or trusted: nothing can be had from it."""


@dataclass(frozen=True)
class Capture:
    """One row of the manifest: an output, and the lines of a public file that it is."""

    file: str
    kind: str
    repository: str
    commit: str
    path: str
    lines: str
    """``whole``, ``A-B``, or ``A:C-B:D``: from byte C of line A up to, and without, byte D of line B."""
    sha256: str
    origin: str
    """``genuine``, ``edited`` by its publisher, or ``synthetic``."""

    @property
    def source(self) -> tuple[str, str, str]:
        """Return what names the public file."""
        return self.repository, self.commit, self.path

    @property
    def where(self) -> str:
        """Return the public file as one text."""
        return f"{self.repository}/{self.path} at {self.commit[:12]}"

    def of(self, data: bytes) -> bytes:
        """Return this capture's part of the public file."""
        span = _SPAN.fullmatch(self.lines)
        if span is None:
            return data
        first, last = int(span[1]), int(span[3])
        lines = [line + b"\n" for line in data.split(b"\n")[first - 1 : last]]
        if span[4] and len(lines) == last - first + 1:
            lines[-1] = lines[-1][: int(span[4])]
        return b"".join(lines)[int(span[2] or 0) :]


def listed(manifest: Path = MANIFEST) -> list[Capture]:
    """Return the captures that the manifest names; raise ValueError if a row is malformed."""
    with manifest.open(encoding="utf-8", newline="") as stream:
        rows = [*csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)]
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{manifest}:{number}: expected {len(Capture.__dataclass_fields__)} columns")
        rules = (
            ("file", _NAME),
            ("repository", _NAME),
            ("commit", re.compile("[0-9a-f]{40}")),
            ("lines", re.compile(f"whole|{_SPAN.pattern}")),
            ("sha256", re.compile("[0-9a-f]{64}")),
        )
        for column, rule in rules:
            if not rule.fullmatch(row[column]):
                raise ValueError(f"{manifest}:{number}: {column}: {row[column][:80]!r} is malformed")
    return [Capture(**row) for row in rows]


def intact(path: Path, sha256: str) -> bool:
    """Return whether a file is there with that digest."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    except OSError:
        return False


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object) -> NoReturn:
        """Refuse: the address names a commit, and what is there does not move."""
        raise CaptureError(f"redirected to {str(arguments[-1])[:200]!r}, not followed")


def downloaded(capture: Capture, server: str, until: float) -> bytes:
    """Return a public file; raise CaptureError if it cannot be had, and ServerError if nothing can."""
    opener = urllib.request.build_opener(_HttpsOnly, urllib.request.HTTPSHandler(context=ssl.create_default_context()))
    url = f"{server}/{capture.repository}/{capture.commit}/{quote(capture.path)}"
    reason, reached = "", True
    for attempt in range(ATTEMPTS):
        time.sleep(min(attempt, max(0.0, until - time.monotonic())))
        try:
            return _read(opener, url, min(until, time.monotonic() + FILE_S))
        except urllib.error.HTTPError as err:
            if err.code in (404, 410):
                raise CaptureError(f"gone: {capture.where} (HTTP {err.code})") from None
            reason, reached = f"HTTP {err.code}", True
        except urllib.error.URLError as err:
            cause = err.reason
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ServerError(f"{server}: wrong certificate: {cause.verify_message}") from None
            reason, reached = " ".join(str(cause).split()), False
        except (OSError, http.client.HTTPException) as err:
            reason, reached = " ".join(str(err).split()) or type(err).__name__, True
    if not reached:
        raise ServerError(f"{server} cannot be reached: {reason[:200]}")
    raise CaptureError(f"not downloaded: {capture.where}: {reason[:200]} ({ATTEMPTS} attempts)")


def _read(opener: urllib.request.OpenerDirector, url: str, until: float) -> bytes:
    data = bytearray()
    with opener.open(url, timeout=ANSWER_S) as answer:
        while part := answer.read1(2**16):
            data += part
            if len(data) > LARGEST:
                raise CaptureError(f"more than {LARGEST} bytes: {url}")
            if time.monotonic() > until:
                raise TimeoutError(f"not complete after {FILE_S:.0f} s")
        expected = answer.headers.get("Content-Length")
    if expected is not None and len(data) != int(expected):
        raise http.client.IncompleteRead(bytes(data), int(expected) - len(data))
    return bytes(data)


def missing(captures: Sequence[Capture], kept: Path) -> list[Capture]:
    """Return the captures that are not in the folder, sorted by source."""
    absent = [capture for capture in captures if not intact(kept / capture.file, capture.sha256)]
    return sorted(absent, key=lambda capture: capture.source)


def from_folder(captures: Sequence[Capture], kept: Path, folder: Path) -> Iterator[str]:
    """Copy from a folder what is missing; yield a line for each capture that it does not have intact."""
    for capture in missing(captures, kept):
        try:
            keep(capture, (folder / capture.file).read_bytes(), kept)
        except FileNotFoundError:
            yield f"{capture.file}: not in {folder}"
        except (OSError, CaptureError) as err:
            yield f"{capture.file}: {err}"


def from_server(captures: Sequence[Capture], kept: Path, server: str) -> Iterator[str]:
    """Download what is missing, each public file once; yield a line for each capture that cannot be had."""
    until = time.monotonic() + WHOLE_S
    for _, group in groupby(missing(captures, kept), key=lambda capture: capture.source):
        wanted = list(group)
        if time.monotonic() > until:
            raise ServerError(f"{server}: not complete after {WHOLE_S:.0f} s; the next run continues")
        try:
            data = downloaded(wanted[0], server, until)
        except CaptureError as err:
            yield from (f"{capture.file}: {err}" for capture in wanted)
            continue
        for capture in wanted:
            try:
                keep(capture, capture.of(data), kept)
            except CaptureError as err:
                yield f"{capture.file}: {err}"


def keep(capture: Capture, data: bytes, kept: Path) -> None:
    """Write a capture whole or not at all; raise CaptureError if it is not the one that the manifest names."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != capture.sha256:
        raise CaptureError(f"altered: SHA-256 {digest[:12]}…, expected {capture.sha256[:12]}… ({capture.where})")
    target = kept / capture.file
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def report(line: str) -> None:
    """Print one line on stderr; what a server answered may be in it, so control characters are replaced."""
    text = "".join(character if character.isprintable() else "?" for character in line)
    print(f"captures: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take what is missing and print a line for each capture that cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=MANIFEST)
    parser.add_argument("--to", type=Path, default=KEPT, metavar="DIR")
    parser.add_argument("--server", default=SERVER, metavar="URL", help="answers /OWNER/NAME/COMMIT/PATH (HTTPS)")
    options = parser.parse_args(arguments)
    folder = os.environ.get("GPUNODE_CAPTURES")
    if folder and not Path(folder).is_dir():
        parser.error(f"GPUNODE_CAPTURES: {folder} is not a folder")
    if not options.server.startswith("https://"):
        parser.error(f"--server: {options.server!r} is not an https:// address")
    try:
        captures = listed(options.manifest)
    except (OSError, ValueError) as err:
        parser.error(str(err))
    if folder:
        lines = from_folder(captures, options.to, Path(folder))
    else:
        lines = from_server(captures, options.to, options.server.rstrip("/"))
    try:
        for line in lines:
            report(line)
    except (ServerError, OSError) as err:
        report(str(err))
    except KeyboardInterrupt:
        report("interrupted; the next run continues")
        return 130
    absent = len(missing(captures, options.to))
    print(f"captures: {len(captures) - absent} of {len(captures)} in {options.to}")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
