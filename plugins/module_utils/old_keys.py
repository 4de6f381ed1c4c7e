"""Find the keyrings that apt trusts for every repository and in which NVIDIA's keys may be.

apt accepts signatures of such a key for every repository of the node. gpunode's repository file names its own key.
"""

import base64
from pathlib import Path

KEYS = ("F60F4B3D7FA2AF80", "A4B469963BF863CC", "97A5D4CB8793F200")
"""Ends of the fingerprints, which the signatures of each key contain."""
APT = Path("/etc/apt")
LARGEST = 1 << 19


def keyrings() -> dict[str, str]:
    """Return the content of each such keyring in base64, by path. The controller reads the keys in it."""
    contents = {}
    for path in (APT / "trusted.gpg", *sorted((APT / "trusted.gpg.d").glob("*.gpg"))):
        try:
            data = path.read_bytes() if path.stat().st_size <= LARGEST else b""
        except OSError:
            continue
        if any(bytes.fromhex(key) in data for key in KEYS):
            contents[str(path)] = base64.b64encode(data).decode("ascii")
    return contents
