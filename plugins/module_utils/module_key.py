"""Read the key that signs modules built by DKMS, and whether the firmware trusts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils.commands import LIMIT_S, run

DKMS_SETTINGS = Path("/etc/dkms/framework.conf")
MACHINE_OWNER_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
# The boot in which the role nvidia_driver staged the key. The next boot starts MokManager on the console, to enrol it.
STAGED_IN = Path("/var/lib/gpunode/nvidia_driver/key-staged")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def certificates() -> list[str]:
    """Return the possible paths of the signing key: those of DKMS's configuration, last one first, then defaults."""
    configured = []
    for path in (DKMS_SETTINGS, *sorted(Path(f"{DKMS_SETTINGS}.d").glob("*.conf"))):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        configured += re.findall(r"(?m)^\s*mok_certificate=[\"']?(/[^\s\"'#]+)", text)
    return [*reversed(configured), *MACHINE_OWNER_KEYS]


def key() -> dict[str, Any] | None:
    """Return the key that signs modules built by DKMS: its path, and whether it is ``enrolled`` (None: unknown).

    ``waits``: the key is staged; ``fresh``: the node was not restarted since then. None without a key.
    """
    path = next((path for path in certificates() if Path(path).exists()), None)
    if path is None:
        return None
    output = "".join(run(["mokutil", "--test-key", path], LIMIT_S)[1:])
    # By shim, in the firmware's own list, or built into the kernel. The meaning of the exit status differs by version.
    known = re.search(r"already (enrolled|in db|in the built-in trusted keyring)", output)
    enrolled = True if known else False if "is not enrolled" in output else None
    fresh = STAGED_IN.exists() and STAGED_IN.read_text(encoding="ascii") == BOOT.read_text(encoding="ascii")
    return {"path": path, "enrolled": enrolled, "waits": "enrollment request" in output, "fresh": fresh}
