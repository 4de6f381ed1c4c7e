"""Host keys that are trusted, as OpenSSH itself reads its files: ``ssh-keygen -F`` answers, so no line is parsed here.

A second parser of known_hosts would have to agree with ssh's on every byte: a key that only this one finds is trusted
without reason, and a changed key that only ssh finds is accepted as an unknown one.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpunode.errors import GpunodeError
from gpunode.fleet import process
from gpunode.fleet.session import NodeFailure

_TIMEOUT_S = 20.0
_FOUND = re.compile(r"# Host .* found: line (?P<line>\d+) (?P<marker>CA|REVOKED)?\s*")
_TYPES = {
    "RSA": ("ssh-rsa",),
    "ED25519": ("ssh-ed25519",),
    "ECDSA": ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
}
"""Types by ssh-keygen's names of those that Paramiko knows."""


@dataclass(frozen=True)
class KnownKey:
    """One key of one line. ``marker`` is None, ``revoked`` or ``cert-authority``."""

    key_types: tuple[str, ...]
    """Its type; more than one where ssh-keygen's answer does not distinguish them."""
    fingerprint: str
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
    """Return all keys listed for ``name``, in the order of the files. An absent or unreadable file has none, as in ssh.

    Raises NodeFailure if ssh-keygen does not answer.
    """
    return [key for file in files if os.access(file, os.R_OK) for key in _find(file, name)]


def _find(file: str, name: str) -> list[KnownKey]:
    try:
        done = process.run(["ssh-keygen", "-l", "-E", "sha256", "-F", name, "-f", file], timeout_s=_TIMEOUT_S)
    except GpunodeError as err:
        raise NodeFailure(f"its host key cannot be looked up in {file}: {err}") from None
    # Comments may contain any character but the line feed.
    lines = done.stdout.removesuffix("\n").split("\n") if done.stdout else []
    heads = [_FOUND.fullmatch(line) for line in lines[::2]]
    if done.rc not in (0, 1) or len(lines) % 2 or None in heads:
        complaint = done.stderr.strip().partition("\n")[0] or f"exit code {done.rc}"
        raise NodeFailure(f"its host key cannot be looked up in {file}: ssh-keygen: {complaint}")
    keys = []
    for head, line in zip(heads, lines[1::2], strict=True):
        # NAME TYPE SHA256:... COMMENT
        kind, digest = line.split(" ")[1 + name.count(" ") :][:2]
        marker = {"CA": "cert-authority", "REVOKED": "revoked"}.get(head["marker"] or "") if head else None
        keys.append(KnownKey(_TYPES.get(kind, ()), digest, marker, file, int(head["line"]) if head else 0))
    return keys
