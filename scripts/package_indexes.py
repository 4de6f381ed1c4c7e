"""Package indexes of repositories: bytes in, package names and versions out.

Debian's ``Packages`` (plain, gz, xz) and RPM's ``repodata`` (``repomd.xml`` and the primary index that it names, plain,
gz, xz, and zst if this Python supports it). A source is a folder or an https address; plain http is refused, because
signatures are not checked. All input is untrusted: it is bounded in size, number and time.
"""

import gzip
import hashlib
import lzma
import os
import re
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from http.client import HTTPException
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from gpunode.errors import UndeterminedError, UsageError

TIMEOUT_S = 30
"""For one connection and each read of it."""
MOST_SECONDS = 300
"""For one file, in seconds."""
MOST_READ = 64_000_000
"""Bytes of one published file; NVIDIA's largest index has 2 MB."""
MOST_UNPACKED = 512_000_000
MOST_PACKAGES = 200_000
MOST_FILES = 64
MOST_LEVELS = 5
LONGEST_LINE = 1_000_000
CHUNK = 1 << 20
DEB = ("Packages.gz", "Packages.xz", "Packages")
RPM = "repodata/repomd.xml"
PCI = "pci.ids"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,150}")
_VERSION = re.compile(r"(?:\d{1,5}:)?([0-9][0-9A-Za-z.+~]{0,80})(?:-[0-9A-Za-z.+~]{1,80})?")
_REPOMD = "{http://linux.duke.edu/metadata/repo}"
_COMMON = "{http://linux.duke.edu/metadata/common}"


class IndexedPackage(NamedTuple):
    """One package of an index: name, version without epoch and revision, whole version."""

    name: str
    version: str
    full: str


class Index(NamedTuple):
    """The content of one file."""

    where: str
    """Address or path."""
    digest: str
    """SHA-256 of the published file."""
    packages: tuple[IndexedPackage, ...] = ()
    pci: str | None = None
    """The text of a ``pci.ids``."""


def read_source(source: str) -> list[Index]:
    """Return every index of a folder, of a file, or at an https address; raise UsageError if there is none."""
    parts = urlsplit(source)
    if "://" in source:
        if parts.scheme != "https":
            raise UsageError(f"--from {source}: {parts.scheme} is not read: use https, or a folder with a copy")
        return list(_of_address(source))
    path = Path(source)
    if path.is_dir():
        indexes = [index for file in _files(path) for index in _of_file(file)]
    elif path.is_file():
        indexes = _of_file(path)
    else:
        raise UsageError(f"--from {source}: no such file or directory")
    if not indexes:
        raise UsageError(f"--from {source}: no index found; expected one of {', '.join((*DEB, RPM, PCI))}")
    return indexes


def _files(folder: Path) -> list[Path]:
    """Return the indexes of a folder; of each repository the first format that exists."""
    indexes: list[Path] = []
    for at, folders, names in os.walk(folder):
        folders.sort()
        path = Path(at)
        if len(path.relative_to(folder).parts) >= MOST_LEVELS:
            folders.clear()
        deb = next((name for name in DEB if name in names), None)
        indexes += [path / name for name in (deb, PCI) if name and name in names]
        if path.name == "repodata" and "repomd.xml" in names:
            indexes.append(path / "repomd.xml")
        if len(indexes) > MOST_FILES:
            raise UsageError(f"--from {folder}: more than {MOST_FILES} indexes: select one repository")
    return indexes


def _of_file(path: Path) -> list[Index]:
    content = _content(path)
    if path.name == "repomd.xml":
        href, checksum = _primary(content, str(path))
        primary = path.parent.parent / href
        return [_rpm(str(primary), _content(primary), checksum)]
    return [_index(str(path), content)]


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return _bounded(stream, str(path))
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None


def _of_address(address: str) -> Iterator[Index]:
    base = address if address.endswith("/") else f"{address}/"
    last = urlsplit(address).path.rsplit("/", 1)[-1]
    if last in (*DEB, PCI):
        content = _fetch(address)
        if content is None:
            raise UsageError(f"--from {address}: no such file")
        yield _index(address, content)
        return
    if last == "repomd.xml":
        base = address.removesuffix(RPM)
    for name in (*DEB, RPM) if last != "repomd.xml" else (RPM,):
        content = _fetch(base + name)
        if content is None:
            continue
        if name != RPM:
            yield _index(base + name, content)
            return
        href, checksum = _primary(content, base + name)
        primary = _fetch(base + href)
        if primary is None:
            raise UndeterminedError(f"{base}{href}: listed in repomd.xml but missing")
        yield _rpm(base + href, primary, checksum)
        return
    raise UsageError(f"--from {address}: no index found; expected one of {', '.join((*DEB, RPM))}")


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> Any:
        request, address = args[0], str(args[-1])
        if urlsplit(address).scheme != "https":
            raise UsageError(f"{request.full_url}: leads to {address[:200]!r}, which is not https")
        return super().redirect_request(*args)


def _fetch(address: str) -> bytes | None:
    """Return the content at an https address; None if it does not exist. Proxies of the environment are used."""
    opener = urllib.request.build_opener(_HttpsOnly)
    request = urllib.request.Request(address, headers={"User-Agent": "gpunode"})  # noqa: S310 (https alone comes here)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return _in_time(answer, address)
    except urllib.error.HTTPError as err:
        if err.code in (403, 404, 410):
            return None
        raise UndeterminedError(f"{address}: the server answers {err.code}") from None
    except (OSError, HTTPException, ValueError) as err:
        reason = getattr(err, "reason", None) or err
        raise UndeterminedError(f"{address}: cannot be fetched: {str(reason)[:200]}") from None


def _in_time(answer: Any, where: str) -> bytes:
    """Return the body of an answer, bounded in size and in time: a server may send single bytes for ever."""
    ends = time.monotonic() + MOST_SECONDS
    content = bytearray()
    while chunk := answer.read1(CHUNK):
        content += chunk
        if len(content) > MOST_READ:
            raise UsageError(f"{where}: larger than {MOST_READ // 1_000_000} MB: not a package index")
        if time.monotonic() > ends:
            raise UndeterminedError(f"{where}: not fetched within {MOST_SECONDS} s")
    return bytes(content)


def _bounded(stream: IO[bytes], where: str) -> bytes:
    content = stream.read(MOST_READ + 1)
    if len(content) > MOST_READ:
        raise UsageError(f"{where}: larger than {MOST_READ // 1_000_000} MB: not a package index")
    return content


def _index(where: str, content: bytes) -> Index:
    """Return the content of one file, by its name."""
    digest = hashlib.sha256(content).hexdigest()
    name = where.rsplit("/", 1)[-1]
    if name == PCI:
        return Index(where, digest, pci=content.decode("utf-8", "replace"))
    if name in DEB:
        return Index(where, digest, tuple(_debian(_unpacked(where, content), where)))
    raise UsageError(f"{where}: not the name of an index; known: {', '.join((*DEB, 'repomd.xml', PCI))}")


def _unpacked(where: str, content: bytes) -> IO[bytes]:
    """Return a stream of the plain content; it raises an error beyond ``MOST_UNPACKED``."""
    source = BytesIO(content)
    stream: Any
    if content[:2] == b"\x1f\x8b":
        stream = gzip.GzipFile(fileobj=source)
    elif content[:6] == b"\xfd7zXZ\x00":
        stream = lzma.LZMAFile(source)  # noqa: SIM115 (in memory)
    elif content[:4] == b"\x28\xb5\x2f\xfd":
        stream = _zstd(where, source)
    else:
        stream = source
    return stream  # type: ignore[no-any-return]


def _zstd(where: str, source: BytesIO) -> IO[bytes]:
    try:
        zstd = import_module("compression.zstd")  # Python 3.14
    except ImportError:
        raise UsageError(
            f"{where}: zstd needs Python 3.14; unpack it beside the original (zstd -d) and repack it with gzip"
        ) from None
    stream: IO[bytes] = zstd.ZstdFile(source)
    return stream


def _lines(stream: IO[bytes], where: str) -> Iterator[str]:
    """Yield the lines of an unpacked stream, bounded in length."""
    read = 0
    try:
        while line := stream.readline(LONGEST_LINE):
            read += len(line)
            if read > MOST_UNPACKED or (len(line) == LONGEST_LINE and not line.endswith(b"\n")):
                raise UsageError(f"{where}: larger than a package index can be")
            yield line.decode("utf-8", "replace")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as err:
        raise UsageError(f"{where}: cannot be unpacked: {err}") from None


def _debian(stream: IO[bytes], where: str) -> Iterator[IndexedPackage]:
    """Yield the packages of a Debian index: stanzas of ``Field: value``, separated by a blank line."""
    name = version = ""
    count = 0
    for line in _lines(stream, where):
        if line.startswith("Package:"):
            name = line[8:].strip()
        elif line.startswith("Version:"):
            version = line[8:].strip()
        elif not line.strip():
            count += bool(name)
            yield from _package(name, version)
            name = version = ""
        if count > MOST_PACKAGES:
            raise UsageError(f"{where}: more than {MOST_PACKAGES} packages")
    yield from _package(name, version)


def _package(name: str, version: str) -> Iterator[IndexedPackage]:
    """Yield the package if a package manager accepts its name and version."""
    match = _VERSION.fullmatch(version)
    if match is not None and _NAME.fullmatch(name):
        yield IndexedPackage(name, match[1], version)


def _primary(content: bytes, where: str) -> tuple[str, str]:
    """Return path and SHA-256 of the primary index that ``repomd.xml`` names."""
    tree = _xml(content, where)
    for data in tree.iter(f"{_REPOMD}data"):
        if data.get("type") != "primary":
            continue
        location, checksum = data.find(f"{_REPOMD}location"), data.find(f"{_REPOMD}checksum")
        href = location.get("href", "") if location is not None else ""
        if not re.fullmatch(r"repodata/[A-Za-z0-9._-]{1,200}", href):
            raise UsageError(f"{where}: the primary index is at {href[:100]!r}, not below repodata/")
        if checksum is None or checksum.get("type") != "sha256":
            raise UsageError(f"{where}: no SHA-256 for its primary index")
        return href, (checksum.text or "").strip().lower()
    raise UsageError(f"{where}: no primary index")


def _xml(content: bytes, where: str) -> ElementTree.Element:
    """Parse a small document; a document type is refused, because its entities could expand without limit."""
    if b"<!" in content.replace(b"<!--", b""):
        raise UsageError(f"{where}: has a document type definition: not a repository index")
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError) as err:
        raise UsageError(f"{where}: is not XML: {err}") from None


def _rpm(where: str, content: bytes, checksum: str) -> Index:
    digest = hashlib.sha256(content).hexdigest()
    if digest != checksum:
        raise UsageError(f"{where}: SHA-256 differs from repomd.xml; fetch both again")
    return Index(where, digest, tuple(_rpm_packages(_unpacked(where, content), where)))


def _rpm_packages(stream: IO[bytes], where: str) -> Iterator[IndexedPackage]:
    """Yield the packages of a primary index, one element at a time."""
    parser: Any = ElementTree.XMLPullParser(events=("end",))
    count = 0
    end = b""
    for text in _chunks(stream, where):
        seam, end = end + text[:16], text[-16:]
        if any(word in part for word in (b"<!DOCTYPE", b"<!ENTITY") for part in (text, seam)):
            raise UsageError(f"{where}: has a document type definition: not a repository index")
        try:
            parser.feed(text)
            for _, element in parser.read_events():
                if not isinstance(element, ElementTree.Element) or element.tag != f"{_COMMON}package":
                    continue
                count += 1
                if count > MOST_PACKAGES:
                    raise UsageError(f"{where}: more than {MOST_PACKAGES} packages")
                version = element.find(f"{_COMMON}version")
                if version is not None:
                    full = f"{version.get('epoch', '0')}:{version.get('ver', '')}-{version.get('rel', '')}"
                    yield from _package(element.findtext(f"{_COMMON}name", ""), full.removeprefix("0:"))
                element.clear()
        except ElementTree.ParseError as err:
            raise UsageError(f"{where}: is not XML: {err}") from None


def _chunks(stream: IO[bytes], where: str) -> Iterator[bytes]:
    read = 0
    try:
        while chunk := stream.read(CHUNK):
            read += len(chunk)
            if read > MOST_UNPACKED:
                raise UsageError(f"{where}: larger than a package index can be")
            yield chunk
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as err:
        raise UsageError(f"{where}: cannot be unpacked: {err}") from None
