"""Programs of the driver in the lab's packages that are not simulated, except for their version."""

from __future__ import annotations

import sys
from pathlib import Path

from .node import package_release


def main(argv: list[str]) -> int:
    """Print the version on request; else report that the program is not simulated."""
    tool = Path(sys.argv[0]).name
    if {"-v", "--version", "-V"}.intersection(argv):
        sys.stdout.write(f"{tool}:  version {package_release() or 'unknown'}\n")
        return 0
    sys.stderr.write(f"{tool}: a simulated GPU node has nothing behind this program (gpunode lab)\n")
    return 1
