"""The key that signs modules built by DKMS, and what the firmware knows of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

DKMS_SETTINGS = Path("/etc/dkms/framework.conf")
MACHINE_OWNER_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
# The boot in which the role nvidia_driver staged the key: the next one leads to the console where a person enrols it.
STAGED_IN = Path("/var/lib/gpunode/nvidia_driver/key-staged")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def certificates() -> list[str]:
    """Where the key that signs modules may lie: what DKMS was told, the last word first, then its own places."""
    told = []
    for path in (DKMS_SETTINGS, *sorted(Path(f"{DKMS_SETTINGS}.d").glob("*.conf"))):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        told += re.findall(r"(?m)^\s*mok_certificate=[\"']?(/[^\s\"'#]+)", text)
    return [*reversed(told), *MACHINE_OWNER_KEYS]


def key() -> dict[str, Any] | None:
    """The key that signs modules built by DKMS: its path, whether the firmware knows it (None: not to be told).

    ``waits``: it is staged; ``fresh``: since then the node was not restarted.
    """
    path = next((path for path in certificates() if Path(path).exists()), None)
    if path is None:
        return None
    try:
        done = subprocess.run(
            ["mokutil", "--test-key", path], check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    # By shim, in the firmware's own list, or built into the kernel. What the exit status means depends on the version.
    known = re.search(r"already (enrolled|in db|in the built-in trusted keyring)", said)
    enrolled = True if known else False if "is not enrolled" in said else None
    fresh = STAGED_IN.exists() and STAGED_IN.read_text(encoding="ascii") == BOOT.read_text(encoding="ascii")
    return {"path": path, "enrolled": enrolled, "waits": "enrollment request" in said, "fresh": fresh}
