"""``nvidia-modprobe``: loads the modules and makes their device files, for those who may not."""

from __future__ import annotations

import subprocess
import sys

from . import state
from .node import Node, package_release

LIMIT_S = 60


def main(argv: list[str]) -> int:
    """Load what the options ask for: ``-u`` the unified memory module, ``-m`` modeset; else the driver."""
    if "-v" in argv or "--version" in argv:
        sys.stdout.write(f"nvidia-modprobe:  version {package_release() or 'unknown'}\n")
        return 0
    names = ["nvidia"]
    letters = {letter for word in argv if word.startswith("-") and not word.startswith("--") for letter in word[1:]}
    if "u" in letters or "--unified-memory" in argv:
        names.append("nvidia-uvm")
    if "m" in letters or "--modeset" in argv:
        names.append("nvidia-modeset")
    for name in names:
        done = subprocess.run(
            [str(state.path("/usr/sbin/modprobe")), name],
            check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        if done.returncode:
            return 1
    return 0 if Node().release else 1
