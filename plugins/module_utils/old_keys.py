"""Keyrings that apt trusts for every repository, and that hold NVIDIA's keys.

A key given to apt-key vouches for every repository of the node; the repository names its own key instead.
"""

import base64
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.openpgp import keys

KEYS = ("7FA2AF80", "3BF863CC", "8793F200")
APT = Path("/etc/apt")
LARGEST = 1 << 19


def remainders() -> dict[str, str]:
    """Return each such keyring with what is left of it without NVIDIA's keys, in base64; empty: nothing."""
    found = {}
    for path in (APT / "trusted.gpg", *sorted((APT / "trusted.gpg.d").glob("*.gpg"))):
        try:
            if path.stat().st_size > LARGEST:
                continue
            there = keys(path.read_bytes())
        except (OSError, ValueError):
            continue
        left = b"".join(whole for fingerprint, whole in there if not fingerprint.endswith(KEYS))
        if any(fingerprint.endswith(KEYS) for fingerprint, _ in there):
            found[str(path)] = base64.b64encode(left).decode("ascii")
    return found
