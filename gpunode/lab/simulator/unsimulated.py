"""Programs of the driver that the lab's packages bring, and of which there is nothing to simulate but the version."""

from __future__ import annotations

import sys
from pathlib import Path

from .node import package_release


def main(argv: list[str]) -> int:
    """The version where it is asked for; else say that a simulated node cannot."""
    tool = Path(sys.argv[0]).name
    if {"-v", "--version", "-V"}.intersection(argv):
        sys.stdout.write(f"{tool}:  version {package_release() or 'unknown'}\n")
        return 0
    sys.stderr.write(f"{tool}: a simulated GPU node has nothing behind this program (gpunode lab)\n")
    return 1
