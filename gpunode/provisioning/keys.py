"""OpenPGP keys of package repositories: whether a key is the publisher's, by its fingerprint."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator

PUBLIC_KEY = 6
BLOCK = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?P<body>.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)


def key_problem(text: str | None, source: str, fingerprints: Iterable[str] | None = None) -> str:
    """Return why an armored key must not be trusted, in one line; empty if it may be.

    ``source`` is its origin: a file on the controller, or an address. An address must be https: over http anybody on
    the path could replace the key. ``fingerprints`` are the publisher's; every key of ``text`` must have one of them.
    None or empty: the site's own key, which is trusted without a check. ``text`` None: check only the source.
    """
    if re.match(r"[a-z]+://", source) and not source.startswith("https://"):
        return f"{source}: a repository key is fetched over https only: use https, or a file on the controller"
    if text is None:
        return ""
    try:
        found = fingerprints_of(text)
    except (ValueError, IndexError, binascii.Error):
        found = []
    if not found:
        return f"{source} contains no armored OpenPGP key: export it with gpg --export --armor"
    pinned = {name.replace(" ", "").upper() for name in fingerprints or ()}
    foreign = [name for name in found if pinned and name not in pinned]
    if foreign:
        return (
            f"{source} contains the key {foreign[0]}, expected {', '.join(sorted(pinned))}: do not trust it; "
            "if the publisher announced a new key, set it as a file on the controller"
        )
    return ""


def fingerprints_of(text: str) -> list[str]:
    """Return the fingerprints of the primary keys in armored text. Raises ValueError if it is not OpenPGP v4."""
    found = []
    for block in BLOCK.finditer(text):
        lines = block["body"].replace("\r", "").split("\n")
        # Headers end at the first empty line; the checksum is a line that begins with "=".
        start = lines.index("") if "" in lines else 0
        data = base64.b64decode("".join(line for line in lines[start:] if not line.startswith("=")), validate=True)
        for tag, body in _packets(data):
            if tag == PUBLIC_KEY:
                if body[:1] != b"\x04":
                    raise ValueError("not a key of version 4")
                digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)  # noqa: S324 - RFC 4880, 12.2
                found.append(digest.hexdigest().upper())
    return found


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and body of each packet (RFC 4880, 4.2)."""
    at = 0
    while at < len(data):
        first = data[at]
        if not first & 0x80:
            raise ValueError("not OpenPGP")
        if first & 0x40:
            tag, length, head = first & 0x3F, data[at + 1], 2
            if 192 <= length < 224:
                length, head = ((length - 192) << 8) + data[at + 2] + 192, 3
            elif length == 255:
                length, head = int.from_bytes(data[at + 2 : at + 6], "big"), 6
            elif length >= 224:
                raise ValueError("partial length")
        else:
            if first & 3 == 3:
                raise ValueError("indeterminate length")
            tag, size = first >> 2 & 0xF, 1 << (first & 3)
            length, head = int.from_bytes(data[at + 1 : at + 1 + size], "big"), 1 + size
        body = data[at + head : at + head + length]
        if len(body) != length:
            raise ValueError("cut short")
        yield tag, body
        at += head + length
