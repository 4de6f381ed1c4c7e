"""Public keys from a user: checked before a node gets them."""

from __future__ import annotations

import re
from base64 import b64decode

TYPES = re.compile(r"(sk-)?(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa)(@openssh\.com)?")
LEAST_RSA_BITS = 2048


def key_problem(text: str) -> str | None:
    """Return the error in one public key in one line, without repeating a secret; None if there is none."""
    if "PRIVATE KEY" in text:
        return "is a private key: use the public key (the .pub file), and replace a private key that was shared"
    if "PuTTY-User-Key-File" in text or "SSH2 PUBLIC KEY" in text:
        return "has the format of another program: convert it with ssh-keygen -i -f FILE"
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        return f"has {len(lines)} lines: list one key each"
    fields = lines[0].split()
    key = next(((kind, fields[at + 1]) for at, kind in enumerate(fields[:-1]) if TYPES.fullmatch(kind)), None)
    if key is None:
        return f"starts with {fields[0][:20]!r}, which is not a key type (example: ssh-ed25519 AAAA… name)"
    kind, blob = key
    try:
        data = b64decode(blob, validate=True)
    except ValueError:
        return f"({kind}) is damaged: its base64 does not decode"
    parts = _parts(data)
    if not parts or parts[0].decode("ascii", "replace") != kind:
        return f"({kind}) is damaged: its content is not a key of this type"
    if kind == "ssh-rsa":
        bits = int.from_bytes(parts[2], "big").bit_length() if len(parts) == 3 else 0
        if bits < LEAST_RSA_BITS:
            return f"is an RSA key of {bits} bits: use at least {LEAST_RSA_BITS}, or ssh-ed25519"
    elif kind == "ssh-ed25519" and [len(part) for part in parts[1:]] != [32]:
        return f"({kind}) is damaged: it is cut off"
    return None


def key_blob(text: str) -> str:
    """Return the part that two lines of one key have in common."""
    fields = text.split()
    return next((fields[at + 1] for at, kind in enumerate(fields[:-1]) if TYPES.fullmatch(kind)), text)


def _parts(data: bytes) -> list[bytes]:
    """Return the length-prefixed parts of a key; empty if it is truncated."""
    parts = []
    while data:
        length = int.from_bytes(data[:4], "big")
        if len(data) < 4 + length:
            return []
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return parts
