"""Host keys that are trusted: files in the format of sshd(8), section SSH_KNOWN_HOSTS FILE FORMAT."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
    """As ssh prints it: ``SHA256:`` and base64 without padding."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def lookup_name(hostname: str, port: int) -> str:
    """The name under which a host is listed: ``host``, or ``[host]:port`` for any port but 22."""
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def find(files: Iterable[str], name: str) -> list[KnownKey]:
    """All keys listed for ``name``, in the order of the files. A file that is absent lists none."""
    found = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            key = _parse(line, name, file, number)
            if key is not None:
                found.append(key)
    return found


def _parse(line: str, name: str, file: str, number: int) -> KnownKey | None:
    words = line.split()
    marker = None
    if words and words[0] in ("@revoked", "@cert-authority"):
        marker = words.pop(0)[1:]
    if len(words) < 3 or words[0].startswith("#") or not _matches(words[0], name):
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except binascii.Error:
        return None
    return KnownKey(words[1], blob, marker, file, number)


def _matches(field: str, name: str) -> bool:
    if field.startswith("|1|"):
        return _matches_hash(field, name)
    patterns = field.lower().split(",")
    if any(pattern.startswith("!") and _fits(pattern[1:], name) for pattern in patterns):
        return False
    return any(_fits(pattern, name) for pattern in patterns if not pattern.startswith("!"))


def _fits(pattern: str, name: str) -> bool:
    # In ssh only * and ? are special; fnmatch would take "[host]:22" for a set of characters.
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
