"""Host keys that are trusted: files in the format of sshd(8), section SSH_KNOWN_HOSTS FILE FORMAT."""

import base64
import binascii
import hashlib
import hmac
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class KnownKey:
    """One key of one line. ``marker`` is None, ``revoked`` or ``cert-authority``."""

    key_type: str
    blob: bytes
    marker: str | None
    file: str
    line: int


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint as ssh prints it: ``SHA256:`` and base64 without padding."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def lookup_name(hostname: str, port: int) -> str:
    """Return the name under which a host is listed: ``host``, or ``[host]:port`` for any port but 22."""
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def find(files: Iterable[str], name: str) -> list[KnownKey]:
    """Return all keys listed for ``name``, in the order of the files. An absent file has none."""
    found: list[KnownKey] = []
    for file in files:
        try:
            about = Path(file).stat()
            # Threads of many nodes call this at the same time: one of them reads.
            with _reading:
                listed = _read(file, (about.st_ino, about.st_size, about.st_mtime_ns))
        except OSError:
            continue
        found += listed.of(name)
    return found


_reading = threading.Lock()


@dataclass(frozen=True)
class _Listed:
    """The entries of one file."""

    by_name: Mapping[str, Sequence[KnownKey]]
    """Keys by the names that lines list literally."""
    by_pattern: Sequence[tuple[str, KnownKey]]
    """Lines with patterns, exceptions or hashes: to be compared one by one."""

    def of(self, name: str) -> list[KnownKey]:
        matching = [key for field, key in self.by_pattern if _matches(field, name)]
        return sorted([*self.by_name.get(name, ()), *matching], key=lambda key: key.line)


@lru_cache(maxsize=16)
def _read(file: str, stamp: tuple[int, int, int]) -> _Listed:  # noqa: ARG001 (a file that changed is read again)
    """Read a file once for all nodes: a fleet's own has a line for each of them."""
    by_name: dict[str, list[KnownKey]] = {}
    by_pattern = []
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        marker = fields.pop(0)[1:] if fields and fields[0] in ("@revoked", "@cert-authority") else None
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except binascii.Error:
            continue
        key = KnownKey(fields[1], blob, marker, file, number)
        if fields[0].startswith("|1|") or set("*?!") & set(fields[0]):
            by_pattern.append((fields[0], key))
        else:
            for name in dict.fromkeys(fields[0].lower().split(",")):
                by_name.setdefault(name, []).append(key)
    return _Listed(by_name, by_pattern)


def _matches(field: str, name: str) -> bool:
    if field.startswith("|1|"):
        return _matches_hash(field, name)
    patterns = field.lower().split(",")
    if any(pattern.startswith("!") and _fits(pattern[1:], name) for pattern in patterns):
        return False
    return any(_fits(pattern, name) for pattern in patterns if not pattern.startswith("!"))


def _fits(pattern: str, name: str) -> bool:
    # In ssh only * and ? are special; fnmatch would read "[host]:22" as a set of characters.
    return fnmatchcase(name, pattern.replace("[", "[[]"))


def _matches_hash(field: str, name: str) -> bool:
    parts: Sequence[str] = field.split("|")
    if len(parts) != 4:
        return False
    try:
        salt, digest = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except binascii.Error:
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
