"""Find NVIDIA's keys in the keyrings that apt trusts for every repository.

apt accepts signatures of such a key for every repository of the node. gpunode's repository file names its own key.
"""

import base64
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.openpgp import keys

KEYS = (
    "AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80",
    "EB693B3035CD5710E231E123A4B469963BF863CC",
    "02182E60104FCDC26EAE1B8597A5D4CB8793F200",
)
APT = Path("/etc/apt")
LARGEST = 1 << 19


def remainders() -> dict[str, str]:
    """Return each such keyring with its content without NVIDIA's keys, in base64; empty if no other key is in it."""
    found = {}
    for path in (APT / "trusted.gpg", *sorted((APT / "trusted.gpg.d").glob("*.gpg"))):
        try:
            if path.stat().st_size > LARGEST:
                continue
            there = keys(path.read_bytes())
        except (OSError, ValueError):
            continue
        left = b"".join(whole for fingerprint, whole in there if fingerprint not in KEYS)
        if any(fingerprint in KEYS for fingerprint, _ in there):
            found[str(path)] = base64.b64encode(left).decode("ascii")
    return found
