"""Take NVIDIA's keys out of the keyrings that apt trusts for every repository, and print which files that touched.

Runs as ``python3 -I -c``, behind openpgp.py, with the standard library alone; with the argument ``--tell`` nothing is
changed. A key given to apt-key vouches for every repository of the node; the repository names its own key instead.
"""

import sys
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.openpgp import keys

KEYS = ("7FA2AF80", "3BF863CC", "8793F200")


def main():
    """Print one path a line."""
    sys.stdout.write("".join(f"{path}\n" for path in found(change="--tell" not in sys.argv)))


def found(change):
    """Return the keyrings that hold NVIDIA's keys, and take the keys out where ``change`` is set."""
    touched = []
    for path in (Path("/etc/apt/trusted.gpg"), *sorted(Path("/etc/apt/trusted.gpg.d").glob("*.gpg"))):
        try:
            there = keys(path.read_bytes())
        except (OSError, ValueError):
            continue
        left = b"".join(whole for fingerprint, whole in there if not fingerprint.endswith(KEYS))
        if all(not fingerprint.endswith(KEYS) for fingerprint, _ in there):
            continue
        touched.append(str(path))
        if not change:
            continue
        if left:
            draft = path.with_name(path.name + ".new")
            draft.write_bytes(left)
            draft.chmod(0o644)
            draft.replace(path)
        else:
            path.unlink()
    return touched


if __name__ == "__main__":
    main()
